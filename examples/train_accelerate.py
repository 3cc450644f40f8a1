"""MFAC under accelerate: prepare, gradient accumulation, save_state and load_state in mid-epoch.

    python examples/train_accelerate.py                                        # or: accelerate launch ...
    python examples/train_accelerate.py --resume checkpoints/step-50    # the same weights in the end, bit for bit

Digits, with the settings of train_plain.py, which explains them. One row of the window is the gradient of
a whole step, all accumulated batches of it.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.nn import functional as F
from torch.utils.data import DataLoader

from digits import accuracy, build_model, build_optimizer, load_data

ACCUMULATE = 2


def parse(argv):
    parser = argparse.ArgumentParser(description="digits with MFAC under accelerate")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--optimizer", choices=["mfac", "full_matrix_adam"], default="mfac")
    parser.add_argument("--num-grads", type=int, default=64, help="m, the gradients in the window")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--save-at", type=int, default=50, metavar="STEP", help="when to save the state")
    parser.add_argument("--resume", type=Path, help="a folder step-… to go on from")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    # The seedable sampler draws the order from the epoch, so a resumed run sees what it would have seen.
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    train, test = load_data()
    model = build_model()
    optimizer = build_optimizer(args.optimizer, model.named_parameters(), args.num_grads)
    loader = DataLoader(train, batch_size=30, shuffle=True)
    steps_an_epoch = -(-len(loader) // ACCUMULATE)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * steps_an_epoch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    step = 0
    if args.resume:
        accelerator.load_state(args.resume)  # model, optimizer with its window, scheduler, random state
        step = int(args.resume.name.removeprefix("step-"))
    losses = []
    for epoch in range(step // steps_an_epoch, args.epochs):
        loader.set_epoch(epoch)
        done = (step - epoch * steps_an_epoch) * ACCUMULATE
        for images, labels in accelerator.skip_first_batches(loader, done):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                step += 1
                if step == args.save_at:
                    accelerator.save_state(args.folder / f"step-{step}")
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {accuracy(model, test):.1f} %")
    return model, losses


if __name__ == "__main__":
    main()
