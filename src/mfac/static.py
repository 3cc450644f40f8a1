"""The static operator: a fixed set of gradients, in full, in blocks, and paged through memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from mfac.dual import DualBlocks
from mfac.fisher_blocks import FisherBlocks
from mfac.gradient_file import GradientFile
from mfac.inverse_fisher import Blocks, InverseFisher, check_damping, ranks_of, unrecorded
from mfac.memory import available_memory, check_count, gib
from mfac.pages import BlockRun, Pages, Reduce, Watched, block_runs
from mfac.precision import Precision, check_dense, check_precision, product_dtype
from mfac.primal import PrimalBlocks
from mfac.saved import digest

Gradients = Tensor | GradientFile | FisherBlocks


class StaticInverseFisher(InverseFisher):
    """F⁻¹ for F = λ I + (1/m) Σ g gᵀ over the rows g of a matrix, exactly.

    The matrix is not copied: the operator reads it for every answer, and notices if it was changed. Blocks of at most m
    weights are factored in the primal and do not need the matrix after that.

    With a `process_group` each rank has some columns of all m rows, and `shape`, vectors and indices are of these:
    `op @ x` takes and gives this rank's share, `op[i, j]` is an element between two of its weights. All ranks build the
    operator, and call its products, together. The full matrix sums m x m numbers when it is built and m numbers per
    product; each block lives on one rank, and sends nothing.

    Args:
        grads: the gradients [m, d], a tensor or a `GradientFile`; or `FisherBlocks`.
        damping: λ.
        block_size: keep only diagonal blocks of F of this many weights; None: the full matrix.
        sizes: lengths of the tensors whose weights lie side by side; no block straddles two of them.
        row_weights: c [m], for F = λ I + Σ c_i g_i g_iᵀ; None: 1/m each.
        device: where to compute; None: where the gradients are.
        page_size: leave the gradients where they are and bring this many columns at a time to `device`.
        overwrite: the memory of `grads` may be used: single elements then cost O(m) instead of O(m²), and `grads` is
            overwritten. It is left alone if its dtype could not hold the result.
        precision: of products with G: "float32", "float64", or "auto": float32 where that is safe.
        process_group: the ranks that share the columns; see `column_shares` and `collect_gradients`.

    Raises:
        ValueError: an argument that does not fit the others, or gradients that are not finite; on every rank.
        MemoryError: not enough memory for what has to be allocated.
        torch.linalg.LinAlgError: the damping is too small for the gradients, even in float64.
    """

    @unrecorded
    def __init__(
        self,
        grads: Gradients,
        damping: float = 1e-5,
        *,
        block_size: int | None = None,
        sizes: Sequence[int] | None = None,
        row_weights: Float[Tensor, " m"] | None = None,
        device: torch.device | str | None = None,
        page_size: int | None = None,
        overwrite: bool = False,
        precision: Precision = "auto",
        process_group: dist.ProcessGroup | None = None,
    ):
        # Otherwise the same object: it is pickled once.
        grads = grads.detach() if isinstance(grads, Tensor) and grads.requires_grad else grads
        self._ranks = ranks_of(process_group)
        # Ranks share the one block of the full matrix, which sums over them itself; other blocks lie on one rank each.
        self._shared = block_size is None and not isinstance(grads, FisherBlocks)
        alone = self._ranks.size == 1
        with self._ranks.together("building the operator"):
            if row_weights is not None:  # a copy: those of the caller may change
                row_weights = torch.as_tensor(row_weights, dtype=torch.float64, device="cpu").clone()
            options = BlockOptions(block_size, sizes, row_weights, device, page_size, overwrite, precision)
            options.check(grads, damping, least=1 if alone else 0)
        damping = float(damping)
        self._ranks.agree_on({"damping": damping, **options.description(grads)})
        self._grads, self._options, self._watch = grads, options, Watched(grads)
        with self._separate("building the blocks"):
            reduce = self._ranks.sum_ if self._shared and not alone else None
            self._blocks = build_blocks(grads, damping, options, reduce)
        m, d = map(int, grads.shape)
        dtype = torch.float32 if isinstance(grads, FisherBlocks) else product_dtype("auto", grads.dtype)
        super().__init__(m, d, damping, dtype, options.device_for(grads))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "StaticInverseFisher":
        grads = self._unchanged()
        if dtype is not None and not isinstance(grads, Tensor):
            raise ValueError(f"only rows in memory can change their dtype to {dtype}, not a {type(grads).__name__}")
        if isinstance(grads, Tensor):
            grads = grads.to(dtype or grads.dtype)
        return self._again(grads, device=self.device if device is None else device)

    @unrecorded
    def diagnostics(self) -> dict[str, int | float]:
        """What float64 was needed for under `precision`, and why.

        `blocks`; of these `float64_blocks`, whose Gram matrix is in float64; `products` and `entries` of the diagonal
        that were made again in float64; and `gram_error`, the largest relative error that a Gram matrix brings.
        """
        found = [blocks.diagnostics() for blocks in self._blocks]
        worst = max((part.pop("gram_error") for part in found), default=0.0)
        sums = {name: sum(part[name] for part in found) for name in ("float64_blocks", "products", "entries")}
        return {"blocks": sum(part.run.count for part in self._blocks), **sums, "gram_error": worst}

    def _ask(self, question: Callable[[Blocks], Any]) -> list[Any]:
        return [question(blocks) for blocks in self._blocks]

    def _held_rows(self) -> tuple[Tensor | GradientFile, Float[Tensor, " m"]]:
        grads, weights = self._unchanged(), self._options.row_weights
        if isinstance(grads, FisherBlocks):
            raise ValueError("FisherBlocks keep sums and no rows; build the operator on the rows themselves")
        if weights is None:
            weights = torch.full((self.num_grads,), 1 / self.num_grads, dtype=torch.float64, device=self.device)
        return grads, weights.to(self.device, copy=True)

    def _whole(self) -> Blocks:
        if len(self._blocks) == self._blocks[0].run.count == 1:
            return self._blocks[0]
        raise ValueError("this requires the full matrix, and the operator keeps blocks; use block_size=None")

    def _unchanged(self) -> Gradients:
        """The rows that the operator was built on, if they still are what they were."""
        if self._options.overwrite or self._watch.changed or self._grads.shape[0] != self.num_grads:
            raise ValueError(
                "the operator's rows have changed since it was built (by overwrite=True, or by other code); build it "
                "on rows that stay as they are"
            )
        return self._grads

    def _again(self, grads: Gradients, **changes: Any) -> "StaticInverseFisher":
        """An operator with the same options but for some changes."""
        options = vars(replace(self._options, overwrite=False, **changes))
        return StaticInverseFisher(grads, self.damping, **options, process_group=self._ranks.group)

    def _separate(self, what: str) -> AbstractContextManager[None]:
        """For what each rank does with its own blocks: if it fails on one rank, it fails on all of them."""
        return nullcontext() if self._shared else self._ranks.together(what)

    def _refactor(self, old_damping: float) -> None:
        self._ranks.agree_on({"damping": self.damping})
        done: list[Blocks] = []
        try:
            with self._separate("another damping"):
                for blocks in self._blocks:
                    blocks.refactor(self.damping)
                    done.append(blocks)
        except Exception:
            for blocks in done:
                blocks.refactor(old_damping)
            raise


@dataclass(frozen=True)
class BlockOptions:
    """How blocks are built; see `StaticInverseFisher`."""

    block_size: int | None = None
    sizes: Sequence[int] | None = None
    row_weights: Float[Tensor, " m"] | None = None
    device: torch.device | str | None = None
    page_size: int | None = None
    overwrite: bool = False
    precision: Precision = "auto"

    def device_for(self, grads: Gradients) -> torch.device:
        if self.device is not None:
            return torch.empty(0, device=self.device).device  # "cuda" becomes "cuda:0"
        return torch.device("cpu") if isinstance(grads, GradientFile) else grads.device

    def check(self, grads: Gradients, damping: float, least: int = 0) -> None:
        """Raises for arguments that do not fit; `least` is the number of columns that the matrix must have."""
        check_precision(self.precision)
        if isinstance(grads, FisherBlocks):
            check_damping(damping, torch.float32)
            given = (self.block_size, self.sizes, self.row_weights, self.page_size, self.overwrite)
            if any(argument is not None and argument is not False for argument in given):
                raise ValueError(
                    "FisherBlocks already have their blocks and their sums; block_size, sizes, row_weights, page_size "
                    "and overwrite are for gradients"
                )
            if grads.num_grads == 0:
                raise ValueError("the FisherBlocks hold no gradient yet; add some rows first")
            return
        _check_grads(grads, least)
        check_damping(damping, product_dtype("auto", grads.dtype))
        m, d = grads.shape
        runs, device, weights = block_runs(d, self.block_size, self.sizes), self.device_for(grads), self.row_weights
        if weights is not None and weights.shape != (m,):
            raise ValueError(f"row_weights must be [{m}], one for each gradient, not {list(weights.shape)}")
        if weights is not None and not bool((torch.isfinite(weights) & (weights >= 0)).all()):
            raise ValueError("row_weights must be finite and not negative: F would not be positive definite")
        if self.page_size is not None:
            check_count("page_size", self.page_size)
        moved = isinstance(grads, Tensor) and grads.device != device and self.page_size is None
        _check_memory(runs, m, m * d * grads.dtype.itemsize if moved else 0, device)

    def description(self, grads: Gradients) -> dict[str, object]:
        """What must be the same on all ranks."""
        if isinstance(grads, FisherBlocks):
            return {"num_grads": grads.num_grads}
        in_place = isinstance(grads, Tensor) and (self.page_size is None or grads.device == self.device_for(grads))
        return {
            "block_size": self.block_size,
            "num_grads": int(grads.shape[0]),
            "dtype": grads.dtype,
            "precision": self.precision,
            "overwrite": self.overwrite and in_place,
            "row_weights": None if self.row_weights is None else digest([], [self.row_weights]),
        }


def build_blocks(grads: Gradients, damping: float, options: BlockOptions, reduce: Reduce | None = None) -> list[Blocks]:
    """The blocks of the damped Fisher matrix; `reduce` sums over ranks that share the full matrix by its columns."""
    device = options.device_for(grads)
    if isinstance(grads, FisherBlocks):
        return [
            PrimalBlocks.from_sums(run, total.to(device) / grads.num_grads, damping)
            for run, total in zip(grads.runs, grads.sums, strict=True)
        ]
    source = grads if isinstance(grads, GradientFile) or options.page_size is not None else grads.to(device)
    pages, precision = Pages(source, device, options.page_size), options.precision
    weights = None if options.row_weights is None else options.row_weights.to(device)
    return [
        PrimalBlocks(run, damping, pages.device, precision, pages, weights)
        if run.length <= pages.shape[0] and reduce is None
        else DualBlocks(run, pages, damping, precision, weights, None, options.overwrite, reduce)
        for run in block_runs(pages.shape[1], options.block_size, options.sizes)
    ]


def _check_grads(grads: Tensor | GradientFile, least: int) -> None:
    if not isinstance(grads, GradientFile):
        check_dense("grads (or a GradientFile, or FisherBlocks)", grads)
    elif grads.rows < grads.num_grads:
        raise ValueError(
            f"{grads.path} has {grads.rows} of {grads.num_grads} rows; finish collecting it, or use the complete ones "
            "with read_rows"
        )
    if len(grads.shape) != 2 or not grads.shape[0] or grads.shape[1] < least:
        raise ValueError(f"grads must be [m, d] with at least one gradient and one weight, not {list(grads.shape)}")


def _check_memory(runs: list[BlockRun], m: int, moved: int, device: torch.device) -> None:
    """What stays allocated: an m x m factor per dual block, a B x B one per primal block, and G if it must move."""
    squares = sum(run.count * min(run.length, m) ** 2 for run in runs)
    needed, available = 8 * squares + moved, available_memory(device)
    if available is None or needed <= available:
        return
    remedies = []
    if moved > available // 2:
        page_size = max(1, available // 8 * runs[-1].stop // moved)
        remedies.append(f"{page_size=} (leaves the gradients where they are)")
    if 8 * squares > available // 2:
        fits = max(1, available // 2 // (8 * runs[-1].stop))
        remedies.append(f"block_size={fits}" if fits <= m and len(runs) + runs[0].count > 2 else "fewer gradients")
    raise MemoryError(
        f"the operator needs {gib(needed)} on {device} ({gib(8 * squares)} for its factors, {gib(moved)} to move the "
        f"gradients there) and {gib(available)} are available; what would fit: {', '.join(remedies)}"
    )
