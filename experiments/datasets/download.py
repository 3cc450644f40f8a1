"""Downloads that go on where they were cut, and are in place only when they are whole."""

import hashlib
import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PIECE = 1 << 18
# Not OSError as a whole: a full disk is no fault of the network, and trying again would not mend it.
NETWORK_ERRORS = (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError)
Progress = Callable[[str, int, int | None], None]  # (file, bytes so far, bytes in all where that is known)


class DownloadError(OSError):
    """A download that did not come to its end; what came is kept, and the next try goes on from there."""


class ChecksumError(ValueError):
    """A file that is not the published one."""


def download(
    urls: Sequence[str],
    target: Path,
    checksum: str | None = None,
    *,
    progress: Progress | None = None,
    attempts: int = 4,
    timeout: float = 30.0,
    pause: float = 1.0,
) -> None:
    """Fetches the first of `urls` that answers to `target`, by way of `target.part` beside it.

    A part that is there is continued where a checksum will tell whether that went well and the server can do it;
    else the download starts anew. Proxies are those of the environment (`http_proxy`, `https_proxy`, `no_proxy`).

    Args:
        urls: the same file at several places.
        target: where it goes; nothing is done if it is there and has the checksum.
        checksum: "md5:..." or "sha256:..."; None if it is not known.
        progress: called with (name, bytes so far, bytes in all or None).
        attempts: for each address; a try that brought something does not count.
        timeout: seconds without any data.
        pause: seconds before the second try, twice as long before the third, and so on.

    Raises:
        DownloadError: no address gave all of it.
        ChecksumError: what came, or what is at `target`, has another checksum.
    """
    if target.exists():
        check(target, checksum)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    report = progress or (lambda name, done, total: None)
    attempt = _Download(
        target.with_name(f"{target.name}.part"),
        checksum,
        lambda done, total: report(target.name, done, total),
        attempts,
        timeout,
        pause,
    )
    reasons = []
    for url in urls:
        try:
            attempt.fetch_checked(url)
        except DownloadError as error:
            reasons.append(str(error))
        else:
            attempt.part.replace(target)
            return
    raise DownloadError("; ".join(reasons))


def check(path: Path, checksum: str | None) -> None:
    """Compares a file with its checksum, if there is one.

    Raises:
        ChecksumError: they differ.
    """
    if checksum is None:
        return
    algorithm, _, expected = checksum.partition(":")
    digest = hashlib.new(algorithm)
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    if digest.hexdigest() != expected:
        raise ChecksumError(
            f"{path} is not the published file: its {algorithm} is {digest.hexdigest()}, it should be {expected}; "
            "remove it and try again"
        )


@dataclass(frozen=True)
class _Download:
    """What stays the same over tries and addresses; see `download`."""

    part: Path
    checksum: str | None
    report: Callable[[int, int | None], None]
    attempts: int
    timeout: float
    pause: float

    def fetch_checked(self, url: str) -> None:
        """The whole of it in `part`, with the right checksum; a part that was there and did not fit is dropped."""
        if self.checksum is None:
            self.part.unlink(missing_ok=True)
        resumed = self.part.exists()
        self._fetch(url)
        try:
            check(self.part, self.checksum)
        except ChecksumError:
            self.part.unlink()  # it would only be continued to another wrong file
            if not resumed:
                raise
            self.fetch_checked(url)

    def _fetch(self, url: str) -> None:
        """Tries until the whole of it has come, or `attempts` times without anything new."""
        failures = 0
        while True:
            before = _size(self.part)
            try:
                if self._fetch_once(url):
                    return
                reason = f"the connection was cut after {_size(self.part):,} bytes"
            except urllib.error.HTTPError as error:
                error.close()
                reason = f"the server answered {error.code} {error.reason}"
                if error.code < 500:  # it will be the same in a minute
                    raise DownloadError(f"{url}: {reason}") from error
            except NETWORK_ERRORS as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            failures = 0 if _size(self.part) > before else failures + 1
            if failures >= self.attempts:
                raise DownloadError(f"{url}: {reason}")
            time.sleep(self.pause * failures)

    def _fetch_once(self, url: str) -> bool:
        """One request, from where the part ends; whether all of it is there afterwards."""
        done = _size(self.part)
        request = urllib.request.Request(url, headers={"User-Agent": "mfac"})
        if done:
            request.add_header("Range", f"bytes={done}-")
        opener = urllib.request.build_opener()  # anew: it reads the proxies of the environment as they are now
        try:
            response = opener.open(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            if error.code != 416 or not done:
                raise
            error.close()
            whole = _whole_length(error.headers) == done
            if not whole:
                self.part.unlink()  # longer than the file itself
            return whole
        with response:
            return self._write(response, done)

    def _write(self, response: Any, asked: int) -> bool:
        """Appends an answer to the part, or starts it anew; whether all of it is there afterwards."""
        done, total = _extent(response, asked)
        with self.part.open("ab" if done else "wb") as file:
            self.report(done, total)
            while piece := response.read(PIECE):
                file.write(piece)
                done += len(piece)
                self.report(done, total)
        return total is None or done == total


def _extent(response: Any, asked: int) -> tuple[int, int | None]:
    """(where the answer begins, the length of the file): zero where the server sends all of it from the start."""
    length = response.headers.get("Content-Length")
    length = None if length is None else int(length)
    given = response.headers.get("Content-Range", "")
    if response.status != 206 or not given.startswith(f"bytes {asked}-"):
        return 0, length
    return asked, None if length is None else asked + length


def _whole_length(headers: Any) -> int | None:
    """The length in a header "bytes */123"."""
    length = str(headers.get("Content-Range", "")).rpartition("/")[2]
    return int(length) if length.isdigit() else None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
