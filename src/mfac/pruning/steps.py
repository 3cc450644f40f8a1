"""One recomputation: measure, score, choose, remove, and look at the loss; as a whole or not at all."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mfac.columns import Ranks
from mfac.gradients.batches import Batch
from mfac.layout import ParameterLayout
from mfac.pruning.batch_norm import recalibrate
from mfac.pruning.batch_stream import BatchStream
from mfac.pruning.budget import Pool
from mfac.pruning.curvature import Curvature, FisherCurvature
from mfac.pruning.loss_probe import LossProbe
from mfac.pruning.methods import Method
from mfac.pruning.patterns import NOfM, Pattern, Slices
from mfac.pruning.result import StepRecord
from mfac.pruning.selection import cheapest
from mfac.pruning.shared_curvature import SharedCurvature
from mfac.pruning.slices import cheapest_slices
from mfac.pruning.weights import MaskedWeights

WithBlocks = FisherCurvature | SharedCurvature


@dataclass(frozen=True)
class Stepper:
    """Everything that stays the same from step to step; see `prune` for what it means."""

    weights: MaskedWeights
    stream: BatchStream
    method: Method
    probe: LossProbe
    update: str
    order: str
    pattern: Pattern
    floors: Mapping[str, int]
    bn_batches: Iterable[Batch] | None
    ranks: Ranks = field(default_factory=Ranks)

    def step(self, number: int, pools: Sequence[Pool], loss: float) -> StepRecord:
        """Removes what the pools do not keep; if anything fails, the model and the masks are as before."""
        start = time.perf_counter()
        layout = self.weights.layout()
        measured = self.method.measure(self.weights, layout, self.stream, number)
        gradient_seconds = time.perf_counter() - start
        theta = self.weights.vector(layout)
        count = layout.dim - sum(pool.keep for pool in pools)
        curvature = self.method.curvature(measured, self.weights, layout)
        removed = self._choose(curvature, theta, layout, pools, count)
        gone: Bool[Tensor, " d"] = self.weights.row_of(layout, removed)
        if self.ranks.size > 1:  # all choose by the same numbers; ties are broken as the first rank has it
            self.ranks.from_first_(gone)
            removed = layout.unflatten(gone)
        delta, predicted = curvature.remove(theta, gone, self.update)
        with self.weights.all_or_nothing():
            with self.ranks.together("writing the weights"):
                self.weights.write(layout, theta + delta, removed)
            if self.bn_batches is not None:
                recalibrate(self.weights.model, self.bn_batches, self.ranks)
            after = self.probe.after()
        return StepRecord(
            step=number,
            removed=int(gone.sum()),
            sparsity=self.weights.sparsity,
            loss_before=loss,
            loss_after=after,
            predicted_increase=predicted,
            damping=curvature.damping,
            seconds=time.perf_counter() - start,
            gradient_seconds=gradient_seconds,
        )

    def _choose(
        self,
        curvature: Curvature,
        theta: Float[Tensor, " d"],
        layout: ParameterLayout,
        pools: Sequence[Pool],
        count: int,
    ) -> dict[str, Tensor]:
        """{name: which weights go now}."""
        if isinstance(self.pattern, Slices):
            return self._choose_slices(self.pattern, curvature, theta, layout, pools)
        if isinstance(self.pattern, NOfM):
            return self._choose_in_groups(self.pattern, curvature, theta, layout, pools)
        if self.order == "greedy":
            assert isinstance(curvature, WithBlocks)
            # Weights that a floor keeps must not use up what was asked for.
            spare = sum(self.floors.values())
            costs = curvature.greedy_scores(theta, count + spare if len(pools) == 1 else None)
        else:
            costs = curvature.scores(theta)
        return cheapest(layout.unflatten(costs), self.weights.masks, pools, self.floors)

    def _choose_in_groups(
        self, pattern: NOfM, curvature: Curvature, theta: Tensor, layout: ParameterLayout, pools: Sequence[Pool]
    ) -> dict[str, Tensor]:
        """Inside a group the exact order, one weight after the other; among groups the cheapest."""
        masks = self.weights.masks
        if isinstance(curvature, WithBlocks):
            positions = [
                pattern.positions(masks[n], slot.start) for n, slot in zip(layout.names, layout.slots, strict=True)
            ]
            parts = curvature.order_in_groups(theta, torch.cat(positions)).split([len(p) for p in positions])
            costs = {n: pattern.ungrouped(part, masks[n].shape) for n, part in zip(layout.names, parts, strict=True)}
        else:
            costs = layout.unflatten(curvature.scores(theta))
        offered = {name: pattern.offered(value, masks[name]) for name, value in costs.items()}
        return cheapest(offered, masks, pools, self.floors)

    def _choose_slices(
        self, pattern: Slices, curvature: Curvature, theta: Tensor, layout: ParameterLayout, pools: Sequence[Pool]
    ) -> dict[str, Tensor]:
        masks = self.weights.masks
        ids, ranges = pattern.groups(masks)
        groups = self.weights.row_of(layout, ids)
        count = max(numbers.stop for numbers in ranges.values())
        if isinstance(curvature, WithBlocks):
            costs = curvature.group_costs(theta, groups, count)
        else:
            costs = torch.zeros(count, dtype=torch.float64, device=theta.device)
            costs.index_add_(0, groups, curvature.scores(theta))
        sizes = torch.bincount(groups, minlength=count)
        chosen = torch.zeros(count, dtype=torch.bool, device=theta.device)
        chosen[sorted(cheapest_slices(costs, sizes, ranges, pools, self.floors))] = True
        return {name: chosen[ids[name]] & mask for name, mask in masks.items()}
