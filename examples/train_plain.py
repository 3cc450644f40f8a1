"""FullMatrixAdam in a plain training loop: scikit-learn's digits, a learning-rate schedule, checkpoint and resume.

python examples/train_plain.py
python examples/train_plain.py --resume checkpoints/epoch-4.pt    # the same weights in the end, bit for bit
python examples/train_plain.py --compile                          # the model through torch.compile
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from digits import EpochOrder, accuracy, build_model, load_data
from mfac import FullMatrixAdam


def parse(argv):
    parser = argparse.ArgumentParser(description="digits with FullMatrixAdam in a plain loop")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--num-grads", type=int, default=64, help="m, the gradients in the window")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile the model")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    train, test = load_data()
    order = EpochOrder(train)
    loader = DataLoader(train, batch_size=64, sampler=order)
    model = build_model()
    # A compiled model shares the parameters, so the optimizer and checkpoints stay with the plain one.
    forward = torch.compile(model, backend=args.compile) if args.compile else model

    optimizer = FullMatrixAdam(model.named_parameters(), lr=1e-2, num_grads=args.num_grads)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    first = 0
    if args.resume:
        checkpoint = torch.load(args.resume, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])  # the window of gradients and all
        scheduler.load_state_dict(checkpoint["scheduler"])
        first = checkpoint["epoch"]

    losses = []
    for epoch in range(first, args.epochs):
        order.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(forward(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()

        figures = optimizer.diagnostics()
        print(
            f"epoch {epoch + 1}: loss {losses[-1]:.4f}, accuracy {accuracy(model, test):.1f} %, "
            f"cosine(gradient, step) {figures['cosine']:.2f}, effective rank {figures['effective_rank']:.0f}"
        )
        checkpoint = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "epoch": epoch + 1,
        }
        args.folder.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, args.folder / f"epoch-{epoch + 1}.pt")
    return model, losses


if __name__ == "__main__":
    main()
