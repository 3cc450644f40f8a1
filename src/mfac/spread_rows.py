"""The rows of G on the devices that compute with them, and the blocks of F that are built there."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.blocks import FisherBlocks, Run, runs_between
from mfac.columns import Ranks
from mfac.distributed.shares import ColumnShare
from mfac.dual import DualBlocks
from mfac.gradient_file import GradientFile
from mfac.memory import available_memory, gib
from mfac.pages import Pages, SpreadPages
from mfac.precision import Precision
from mfac.primal import PrimalBlocks

# Numbers of G that are worked on at once: a piece of many small blocks stays in cache, one of a large block is wide
# enough for the matrix products, and one from disk is worth the reading.
BLOCK_PIECE = 1 << 20
WIDE_PIECE = 1 << 24
DISK_PIECE = 1 << 26


@dataclass(frozen=True)
class SpreadRows:
    """G with a share of the columns on each device, and how it is worked on.

    `runs` are the blocks of F, none of which is in two shares; or the full matrix, which is in all of them.
    """

    pages: list[Pages]
    shares: Sequence[ColumnShare]
    runs: list[Run]
    weights: Float[Tensor, " m"] | None
    page_size: int | None
    precision: Precision
    overwrite: bool

    @classmethod
    def place(
        cls,
        grads: Tensor | GradientFile,
        devices: Sequence[torch.device],
        shares: Sequence[ColumnShare],
        runs: list[Run],
        weights: Float[Tensor, " m"] | None,
        page_size: int | None,
        precision: Precision,
        overwrite: bool,
    ) -> "SpreadRows":
        """Moves each share to its device, unless it is there, or is to come page by page.

        Raises:
            ValueError: a page size that is not a positive int.
            MemoryError: what has to be allocated is more than there is.
        """
        if page_size is not None and (not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1):
            raise ValueError(f"page_size must be a positive number of columns, not {page_size!r}")
        m, pages = grads.shape[0], []
        grads = grads.detach() if isinstance(grads, Tensor) else grads
        for share, device in zip(shares, devices, strict=True):
            moved = isinstance(grads, Tensor) and grads.device != device and page_size is None
            here = runs if len(runs) == 1 and runs[0].count == 1 else runs_between(runs, share.start, share.stop)
            _check_memory(here, m, m * len(share) * grads.dtype.itemsize if moved else 0, device)
            if moved and isinstance(grads, Tensor):
                pages.append(Pages(grads[:, share.columns].to(device), device, share.start))
            else:
                pages.append(Pages(grads, device))
        return cls(pages, shares, runs, weights, page_size, precision, overwrite)

    @property
    def dim(self) -> int:
        """d."""
        return self.shares[-1].stop

    @property
    def num_grads(self) -> int:
        """m."""
        return self.pages[0].shape[0]

    @property
    def device(self) -> torch.device:
        """Where vectors come and go."""
        return self.pages[0].device

    @property
    def answer_dtype(self) -> torch.dtype:
        """Of what has no vector."""
        return torch.float64 if self.pages[0].dtype == torch.float64 else torch.float32

    def full(self, damping: float, ranks: Ranks) -> DualBlocks | PrimalBlocks:
        """The one block, over all devices and ranks."""
        run, pages = self.runs[0], self.pages[0]
        if len(self.pages) == 1 and ranks.size == 1:
            return self._part(run, pages, damping)
        spread = pages if len(self.pages) == 1 else SpreadPages(self.pages, [share.stop for share in self.shares])
        columns, auto = self._columns(run, pages), self.precision == "auto"
        return DualBlocks(
            run, spread, self.weights, damping, columns, self._dtype, auto, overwrite=self.overwrite, ranks=ranks
        )

    def blocks(self, damping: float) -> list[DualBlocks | PrimalBlocks]:
        """Runs of blocks, each on the device that has its columns."""
        return [
            self._part(run, pages, damping)
            for share, pages in zip(self.shares, self.pages, strict=True)
            for run in runs_between(self.runs, share.start, share.stop)
        ]

    def describe(self) -> dict[str, object]:
        """What must be the same wherever a part of the same matrix is."""
        weights = None if self.weights is None else hashlib.blake2b(self.weights.cpu().numpy().tobytes(), digest_size=8)
        return {
            "num_grads": self.num_grads,
            "dtype": self.pages[0].dtype,
            "precision": self.precision,
            "overwrite": self.overwrite and all(pages.in_place for pages in self.pages),
            "row_weights": None if weights is None else weights.hexdigest(),
        }

    @property
    def _dtype(self) -> torch.dtype:
        """Of products with G."""
        if self.precision == "auto":
            return self.answer_dtype
        return torch.float64 if self.precision == "float64" else torch.float32

    def _part(self, run: Run, pages: Pages, damping: float) -> DualBlocks | PrimalBlocks:
        columns, auto = self._columns(run, pages), self.precision == "auto"
        weights = None if self.weights is None else self.weights.to(pages.device)
        if run.length <= pages.shape[0]:
            return PrimalBlocks.from_rows(run, pages, weights, damping, columns, self._dtype, auto)
        return DualBlocks(run, pages, weights, damping, columns, self._dtype, auto, overwrite=self.overwrite)

    def _columns(self, run: Run, pages: Pages) -> int:
        """How many columns are loaded at once."""
        if self.page_size is not None:
            return self.page_size
        m = pages.shape[0]
        if not pages.in_place:
            return max(1, DISK_PIECE // m)
        return max(1, (WIDE_PIECE if run.length * m > BLOCK_PIECE else BLOCK_PIECE) // m)


@dataclass(frozen=True)
class BlockSums:
    """Blocks of GᵀG that were summed up before, in the place of rows.

    Raises:
        ValueError: nothing was added to them.
    """

    sums: FisherBlocks
    device: torch.device

    answer_dtype = torch.float32

    def __post_init__(self) -> None:
        if self.sums.num_grads == 0:
            raise ValueError("the FisherBlocks hold no gradient yet; add some rows first")

    @property
    def dim(self) -> int:
        """d."""
        return self.sums.dim

    @property
    def num_grads(self) -> int:
        """m."""
        return self.sums.num_grads

    def blocks(self, damping: float) -> list[DualBlocks | PrimalBlocks]:
        """Runs of blocks."""
        return [
            PrimalBlocks.from_sums(run, total.to(self.device) / self.num_grads, damping)
            for run, total in zip(self.sums.runs, self.sums.sums, strict=True)
        ]

    def describe(self) -> dict[str, object]:
        """What must be the same wherever a part of the same matrix is."""
        return {"num_grads": self.num_grads}


def _check_memory(runs: list[Run], m: int, moved: int, device: torch.device) -> None:
    """What stays allocated: an m x m factor a dual block, a B x B one a primal block, and G where it must move."""
    squares = sum(run.count * min(run.length, m) ** 2 for run in runs)
    needed, available = 8 * squares + moved, available_memory(device)
    if available is None or needed <= available:
        return
    remedies = []
    if moved > available // 2:
        remedies.append(
            f"page_size={max(1, available // 8 * runs[-1].stop // moved)} (leaves the gradients where they are)"
        )
    if 8 * squares > available // 2:
        fits = max(1, available // 2 // (8 * runs[-1].stop))
        remedies.append(f"block_size={fits}" if fits <= m and len(runs) + runs[0].count > 2 else "fewer gradients")
    raise MemoryError(
        f"the operator needs {gib(needed)} on {device} ({gib(8 * squares)} for its factors, {gib(moved)} to move the "
        f"gradients there) and {gib(available)} are available; what would fit: {', '.join(remedies)}"
    )
