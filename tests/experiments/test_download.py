"""Downloads from a server on this machine that is cut, changes its mind, or stands behind a proxy."""

import errno
import hashlib
import random

import pytest
from loopback import serve

from experiments.datasets.download import ChecksumError, DownloadError, check, download

BODY = random.Random(0).randbytes(200_000)
SHA256 = f"sha256:{hashlib.sha256(BODY).hexdigest()}"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server():
    with serve({"file": BODY}) as running:
        yield running


def fetch(server, target, checksum=SHA256, **options):
    download([f"{server.url}file"], target, checksum, pause=0, **options)


def part_of(target):
    return target.with_name(f"{target.name}.part")


def test_a_whole_file_and_its_progress(server, tmp_path):
    seen = []
    fetch(server, tmp_path / "deep" / "file", progress=lambda *state: seen.append(state))
    assert (tmp_path / "deep" / "file").read_bytes() == BODY
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]
    assert seen[0] == ("file", 0, len(BODY))
    assert seen[-1] == ("file", len(BODY), len(BODY))


def test_a_connection_that_is_cut_is_taken_up_where_it_ended(server, tmp_path):
    server.cuts = [1000, 50_000]
    fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert [wanted for _, wanted in server.requests] == [None, "bytes=1000-", "bytes=51000-"]


def test_another_process_goes_on_with_the_part(server, tmp_path):
    target = tmp_path / "file"
    part_of(target).write_bytes(BODY[:777])
    fetch(server, target)
    assert target.read_bytes() == BODY
    assert server.requests == [("/file", "bytes=777-")]


def test_what_came_is_kept_when_the_server_gives_up(server, tmp_path):
    target = tmp_path / "file"
    part_of(target).write_bytes(BODY[:777])
    server.broken = True
    with pytest.raises(DownloadError, match="file: the server answered 503"):
        fetch(server, target, attempts=2)
    assert len(server.requests) == 2
    assert part_of(target).read_bytes() == BODY[:777]
    assert not target.exists()


def test_a_server_without_ranges_is_asked_for_all_of_it(tmp_path):
    target = tmp_path / "file"
    part_of(target).write_bytes(b"x" * 777)
    with serve({"file": BODY}, ranges=False) as server:
        fetch(server, target)
        assert server.requests == [("/file", "bytes=777-")]
    assert target.read_bytes() == BODY


@pytest.mark.parametrize("part", [BODY, BODY + b"more"], ids=["complete", "too long"])
def test_a_part_that_has_all_or_more(server, tmp_path, part):
    target = tmp_path / "file"
    part_of(target).write_bytes(part)
    fetch(server, target)
    assert target.read_bytes() == BODY


def test_a_part_of_something_else_is_dropped_and_all_fetched_anew(server, tmp_path):
    target = tmp_path / "file"
    part_of(target).write_bytes(b"x" * 777)
    fetch(server, target)
    assert target.read_bytes() == BODY
    assert [wanted for _, wanted in server.requests] == ["bytes=777-", None]


def test_without_a_checksum_nothing_is_continued(server, tmp_path):
    target = tmp_path / "file"
    part_of(target).write_bytes(b"x" * 777)
    fetch(server, target, checksum=None)
    assert target.read_bytes() == BODY
    assert server.requests == [("/file", None)]


def test_a_wrong_checksum_leaves_nothing_behind(server, tmp_path):
    with pytest.raises(ChecksumError, match=r"not the published file: its md5 is .*, it should be 0000; remove it"):
        fetch(server, tmp_path / "file", checksum="md5:0000")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_not_asked_for(server, tmp_path):
    (tmp_path / "file").write_bytes(BODY)
    fetch(server, tmp_path / "file")
    assert server.requests == []
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(ChecksumError, match="remove it and try again"):
        fetch(server, tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_the_second_address_serves_where_the_first_does_not(server, tmp_path):
    download([f"{server.url}gone", f"{server.url}file"], tmp_path / "file", SHA256, pause=0)
    assert (tmp_path / "file").read_bytes() == BODY


def test_the_reasons_of_all_addresses_are_told(server, tmp_path):
    with serve({}) as closed:
        dead = closed.url
    with pytest.raises(DownloadError, match=r"gone: the server answered 404 Not Found; .*file: .*refused"):
        download([f"{server.url}gone", f"{dead}file"], tmp_path / "file", SHA256, attempts=2, pause=0)


def test_the_proxy_of_the_environment_is_used_as_it_is_now(server, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    download(["http://data.invalid/file"], tmp_path / "file", SHA256, pause=0)
    assert server.requests == [("http://data.invalid/file", None)]
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    fetch(server, tmp_path / "direct")
    assert server.requests[-1] == ("/file", None)


def test_md5_and_sha256_of_a_file(tmp_path):
    (tmp_path / "file").write_bytes(BODY)
    check(tmp_path / "file", f"md5:{hashlib.md5(BODY).hexdigest()}")
    check(tmp_path / "file", SHA256)
    check(tmp_path / "file", None)


def test_a_full_disk_is_told_as_it_is(server, tmp_path, monkeypatch):
    def full(self, response, asked):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("experiments.datasets.download._Download._write", full)
    with pytest.raises(OSError, match="No space left") as caught:
        fetch(server, tmp_path / "file")
    assert caught.value.errno == errno.ENOSPC
    assert len(server.requests) == 1


def test_an_answer_of_another_range_than_asked_for_is_not_appended(server, tmp_path, monkeypatch):
    target = tmp_path / "file"
    part_of(target).write_bytes(BODY[:777])
    monkeypatch.setattr("loopback.Handler._start", lambda self: 500 if self.headers.get("Range") else 0)
    fetch(server, target)
    assert target.read_bytes() == BODY
    assert [wanted for _, wanted in server.requests] == ["bytes=777-", None]
