"""Random numbers that depend on the row alone, and beside them those that batches are drawn with."""

from collections.abc import Iterator

import torch

from mfac.gradients.batches import Batch


class RowSeeds:
    """The seeds of rows: a run that is resumed, or shared by ranks, draws the same numbers for each.

    Row i that is made here is row first + every · i of the matrix, which is what they go by.

    Args:
        seed: of the whole matrix.
        device: where rows are made.
        first: the row of the matrix that is the first one here.
        every: so many rows further is the next.
    """

    def __init__(self, seed: int, device: torch.device, first: int, every: int):
        self._base, self._step = seed * 0x9E3779B97F4A7C15 + 2 * first, 2 * every
        self._device = device
        self._accelerator = None if device.type in ("cpu", "meta") else torch.get_device_module(device)

    def of(self, row: int) -> int:
        """For what the loss draws."""
        return (self._base + self._step * row) % 2**63

    def of_labels(self, row: int) -> int:
        """For the labels that are drawn."""
        return (self._base + self._step * row + 1) % 2**63

    def start(self, seed: int) -> None:
        """Sets torch's random state, on the CPU and where rows are made."""
        torch.default_generator.manual_seed(seed)
        if self._accelerator is not None:
            with self._accelerator.device(self._device):
                self._accelerator.manual_seed(seed)

    def apart(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches; what is drawn at random for them goes on as if no seed had been set in between."""
        generator, accelerator = torch.default_generator, self._accelerator
        for batch in batches:
            here = generator.get_state()
            there = None if accelerator is None else accelerator.get_rng_state(self._device)
            yield batch
            generator.set_state(here)
            if accelerator is not None:
                accelerator.set_rng_state(there, self._device)
