"""The methods behind `prune`: each measures something on the model and the data, and makes a curvature of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mfac.blocks import FisherBlocks
from mfac.columns import Ranks
from mfac.distributed.exchange import accumulate_share, check_ranks, collect_share
from mfac.distributed.shares import ColumnShare, column_shares, shares_at
from mfac.gradient_file import GradientFile
from mfac.gradients import accumulate_fisher, collect_gradients
from mfac.gradients.collection import Collection
from mfac.gradients.collector import Fisher
from mfac.gradients.one_batch import LossFn
from mfac.layout import ParameterLayout
from mfac.pruning.batch_stream import BatchStream
from mfac.pruning.curvature import Curvature, FisherCurvature
from mfac.pruning.dampings import choose_damping
from mfac.pruning.layer_curvature import KroneckerCurvature, LayerInputCurvature, WeightCurvature
from mfac.pruning.layer_statistics import find_layers, layer_moments
from mfac.pruning.patterns import Pattern, Slices
from mfac.pruning.shared_curvature import SharedCurvature
from mfac.pruning.weights import MaskedWeights
from mfac.pruning.woodfisher import RecursionCurvature

# Float32 rows beyond twice the block size take more memory than float64 sums of the blocks.
ROWS_PER_BLOCK_SIZE = 2

Rows = Tensor | GradientFile | FisherBlocks


class Method(Protocol):
    """How the weights of one step are judged."""

    def measure(self, weights: MaskedWeights, layout: ParameterLayout, stream: BatchStream, step: int) -> Any:
        """What takes the data: gradients, or statistics of layers."""

    def curvature(self, measured: Any, weights: MaskedWeights, layout: ParameterLayout) -> Curvature:
        """What is made of it."""


@dataclass(frozen=True)
class Estimation:
    """How gradients are taken and damped: what the methods share."""

    loss_fn: LossFn
    num_grads: int
    block_size: int | None
    damping: float | str
    per_sample: bool
    fisher: Fisher
    rows_dir: str | None
    seed: int
    progress: bool | None
    ranks: Ranks = field(default_factory=Ranks)

    def collection(self, step: int = 0) -> Collection:
        """What is asked of the collectors of gradients."""
        return Collection(
            self.num_grads, self.per_sample, self.fisher, "auto", None, False, self.progress, self.seed + step
        )

    def check(self, weights: MaskedWeights) -> None:
        """Raises ValueError for whatever the collectors of gradients would not take, before anything is done."""
        self.collection().task(weights.model, self.loss_fn, weights.layout(), None, None)

    def check_ranks(self, weights: MaskedWeights, arguments: Mapping[str, object]) -> None:
        """Raises ValueError, on every rank, where the ranks have different models, masks or arguments."""
        collection = self.collection()
        task = collection.task(weights.model, self.loss_fn, weights.layout(), None, None)
        check_ranks(self.ranks, task, collection, arguments)


class FisherMethod:
    """M-FAC: F = λI + GᵀG/m over `num_grads` gradients, in blocks or in full.

    Args:
        estimation: how gradients are taken.
        keep_rows: never sum blocks up, for what needs the rows themselves.
        by_slices: where ranks share the full matrix, keep weights of one slice along dimension 0 on one of them.
    """

    def __init__(self, estimation: Estimation, keep_rows: bool = False, by_slices: bool = False):
        if estimation.damping == "auto" and estimation.rows_dir is not None:
            raise ValueError('damping="auto" tries several on rows in memory, and rows_dir puts them on disk; drop one')
        self.estimation = estimation
        self.keep_rows = keep_rows or estimation.damping == "auto" or estimation.rows_dir is not None
        self.by_slices = by_slices

    def measure(self, weights: MaskedWeights, layout: ParameterLayout, stream: BatchStream, step: int) -> Rows:
        """The gradients of this step: rows, or where these would take more memory, sums over blocks."""
        e = self.estimation
        if e.ranks.size > 1:
            return self._measure_together(weights, layout, stream, step)
        shared: dict[str, Any] = {
            "params": list(layout.names), "masks": weights.masks, "per_sample": e.per_sample,
            "fisher": e.fisher, "seed": e.seed + step, "progress": e.progress,
        }  # fmt: skip
        if e.block_size is not None and self._sums_up:
            return accumulate_fisher(weights.model, e.loss_fn, stream, e.num_grads, e.block_size, **shared)
        out = None if e.rows_dir is None else Path(e.rows_dir) / "gradients.rows"
        if out is not None:
            out.unlink(missing_ok=True)  # the rows of the step before
        try:
            return collect_gradients(weights.model, e.loss_fn, stream, e.num_grads, out=out, **shared)
        except MemoryError as error:
            raise MemoryError(f"{error}; for prune the way to disk is rows_dir='a folder with room'") from None

    def curvature(self, measured: Rows, weights: MaskedWeights, layout: ParameterLayout) -> Curvature:
        """The matrix, with a damping chosen if that was asked for."""
        e = self.estimation
        shares = self._shares(weights, layout)
        sizes = layout.sizes if e.ranks.size == 1 else shares[e.ranks.rank].sizes
        damping = e.damping
        if isinstance(damping, str):
            assert isinstance(measured, Tensor)
            damping = choose_damping(measured, e.block_size, sizes, ranks=e.ranks)
        local = FisherCurvature(measured, damping, e.block_size, sizes, layout.device, e.ranks)
        return local if e.ranks.size == 1 else SharedCurvature(local, shares, e.ranks)

    @property
    def _sums_up(self) -> bool:
        e = self.estimation
        return e.block_size is not None and e.num_grads > ROWS_PER_BLOCK_SIZE * e.block_size and not self.keep_rows

    def _measure_together(
        self, weights: MaskedWeights, layout: ParameterLayout, stream: BatchStream, step: int
    ) -> Tensor | FisherBlocks:
        """This rank's columns of the gradients that all ranks take."""
        e, collection = self.estimation, self.estimation.collection(step)
        task = collection.task(weights.model, e.loss_fn, layout, None, None)
        shares = self._shares(weights, layout)
        if e.block_size is not None and self._sums_up:
            return accumulate_share(collection, task, stream, shares, e.ranks, e.block_size, layout.device)
        return collect_share(collection, task, stream, shares, e.ranks, layout.dtype, layout.device)

    def _shares(self, weights: MaskedWeights, layout: ParameterLayout) -> tuple[ColumnShare, ...]:
        """How the kept weights are divided among the ranks."""
        e = self.estimation
        if e.block_size is not None or not self.by_slices:
            return column_shares(layout.sizes, e.ranks.size, e.block_size)
        cuts = [0]
        for name in layout.names:
            kept = weights.masks[name].reshape(len(weights.masks[name]), -1).sum(1)
            cuts += (cuts[-1] + kept.cumsum(0)).tolist()
        return shares_at(cuts, layout.sizes, e.ranks.size)


class WoodFisherMethod:
    """The same gradients, inverted block by block by the literal recursion."""

    def __init__(self, estimation: Estimation):
        if estimation.block_size is None or estimation.rows_dir is not None:
            raise ValueError("method 'woodfisher' keeps dense blocks and rows in memory: give block_size, no rows_dir")
        self._gradients = FisherMethod(estimation, keep_rows=True)

    def measure(self, weights: MaskedWeights, layout: ParameterLayout, stream: BatchStream, step: int) -> Rows:
        """The gradients of this step."""
        return self._gradients.measure(weights, layout, stream, step)

    def curvature(self, measured: Rows, weights: MaskedWeights, layout: ParameterLayout) -> Curvature:
        """The inverses of the blocks."""
        e = self._gradients.estimation
        assert isinstance(measured, Tensor)
        assert e.block_size is not None
        assert not isinstance(e.damping, str)
        return RecursionCurvature(measured, e.damping, e.block_size, layout.sizes)


class LayerMethod:
    """Methods that go by moments of layer inputs, and K-FAC by those of output gradients besides."""

    def __init__(self, name: str, estimation: Estimation, weights: MaskedWeights):
        self.name = name
        self.estimation = estimation
        self._layers = find_layers(weights.model, weights.targets, name)

    def measure(self, weights: MaskedWeights, layout: ParameterLayout, stream: BatchStream, step: int) -> Any:
        """The moments over `num_grads` batches."""
        e = self.estimation
        return layer_moments(weights.model, e.loss_fn, stream, e.num_grads, self._layers, self.name == "kfac")

    def curvature(self, measured: Any, weights: MaskedWeights, layout: ParameterLayout) -> Curvature:
        """Wanda's factors, L-OBS's matrices or K-FAC's."""
        damping = self.estimation.damping
        assert not isinstance(damping, str)
        if self.name == "kfac":
            return KroneckerCurvature(measured, damping, layout)
        if self.name == "lobs":
            return LayerInputCurvature(measured, damping, layout, weights.masks)
        factors = {}
        for name, moments in measured.items():
            squares = moments.inputs.diagonal(dim1=1, dim2=2) / moments.positions
            rows = squares.repeat_interleave(len(weights.masks[name]) // len(squares), 0)
            factors[name] = rows.view(weights.masks[name].shape)
        return WeightCurvature(weights.row_of(layout, factors))


class MagnitudeMethod:
    """The smallest weights go; no data is looked at."""

    def measure(self, weights: MaskedWeights, layout: ParameterLayout, stream: BatchStream, step: int) -> None:
        """Nothing."""

    def curvature(self, measured: None, weights: MaskedWeights, layout: ParameterLayout) -> Curvature:
        """The identity."""
        return WeightCurvature()


SHARED_METHODS = ("mfac", "diagonal", "magnitude")
METHODS = ("mfac", "magnitude", "diagonal", "wanda", "woodfisher", "lobs", "kfac")


def make_method(name: str, estimation: Estimation, weights: MaskedWeights, pattern: Pattern) -> Method:
    """The method of a name.

    Raises:
        ValueError: an unknown name, or settings that the method has no use for.
    """
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, not {name!r}")
    if isinstance(estimation.damping, str) and estimation.damping != "auto":
        raise ValueError(f'damping must be a positive number or "auto", not {estimation.damping!r}')
    if estimation.damping == "auto" and name not in ("mfac", "magnitude"):
        raise ValueError(f"damping=\"auto\" is for method 'mfac'; give method {name!r} a number")
    if estimation.ranks.size > 1:
        _check_shared(name, estimation, pattern)
    if name == "magnitude":
        return MagnitudeMethod()
    if name == "woodfisher":
        return WoodFisherMethod(estimation)
    if name in ("mfac", "diagonal"):
        # The diagonal of the Fisher matrix is what blocks of one weight are.
        estimation = replace(estimation, block_size=1) if name == "diagonal" else estimation
        return FisherMethod(estimation, keep_rows=isinstance(pattern, Slices), by_slices=pattern is not None)
    return LayerMethod(name, estimation, weights)


def _check_shared(name: str, estimation: Estimation, pattern: Pattern) -> None:
    """Raises ValueError for what is done on one process only."""
    if name not in SHARED_METHODS:
        raise ValueError(
            f"method {name!r} works in one process; with a process_group use one of "
            f"{', '.join(map(repr, SHARED_METHODS))}, or leave the group out"
        )
    if estimation.rows_dir is not None:
        raise ValueError("rows_dir is for one process; with a process_group every rank keeps its columns in memory")
    if name == "mfac" and estimation.block_size is None and isinstance(pattern, Slices) and pattern.dim != 0:
        raise ValueError(
            f"pattern {pattern} with the full matrix works in one process: a {pattern} has weights on several ranks; "
            "give a block_size, or leave the process_group out"
        )
