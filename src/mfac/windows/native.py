"""Products of stored rows with a vector by compiled code: torch has none that read one dtype and compute in another.

`native.c` is compiled when a window is built that is large enough to pay for it, once per process and storage dtype, in
less than half a second. Without a compiler or a writable temporary folder, or if compiling takes too long, `project`
and `combine` give None, and torch converts the rows a tile at a time instead.
"""

import ctypes
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-fopenmp-simd", "-shared", "-fPIC")
SECONDS = 10  # after that the compiler is given up
LEAST_NUMBERS = 1 << 24  # of a window: compiling pays within a few hundred steps
STORED = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32", torch.int8: "INT8"}
REAL = {torch.float32: "float", torch.float64: "double"}
ROWS, STRIP = 4, 4096  # never divided between threads; as in native.c

_allowed = True


def allow(allowed: bool) -> None:
    """Says whether windows may use compiled code from now on, in the whole process; by default they may.

    Compiled code adds up in another order than torch does, so decide before the first step.
    """
    global _allowed
    _allowed = bool(allowed)


class Stored(NamedTuple):
    """Rows as stored: `numbers` [m, d], times `scales` where there are any, one for `block` columns of a row.

    Products are None where torch has to make them.
    """

    numbers: Tensor
    scales: Float[Tensor, "blocks m"] | None = None
    block: int | None = None

    def compiled(self, dtype: torch.dtype) -> bool:
        """Whether it makes products in another dtype; compiles it if that pays and has not been done."""
        return dtype != self.numbers.dtype and _library(self.numbers) is not None

    def project(self, n: int, x: Float[Tensor, " d"], dtype: torch.dtype) -> Float[Tensor, " n"] | None:
        """G x for the first n rows: computed in `dtype`, returned in float64."""
        return self._run("project", x.to(dtype), n, dtype, (n, torch.float64), ROWS)

    def combine(self, a: Float[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, " d"] | None:
        """Gᵀ a over the first len(a) rows, in `dtype`."""
        shape = self.numbers.shape[1], dtype
        return self._run("combine", a.double(), len(a), dtype, shape, self.block or STRIP)

    def _run(
        self, name: str, vector: Tensor, n: int, dtype: torch.dtype, made: tuple[int, torch.dtype], unit: int
    ) -> Tensor | None:
        """In as many threads as torch has, each an equal share of whole units of the numbers that are `made`."""
        if (library := _library(self.numbers)) is None:
            return None
        (m, d), scales = self.numbers.shape, None if self.scales is None else self.scales.data_ptr()
        function, vector = getattr(library, f"{name}_{REAL[dtype]}"), vector.contiguous()
        arguments = self.numbers.data_ptr(), scales, m, d, self.block or d, vector.data_ptr(), n
        length, out = made[0], torch.empty(made[0], dtype=made[1], device="cpu")

        def work(first: int, last: int) -> None:
            function(*arguments, first, last, out.data_ptr())

        units = -(-length // unit)
        threads = min(torch.get_num_threads(), units)
        ends = [min(length, units * i // threads * unit) for i in range(threads + 1)]
        if threads == 1:
            work(0, length)
            return out
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, ends[:-1], ends[1:]))
        return out


def _library(numbers: Tensor) -> ctypes.CDLL | None:
    known = numbers.device.type == "cpu" and numbers.dtype in STORED
    return _compiled(STORED[numbers.dtype]) if _allowed and known and numbers.numel() >= LEAST_NUMBERS else None


@cache
def _compiled(stored: str) -> ctypes.CDLL | None:
    """The library, of which no file is left; None where it cannot be made."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    for tuned in (("-march=native",), ()):  # not every compiler knows the machine it runs on
        try:
            with tempfile.TemporaryDirectory(prefix="mfac-", ignore_cleanup_errors=True) as folder:
                target = str(Path(folder) / "native.so")
                command = [compiler, *FLAGS, *tuned, f"-D{stored}", str(SOURCE), "-o", target]
                subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
                return _declared(ctypes.CDLL(target))
        except subprocess.TimeoutExpired:
            return None
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for real in REAL.values():
        for name in ("project", "combine"):
            function = getattr(library, f"{name}_{real}")
            function.argtypes = [pointer, pointer, *[number] * 3, pointer, *[number] * 3, pointer]
            function.restype = None
    return library
