"""`mfac data`: public data sets into the data folder."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mfac.app.cli.options import AsJson, complete
from mfac.app.cli.progress_display import ProgressDisplay
from mfac.app.cli.tables import aligned
from mfac.app.datasets import CATALOGUE, ChecksumError, data_folder, data_set, fetch, missing_files
from mfac.memory import gib


def data(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help=f"Which to fetch: {', '.join(CATALOGUE)}. None: list them.",
            autocompletion=complete(tuple(CATALOGUE)),
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where data is kept.", show_default="MFAC_DATA, or ~/.cache/mfac/data"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fetch public data sets from their homes: resumed where a download was cut, and checked before they are used.

    Proxies are those of http_proxy and https_proxy. Without a network, the error says which files to put where.

    \b
    Examples:
      mfac data                      what there is, and what is here already
      mfac data mnist
      mfac data cifar10 resnet20
    """
    root = folder or data_folder()
    entries = [data_set(name) for name in names or ()]  # all of them before the first is fetched
    if not entries:
        rows = [_state(name, root) for name in CATALOGUE]
        typer.echo(json.dumps({"folder": str(root), "data": rows}) if as_json else _listing(rows, root))
        return
    fetched = {}
    with ProgressDisplay() as display:
        for entry in entries:
            progress = _Progress(display)
            fetched[entry.name] = [str(path) for path in fetch(entry.name, progress=progress, folder=root)]
            if not as_json:
                typer.echo(f"{entry.name}: {'fetched' if progress.used else 'is there already'}, under {root}")
    if as_json:
        typer.echo(json.dumps({"folder": str(root), "files": fetched}))


class _Progress:
    """Downloads as pieces of work for a display."""

    def __init__(self, display: ProgressDisplay):
        self.used = False
        self._display = display
        self._file = ""

    def __call__(self, file: str, done: int, total: int | None) -> None:
        self.used = True
        if file != self._file:
            self._file = file
            self._display.begin(file, (total or 0) / 1e6, "MB")
        self._display.at(done / 1e6)


def _state(name: str, root: Path) -> dict[str, Any]:
    entry = data_set(name)
    try:
        missing = missing_files(entry, root)
        state = "here" if not missing else "not here" if len(missing) == len(entry.files) else "in part"
    except ChecksumError:
        state = "differs from the published one"
    sizes = [source.size for source in entry.sources]
    download = sum(size for size in sizes if size) if all(sizes) else None
    return {"name": name, "title": entry.title, "state": state, "download_bytes": download}


def _listing(rows: list[dict[str, Any]], root: Path) -> str:
    sizes = ["" if row["download_bytes"] is None else gib(row["download_bytes"]) for row in rows]
    table = [
        ("name", "download", "state"),
        *((r["name"], size, r["state"]) for r, size in zip(rows, sizes, strict=True)),
    ]
    lines = aligned(table).splitlines()
    titles = ["", *(row["title"] for row in rows)]
    return "\n".join(
        [*(f"{line}   {title}".rstrip() for line, title in zip(lines, titles, strict=True)), "", f"Kept under {root}"]
    )
