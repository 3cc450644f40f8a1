"""Downloads from a server of our own, and the registry against the files in the data folder."""

import functools
import hashlib
import http.server
import io
import random
import tarfile
import threading
import zipfile

import pytest

from experiments.datasets import fetching
from experiments.datasets.fetching import Entry, fetch, registry, split_mrpc
from experiments.datasets.folder import data_folder

pytest.importorskip("pooch", reason="pooch is not installed")
TRAIN, TEST = random.Random(0).randbytes(5000), b"test" * 100


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        self.server.requests.append(self.path)


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Serves `served`; data set "toy" is in its three forms there."""
    pytest.importorskip("requests", reason="requests is not installed")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MFAC_DATA", str(tmp_path / "data"))
    folder = tmp_path / "served"
    folder.mkdir()
    with tarfile.open(folder / "toy.tar.gz", "w:gz") as tar, zipfile.ZipFile(folder / "toy.zip", "w") as zipped:
        for name, content in (("train.bin", TRAIN), ("test.bin", TEST), ("readme", b"-")):
            info = tarfile.TarInfo(f"toy/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
            zipped.writestr(f"toy/{name}", content)
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    running.folder, running.requests = folder, []
    running.url = f"http://127.0.0.1:{running.server_address[1]}/"
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


def serve_toy(monkeypatch, server, archive, checksum=None):
    entries = [
        Entry(archive, checksum or sha256((server.folder / archive).read_bytes()), f"{server.url}{archive}"),
        Entry("toy/train.bin", sha256(TRAIN), None),
        Entry("toy/test.bin", sha256(TEST), None),
    ]
    monkeypatch.setattr(fetching, "registry", lambda: {"toy": entries})


def sha256(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.mark.parametrize("archive", ["toy.tar.gz", "toy.zip"])
def test_an_archive_is_downloaded_once_and_unpacked(monkeypatch, server, tmp_path, archive):
    serve_toy(monkeypatch, server, archive)
    for _ in range(2):
        assert fetch("toy") == [tmp_path / "data" / "toy" / "train.bin", tmp_path / "data" / "toy" / "test.bin"]
    present = {path: path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()}
    assert present == {tmp_path / "data/toy/train.bin": TRAIN, tmp_path / "data/toy/test.bin": TEST}
    assert len(server.requests) == 1


def test_a_file_that_is_not_the_published_one_is_neither_used_nor_overwritten(monkeypatch, server, tmp_path):
    serve_toy(monkeypatch, server, "toy.zip")
    fetch("toy")
    (tmp_path / "data" / "toy" / "test.bin").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"test.bin.* does not match"):
        fetch("toy")
    assert (tmp_path / "data" / "toy" / "test.bin").read_bytes() == b"mine"


def test_the_registry_is_complete():
    entries = registry()
    names = {"mnist", "fashion-mnist", "cifar10", "glue-mrpc", "glue-stsb", "glue-rte", "glue-sst2", "minilm-l3"}
    assert set(entries) == names | {"resnet20"}
    lengths = {"md5": 32, "sha256": 64}
    for entry in (entry for group in entries.values() for entry in group):
        assert entry.url is None or entry.url.startswith("https://")
        if entry.checksum is not None:
            algorithm, digest = entry.checksum.split(":")
            assert len(digest) == lengths[algorithm]
    with pytest.raises(ValueError, match=r"no data set 'minst'; there are mnist, fashion-mnist"):
        fetch("minst")


@pytest.mark.parametrize("name", registry())
def test_the_files_in_the_data_folder_are_those_of_the_registry(name):
    wanted = [entry.path for entry in registry()[name] if entry.url is None] or [registry()[name][0].path]
    if not all((data_folder() / path).exists() for path in wanted):
        pytest.skip(f"{name} is not in the data folder")
    assert fetch(name)


def test_mrpc_is_split_by_the_list_of_its_development_set(tmp_path):
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    lines = [f'1\t{i}\t{i + 1}\tIt \'s "{i}" .\tNo .' for i in range(6)]
    (tmp_path / "msr_paraphrase_train.txt").write_bytes("\r\n".join([header, *lines, ""]).encode())
    (tmp_path / "mrpc_dev_ids.tsv").write_bytes(b"4\t5\n1\t2\n")
    split_mrpc(tmp_path)
    assert (tmp_path / "dev.tsv").read_bytes() == "\n".join([header, lines[1], lines[4], ""]).encode()
    rest = [lines[0], lines[2], lines[3], lines[5]]
    assert (tmp_path / "train.tsv").read_bytes() == "\n".join([header, *rest, ""]).encode()
