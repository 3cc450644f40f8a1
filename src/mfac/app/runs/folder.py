"""The folder of a run: run.json, always complete, its format, and the files of its cells. One process writes."""

import datetime
import json
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from mfac.pruning.compact_file import FORMAT as COMPACT
from mfac.pruning.compact_file import load_compact
from mfac.saved import locked, replacing

REPORT, DENSE, LOCK, STATE = "report.html", "dense.safetensors", ".lock", "state.pt"
PATHS = ("source", "checkpoint")  # files are compared by their digests, not by their paths
INNER = ("state_dict", "model_state_dict", "model")  # names of the weights inside the checkpoints of training scripts
FORMAT, RUN, GENERATOR = 1, "run.json", b'<meta name="generator" content="mfac '
REMEDY = "restore it, or run the command again in another folder (--out)"
Record = dict[str, Any]

NUMBER, MAYBE = (int, float), (int, float, NoneType)
RECORD = {
    "kind": str, "command": str, "title": str, "environment": dict, "settings": dict, "digests": dict,
    "task": {"name": str, "measure": str, "source": str, "higher_is_better": bool},
    "model": {"weights": int, "tensors": int}, "started": str, "finished": (str, NoneType),
}  # fmt: skip
# A list has items of its first entry, and with "..." at least one.
CELL = {"label": str, "files": dict, "peak_bytes": NUMBER}
CELLS: dict[str, dict[str, Any]] = {
    "prune": {
        **CELL, "asked": NUMBER, "sparsity": NUMBER, "loss": MAYBE, "measure": MAYBE, "seconds": NUMBER,
        "gradient_seconds": NUMBER, "bytes": {"dense": int, "compact": int},
        "layers": [{"name": str, "weights": int, "kept": int}],
        "steps": [{"sparsity": NUMBER, "predicted_increase": MAYBE, "loss_before": MAYBE, "loss_after": MAYBE}],
        "training": [{"step": int, "second": NUMBER, "loss": MAYBE}],
    },
    "train": {
        **CELL, "seed": int, "settings": dict, "steps": int, "losses": [MAYBE, ...], "seconds": [NUMBER, ...],
        "seconds_total": NUMBER, "evaluations": [{"step": int, "second": NUMBER, "loss": MAYBE, "measure": MAYBE}, ...],
    },
}  # fmt: skip


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A draft that replaces `path` at the end of the block; all errors are OSErrors, with the system's error number."""
    try:
        with replacing(path) as draft:
            yield draft
    except (OSError, RuntimeError, SafetensorError) as error:
        cause: BaseException | None = error
        while cause is not None:
            in_text = re.search(r"os error (\d+)", str(cause))  # as safetensors reports it
            number = cause.errno if isinstance(cause, OSError) else int(in_text[1]) if in_text else None
            if number is not None:
                raise OSError(number, os.strerror(number), str(path)) from error
            cause = cause.__cause__ or cause.__context__
        raise OSError(f"{path} cannot be written: {error}") from error


def save_weights(model: nn.Module, path: Path) -> None:
    """Saves a model's state as safetensors; tied tensors are stored once."""
    with writing(path) as draft:
        save_model(model, str(draft), metadata={"format": "pt"})


def load_checkpoint(path: Path, model: nn.Module) -> None:
    """Loads a state_dict (of torch.save or safetensors) or a compact file; ValueError if it does not fit the model."""
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}; expected a state_dict saved by torch.save or safetensors")
    try:
        if path.suffix != ".safetensors":
            model.load_state_dict(_named_as(model, _read_state_dict(path)))
            return
        with safe_open(path, framework="pt") as file:
            is_compact = (file.metadata() or {}).get("format") == COMPACT
        (load_compact(path, model) if is_compact else model.load_state_dict(_named_as(model, load_file(path))))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a complete safetensors file ({error}); copy or save it again") from None
    except RuntimeError as error:  # its first line names the model, its second the first difference
        problem = " ".join(line.strip() for line in str(error).splitlines()[1:2]).rstrip(".") or str(error)
        raise ValueError(f"{path} does not fit the model: {problem}; it must be a state_dict of this model") from None


def read_torch(path: Path) -> Any:
    """What torch.save has written, without running any code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        with open(path, "rb") as file:
            is_whole = zipfile.is_zipfile(path) or file.read(1) == b"\x80"
        if is_whole and isinstance(error, pickle.UnpicklingError):
            problem = "contains more than tensors, and loading it could run code; save model.state_dict() instead"
            raise ValueError(f"{path} {problem}") from None
        raise ValueError(f"{path} is not a complete file of torch.save; copy or save it again") from None


def _read_state_dict(path: Path) -> Mapping[str, Tensor]:
    found = read_torch(path)
    if isinstance(found, Mapping):
        found = next((found[key] for key in INNER if isinstance(found.get(key), Mapping)), found)
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} holds a {type(found).__name__}, not a state_dict; save model.state_dict() instead")
    return found


def _named_as(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state under the model's names: without those of wrappers, and tied tensors under each of theirs."""
    own = model.state_dict()
    if not state.keys() <= own.keys():
        state = {name.replace("_orig_mod.", "").removeprefix("module."): value for name, value in state.items()}
    places = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in own.items() if isinstance(tensor, Tensor)}
    stored = {places[name]: value for name, value in state.items() if name in places}
    return {**{name: stored[place] for name, place in places.items() if place in stored}, **state}


@dataclass
class RunFolder:
    """An open run; everything added is on disk when the call returns."""

    path: Path
    record: Record

    def put(self, **entries: Any) -> None:
        record = {**self.record, **entries}
        with writing(inside(self.path, RUN)) as draft:
            draft.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
        self.record = record  # only now: memory is never ahead of the disk

    def add(self, cell: Record) -> None:
        self.put(cells=[*self.record["cells"], cell])


@contextmanager
def open_run(path: Path, description: Record, *, fresh: bool = False) -> Iterator[RunFolder]:
    """Opens and locks the folder of a run, new or to be resumed; ValueError if it is in use or holds something else.

    `fresh` starts over; a run without any result is replaced in any case.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; choose another folder (--out)")
    path.mkdir(parents=True, exist_ok=True)
    with locked(inside(path, LOCK), path, "choose another folder (--out)"):
        before = read_run(path) if (path / RUN).exists() else None
        if before is None:
            _check_empty(path)
        elif not fresh and _facts(description) == _facts(before):
            yield RunFolder(path, before)
            return
        elif not fresh and (before["cells"] or any(path.glob(f"*/{STATE}"))):
            raise ValueError(_differences(path, _facts(before), _facts(description)))
        states = [str(file.relative_to(path)) for file in path.glob(f"*/{STATE}")]
        cells = [name for cell in (before or {"cells": ()})["cells"] for name in cell["files"].values()]
        cells += [REPORT] if is_report(path / REPORT) else []
        old, results = ([inside(path, name) for name in names] for names in ((DENSE, *states), cells))
        for file in old:  # before the new record, which must not find them
            file.unlink(missing_ok=True)
        folder = RunFolder(path, {})
        folder.put(format=FORMAT, **description, started=now(), finished=None, cells=[])
        for file in results:
            file.unlink(missing_ok=True)
            with suppress(OSError):  # a folder that holds something else stays
                file.parent.rmdir()
        yield folder


def now() -> str:
    """The time in UTC, as run.json has it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    found = {"the command": record["kind"]}
    for part, prefix in (("task", "task "), ("model", "model "), ("settings", ""), ("digests", "the content of ")):
        found |= {f"{prefix}{key}": value for key, value in record[part].items() if key not in PATHS}
    return found


def _differences(path: Path, old: dict[str, Any], new: dict[str, Any]) -> str:
    changed = [name for name in {**new, **old} if old.get(name) != new.get(name)]
    found = [f"{name} was {_shown(old.get(name))} and is now {_shown(new.get(name))}" for name in changed[:3]]
    remedy = "choose another folder (--out), or start this one over (--fresh)"
    return f"{path} holds another run: {'; '.join(found)}; {remedy}"


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
    return (text if len(text) < 64 else text[:8]) or "none"  # a digest is shown by its first digits


def _check_empty(path: Path) -> None:
    others = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK and not entry.name.endswith(".part"))
    if others:
        raise ValueError(f"{path} is not empty and not a run folder (it contains {others[0]}); choose another (--out)")


def read_run(path: Path) -> Record:
    """The record of a run, from its folder or its run.json; ValueError if there is none, or it is not complete."""
    file = inside(path, RUN) if path.is_dir() else path
    if not file.is_file():
        inner = sorted(str(found.parent) for found in path.glob(f"*/{RUN}"))
        hint = f"did you mean {' '.join(inner)}?" if inner else "`mfac prune` and `mfac train` create one"
        raise ValueError(f"{path} is not a run folder (it has no {RUN}); {hint}")
    try:
        record: Record = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON ({error}); {REMEDY}") from None
    found = (record.get("format"), record.get("kind")) if isinstance(record, dict) else type(record).__name__
    if found not in [(FORMAT, kind) for kind in CELLS]:
        raise ValueError(f"{file}: expected the contents of a {RUN} of format {FORMAT}, got {found}")
    _check(record, {**RECORD, "cells": [CELLS[record["kind"]]]}, str(file))
    for name in (name for cell in record["cells"] for name in cell["files"].values()):
        if not isinstance(name, str) or inside(file.parent, name).parent == file.parent:
            raise ValueError(f"{file} names {name!r} as a file of a cell, which is not in the cell's folder; {REMEDY}")
    return record


def is_report(path: Path) -> bool:
    """Whether a file is a page of `mfac report`, which may be replaced."""
    return path.is_file() and GENERATOR in path.read_bytes()[:2048]


def inside(folder: Path, name: str) -> Path:
    """The path of a file of a run; ValueError if it is outside of the folder, by its name or by a link."""
    if Path(os.path.realpath(folder)) not in Path(os.path.realpath(folder / name)).parents:
        problem = f"{folder / name} is a file of a run and outside of the run folder {folder}"
        raise ValueError(f"{problem}; remove that link or entry of {RUN}, or choose another folder (--out)")
    return folder / name


def _check(value: Any, shape: Any, name: str) -> None:
    kinds = (type(shape),) if isinstance(shape, dict | list) else shape if isinstance(shape, tuple) else (shape,)
    if not isinstance(value, kinds):
        expected = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
        raise ValueError(f"{name} must be of type {expected}, not {repr(value)[:40]}; {REMEDY}")
    if isinstance(shape, dict):
        for key, inner in shape.items():
            if key not in value:
                raise ValueError(f"{name} has no entry {key!r}; {REMEDY}")
            _check(value[key], inner, f"{name}: {key}")
    elif isinstance(shape, list):
        if not value and shape[1:]:
            raise ValueError(f"{name} is empty; {REMEDY}")
        for number, item in enumerate(value):
            _check(item, shape[0], f"{name} {number}")
