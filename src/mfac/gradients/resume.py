"""What a file of gradients was made from, in one line of text that is checked before a run is resumed."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mfac.gradient_file import GradientFile
from mfac.gradients.batches import Batch, tensors
from mfac.gradients.collection import Collection
from mfac.gradients.per_sample import Plan

Fields = dict[str, str]


def fields(collection: Collection, first_batch: Batch) -> Fields:
    """One short entry for each thing that the rows depend on."""
    layout, model = collection.layout, collection.model
    state = [*model.named_parameters(), *model.named_buffers()]
    kept = [torch.empty(0) if indices is None else indices for indices in layout.kept]
    return {
        "model": digest([name for name, _ in state], (tensor for _, tensor in state)),
        "loss_fn": _describe(collection.loss_fn),
        "batches": digest([], tensors(first_batch)),
        "params": digest(layout.names, []),
        "masks": digest([], kept),
        "per_sample": str(collection.per_sample),
        "fisher": collection.fisher,
        "method": collection.method,
        "chunk_size": str(collection.chunk_size),
        "seed": str(collection.seed),
    }


def encode(entries: Fields, collection: Collection) -> str:
    """The line that goes into the file."""
    return json.dumps({"from": entries, "plan": collection.mapped.plan if collection.per_sample else None})


def check(file: GradientFile, entries: Fields, collection: Collection, dtype: torch.dtype) -> Plan | None:
    """The plan that the file was begun with.

    Raises:
        ValueError: it was made with other arguments; the message names them.
    """
    try:
        found = json.loads(file.fingerprint)
        theirs, plan = found["from"], found["plan"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file.path} was not made by collect_gradients; choose another out=") from None
    ours = entries | {"num_grads": str(collection.num_grads), "dim": str(collection.layout.dim), "dtype": str(dtype)}
    theirs = theirs | {"num_grads": str(file.num_grads), "dim": str(file.dim), "dtype": str(file.dtype)}
    differing = sorted(name for name in ours if ours[name] != theirs.get(name))
    if differing:
        changes = ", ".join(f"{name} ({theirs.get(name)} there, {ours[name]} now)" for name in differing)
        raise ValueError(
            f"{file.path} holds {file.rows} rows made with something else: {changes}; "
            "delete it or choose another out= (batches that are shuffled differ from run to run: seed them)"
        )
    return None if plan is None else Plan(*plan)


def digest(words: Iterable[str], values: Iterable[Tensor]) -> str:
    """A short word that differs where one of the words or of the numbers does."""
    hasher = hashlib.blake2b(digest_size=8)
    for word in words:
        hasher.update(word.encode() + b"\0")
    for value in values:
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        plain = value.detach().cpu().contiguous().reshape(-1)
        if plain.numel():
            hasher.update(plain.view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def _describe(loss_fn: Any) -> str:
    """A name for a loss function that is the same in the next process."""
    name: str = getattr(loss_fn, "__qualname__", "") or repr(loss_fn)
    return type(loss_fn).__name__ if " at 0x" in name else name
