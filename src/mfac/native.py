"""Products of stored rows with a vector by compiled code: torch has none that read one dtype and compute in another.

`native.c` is compiled once a process, in half a second, when a window is large enough for that to pay. Where there is
no compiler, or compiling fails, `find` gives None and torch converts the rows a tile at a time. The choice depends on
the window's size and the machine only, so it is the same all through a run and when a run is resumed.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Thread

import torch
from jaxtyping import Float
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-fopenmp-simd", "-shared", "-fPIC")
SECONDS = 60  # a compiler that takes longer is given up
LEAST_NUMBERS = 1 << 24  # of a matrix: compiling is paid back within some hundred steps
STORED = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT32", torch.int8: "INT8"}
REAL = {torch.float32: "float", torch.float64: "double"}
ROWS, STRIP = 4, 4096  # what is not divided between threads, as in native.c

_allowed = True


def allow(allowed: bool) -> None:
    """Says whether windows and blocks may use compiled code from now on, in the whole process; they may by default.

    Sums are made in another order with it and without, so decide before the first step.
    """
    global _allowed
    _allowed = bool(allowed)


def worthwhile(device: torch.device, count: int) -> bool:
    """Whether code may be compiled, and should be, for so many numbers."""
    return _allowed and device.type == "cpu" and count >= LEAST_NUMBERS


class _Matrix(ctypes.Structure):
    """The struct of the same name in native.c."""

    _fields_ = [
        ("numbers", ctypes.c_void_p), ("scales", ctypes.c_void_p),
        ("m", ctypes.c_int64), ("d", ctypes.c_int64), ("width", ctypes.c_int64), ("packed", ctypes.c_int64),
    ]  # fmt: skip


class NativeProducts:
    """G x and Gᵀa of one matrix as stored.

    Args:
        library: native.c, compiled for the dtype of the numbers and for `real`.
        real: the dtype of the arithmetic.
        numbers: the matrix [m, d]; or, where there are scales, one block [m, block] of columns behind the other.
        shape: (m, d).
        scales: [blocks, m], what the numbers of a row of a block are multiplied by.
        block: how many columns share a scale.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        real: torch.dtype,
        numbers: Tensor,
        shape: tuple[int, int],
        scales: Float[Tensor, "blocks m"] | None = None,
        block: int | None = None,
    ):
        self._library = library
        self._real = real
        self._held = numbers, scales
        self._unit = STRIP if block is None else block
        (m, d), packed = shape, scales is not None
        scales_at = scales.data_ptr() if scales is not None else None
        self._matrix = _Matrix(numbers.data_ptr(), scales_at, m, d, block or d, packed)
        self._at = ctypes.byref(self._matrix)

    def project(self, n: int, x: Float[Tensor, " d"]) -> Float[Tensor, " n"]:
        """G x for the first n rows, in float64."""
        x, out = x.to(self._real).contiguous(), torch.empty(n, dtype=torch.float64)

        def rows(top: int, bottom: int) -> None:
            self._library.project(self._at, *pointers(x), *longs(top, bottom), *pointers(out))

        in_threads(rows, n, ROWS)
        return out

    def combine(self, a: Float[Tensor, " n"]) -> Float[Tensor, " d"]:
        """Gᵀ a over the first n rows."""
        a, out = a.double().contiguous(), torch.empty(self._matrix.d, dtype=self._real)

        def columns(first: int, last: int) -> None:
            self._library.combine(self._at, *pointers(a), *longs(len(a), first, last), *pointers(out))

        in_threads(columns, self._matrix.d, self._unit)
        return out


def find(
    real: torch.dtype,
    numbers: Tensor,
    shape: tuple[int, int],
    scales: Float[Tensor, "blocks m"] | None = None,
    block: int | None = None,
) -> NativeProducts | None:
    """Compiled products of this matrix, in the arithmetic `real`; None where torch's own are to be used."""
    known = numbers.dtype in STORED and real in REAL and numbers.dtype != real
    if not (known and worthwhile(numbers.device, numbers.numel())):
        return None
    library = compiled(SOURCE, STORED[numbers.dtype], f"REAL={REAL[real]}")
    return None if library is None else NativeProducts(library, real, numbers, shape, scales, block)


@cache
def compiled(source: Path, *defined: str) -> ctypes.CDLL | None:
    """A source file, compiled into one that is gone when it is loaded; None where that cannot be done."""
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    if found is None or not source.exists():
        return None
    for tuned in (("-march=native",), ()):  # not every compiler knows the machine it runs on
        with tempfile.TemporaryDirectory(prefix="mfac-", ignore_cleanup_errors=True) as folder:
            target = Path(folder) / "native.so"
            command = [found, *FLAGS, *tuned, *(f"-D{name}" for name in defined), str(source), "-o", str(target), "-lm"]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
                return ctypes.CDLL(str(target))
            except (OSError, subprocess.SubprocessError):
                continue
    return None


def pointers(*tensors: Tensor) -> list[ctypes.c_void_p]:
    """Where their numbers are, as arguments of compiled code."""
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def longs(*numbers: int) -> list[ctypes.c_int64]:
    """Whole numbers, as arguments of compiled code."""
    return [ctypes.c_int64(number) for number in numbers]


def in_threads(work: Callable[[int, int], None], count: int, unit: int) -> None:
    """Calls work(start, stop) over `count` things, as many at a time as torch has threads; no unit is divided."""
    units = -(-count // unit)
    threads = min(torch.get_num_threads(), units)
    ends = [min(count, units * i // threads * unit) for i in range(threads + 1)]
    others = [Thread(target=work, args=span) for span in pairwise(ends[1:])]
    for thread in others:
        thread.start()
    work(0, ends[1])
    for thread in others:
        thread.join()
