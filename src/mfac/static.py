"""The static operator: a fixed set of gradients, in full, in blocks, and paged through memory."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac.blocks import FisherBlocks, Run, block_runs
from mfac.dual import DualBlocks
from mfac.gradient_file import GradientFile
from mfac.inverse_fisher import InverseFisher
from mfac.memory import available_memory, gib
from mfac.pages import Pages
from mfac.precision import Precision, check_precision
from mfac.primal import PrimalBlocks

# Numbers of G that are worked on at once: a piece of many small blocks stays in cache, one of a large block is wide
# enough for the matrix products, and one from disk is worth the reading.
BLOCK_PIECE = 1 << 20
WIDE_PIECE = 1 << 24
DISK_PIECE = 1 << 26


class StaticInverseFisher(InverseFisher):
    """F⁻¹ for F = λ I + (1/m) Σ g gᵀ over the rows g of a matrix, exactly.

    The matrix is not copied: the operator reads it whenever it is asked something, and notices when it was changed.
    Blocks of at most m weights are factored in the primal and need the matrix no more after that.

    Args:
        grads: the gradients [m, d], a tensor or a `GradientFile`; or `FisherBlocks`, summed up before.
        damping: λ.
        block_size: keep only diagonal blocks of F of this many weights; None: the full matrix.
        sizes: lengths of the tensors whose weights lie side by side; no block straddles two of them.
        row_weights: c [m], for F = λ I + Σ c_i g_i g_iᵀ; None: 1/m each.
        device: where to compute; None: where the gradients are.
        page_size: leave the gradients where they are and bring this many columns at a time to `device`.
        overwrite: the memory of `grads` may be used: single elements then cost O(m) instead of O(m²), and `grads` is
            not what it was. It is left alone where its dtype could not hold what would be put there.
        precision: of products with G: "float32", "float64", or "auto": float32 where that is safe.

    Raises:
        ValueError: an argument that does not fit the others, or gradients that are not finite.
        MemoryError: what has to be allocated is more than there is.
        torch.linalg.LinAlgError: the damping is too small for the gradients, even in float64.
    """

    @torch.no_grad()
    def __init__(
        self,
        grads: Float[Tensor, "m d"] | GradientFile | FisherBlocks,
        damping: float = 1e-5,
        *,
        block_size: int | None = None,
        sizes: Sequence[int] | None = None,
        row_weights: Float[Tensor, " m"] | None = None,
        device: torch.device | str | None = None,
        page_size: int | None = None,
        overwrite: bool = False,
        precision: Precision = "auto",
    ):
        check_precision(precision)
        if isinstance(grads, FisherBlocks):
            _refuse_for_sums(block_size, sizes, row_weights, page_size, overwrite)
            super().__init__(grads.dim, damping, torch.float32, torch.device(device or grads.device))
            self._num_grads = grads.num_grads
            self._parts: list[DualBlocks | PrimalBlocks] = _parts_of_sums(grads, self.damping, self.device)
            return
        _check_grads(grads)
        m, d = grads.shape
        super().__init__(d, damping, _answer_dtype(grads.dtype), _device_of(grads, device))
        self._num_grads = m
        runs = block_runs(d, block_size, sizes)
        moved = isinstance(grads, Tensor) and grads.device != self.device and page_size is None
        _check_memory(runs, m, m * d * grads.dtype.itemsize if moved else 0, self.device)
        if isinstance(grads, Tensor):
            grads = grads.detach().to(self.device) if moved else grads.detach()
        pages = Pages(grads, self.device)
        weights = _check_weights(row_weights, m, self.device)
        dtype = _product_dtype(grads.dtype, precision)
        self._parts = []
        part: DualBlocks | PrimalBlocks
        auto = precision == "auto"
        for run in runs:
            columns = _piece_columns(run, pages, page_size)
            if run.length <= m:
                part = PrimalBlocks.from_rows(run, pages, weights, self.damping, columns, dtype, auto)
            else:
                part = DualBlocks(run, pages, weights, self.damping, columns, dtype, auto, overwrite=overwrite)
            self._parts.append(part)

    @property
    def num_grads(self) -> int:
        """m, the number of gradients."""
        return self._num_grads

    @torch.no_grad()
    def diagonal(self) -> Float[Tensor, " d"]:
        """[F⁻¹]_ii for every i, each between 1/F_ii and 1/λ."""
        return torch.cat([part.diagonal() for part in self._parts]).to(self.dtype)

    @torch.no_grad()
    def logdet(self) -> Float[Tensor, ""]:
        """log det F⁻¹, in float64."""
        return torch.stack([part.logdet() for part in self._parts]).sum()

    def _apply(self, x: Float[Tensor, "d *k"]) -> Float[Tensor, "d *k"]:
        return torch.cat([part.apply(x[part.run.start : part.run.stop]) for part in self._parts])

    def _quadratic_form(self, x: Float[Tensor, "d k"]) -> Float[Tensor, " k"]:
        forms = [part.quadratic_form(x[part.run.start : part.run.stop]) for part in self._parts]
        return torch.stack(forms).sum(0)

    def _elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        out = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        for part in self._parts:
            run = part.run
            inside = (rows >= run.start) & (rows < run.stop) & (columns >= run.start) & (columns < run.stop)
            out[inside] = part.elements(rows[inside] - run.start, columns[inside] - run.start)
        return out

    def _refactor(self, old_damping: float) -> None:
        done: list[DualBlocks | PrimalBlocks] = []
        try:
            for part in self._parts:
                part.refactor(self.damping)
                done.append(part)
        except Exception:
            for part in done:
                part.refactor(old_damping)
            raise


def _answer_dtype(stored: torch.dtype) -> torch.dtype:
    return torch.float64 if stored == torch.float64 else torch.float32


def _product_dtype(stored: torch.dtype, precision: Precision) -> torch.dtype:
    if precision == "auto":
        return _answer_dtype(stored)
    return torch.float64 if precision == "float64" else torch.float32


def _device_of(grads: Tensor | GradientFile, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.empty(0, device=device).device  # "cuda" becomes "cuda:0", as on tensors
    return grads.device if isinstance(grads, Tensor) else torch.device("cpu")


def _piece_columns(run: Run, pages: Pages, page_size: int | None) -> int:
    """How many columns are loaded at once."""
    if page_size is None:
        m = pages.shape[0]
        if not pages.in_place:
            return max(1, DISK_PIECE // m)
        return max(1, (WIDE_PIECE if run.length * m > BLOCK_PIECE else BLOCK_PIECE) // m)
    if not isinstance(page_size, int) or isinstance(page_size, bool) or page_size < 1:
        raise ValueError(f"page_size must be a positive number of columns, not {page_size!r}")
    return page_size


def _check_grads(grads: object) -> None:
    if not isinstance(grads, Tensor | GradientFile):
        raise ValueError(f"grads must be a tensor [m, d], a GradientFile or FisherBlocks, not {type(grads).__name__}")
    if isinstance(grads, GradientFile):
        if grads.rows < grads.num_grads:
            raise ValueError(
                f"{grads.path} has {grads.rows} of {grads.num_grads} rows; finish collecting it, or take what there is "
                "with read_rows"
            )
    elif not grads.is_floating_point():
        raise ValueError(f"grads must be floating-point, not {grads.dtype}; convert them with .float()")
    if len(grads.shape) != 2 or 0 in grads.shape:
        raise ValueError(f"grads must be [m, d] with at least one gradient and one weight, not {list(grads.shape)}")


def _check_weights(weights: Tensor | None, m: int, device: torch.device) -> Float[Tensor, " m"] | None:
    if weights is None:
        return None
    weights = torch.as_tensor(weights, dtype=torch.float64, device=device)
    if weights.shape != (m,):
        raise ValueError(f"row_weights must be [{m}], one for each gradient, not {list(weights.shape)}")
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise ValueError("row_weights must be finite and not negative: F would not be positive definite")
    return weights


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


def _refuse_for_sums(*arguments: object) -> None:
    if any(argument not in (None, False) for argument in arguments):
        raise ValueError(
            "FisherBlocks already have their blocks and their sums; block_size, sizes, row_weights, page_size and "
            "overwrite are for gradients"
        )


def _parts_of_sums(sums: FisherBlocks, damping: float, device: torch.device) -> list[DualBlocks | PrimalBlocks]:
    if sums.num_grads == 0:
        raise ValueError("the FisherBlocks hold no gradient yet; add some rows first")
    return [
        PrimalBlocks.from_sums(run, total.to(device) / sums.num_grads, damping)
        for run, total in zip(sums.runs, sums.sums, strict=True)
    ]
