"""Rows that go to a file as they are made, and the fingerprint that is checked before a run is resumed."""

import errno
import json
import os
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from mfac.gradient_file import GradientFile
from mfac.gradients.batches import Batch, tensors
from mfac.gradients.collect import Collection, NotFiniteError
from mfac.gradients.model_state import evaluation
from mfac.gradients.per_sample import ChunkPlan
from mfac.memory import gib
from mfac.saved import digest, locked


def collect_to_file(
    collection: Collection, batches: Iterable[Batch], path: str | os.PathLike[str], dtype: torch.dtype
) -> GradientFile:
    """Appends the rows that the file does not have; it is made when the first of them is there.

    ValueError if another process is appending to it, or it was made with something else.
    """
    path = Path(path)
    done = GradientFile(path).rows if path.exists() else 0
    _check_disk(path, collection.num_grads - done, collection.layout.dim * dtype.itemsize)
    if done == collection.num_grads:
        return _append_missing(collection, batches, path, dtype)
    with locked(path.with_name(path.name + ".lock"), path, "choose another out="):
        return _append_missing(collection, batches, path, dtype)


def _append_missing(collection: Collection, batches: Iterable[Batch], path: Path, dtype: torch.dtype) -> GradientFile:
    file, dim = GradientFile(path) if path.exists() else None, collection.layout.dim
    done = file.rows if file else 0
    with evaluation(collection.model, collection.layout.tensors):
        stream = collection.stream(batches)
        head = next(stream, None)
        if head is None:
            raise ValueError("batches is empty; at least one batch is needed")
        entries = _fields(collection, head)
        if file is not None:
            collection.plan = _check_fields(file, entries, collection, dtype)
            if done == collection.num_grads:
                return file
        for chunk in collection.chunks(chain([head], stream), done):
            rows = torch.empty(chunk.count, dim, dtype=dtype, device="cpu")
            known, good, failure = max(0, done - chunk.row), chunk.count, None
            try:
                collection.fill(chunk, rows)
            except NotFiniteError as error:
                good, failure = error.good, error
            if good > known:
                if file is None:
                    plan = collection.mapped.plan if collection.per_sample else None
                    fingerprint = json.dumps({"from": entries, "plan": plan})
                    file = GradientFile.create(path, collection.num_grads, dim, dtype, fingerprint)
                file.append(rows[known:good])
            if failure is not None:
                raise failure
    assert file is not None
    return file


def _fields(collection: Collection, first_batch: Batch) -> dict[str, str]:
    layout, model = collection.layout, collection.model
    state = [*model.named_parameters(), *model.named_buffers()]
    return {
        "model": digest([name for name, _ in state], (tensor for _, tensor in state)),
        "loss_fn": _describe(collection.loss_fn),
        "batches": digest([], tensors(first_batch)),
        "params": digest(layout.names, []),
        "masks": digest([], (torch.empty(0, device="cpu") if indices is None else indices for indices in layout.kept)),
    } | {name: str(getattr(collection, name)) for name in ("per_sample", "fisher", "method", "chunk_size", "seed")}


def _check_fields(
    file: GradientFile, entries: dict[str, str], collection: Collection, dtype: torch.dtype
) -> ChunkPlan | None:
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
        found = f"{file.path} holds {file.rows} rows made with something else: {changes}"
        raise ValueError(f"{found}; delete it or choose another out= (and seed batches that are shuffled)")
    return None if plan is None else ChunkPlan(*plan)


def _describe(loss_fn: Any) -> str:
    name: str = getattr(loss_fn, "__qualname__", "") or repr(loss_fn)
    return type(loss_fn).__name__ if " at 0x" in name else name


def _check_disk(path: Path, rows: int, row_bytes: int) -> None:
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "out= needs a directory that exists", str(folder))
    needed, free = rows * row_bytes, shutil.disk_usage(folder).free
    if needed > free:
        found = f"{rows} rows take {gib(needed)} and the disk has {gib(free)} left"
        raise OSError(errno.ENOSPC, f"{found}; collect fewer rows, or use dtype=torch.bfloat16 or masks", str(path))
