"""Data sets from their homes into the data folder, on a server of our own; and the catalogue against files at hand."""

import hashlib
import io
import random
import re
import tarfile
from dataclasses import replace

import pytest
from loopback import serve

from experiments.datasets import CATALOGUE, ChecksumError, DataSet, DownloadError, UnsafeArchive, data_folder, data_set
from experiments.datasets import fetch as fetch_data
from experiments.datasets.catalogue import Source
from experiments.datasets.fetching import missing_files
from experiments.datasets.mrpc import split_mrpc


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def archive(members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


TRAIN = random.Random(0).randbytes(5000)
MEMBERS = {"toy-bin/train.bin": TRAIN, "toy-bin/test.bin": b"test" * 100, "toy-bin/readme.html": b"<p>"}
ARCHIVE = archive(MEMBERS)


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MFAC_DATA", str(tmp_path / "data"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with serve({"toy.tar.gz": ARCHIVE}) as running:
        source = Source("toy.tar.gz", (f"{running.url}toy.tar.gz",), f"sha256:{sha256(ARCHIVE)}", len(ARCHIVE))
        files = {f"toy/{n}.bin": (f"toy-bin/{n}.bin", sha256(MEMBERS[f"toy-bin/{n}.bin"])) for n in ("train", "test")}
        monkeypatch.setitem(CATALOGUE, "toy", DataSet("toy", "a toy", (source,), files))
        yield running


def present(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_data_set_is_fetched_checked_and_put_in_place(server, tmp_path):
    paths = fetch_data("toy")
    assert paths == [tmp_path / "data" / "toy" / "train.bin", tmp_path / "data" / "toy" / "test.bin"]
    # Only what the catalogue lists, and neither the archive nor a folder for unpacking is left.
    assert present(tmp_path / "data") == {
        "toy/train.bin": MEMBERS["toy-bin/train.bin"],
        "toy/test.bin": MEMBERS["toy-bin/test.bin"],
    }
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["toy"]


def test_what_is_there_is_not_fetched_again(server):
    fetch_data("toy")
    before = list(server.requests)
    assert len(fetch_data("toy")) == 2
    assert server.requests == before


def test_another_folder_can_be_given(server, tmp_path):
    fetch_data("toy", folder=tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere" / "toy" / "train.bin").exists()
    assert not data_folder().exists()


def test_a_fetch_that_was_interrupted_goes_on(server, tmp_path):
    server.cuts, part = [300], tmp_path / "data" / "downloads" / "toy.tar.gz.part"

    def fail(name, done, total):
        if done:
            server.broken = True

    with pytest.raises(DownloadError, match="503"):
        fetch_data("toy", progress=fail)
    assert part.read_bytes() == ARCHIVE[:300]
    server.broken = False
    fetch_data("toy")
    assert server.requests[-1] == ("/toy.tar.gz", "bytes=300-")
    assert not part.exists()


def test_an_error_says_what_to_put_where_by_hand(server, tmp_path):
    server.files.clear()
    hand = tmp_path / "data" / "downloads" / "toy.tar.gz"
    message = f"save {server.url}toy.tar.gz as {hand} and run it again, or put toy/train.bin, toy/test.bin under"
    with pytest.raises(DownloadError, match=re.escape(message)):
        fetch_data("toy")
    hand.write_bytes(ARCHIVE)
    assert len(fetch_data("toy")) == 2


def test_an_archive_with_other_files_than_published_is_refused(server, monkeypatch, tmp_path):
    other = archive({**MEMBERS, "toy-bin/train.bin": b"other"})
    server.files["toy.tar.gz"] = other
    source = replace(CATALOGUE["toy"].sources[0], checksum=None)  # as where no checksum of the archive is known
    monkeypatch.setitem(CATALOGUE, "toy", replace(CATALOGUE["toy"], sources=(source,)))
    with pytest.raises(ChecksumError, match=r"train.bin is not the published file"):
        fetch_data("toy")
    server.files["toy.tar.gz"] = archive({"toy-bin/test.bin": MEMBERS["toy-bin/test.bin"]})
    (tmp_path / "data" / "downloads" / "toy.tar.gz").unlink()
    with pytest.raises(ChecksumError, match=r"have no toy-bin/train.bin"):
        fetch_data("toy")
    assert not (tmp_path / "data" / "toy").exists()


def test_an_evil_archive_writes_nothing(server, monkeypatch, tmp_path):
    server.files["toy.tar.gz"] = archive({**MEMBERS, "../../evil": b"x"})
    source = replace(CATALOGUE["toy"].sources[0], checksum=None)
    monkeypatch.setitem(CATALOGUE, "toy", replace(CATALOGUE["toy"], sources=(source,)))
    with pytest.raises(UnsafeArchive, match=r"'../../evil', which leaves the folder"):
        fetch_data("toy")
    assert list(present(tmp_path)) == ["data/downloads/toy.tar.gz"]


def test_a_file_that_is_not_the_published_one_is_neither_used_nor_overwritten(server, tmp_path):
    fetch_data("toy")
    (tmp_path / "data" / "toy" / "test.bin").write_bytes(b"mine")
    with pytest.raises(ChecksumError, match=r"test.bin is not the published file.*remove it and try again"):
        fetch_data("toy")
    assert (tmp_path / "data" / "toy" / "test.bin").read_bytes() == b"mine"


def test_a_file_can_do_instead_of_another(tmp_path):
    entry = DataSet("toy", "", (), {"toy/a": ("a", None)}, instead={"toy/a": "toy/b"})
    assert missing_files(entry, tmp_path) == ["toy/a"]
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "b").touch()
    assert missing_files(entry, tmp_path) == []


def test_an_unknown_name_is_told_what_there_is():
    with pytest.raises(ValueError, match="no data set 'minst'; did you mean mnist"):
        data_set("minst")
    with pytest.raises(ValueError, match="did you mean glue-rte"):
        data_set("rte")


def test_every_entry_is_whole():
    wanted = {"mnist", "fashion-mnist", "cifar10", "glue-mrpc", "glue-stsb", "glue-rte", "glue-sst2"}
    assert wanted <= set(CATALOGUE)
    for entry in CATALOGUE.values():
        assert entry.files
        for source in entry.sources:
            assert all(url.startswith(("https://", "http://")) for url in source.urls)
            algorithm, _, digest = (source.checksum or "").partition(":")
            assert (algorithm, len(digest)) in {("md5", 32), ("sha256", 64), ("", 0)}
        for path, (_, digest) in entry.files.items():
            assert not path.startswith("/")
            assert digest is None or len(bytes.fromhex(digest)) == 32
    names = [source.name for entry in CATALOGUE.values() for source in entry.sources]
    assert len(set(names)) == len(names)  # downloads lie side by side


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_files_at_hand_are_those_of_the_catalogue(name, monkeypatch):
    monkeypatch.delenv("MFAC_DATA")
    if missing_files(CATALOGUE[name], data_folder()):
        pytest.skip(f"{name} is not in the data folder")
    assert fetch_data(name)


def test_mrpc_is_cut_by_the_list_of_its_development_set(tmp_path):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    lines = [f'1\t{i}\t{i + 1}\tIt \'s "{i}" .\tNo .' for i in range(6)]
    (tmp_path / "msr_paraphrase_train.txt").write_bytes("\r\n".join([header, *lines, ""]).encode())
    (tmp_path / "mrpc_dev_ids.tsv").write_bytes(b"4\t5\n1\t2\n")
    split_mrpc(tmp_path)
    assert (tmp_path / "dev.tsv").read_bytes() == "\n".join([header, lines[1], lines[4], ""]).encode()
    rest = [lines[0], lines[2], lines[3], lines[5]]
    assert (tmp_path / "train.tsv").read_bytes() == "\n".join([header, *rest, ""]).encode()


def test_mrpc_at_hand_is_what_the_cut_gives(tmp_path, monkeypatch):
    """Train and development set, put together as the published file has them, are cut into the same bytes again."""
    monkeypatch.delenv("MFAC_DATA")
    folder = data_folder() / "glue" / "MRPC"
    if not folder.exists():
        pytest.skip("glue-mrpc is not in the data folder")
    header, *train = (folder / "train.tsv").read_bytes().splitlines()
    dev = (folder / "dev.tsv").read_bytes().splitlines()[1:]
    merged = [header, *(line for i, line in enumerate(train) for line in (train[i], *dev[i : i + 1]))]
    assert len(b"\n".join([*merged, b""])) == CATALOGUE["glue-mrpc"].sources[0].size
    (tmp_path / "msr_paraphrase_train.txt").write_bytes(b"\n".join([*merged, b""]))
    ids = [b"\t".join(line.split(b"\t")[1:3]) for line in dev]
    random.Random(0).shuffle(ids)
    (tmp_path / "mrpc_dev_ids.tsv").write_bytes(b"\n".join([*ids, b""]))
    split_mrpc(tmp_path)
    for name in ("train.tsv", "dev.tsv"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
