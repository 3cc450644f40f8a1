"""A data set from its public home into the data folder: downloaded, unpacked aside, checked, moved into place."""

import shutil
import tempfile
from pathlib import Path

from experiments.datasets.catalogue import DataSet, data_set
from experiments.datasets.download import ChecksumError, DownloadError, Progress, check, download
from experiments.datasets.folder import data_folder
from experiments.datasets.unpacking import unpack


def fetch(name: str, *, progress: Progress | None = None, folder: Path | None = None) -> list[Path]:
    """The files of a data set, fetched if they are not there.

    Downloads are kept under `downloads` until everything is in place, so that a fetch that was interrupted goes on
    where it stopped; files that were put there by hand are taken as they are.

    Args:
        name: as in the catalogue.
        progress: called with (file, bytes so far, bytes in all or None).
        folder: the data folder; None: `data_folder()`.

    Raises:
        ValueError: there is no such data set.
        DownloadError: it could not be had; the message says what to put where by hand.
        ChecksumError: a file is not the published one.
    """
    entry, root = data_set(name), folder or data_folder()
    if not missing_files(entry, root):
        return _paths(entry, root)
    downloads = root / "downloads"
    try:
        for source in entry.sources:
            download(source.urls, downloads / source.name, source.checksum, progress=progress)
    except DownloadError as error:
        raise DownloadError(f"{error}. {_by_hand(entry, root)}") from error
    _put_in_place(entry, root, downloads)
    for source in entry.sources:
        (downloads / source.name).unlink()
    if not any(downloads.iterdir()):
        downloads.rmdir()
    return _paths(entry, root)


def missing_files(entry: DataSet, root: Path) -> list[str]:
    """The files of a data set that are not under `root`; those that are there are compared with their checksums.

    A file that another does instead of is not missing.

    Raises:
        ChecksumError: one is not the published file.
    """
    missing = []
    for path, (_, sha256) in entry.files.items():
        if not (root / path).exists():
            if not (path in entry.instead and (root / entry.instead[path]).exists()):
                missing.append(path)
        elif sha256 is not None:
            check(root / path, f"sha256:{sha256}")
    return missing


def _paths(entry: DataSet, root: Path) -> list[Path]:
    paths = [root / path for path in (*entry.files, *entry.instead.values())]
    return [path for path in paths if path.exists()]


def _put_in_place(entry: DataSet, root: Path, downloads: Path) -> None:
    """Unpacks beside the data, checks every file, and only then moves them: each is there whole or not at all."""
    work = Path(tempfile.mkdtemp(prefix=f".unpacking-{entry.name}-", dir=root))
    try:
        for source in entry.sources:
            unpack(downloads / source.name, work)
        if entry.assemble is not None:
            entry.assemble(work)
        for unpacked, sha256 in entry.files.values():
            if not (work / unpacked).is_file():
                raise ChecksumError(
                    f"the downloads of {entry.name} have no {unpacked}; they are not the published ones"
                )
            check(work / unpacked, None if sha256 is None else f"sha256:{sha256}")
        for path, (unpacked, _) in entry.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (work / unpacked).replace(root / path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _by_hand(entry: DataSet, root: Path) -> str:
    downloads = ", ".join(f"{source.urls[0]} as {root / 'downloads' / source.name}" for source in entry.sources)
    return (
        f"What came is kept, and another `python -m experiments.datasets {entry.name}` goes on there. "
        f"By hand: save {downloads} and run it again, or put {', '.join(entry.files)} under {root}"
    )
