"""Public data sets, downloaded to the data folder by pooch and checked against `registry.txt`."""

import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from experiments.datasets.folder import data_folder

REGISTRY = Path(__file__).with_name("registry.txt")


class Entry(NamedTuple):
    """A file under the data folder, its checksum ("md5:..." or "sha256:..."), and its address if it is downloaded."""

    path: str
    checksum: str | None
    url: str | None


def registry() -> dict[str, list[Entry]]:
    """The files of every data set: what is downloaded, and what is made of the downloads."""
    entries: dict[str, list[Entry]] = {}
    for line in REGISTRY.read_text().splitlines():
        if not line.startswith("#"):
            name, *fields = (None if field == "-" else field for field in line.split())
            entries.setdefault(name, []).append(Entry(*fields))
    return entries


def fetch(name: str) -> list[Path]:
    """The files of a data set, downloaded if they are missing; ValueError if one is not the published file."""
    import pooch

    known, root = registry(), data_folder()
    if name not in known:
        raise ValueError(f"there is no data set {name!r}; there are {', '.join(known)}")
    wanted = [entry for entry in known[name] if entry.url is None] or known[name]
    if not all(_is_there(root / entry.path, entry.checksum) for entry in wanted):
        for entry in known[name]:
            if entry.url is not None:
                path = root / entry.path
                try:
                    pooch.retrieve(entry.url, entry.checksum, path.name, path.parent, _unpacking(path, wanted))
                except (KeyError, RecursionError, tarfile.TarError, zipfile.BadZipFile) as error:  # a loop of links
                    raise ValueError(f"{path} cannot be unpacked ({error}); delete it, and fetch it again") from error
                if path.suffix in (".gz", ".zip"):
                    path.unlink()
        if name == "glue-mrpc":
            split_mrpc(root / "glue" / "MRPC")
    for entry in wanted:
        if not _is_there(root / entry.path, entry.checksum):
            raise ValueError(f"the downloads of {name} have no {entry.path}; they are not the published ones")
    return [root / entry.path for entry in wanted]


def split_mrpc(folder: Path) -> None:
    """Writes GLUE's train.tsv and dev.tsv from `msr_paraphrase_train.txt` and the ids of `mrpc_dev_ids.tsv`.

    Lines are copied byte for byte, each file under the header, including its byte order mark.
    """
    ids = {tuple(line.split()) for line in (folder / "mrpc_dev_ids.tsv").read_bytes().splitlines()}
    header, *lines = (folder / "msr_paraphrase_train.txt").read_bytes().splitlines()
    held = [tuple(line.split(b"\t")[1:3]) in ids for line in lines]
    for name, wanted in (("train.tsv", False), ("dev.tsv", True)):
        chosen = [line.strip() for line, is_held in zip(lines, held, strict=True) if is_held is wanted]
        (folder / name).write_bytes(b"\n".join([header, *chosen, b""]))


def _is_there(path: Path, checksum: str | None) -> bool:
    """Whether the file exists; ValueError if it has another checksum than the published file."""
    import pooch

    packed = path.with_name("paraphrase-MiniLM-L3-v2.fp16.npz")  # the same weights in half the space
    if path.name == "model.safetensors" and packed.exists():
        return True
    return path.exists() and pooch.hashes.hash_matches(path, checksum, strict=True, source=str(path))


def _unpacking(path: Path, wanted: list[Entry]) -> Any:
    """Pooch's processor for a download: archives are unpacked in their own folder."""
    import pooch

    members = [str((data_folder() / entry.path).relative_to(path.parent)) for entry in wanted]
    if path.name.endswith(".tar.gz"):
        return pooch.Untar(members, extract_dir=".")
    if path.suffix == ".zip":
        return pooch.Unzip(members, extract_dir=".")
    return pooch.Decompress(name=path.stem) if path.suffix == ".gz" else None
