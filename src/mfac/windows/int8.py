"""Rows in eight bits per number, with one scale per block of columns: a quarter of the memory of float32.

A scale keeps 16 bits of its mantissa, so that code times scale is exact in float32: a row reads back as the same
numbers whatever the arithmetic.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mfac import products
from mfac.memory import is_count
from mfac.saved import count_of, tensor_of
from mfac.windows import native
from mfac.windows.rows import Rows, SavedRows, StoredRow

LARGEST = 127
SPARE_BITS = 0xFF  # of a float32 mantissa: 24 bits, less the 16 of a scale


@dataclass(frozen=True)
class Int8:
    """Rows in int8: symmetric, with one float32 scale per block of columns of a row.

    Args:
        block: columns that share a scale. Shorter blocks follow the gradient more closely, longer ones are faster.
        stochastic: round up or down at random, so that rounding is unbiased, instead of to the nearest.
        seed: of the random numbers, which are the window's own: torch's random state is not used.

    Raises:
        ValueError: the block is not a positive int.
    """

    block: int = 4096
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_count(self.block):
            raise ValueError(f"the block of Int8 must be a positive int, not {self.block!r}; 4096 is the default")

    @property
    def name(self) -> str:
        return "torch.int8" if self == Int8() else f"mfac.{self!r}"

    def blocks(self, dim: int) -> int:
        """How many blocks a row of so many columns has."""
        return -(-dim // self.block)

    def bytes(self, num_grads: int, dim: int) -> int:
        return num_grads * (dim + 4 * self.blocks(dim))

    def build(self, num_grads: int, dim: int, device: torch.device) -> Rows:
        codes = torch.zeros(num_grads, dim, dtype=torch.int8, device=device)
        rows = Int8Rows(self, codes, torch.zeros(self.blocks(dim), num_grads, dtype=torch.float32, device=device))
        rows.compiled(torch.float32)  # compiles now, not in the first step
        return rows


class Int8Rows(Rows):
    """Codes [m, d] and scales [blocks, m].

    Products never multiply codes by scales: within a block a row has one scale, and that multiplies the coefficient
    that goes in (Gᵀa) or the sum that comes out (Gx).
    """

    kind: Int8

    def __init__(self, kind: Int8, codes: Tensor, scales: Float[Tensor, "blocks m"], written: int = 0):
        self.kind = kind
        self.shape = codes.shape[0], codes.shape[1]
        self.device = codes.device
        self._codes = codes
        self._scales = scales
        self._stored: native.Stored = native.Stored(codes, scales, kind.block)
        self._written = written  # numbers the draws of stochastic rounding

    def encode(self, g: Float[Tensor, " d"]) -> StoredRow:
        noise = None
        if self.kind.stochastic:  # by how many rows were written, and nothing else: a resumed run draws the same
            # Spread over all bits: torch's generator on the CPU looks at the lowest 32 only.
            seed = (self.kind.seed * 0x9E3779B97F4A7C15 + self._written) % 2**63
            generator = torch.Generator(g.device).manual_seed(seed)
            noise = torch.rand(len(g), generator=generator, dtype=torch.float32, device=g.device)
        codes, scales = quantize(g, self.kind.block, noise)
        return StoredRow(self._dequantized(codes, scales), (codes, scales))

    def write(self, k: int, stored: StoredRow) -> None:
        self._codes[k], self._scales[:, k] = stored.parts
        self._written += 1

    @products.without_autocast
    def project(self, n: int, x: Float[Tensor, "d *k"], dtype: torch.dtype) -> Float[Tensor, "n *k"]:
        if x.ndim == 1 and (compiled := self._stored.project(n, x, dtype)) is not None:
            return compiled
        x = x.to(dtype)
        parts = torch.empty(len(self._scales), n, *x.shape[1:], dtype=dtype, device=x.device)
        for rows, columns, tile in products.tiles(self._codes[:n], dtype, self.kind.block):
            torch.matmul(tile, x[columns], out=parts[columns.start // self.kind.block, rows])
        return torch.einsum("bn...,bn->n...", parts.double(), self._scales[:, :n].double())

    @products.without_autocast
    def combine(self, a: Float[Tensor, "n *k"], dtype: torch.dtype) -> Float[Tensor, "d *k"]:
        if a.ndim == 1 and (compiled := self._stored.combine(a, dtype)) is not None:
            return compiled
        out = torch.zeros(self.shape[1], *a.shape[1:], dtype=dtype, device=a.device)
        into = torch.addmv if a.ndim == 1 else torch.addmm
        for rows, columns, tile in products.tiles(self._codes[: len(a)], dtype, self.kind.block):
            scales = self._scales[columns.start // self.kind.block, rows].double().view(-1, *[1] * (a.ndim - 1))
            into(out[columns], tile.T, (a[rows] * scales).to(dtype), out=out[columns])
        return out

    def row(self, k: int) -> Float[Tensor, " d"]:
        return self._dequantized(self._codes[k], self._scales[:, k])

    def gather(self, n: int, indices: Int[Tensor, " c"]) -> Float[Tensor, "n c"]:
        return self._codes[:n, indices].float().mul_(self._scales[indices // self.kind.block, :n].T)

    def widened(self, extra: int) -> Rows:
        codes, more = F.pad(self._codes, (0, extra)), self.kind.blocks(self.shape[1] + extra) - len(self._scales)
        return Int8Rows(self.kind, codes, F.pad(self._scales, (0, 0, 0, more)), self._written)

    def state(self) -> dict[str, Any]:
        stored = {"written": self._written, "codes": self._codes, "scales": self._scales}
        return {"kind": "int8", **asdict(self.kind), **stored}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> "Int8Rows":
        """Reads a saved state, in its own memory."""
        codes = state["codes"]
        kind = Int8(int(state["block"]), bool(state["stochastic"]), int(state["seed"]))
        if codes.ndim != 2 or codes.dtype != torch.int8:
            raise TypeError(f"codes are {codes.dtype} {list(codes.shape)}")
        scales = tensor_of(state, "scales", (kind.blocks(codes.shape[1]), len(codes)))
        return cls(kind, codes, scales, count_of(state, "written"))

    def load(self, saved: SavedRows, n: int) -> bool:
        """Copies codes that have the same blocks; quantizes other rows anew."""
        if isinstance(saved, Int8Rows) and (saved.kind.block, saved.shape) == (self.kind.block, self.shape):
            self._codes.copy_(saved._codes)
            self._scales.copy_(saved._scales)
            self._written = saved._written
            return False
        self._store(saved, n, self.encode)
        self._codes[n:], self._scales[:, n:] = 0, 0
        return True

    def _dequantized(self, codes: Tensor, scales: Float[Tensor, " blocks"]) -> Float[Tensor, " d"]:
        return codes.float().mul_(scales.repeat_interleave(self.kind.block)[: len(codes)])


def quantize(
    row: Float[Tensor, " d"], block: int, noise: Float[Tensor, " d"] | None = None
) -> tuple[Tensor, Float[Tensor, " blocks"]]:
    """Codes in [-127, 127] and scales, max|block|/127 rounded up to 16 bits; not finite where the block is not.

    With `noise`, uniform in [0, 1), rounding is up with the probability of the fraction; else to the nearest.
    """
    whole = F.pad(row.float(), (0, -len(row) % block)).view(-1, block)
    scales = (whole.abs().amax(-1) / LARGEST).view(torch.int32).add(SPARE_BITS).bitwise_and_(~SPARE_BITS)
    scales = scales.view(torch.float32)  # NaN and infinity stay what they are
    codes = (whole / torch.where(scales > 0, scales, 1.0)[:, None]).flatten()[: len(row)]
    codes = codes.round_() if noise is None else codes.add_(noise).floor_()
    return codes.clamp_(-LARGEST, LARGEST).nan_to_num_(0.0).to(torch.int8), scales
