"""Processes that wait for work, so that a test on several ranks does not pay for starting them."""

import os
import traceback
from datetime import timedelta
from importlib import import_module
from inspect import Signature, signature
from typing import NamedTuple

import pytest
import torch.distributed as dist
from processes import CONTEXT, started

TIMEOUT = timedelta(seconds=60)


class OnRanks(NamedTuple):
    """A function that `on_ranks` made a test of, found by name in the processes."""

    module: str
    name: str

    def __call__(self, group, arguments):
        getattr(import_module(self.module), self.name).function(group, **arguments)


def on_ranks(*sizes):
    """Makes a test of a function of a process group and parameters: it runs on so many ranks, all at once."""

    def decorate(function):
        def test(rank_pool, size, **arguments):
            rank_pool.run(size, OnRanks(function.__module__, function.__name__), arguments)

        group, *parameters = signature(function).parameters.values()
        test.__signature__ = Signature([group.replace(name="rank_pool"), group.replace(name="size"), *parameters])
        test.function = function
        return pytest.mark.parametrize("size", sizes)(test)

    return decorate


class RankPool:
    """Runs a function on some ranks at once: function(group, *arguments), whose results come back in order.

    The function is one of a module that the processes can import; results are pickled.
    """

    def __init__(self, folder, most=4):
        store = str(folder / "store")
        self._pipes, self._processes = [], []
        for rank in range(most):
            ours, theirs = CONTEXT.Pipe()
            self._pipes.append(ours)
            self._processes.append(started(_serve, rank, most, store, theirs))

    def run(self, size, function, *arguments):
        """The results by rank; the first failure is raised here, with the traceback of its process."""
        for pipe in self._pipes[:size]:
            pipe.send((size, function, arguments))
        answers = [pipe.recv() for pipe in self._pipes[:size]]
        for rank, (result, failure) in enumerate(answers):
            if failure is not None:
                raise AssertionError(f"rank {rank} of {size} failed:\n{failure}") from result
        return [result for result, _ in answers]

    def close(self):
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()


def _serve(rank, most, store, pipe):
    os.environ["OMP_NUM_THREADS"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=most, timeout=TIMEOUT)
    groups = {size: dist.new_group(list(range(size)), timeout=TIMEOUT) for size in range(1, most + 1)}
    while (work := pipe.recv()) is not None:
        size, function, arguments = work
        try:
            pipe.send((function(groups[size], *arguments), None))
        except BaseException as error:
            # What pytest raises itself cannot be pickled; the traceback tells it.
            pipe.send((error if isinstance(error, Exception) else None, traceback.format_exc()))
    dist.destroy_process_group()
