"""Processes forked from one that has imported torch once for all of them, and has no threads yet."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "distributed_cases", "models", "pytest", "sklearn.datasets"])


def started(function, *arguments):
    """A process that runs a function of a module that it can import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # where the server finds what it imports at its start
        forkserver.ensure_running()
    process = CONTEXT.Process(target=_alone, args=(function, *arguments), daemon=True)
    process.start()
    return process


def in_process(function, *arguments):
    """The exit code of a process that runs a function to its end: a signal that killed it is negative."""
    process = started(function, *arguments)
    process.join()
    return process.exitcode


def peak():
    """The peak of this process in MiB. Not ru_maxrss, which a process inherits from the one that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def _alone(function, *arguments):
    # Numbers must not depend on how many cores there are, and all processes share what there is.
    torch.set_num_threads(1)
    function(*arguments)
