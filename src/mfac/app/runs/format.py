"""The format of run.json: what a record must have, and where the files of a run may be."""

import json
import os
from pathlib import Path
from types import NoneType
from typing import Any

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
        "steps": [{"sparsity": NUMBER, "predicted_increase": MAYBE, "loss_before": MAYBE, "loss_after": MAYBE}, ...],
        "training": [{"step": int, "second": NUMBER, "loss": MAYBE}],
    },
    "train": {
        **CELL, "seed": int, "settings": dict, "steps": int, "losses": [MAYBE, ...], "seconds": [NUMBER, ...],
        "seconds_total": NUMBER, "evaluations": [{"step": int, "second": NUMBER, "loss": MAYBE, "measure": MAYBE}, ...],
    },
}  # fmt: skip


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
