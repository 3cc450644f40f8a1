"""The static operator: a fixed set of gradients, in full, in blocks, and paged through memory."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from mfac.blocks import FisherBlocks, block_runs
from mfac.columns import Ranks, ranks_of
from mfac.distributed.shares import column_shares
from mfac.dual import DualBlocks
from mfac.gradient_file import GradientFile
from mfac.inverse_fisher import InverseFisher, check_damping
from mfac.precision import Precision, check_precision
from mfac.primal import PrimalBlocks
from mfac.spread_rows import BlockSums, SpreadRows
from mfac.windows import as_devices


class StaticInverseFisher(InverseFisher):
    """F⁻¹ for F = λ I + (1/m) Σ g gᵀ over the rows g of a matrix, exactly.

    The matrix is not copied: the operator reads it whenever it is asked something, and notices when it was changed.
    Blocks of at most m weights are factored in the primal and need the matrix no more after that.

    With a `process_group` each rank has some columns of all m rows, and `shape`, vectors and indices are of these:
    `op @ x` takes and gives this rank's piece, `op[i, j]` is an element between two of its weights. All ranks build the
    operator, and call its products, together. The full matrix sums m x m numbers when it is built and m numbers a
    product; blocks live on one rank each, and send nothing.

    Args:
        grads: the gradients [m, d], a tensor or a `GradientFile`; or `FisherBlocks`, summed up before.
        damping: λ.
        block_size: keep only diagonal blocks of F of this many weights; None: the full matrix.
        sizes: lengths of the tensors whose weights lie side by side; no block straddles two of them.
        row_weights: c [m], for F = λ I + Σ c_i g_i g_iᵀ; None: 1/m each.
        device: where to compute; None: where the gradients are.
        devices: compute on several, each with a share of the columns; vectors are expected on the first.
        page_size: leave the gradients where they are and bring this many columns at a time to `device`.
        overwrite: the memory of `grads` may be used: single elements then cost O(m) instead of O(m²), and `grads` is
            not what it was. It is left alone where its dtype could not hold what would be put there.
        precision: of products with G: "float32", "float64", or "auto": float32 where that is safe.
        process_group: whose ranks have the columns of one matrix; see `column_shares` and `collect_gradients`.

    Raises:
        ValueError: an argument that does not fit the others, or gradients that are not finite; on every rank.
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
        devices: Sequence[torch.device | str] | None = None,
        page_size: int | None = None,
        overwrite: bool = False,
        precision: Precision = "auto",
        process_group: dist.ProcessGroup | None = None,
    ):
        self._ranks = ranks_of(process_group)
        # The blocks of F are divided among the ranks, or the one block is shared by all and sums over them itself.
        self._shared = block_size is None and not isinstance(grads, FisherBlocks)
        source: SpreadRows | BlockSums
        with self._ranks.together("building the operator"):
            check_precision(precision)
            check_damping(damping)
            if isinstance(grads, FisherBlocks):
                _refuse_for_sums(block_size, sizes, row_weights, page_size, overwrite, devices)
                source = BlockSums(grads, torch.device(device or grads.device))
            else:
                _check_grads(grads, some=self._ranks.size == 1)
                m, d = grads.shape
                runs = block_runs(d, block_size, sizes)
                places = as_devices(_device_of(grads) if device is None and devices is None else device, devices)
                shares = column_shares([d] if sizes is None else sizes, len(places), block_size)
                weights = _check_weights(row_weights, m, places[0])
                source = SpreadRows.place(grads, places, shares, runs, weights, page_size, precision, overwrite)
            super().__init__(source.dim, damping, source.answer_dtype, source.device)
        self._num_grads = source.num_grads
        self._ranks.agree_on({"damping": self.damping, "block_size": block_size, **source.describe()})
        self._parts: list[DualBlocks | PrimalBlocks]
        if self._shared and isinstance(source, SpreadRows):
            self._parts = [source.full(self.damping, self._ranks)]
        else:
            with self._ranks.together("building the blocks"):
                self._parts = source.blocks(self.damping)

    @property
    def num_grads(self) -> int:
        """m, the number of gradients."""
        return self._num_grads

    @torch.no_grad()
    def diagonal(self) -> Float[Tensor, " d"]:
        """[F⁻¹]_ii for every i, each between 1/F_ii and 1/λ."""
        return self._joined([part.diagonal().to(self.device, self.dtype) for part in self._parts], self.dtype)

    @torch.no_grad()
    def logdet(self) -> Float[Tensor, ""]:
        """log det F⁻¹, in float64; over all ranks."""
        return self._over_blocks([part.logdet() for part in self._parts], ())

    def to_dense(self) -> Float[Tensor, "d d"]:
        """F⁻¹ as a d x d tensor; for people and tests, where d is small, and on one rank."""
        if self._ranks.size > 1:
            raise ValueError(
                "the operator has some columns on each rank, and no rank can have the dense matrix; use op @ x, "
                "op.diagonal(), or op[i, j] between weights of this rank"
            )
        return super().to_dense()

    def _apply(self, x: Float[Tensor, "d *k"]) -> Float[Tensor, "d *k"]:
        return self._joined([part.apply(self._piece(x, part)).to(x.device) for part in self._parts], x.dtype, x)

    def _quadratic_form(self, x: Float[Tensor, "d k"]) -> Float[Tensor, " k"]:
        return self._over_blocks([part.quadratic_form(self._piece(x, part)) for part in self._parts], x.shape[1:])

    def _elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        out = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        for part in self._parts:
            run = part.run
            inside = (rows >= run.start) & (rows < run.stop) & (columns >= run.start) & (columns < run.stop)
            pairs = ((index[inside] - run.start).to(part.device) for index in (rows, columns))
            out[inside] = part.elements(*pairs).to(self.device)
        return out

    def _piece(self, x: Tensor, part: "DualBlocks | PrimalBlocks") -> Tensor:
        return x[part.run.start : part.run.stop].to(part.device)

    def _joined(self, pieces: list[Tensor], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """The pieces of all parts; nothing, in the right shape, on a rank that has no block."""
        if pieces:
            return torch.cat(pieces)
        return torch.empty(0, dtype=dtype, device=self.device) if like is None else torch.empty_like(like)

    def _over_blocks(self, values: list[Tensor], shape: tuple[int, ...]) -> Tensor:
        """The sum over all blocks, whichever rank has them."""
        total = torch.zeros(shape, dtype=torch.float64, device=self.device)
        for value in values:
            total += value.to(self.device)
        return total if self._shared else self._ranks.sum_(total)

    def _refactor(self, old_damping: float) -> None:
        self._ranks.agree_on({"damping": self.damping})
        done: list[DualBlocks | PrimalBlocks] = []
        alone = Ranks() if self._shared else self._ranks
        try:
            with alone.together("another damping"):
                for part in self._parts:
                    part.refactor(self.damping)
                    done.append(part)
        except Exception:
            for part in done:
                part.refactor(old_damping)
            raise


def _device_of(grads: Tensor | GradientFile) -> torch.device:
    return grads.device if isinstance(grads, Tensor) else torch.device("cpu")


def _check_grads(grads: object, some: bool) -> None:
    """Raises ValueError for what is no matrix of gradients; a rank (not `some`) may have no column of it."""
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
    if len(grads.shape) != 2 or not grads.shape[0] or (some and not grads.shape[1]):
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


def _refuse_for_sums(*arguments: object) -> None:
    if any(argument not in (None, False) for argument in arguments):
        raise ValueError(
            "FisherBlocks already have their blocks and their sums; block_size, sizes, row_weights, page_size, "
            "overwrite and devices are for gradients"
        )
