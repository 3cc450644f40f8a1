"""Batches of tensors in memory."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


class TensorBatches:
    """Batches (inputs, targets): in order, or shuffled by torch's global random state at the start of each pass.

    Args:
        inputs: one sample per index of the first dimension.
        targets: one per sample.
        batch_size: of every batch; a smaller last one is dropped if batches are shuffled.
        shuffle: a new order in each pass.
        prepare: applied to the inputs of each batch.

    Raises:
        ValueError: the lengths differ, or there is not one whole batch.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        batch_size: int,
        *,
        shuffle: bool = False,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ):
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs and {len(targets)} targets; expected one target per input")
        if not 1 <= batch_size <= len(inputs):
            raise ValueError(f"batch_size must be from 1 to {len(inputs)}, the number of samples, not {batch_size!r}")
        self.inputs, self.targets = inputs, targets
        self.batch_size, self.shuffle, self.prepare = batch_size, shuffle, prepare

    def __len__(self) -> int:
        whole, rest = divmod(len(self.inputs), self.batch_size)
        return whole + bool(rest and not self.shuffle)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.inputs)) if self.shuffle else torch.arange(len(self.inputs))
        for chosen in order.split(self.batch_size)[: len(self)]:
            inputs = self.inputs[chosen]
            yield inputs if self.prepare is None else self.prepare(inputs), self.targets[chosen]
