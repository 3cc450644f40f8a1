"""Batches of any shape: tensors, tuples, dicts, Hugging Face encodings; walked, counted, cut and moved alike."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Batch = Any
ALIGNMENT = 64
SEQUENCES = (list, tuple)


def passes(batches: Iterable[Batch], cycle: bool = False) -> Iterator[Batch]:
    """Every batch; with `cycle`, again and again. A generator is not closed, so that the next call can continue it."""
    if isinstance(batches, Mapping):
        raise ValueError("batches is one dict, not an iterable of batches; pass [batch], or a DataLoader")
    return _endless(batches) if cycle else iter(batches)


def _endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    count, before = 0, -1
    while count > before:
        before = count
        for batch in batches:
            yield batch
            count += 1
    spent = f"gave nothing after batch {count - 1}: an iterator runs out for good; pass a list or a DataLoader"
    raise ValueError(f"cycle=True, but batches {spent}" if count else "batches is empty; at least one batch is needed")


def map_tensors(batch: Batch, change: Callable[[Tensor], Any]) -> Batch:
    """A batch of the same structure with every tensor changed and anything else kept."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, SEQUENCES):
        items = [map_tensors(item, change) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, Mapping):
        new: Any = copy.copy(batch)  # keeps the class: a BatchEncoding stays one, with its attributes
        for key, value in batch.items():
            new[key] = map_tensors(value, change)
        return new
    return batch


def tensors(batch: Batch) -> list[Tensor]:
    """Every tensor in the batch, in the order of `map_tensors`."""
    if isinstance(batch, Tensor):
        return [batch]
    parts = batch if isinstance(batch, SEQUENCES) else batch.values() if isinstance(batch, Mapping) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def sample_tensors(batch: Batch) -> list[Tensor]:
    """The tensors with one entry per sample: all but those of no dimension."""
    return [tensor for tensor in tensors(batch) if tensor.ndim]


def with_sample_tensors(batch: Batch, values: Iterable[Tensor]) -> Batch:
    """The batch with its `sample_tensors` replaced by `values`."""
    rest = iter(values)
    return map_tensors(batch, lambda tensor: next(rest) if tensor.ndim else tensor)


def num_samples(batch: Batch, index: int) -> int:
    """How many samples a batch has: the leading dimension that all its tensors share."""
    lengths = sorted({len(tensor) for tensor in sample_tensors(batch)})
    if len(lengths) != 1:
        found = f"leading dimensions {lengths}" if lengths else f"no tensor in a {type(batch).__name__}"
        needs = "gradients of single samples need tensors that share their first dimension"
        way = "collate it so, or use per_sample=False (prune: with an int as block_size)"
        raise ValueError(f"{needs}, and batch {index} has {found}; {way}")
    sparse = any(tensor.layout != torch.strided for tensor in tensors(batch))
    if sparse or _has_plain_list(batch, lengths[0]):
        found = "a sparse tensor" if sparse else f"a list of {lengths[0]} other things"
        found = f"batch {index} holds {found}; make it a dense tensor, or leave it out"
        raise ValueError(f"gradients of single samples need batches that can be cut, and {found}")
    return lengths[0]


def cut(batch: Batch, start: int, stop: int) -> Batch:
    """Samples start to stop - 1 of a batch; a view."""
    return map_tensors(batch, lambda tensor: tensor.narrow(0, start, stop - start) if tensor.ndim else tensor)


def move(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`. Copies are synchronous: their source may be reused for the next batch."""
    here = all(tensor.device == device for tensor in tensors(batch))
    return batch if here else map_tensors(batch, lambda tensor: tensor.to(device))


def placed(batch: Batch, device: torch.device | None) -> Batch:
    """The batch with its tensors on `device` (None: where they are), aligned: the last bits depend on it."""
    moved = batch if device is None else move(batch, device)
    if all(map(_is_aligned, tensors(moved))):
        return moved
    return map_tensors(moved, lambda tensor: tensor if _is_aligned(tensor) else tensor.clone())


def _is_aligned(tensor: Tensor) -> bool:
    return tensor.layout != torch.strided or tensor.data_ptr() % ALIGNMENT == 0


def _has_plain_list(batch: Batch, length: int) -> bool:
    if isinstance(batch, Mapping):
        return any(_has_plain_list(value, length) for value in batch.values())
    if not isinstance(batch, SEQUENCES):
        return False
    if len(batch) == length and length and not tensors(batch):
        return not all(item is None for item in batch)
    return any(_has_plain_list(item, length) for item in batch)
