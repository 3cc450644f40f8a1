"""A progress bar on a terminal, silence everywhere else."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def row_progress(total: int, done: int = 0, progress: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Yields a function to be called with the number of new rows.

    Args:
        total: rows in all.
        done: rows that were there before.
        progress: True shows a bar, False never does, None does on a terminal where rich is installed.

    Raises:
        ValueError: a bar is asked for and rich is not installed.
    """
    wanted = sys.stderr.isatty() if progress is None else progress
    installed = wanted and importlib.util.find_spec("rich") is not None
    if progress and not installed:
        raise ValueError("progress=True needs rich, which is not installed; pip install 'torch-mfac[progress]'")
    if not installed:
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("gradients"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("gradients", total=total, completed=done)
        yield lambda rows: bar.advance(task, rows)
