"""Archives that are what they should be, and archives that try to leave the folder."""

import gzip
import io
import stat
import tarfile
import zipfile

import pytest

from experiments.datasets.unpacking import UnsafeArchive, unpack


def tar(path, members):
    """members: {name: bytes, or ("sym" | "hard" | "fifo", target)}."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                kind, info.linkname = content
                info.type = {"sym": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE}[kind]
                archive.addfile(info)
    return path


def zipped(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            if isinstance(content, tuple):
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
                content = content[1].encode()
            archive.writestr(info, content)
    return path


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("make", "name"), [(tar, "a.tar.gz"), (tar, "a.tgz"), (zipped, "a.zip")])
def test_files_and_folders(tmp_path, make, name):
    members = {"data/one.bin": b"1", "data/deep/two.bin": b"22", "three": b""}
    unpack(make(tmp_path / name, members), tmp_path / "out")
    assert contents(tmp_path / "out") == {"data/one.bin": b"1", "data/deep/two.bin": b"22", "three": b""}


def test_one_file_compressed_or_not(tmp_path):
    (tmp_path / "images.gz").write_bytes(gzip.compress(b"pixels"))
    (tmp_path / "ids.tsv").write_bytes(b"1\t2\n")
    unpack(tmp_path / "images.gz", tmp_path / "out")
    unpack(tmp_path / "ids.tsv", tmp_path / "out")
    assert contents(tmp_path / "out") == {"images": b"pixels", "ids.tsv": b"1\t2\n"}


@pytest.mark.parametrize(
    ("make", "name", "evil"),
    [
        (tar, "a.tar.gz", {"/evil": b"x"}),
        (tar, "a.tar.gz", {"../evil": b"x"}),
        (tar, "a.tar.gz", {"data/../../evil": b"x"}),
        (tar, "a.tar.gz", {"data/link": ("sym", "/etc/passwd")}),
        (tar, "a.tar.gz", {"data/link": ("sym", "../../evil")}),
        (tar, "a.tar.gz", {"data/link": ("hard", "../evil")}),
        (tar, "a.tar.gz", {"pipe": ("fifo", "")}),
        (zipped, "a.zip", {"../evil": b"x"}),
        (zipped, "a.zip", {"/evil": b"x"}),
        (zipped, "a.zip", {"..\\evil": b"x"}),
        (zipped, "a.zip", {"C:/evil": b"x"}),
        (zipped, "a.zip", {"data/link": ("sym", "../../evil")}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_what_leaves_the_folder_is_refused_and_nothing_written(tmp_path, make, name, evil):
    archive = make(tmp_path / name, {"data/good.bin": b"good", **evil})
    with pytest.raises(UnsafeArchive, match=r"was not unpacked"):
        unpack(archive, tmp_path / "deep" / "out")
    assert contents(tmp_path) == {name: archive.read_bytes()}


@pytest.mark.parametrize(("make", "name"), [(tar, "a.tar.gz"), (zipped, "a.zip")])
def test_links_inside_become_copies(tmp_path, make, name):
    unpack(make(tmp_path / name, {"data/one": b"1", "again/link": ("sym", "../data/one")}), tmp_path / "out")
    assert contents(tmp_path / "out") == {"data/one": b"1", "again/link": b"1"}
    assert not (tmp_path / "out" / "again" / "link").is_symlink()


@pytest.mark.parametrize(("make", "name"), [(tar, "a.tar.gz"), (zipped, "a.zip")])
def test_a_link_to_nothing_is_refused(tmp_path, make, name):
    with pytest.raises(UnsafeArchive, match="'link' leads to no file"):
        unpack(make(tmp_path / name, {"link": ("sym", "nothing")}), tmp_path / "out")


def test_more_data_than_is_sensible_is_refused(tmp_path):
    for archive in (tar(tmp_path / "a.tar.gz", {"x": b"0" * 5000}), zipped(tmp_path / "a.zip", {"x": b"0" * 5000})):
        with pytest.raises(UnsafeArchive, match="would unpack to 5,000 bytes, over 4,000"):
            unpack(archive, tmp_path / "out", limit=4000)
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"0" * 5000))
    with pytest.raises(UnsafeArchive, match="x unpacks to more than 4,000 bytes"):
        unpack(tmp_path / "x.gz", tmp_path / "out", limit=4000)
    assert contents(tmp_path / "out") == {}


@pytest.mark.parametrize("name", ["a.tar.gz", "a.zip", "a.gz"])
def test_a_damaged_archive_is_told(tmp_path, name):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"pixels" * 99))
    tar(tmp_path / "a.tar.gz", {"x": bytes(range(256)) * 40})
    zipped(tmp_path / "a.zip", {"x": bytes(range(256)) * 40})
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"is damaged .*fetch it again"):
        unpack(tmp_path / name, tmp_path / "out")
