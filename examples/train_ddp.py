"""MFAC on several processes that train one model (DDP), each with a part of the window.

    torchrun --nproc-per-node 2 examples/train_ddp.py
    torchrun --nproc-per-node 2 --max-restarts 1 examples/train_ddp.py --die-at 2    # one is killed: the run comes back
    torchrun --nproc-per-node 3 examples/train_ddp.py --epochs 12                    # goes on, on other processes

Started again in the same folder it goes on from the last checkpoint, on any number of processes. Digits, with the
settings of train_plain.py, which explains them.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from digits import accuracy, build_model, load_data
from elastic import die_once, join, leave, load_latest, save, shares
from mfac import MFAC


def parse(argv):
    parser = argparse.ArgumentParser(description="digits with MFAC under DDP")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--num-grads", type=int, default=64, help="m, the gradients in the window")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--die-at", type=int, metavar="EPOCH", help="kill the second process there, once")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    join()
    train, test = load_data()
    model = build_model()
    forward = DistributedDataParallel(model)
    # Weights and gradients are the same everywhere; only the window is in parts.
    optimizer = MFAC(
        model.named_parameters(),
        lr=1.0,
        num_grads=args.num_grads,
        damping=0.1,
        normalize="sum",
        momentum=0.9,
        process_group=dist.group.WORLD,
    )
    for epoch in range(load_latest(args.folder, model, optimizer), args.epochs):
        die_once(args.die_at, epoch)
        for images, labels in shares(train.tensors, epoch):
            loss = F.cross_entropy(forward(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save(args.folder, epoch + 1, model, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {accuracy(model, test):.1f} %", flush=True)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), args.folder / "final.pt")
    leave()


if __name__ == "__main__":
    main()
