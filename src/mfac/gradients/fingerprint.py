"""What a file of gradients was made from, in a line: checked before an interrupted run goes on."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict

import torch
from torch import Tensor

from mfac.gradient_file import GradientFile
from mfac.gradients.batches import Batch, tensors
from mfac.gradients.collection import Collection, describe
from mfac.gradients.fillers import Plan, Task

Fields = dict[str, str]


def fields(task: Task, collection: Collection, first_batch: Batch) -> Fields:
    """One short entry for each thing that the rows depend on."""
    layout = task.layout
    state = [*task.model.named_parameters(), *task.model.named_buffers()]
    kept = [torch.empty(0) if indices is None else indices for indices in layout.kept]
    return {
        "model": digest([name for name, _ in state], (tensor for _, tensor in state)),
        "loss_fn": describe(task.loss_fn),
        "batches": digest([], tensors(first_batch)),
        "params": digest(layout.names, []),
        "masks": digest([], kept),
        "per_sample": str(collection.per_sample),
        "fisher": collection.fisher,
        "method": collection.method,
        "chunk_size": str(collection.chunk_size),
        "seed": str(collection.seed),
    }


def encode(entries: Fields, plan: Plan | None) -> str:
    """The line that goes into the file."""
    return json.dumps({"from": entries, "plan": None if plan is None else asdict(plan)})


def check(file: GradientFile, entries: Fields, num_grads: int, task: Task, storage: str) -> Plan | None:
    """The plan that the file was begun with.

    Raises:
        ValueError: it was begun with something else; the message says what differs.
    """
    try:
        found = json.loads(file.fingerprint)
        theirs, plan = found["from"], found["plan"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file.path} was not made by collect_gradients; choose another out=") from None
    ours = entries | {"num_grads": str(num_grads), "dim": str(task.layout.dim), "dtype or window": storage}
    theirs = theirs | {"num_grads": str(file.num_grads), "dim": str(file.dim), "dtype or window": str(file.dtype)}
    differing = sorted(name for name in ours if ours[name] != theirs.get(name))
    if differing:
        changes = ", ".join(f"{name} ({theirs.get(name)} there, {ours[name]} now)" for name in differing)
        raise ValueError(
            f"{file.path} holds {file.rows} rows made with something else: {changes}; "
            "delete it or choose another out= (batches that are shuffled differ from run to run: seed them)"
        )
    return None if plan is None else Plan(**plan)


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
