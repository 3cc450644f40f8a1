"""The diagonal blocks of GᵀG, summed while rows arrive."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mfac import products
from mfac.pages import BLOCK_PIECE, block_runs
from mfac.precision import check_dense


class FisherBlocks:
    """The diagonal blocks of GᵀG, summed while rows of length `dim` arrive: memory O(block_size · dim), for any number.

    `sizes` are the lengths of the tensors that no block may straddle; the sums live on `device`.
    """

    @torch.inference_mode(False)  # rows may be added after it
    def __init__(
        self, dim: int, block_size: int, sizes: Sequence[int] | None = None, *, device: torch.device | str | None = None
    ):
        self.dim = dim
        self.num_grads = 0
        self.runs = block_runs(dim, block_size, sizes)
        self.device = torch.device("cpu" if device is None else device)
        shapes = [(run.count, run.length, run.length) for run in self.runs]
        self.sums = [torch.zeros(shape, dtype=torch.float64, device=self.device) for shape in shapes]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows added so far, dim)."""
        return self.num_grads, self.dim

    @torch.no_grad()
    def add(self, rows: Float[Tensor, "k dim"]) -> None:
        """Adds the outer products of the rows, in float64.

        Raises:
            ValueError: the rows have another length, or one is not finite; then nothing is added.
        """
        check_dense("rows", rows)
        if rows.ndim != 2 or rows.shape[1] != self.dim:
            raise ValueError(f"rows must be [k, {self.dim}], not {list(rows.shape)}")
        finite = torch.isfinite(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
        if not bool(finite.all()):
            raise ValueError(f"row {int((~finite).nonzero()[0])} of the rows to be added is not finite")
        rows = rows.to(self.device)
        for run, total in zip(self.runs, self.sums, strict=True):
            for piece in run.pieces(max(run.length, BLOCK_PIECE // max(1, len(rows)))):
                block_rows = piece.split_columns(rows[:, piece.columns])
                total[piece.blocks] += products.gram(block_rows.transpose(1, 2), torch.float64)
        self.num_grads += len(rows)
