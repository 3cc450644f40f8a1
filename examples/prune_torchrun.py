"""Pruning on several processes: handwritten digits, trained under DDP and pruned to 90 %.

Each rank has samples of its own; all end with the same weights.

Run: torchrun --nproc-per-node 2 examples/prune_torchrun.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import mfac
from digits import accuracy, build_model, load_data


def train(model, loader, optimizer, epochs):
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()


def main(group):
    """(the model, its masks, accuracy when it was dense, and after pruning and some more training)."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    data, test = load_data()
    sampler = DistributedSampler(data, ranks, rank)
    wrapped = DistributedDataParallel(build_model(), process_group=group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    train(wrapped, DataLoader(data, batch_size=64 // ranks, sampler=sampler), optimizer, 10)
    dense = accuracy(wrapped.module, test)

    # The model itself, not its wrapper; 64 gradients of all ranks together, of batches of 16.
    result = mfac.prune(
        wrapped.module,
        mfac.criterion_loss(nn.CrossEntropyLoss()),
        DataLoader(data, batch_size=16, sampler=sampler),
        0.9,
        num_grads=64,
        recomputations=8,
        progress=False,
        process_group=group,
    )
    with mfac.attach_masks(optimizer, result.masks, wrapped.module):  # the same ones on every rank
        train(wrapped, DataLoader(data, batch_size=64 // ranks, sampler=sampler), optimizer, 3)
    sparse = accuracy(wrapped.module, test)
    if rank == 0:
        print(f"dense: {dense:.1f} %")
        print(f"{100 * result.sparsity:.1f} % of the weights removed by {ranks} ranks: {sparse:.1f} %")
    return wrapped.module, result.masks, dense, sparse


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(dist.group.WORLD)
    dist.destroy_process_group()
