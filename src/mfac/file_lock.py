"""A lock on what one process at a time may write."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(lock: Path, what: object, remedy: str) -> Iterator[None]:
    """Holds a lock file that names this process, and ends with it however it ends; removes it afterwards.

    Raises:
        ValueError: another process, or another thread, holds it; says which.
    """
    import fcntl  # not on Windows, where the rest of the package can be imported

    while True:
        with open(lock, "a+") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                holder = handle.read() or "another process"
                raise ValueError(f"{holder} is writing to {what}; wait for it, or {remedy}") from None
            if os.fstat(handle.fileno()).st_nlink == 0:
                continue  # its last holder has removed it in the meantime
            handle.truncate(0)
            handle.write(f"process {os.getpid()} on {socket.gethostname()}")
            handle.flush()
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
            return
