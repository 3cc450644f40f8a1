"""Archives unpacked so that nothing is ever written outside the folder, and nothing at all of one that tries."""

import gzip
import shutil
import stat
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

LIMIT = 4 << 30  # bytes that an archive may unpack to: no data set here comes near, a "bomb" goes beyond


class UnsafeArchive(ValueError):  # noqa: N818 (it says what it is)
    """An archive with a name or a link that leaves the folder, a device, or more data than is sensible."""


def unpack(archive: Path, folder: Path, *, limit: int = LIMIT) -> None:
    """Unpacks a .tar, .tar.gz, .tgz or .zip; of a .gz its only file; any other file is copied.

    Every name is looked at before the first file is written. Links within the archive become copies.

    Raises:
        UnsafeArchive: nothing was written.
        ValueError: the archive is damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if archive.name.endswith((".tar.gz", ".tgz", ".tar")):
            _unpack_tar(archive, folder, limit)
        elif archive.suffix == ".zip":
            _unpack_zip(archive, folder, limit)
        elif archive.suffix == ".gz":
            with gzip.open(archive) as source:
                _write(source, folder / archive.stem, limit)
        else:
            shutil.copyfile(archive, folder / archive.name)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{archive} is damaged ({error}); remove it and fetch it again") from error


def _unpack_tar(archive: Path, folder: Path, limit: int) -> None:
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        for member in members:
            _check_name(member.name, archive)
            if member.issym() or member.islnk():
                start = PurePosixPath(member.name).parent if member.issym() else PurePosixPath()
                _check_link(member.name, start, member.linkname, archive)
            elif not (member.isfile() or member.isdir()):
                raise UnsafeArchive(f"{archive} has {member.name!r}, which is no file; it was not unpacked")
        _check_size(sum(member.size for member in members), limit, archive)
        for member in members:
            if not member.isdir():
                _write_member(tar, member, folder / member.name, limit)


def _unpack_zip(archive: Path, folder: Path, limit: int) -> None:
    with zipfile.ZipFile(archive) as file:
        members = file.infolist()
        targets: dict[str, str] = {}
        for member in members:
            _check_name(member.filename, archive)
            if stat.S_ISLNK(member.external_attr >> 16):
                link, start = file.read(member).decode(), PurePosixPath(member.filename).parent
                targets[member.filename] = str(_check_link(member.filename, start, link, archive))
        _check_size(sum(member.file_size for member in members), limit, archive)
        for member in members:
            if member.is_dir():
                continue
            name = targets.get(member.filename, member.filename)
            if name not in file.NameToInfo:
                raise _dangling(member.filename)
            with file.open(name) as source:
                _write(source, folder / member.filename, limit)


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path, limit: int) -> None:
    try:
        source = tar.extractfile(member)
    except KeyError:
        raise _dangling(member.name) from None
    if source is None:
        raise _dangling(member.name)
    with source:
        _write(source, path, limit)


def _dangling(name: str) -> UnsafeArchive:
    return UnsafeArchive(f"the link {name!r} leads to no file of the archive; unpacking stopped there")


def _check_name(name: str, archive: Path) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in (path.parts[0] if path.parts else ""):
        raise UnsafeArchive(f"{archive} has the name {name!r}, which leaves the folder; it was not unpacked")


def _check_link(name: str, start: PurePosixPath, target: str, archive: Path) -> PurePosixPath:
    """Where the link leads, as a name in the archive."""
    parts: list[str] = []
    inside = not PurePosixPath(target).is_absolute()
    for part in (start / target).parts:
        if part == "..":
            inside = inside and bool(parts)
            parts = parts[:-1]
        else:
            parts.append(part)
    if not inside:
        raise UnsafeArchive(f"{archive} has the link {name!r} to {target!r}, outside the folder; it was not unpacked")
    return PurePosixPath(*parts)


def _check_size(total: int, limit: int, archive: Path) -> None:
    if total > limit:
        raise UnsafeArchive(f"{archive} would unpack to {total:,} bytes, over {limit:,}; it was not unpacked")


def _write(source: IO[bytes] | gzip.GzipFile, path: Path, limit: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = 0
    with path.open("wb") as target:
        while piece := source.read(1 << 20):
            written += len(piece)
            if written > limit:  # a gzip, or a lie in the archive's list
                target.close()
                path.unlink()
                raise UnsafeArchive(f"{path.name} unpacks to more than {limit:,} bytes; it was removed")
            target.write(piece)
