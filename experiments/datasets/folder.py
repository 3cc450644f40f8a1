"""Where data sets are kept."""

import os
from pathlib import Path

from mfac.app.tasks import TaskError


class MissingData(FileNotFoundError, TaskError):  # noqa: N818 (it is no defect of the program)
    """A file is not in the data folder; the message says how to get it."""


def data_folder() -> Path:
    """The environment variable MFAC_DATA, or `mfac/data` in the user's cache folder."""
    given = os.environ.get("MFAC_DATA")
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "mfac" / "data"


def find(name: str | None, *parts: str) -> Path:
    """A file of the data set `name`; None for a data set that is not in the registry."""
    path = data_folder().joinpath(*parts)
    if not path.exists():
        remedy = f"`python -m experiments.datasets {name}` fetches it, or put" if name else "put"
        raise MissingData(f"{path} is not there; {remedy} it there by hand, or set MFAC_DATA to the folder that has it")
    return path
