"""The Fisher matrix of each output's weights: summed as batches come, or kept as rows where these are fewer."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from mfac import products
from mfac.dual import DualBlocks
from mfac.gradients.batches import Batch, placed, sample_tensors
from mfac.gradients.collect import Collection
from mfac.gradients.model_state import evaluation, set_seed
from mfac.inverse_fisher import Ranks
from mfac.layout import ParameterLayout
from mfac.pages import BLOCK_PIECE, BlockRun, Pages
from mfac.primal import PrimalBlocks
from mfac.pruning.curvature import PlacedBlocks
from mfac.pruning.weights import LayerCall, MaskedWeights, Weight, uses_of

DAMPING = 1e-2  # of the mean diagonal of a weight
PRIOR = 0.5  # of F is the Kronecker prior, if there is one
LARGEST = 1 << 29  # bytes of a layer's blocks that a prior joins
TOKENS = 32  # for each weight of a block are enough: those with the largest gradients, mostly
TOLERANCE = 0.05  # of a weight's gradient: layers that use their weights otherwise than they should are far beyond it
COPIES = 4  # of a block in float64: its sum, its factor, and two in the making
ROWS_AT_ONCE = 256  # are multiplied together, if blocks are not smaller

Pick = Callable[["Part", slice], Float[Tensor, "rows outputs kept"]]
Calls = dict[str, list[LayerCall]]


class Prior:
    """K-FAC's S ⊗ A, from the output gradients and the inputs of a layer: a share of F that also joins outputs.

    A has one more row and column, of zeros, for places without a weight.
    """

    def __init__(self, shape: torch.Size, device: torch.device):
        outputs, inputs = shape
        self.S = torch.zeros(outputs, outputs, dtype=torch.float64, device=device)
        self.A = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64, device=device)
        self.positions = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, calls: Sequence[LayerCall], root: float) -> None:
        for call in calls:
            S, A, count = call.moments()
            self.S += S * root**2
            self.A[:-1, :-1] += A
            self.positions += count

    def finish(self, divisor: float, ranks: Ranks) -> None:
        """The share of F: S takes the factors."""
        self.S = ranks.sum_(self.S) * (PRIOR / divisor)
        self.A = ranks.sum_(self.A) / ranks.sum_(self.positions).clamp_min(1)
        self._others = self.S - self.S.diagonal().diag()

    def mix_(self, K: Float[Tensor, "outputs kept kept"], part: "Part") -> None:
        """(1 − α) K + α S_oo A for each output."""
        K.mul_(1 - PRIOR)
        own = self.S.diagonal()[part.outputs]
        for some in part.slices():
            inside = part.inside[some]
            K[some] += self.A[inside[:, :, None], inside[:, None, :]] * own[some, None, None]

    def couple(self, part: "Part", x: Float[Tensor, "outputs kept"]) -> Float[Tensor, "outputs kept"]:
        """α S_oo' A x_o', summed over the other outputs o'."""
        X = x.new_zeros(len(x), len(self.A)).scatter_(1, part.inside, x)
        return (self._others @ X @ self.A).gather(1, part.inside)


class Part:
    """Some outputs of a weight, whose matrices are held at once.

    `index` has the place of each weight among all `d` kept ones, a row for each output, and d for removed ones.
    `inside` are the inputs of the kept weights, one more than there are for places without a weight.
    """

    def __init__(self, weight: Weight, index: Int[Tensor, "outputs inputs"], d: int, outputs: slice, joined: bool):
        self.weight, self.outputs, self.joined = weight, outputs, joined
        kept = int((index < d).sum(1).max())
        index = index[outputs]
        order = (index == d).to(torch.uint8).argsort(dim=1, stable=True)[:, :kept]
        places = index.gather(1, order)
        self.places: Int[Tensor, " n"] = places.flatten()
        self.inside = torch.where(places < d, order, index.shape[1])
        self.whole = kept == index.shape[1] and bool((places < d).all())
        self._sums: Tensor | None = None
        self._rows, self._filled, self._summed = torch.empty(0), 0, True

    def slices(self) -> Iterator[slice]:
        """Outputs whose blocks stay in cache."""
        count, kept = self.inside.shape
        step = max(1, BLOCK_PIECE // kept**2)
        return (slice(first, min(first + step, count)) for first in range(0, count, step))

    def start(self, rows: float, dtype: torch.dtype, device: torch.device) -> None:
        """Begins with nothing; `rows` will come, which are kept if they are fewer than the weights of a block."""
        count, kept = self.inside.shape
        at_once = int(rows) if rows < kept else min(ROWS_AT_ONCE, kept)
        self._rows, self._filled = torch.empty(at_once, count, kept, dtype=dtype, device=device), 0
        self._sums, self._summed = None, rows >= kept

    def add(self, pick: Pick, rows: int) -> None:
        """Adds `rows` rows, of which pick(self, some) gives some, over the kept weights."""
        first = 0
        while first < rows:
            if self._filled == len(self._rows):
                self._sum_up()
            count = min(rows - first, len(self._rows) - self._filled)
            self._rows[self._filled : self._filled + count] = pick(self, slice(first, first + count))
            self._filled, first = self._filled + count, first + count

    def blocks(self, divisor: float, damping: float, ranks: Ranks, prior: Prior | None = None) -> PlacedBlocks:
        """The blocks of λI + Σ g gᵀ/divisor, which is mixed with a prior; the sums are used up."""
        count, kept = self.inside.shape
        run = BlockRun(0, kept, count)
        if self._sums is None and not self._summed:
            rows = self._rows[: self._filled].mul_((self._filled / divisor) ** 0.5)
            return PlacedBlocks(DualBlocks(run, Pages(rows.flatten(1), rows.device), damping), self.places)
        K, self._sums, self._rows = ranks.sum_(self._sum_up()).div_(divisor), None, torch.empty(0)
        if prior is not None:
            prior.mix_(K, self)
        couple = partial(prior.couple, self) if prior is not None and self.joined else None
        return PlacedBlocks(PrimalBlocks.from_sums(run, K, damping), self.places, couple)

    def _sum_up(self) -> Float[Tensor, "outputs kept kept"]:
        """Adds the products of the rows to the sums, which makes room for others."""
        X = self._rows[: self._filled].permute(1, 2, 0)
        if self._sums is None:
            self._sums = torch.zeros(*X.shape[:2], X.shape[1], dtype=torch.float64, device=X.device)
        for some in self.slices():
            self._sums[some] += products.gram(X[some], X.dtype)
        self._filled = 0
        return self._sums


@dataclass
class RowFisher:
    """The Fisher matrix over the weights of each output, from the inputs and the output gradients of layers.

    Convolutions have a row for each sample, linear layers over tokens one for each token; weights that are used in
    other ways have a row for each sample from the `collection`. Outputs are measured in groups that fit in `memory`
    bytes, with a pass over the batches for each; with several ranks, sums are those of all of them.

    `damping` is λ, or None: relative to each weight's mean diagonal. With a `prior`, the outputs of a layer are joined
    if their blocks fit in `memory` together.
    """

    weights: MaskedWeights
    layout: ParameterLayout
    collection: Collection
    batches: Sequence[Batch]
    damping: float | None
    memory: int | None
    ranks: Ranks
    prior: bool = False

    def __post_init__(self) -> None:
        d = self.layout.dim
        by_name = self.layout.unflatten(torch.arange(1, d + 1, device=self.layout.device)).items()
        places = {name: self.weights.layers[name].by_output(index) - 1 for name, index in by_name}
        self._index = {name: torch.where(index < 0, d, index) for name, index in places.items()}
        self._samples = self.ranks.total(sum(map(num_samples, self.batches)))
        self._num_batches = self.ranks.total(len(self.batches))
        with self.ranks.together("finding the layers"):
            self._by_layer = self._understood()
        self._mixed = {name for name in self._by_layer if self.prior and self._can_be_mixed(name)}
        self.groups = self._grouped()
        self.dampings: dict[str, float] = {}
        self._only: list[PlacedBlocks] | None = None

    def blocks(self) -> Iterator[list[PlacedBlocks]]:
        """The blocks, group by group; those of a single group are measured once."""
        if len(self.groups) > 1:
            yield from map(self._measured, self.groups)
        else:
            self._only = self._only or self._measured(self.groups[0])
            yield self._only

    def _grouped(self) -> list[list[Part]]:
        """The outputs of all weights in groups whose matrices fit."""
        groups: list[list[Part]] = [[]]
        room = budget = float("inf") if self.memory is None else self.memory
        for name, index in self._index.items():
            kept, rows, outputs = self._kept(name), self._rows(name), len(index)
            each = max(1, 8 * COPIES * kept**2 if rows >= kept else 8 * rows * kept + 8 * COPIES * rows**2)
            joined = name in self._mixed and each * outputs <= budget
            first = 0
            while kept and first < outputs:
                if groups[-1] and room < (each * outputs if joined else each):
                    groups.append([])
                    room = budget
                last = first + max(1, int(min(room // each, outputs - first)))
                groups[-1].append(Part(self.weights.layers[name], index, self.layout.dim, slice(first, last), joined))
                room -= each * (last - first)
                first = last
        return groups

    def _kept(self, name: str) -> int:
        return int((self._index[name] < self.layout.dim).sum(1).max())

    def _rows(self, name: str) -> float:
        """How many rows will come, where they can be kept; those of tokens and of several ranks are summed."""
        summed = self._by_layer.get(name) or self.ranks.size > 1 or name in self._mixed
        return math.inf if summed else self._samples

    def _measured(self, parts: Sequence[Part]) -> list[PlacedBlocks]:
        """One pass over the batches."""
        device, found = self.layout.device, []
        shapes = {part.weight.name: self._index[part.weight.name].shape for part in parts}
        squares = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
        priors = {name: Prior(shape, device) for name, shape in shapes.items() if name in self._mixed}
        for part in parts:
            dtype = torch.promote_types(part.weight.tensor.dtype, torch.float32)
            part.start(self._rows(part.weight.name), dtype, device)
        with self.ranks.together("measuring"):
            layers = [part for part in parts if part.weight.name in self._by_layer]
            for uses, _ in self._backward([part.weight for part in layers]):
                for part in layers:
                    self._add(part, uses[part.weight.name], squares[part.weight.name], priors.get(part.weight.name))
            self._add_others([part for part in parts if part.weight.name not in self._by_layer], squares)
        for part in parts:
            name = part.weight.name
            divisor = self._num_batches if name in self._by_layer else self._samples
            mean = float(self.ranks.sum_(squares[name])[self._index[name] < self.layout.dim].mean()) / divisor
            if not math.isfinite(mean):
                raise RuntimeError(f"the gradients of {name} are not finite; check the loss and the batches")
            self.dampings[name] = self.damping or DAMPING * mean or 1.0  # without a gradient nothing is costly
            if name in priors:
                priors[name].finish(divisor, self.ranks)
            found.append(part.blocks(divisor, self.dampings[name], self.ranks, priors.get(name)))
        return found

    def _backward(
        self, weights: Sequence[Weight], also: Sequence[Tensor] = ()
    ) -> Iterator[tuple[Calls, Sequence[Tensor | None]]]:
        """The uses of the weights in each batch, those that the loss depends on, and the gradients of other tensors."""
        tensors, device = [weight.tensor for weight in weights], self.layout.device
        if not weights:
            return
        with evaluation(self.weights.model, tensors), uses_of(weights) as uses:
            for seed, batch in enumerate(self.batches, self.collection.seed):
                set_seed(seed, device)
                drawn = self.collection.drawn(placed(batch, device), [seed])
                for calls in uses.values():  # drawing may have called the model
                    calls.clear()
                loss = self.collection.loss(self.weights.model, drawn)
                every = [call for calls in uses.values() for call in calls]
                wanted: Any = (*(call.output for call in every), *also)  # not the weights, which would cost more
                gradients = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
                for call, dy in zip(every, gradients, strict=False):
                    call.dy = dy
                found = {name: [call for call in calls if call.dy is not None] for name, calls in uses.items()}
                yield found, gradients[len(every) :]

    def _understood(self) -> dict[str, bool]:
        """The weights whose gradient follows from what their layers see, and whether that is tokens."""
        weights, found = [weight for weight in self.weights.layers.values() if weight.modules], {}
        for uses, gradients in self._backward(weights, [weight.tensor for weight in weights]):
            for weight, gradient in zip(weights, gradients, strict=True):
                calls = uses[weight.name]
                if gradient is not None and calls:
                    true = weight.by_output(gradient)
                    error = sum((use.gradient() for use in calls), -true)
                    if float(error.norm()) <= TOLERANCE * float(true.norm()):
                        found[weight.name] = calls[0].has_positions
            break
        return found

    def _can_be_mixed(self, name: str) -> bool:
        """Whether there can be a prior: not with groups of channels, nor where blocks are too large together."""
        small = 8 * len(self._index[name]) * self._kept(name) ** 2 <= LARGEST
        return small and all(getattr(m, "groups", 1) == 1 for m in self.weights.layers[name].modules)

    def _add(
        self, part: Part, calls: Sequence[LayerCall], squares: Float[Tensor, "outputs inputs"], prior: Prior | None
    ) -> None:
        """Adds the rows of a batch to a part, and their squares."""
        is_mean = self.collection.fisher != "gauss-newton"  # whose rows have the weights of the mean already
        root = len(calls[0].x) ** 0.5 if is_mean and calls else 1.0
        if prior is not None:
            prior.add(calls, root)
        if calls and calls[0].has_positions:
            for use in calls:
                a, dy = use.positions()
                squares += (dy.square().T @ a.square()).double() * root**2
                count = -(-TOKENS * part.inside.shape[1] // len(self.batches))
                chosen, weights = _sampled(a.square().sum(1).double() * dy.square().sum(1), count)
                dy = dy[chosen] * (weights.sqrt() * root).to(dy.dtype)[:, None]
                part.add(partial(_outer, F.pad(a[chosen], (0, 1)), dy), len(chosen))
        elif calls:
            self._add_samples(part, sum((use.samples() for use in calls[1:]), calls[0].samples()) * root, squares)

    def _add_others(self, parts: Sequence[Part], squares: Mapping[str, Tensor]) -> None:
        """Adds the rows of weights whose layers are not understood, sample by sample."""
        if not parts:
            return
        layout = ParameterLayout(self.weights.model, [part.weight.name for part in parts])
        collection = replace(self.collection, layout=layout, num_grads=self._samples)
        slots = dict(zip(layout.names, layout.slots, strict=True))
        with evaluation(self.weights.model, layout.tensors):
            for rows in collection.pieces(iter(self.batches)):
                for part in parts:
                    own = rows[:, slots[part.weight.name]]
                    places = torch.arange(own.shape[1], device=own.device).view(part.weight.tensor.shape)
                    G = F.pad(own, (0, 1))[:, part.weight.by_output(places, -1)]
                    self._add_samples(part, G, squares[part.weight.name])

    def _add_samples(self, part: Part, G: Float[Tensor, "rows outputs inputs"], squares: Tensor) -> None:
        squares += G.square().sum(0)
        part.add(partial(_picked, G if part.whole else F.pad(G, (0, 1))), len(G))


def _sampled(sizes: Float[Tensor, " n"], count: int) -> tuple[Int[Tensor, " k"], Float[Tensor, " k"]]:
    """About `count` indices, drawn in proportion to the sizes and without repeats, and their weights in a sum of all.

    Systematic sampling: index i is drawn with probability p_i = min(1, c·size_i), and weighs 1/p_i.
    """
    p = torch.zeros_like(sizes)
    for _ in range(4):  # what is certain to be drawn leaves more for the others
        certain = p >= 1
        share = (count - certain.sum()).clamp_min(1) / sizes[~certain].sum().clamp_min(1e-300)
        p = torch.where(certain, 1.0, sizes * share).clamp_max(1)
    start = torch.rand((), dtype=torch.float64)  # of the seed of the batch
    steps = (p.cumsum(0) + start.to(p.device)).floor()
    chosen = steps.diff(prepend=steps.new_zeros(1)).nonzero()[:, 0]
    return chosen, 1 / p[chosen]


def _outer(
    a: Float[Tensor, "rows inputs+1"], dy: Float[Tensor, "rows outputs"], part: Part, some: slice
) -> Float[Tensor, "some outputs kept"]:
    return (a[some, None, :-1] if part.whole else a[some][:, part.inside]) * dy[some, part.outputs, None]


def _picked(G: Float[Tensor, "rows outputs inputs"], part: Part, some: slice) -> Float[Tensor, "some outputs kept"]:
    X = G[some, part.outputs]
    return X if part.whole else X.gather(2, part.inside.expand(len(X), -1, -1))


def num_samples(batch: Batch) -> int:
    """The leading dimension that a batch's tensors share; 1 if there is none."""
    lengths = {len(tensor) for tensor in sample_tensors(batch)}
    return lengths.pop() if len(lengths) == 1 else 1
