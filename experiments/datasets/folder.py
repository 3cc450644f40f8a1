"""Where data sets are kept, and what to do about one that is not there."""

import os
from pathlib import Path

from mfac.app.tasks import TaskError


class MissingData(FileNotFoundError, TaskError):  # noqa: N818 (it is no defect of the program)
    """A data set that is not under the data folder: which file, which command fetches it, where to put it by hand."""


def data_folder() -> Path:
    """The folder of the data: the variable MFAC_DATA, or `mfac/data` in the user's cache folder."""
    given = os.environ.get("MFAC_DATA")
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "mfac" / "data"


def find(name: str, *parts: str) -> Path:
    """A file or folder of the data set `name`, under the data folder.

    Raises:
        MissingData: it is not there.
    """
    path = data_folder().joinpath(*parts)
    if not path.exists():
        raise MissingData(
            f"{path} is not there; `python -m experiments.datasets {name}` fetches it, or put it there by hand, "
            "or set MFAC_DATA to the folder that has it"
        )
    return path
