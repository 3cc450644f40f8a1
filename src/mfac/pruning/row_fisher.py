"""The Fisher matrix of each output's weights: summed as batches come, or kept as rows where these are fewer."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from mfac import products
from mfac.dual import DualBlocks
from mfac.gradients.batches import Batch, placed, sample_tensors
from mfac.gradients.collect import Collection
from mfac.gradients.model_state import evaluation, set_seed
from mfac.inverse_fisher import Ranks
from mfac.layout import ParameterLayout
from mfac.pages import WIDE_PIECE, BlockRun, Pages
from mfac.primal import Couple, PrimalBlocks
from mfac.pruning.layers import LayerCall, Weight, uses_of

DAMPING = 1e-2  # of the mean diagonal of a weight
PRIOR = 0.5  # of F is the Kronecker prior, if there is one
LARGEST = 1 << 29  # bytes of a layer's blocks that a prior joins
TOKENS = 32  # for each weight of a block are enough: those with the largest gradients, mostly
TOLERANCE = 0.05  # of a weight's gradient: layers that use their weights otherwise than they should are far beyond it
COPIES = 3  # of a block in float64: its sum, its factor, and one in the making

Pick = Callable[[slice, Tensor | None], Float[Tensor, "outputs kept rows"]]
Calls = dict[str, list[LayerCall]]
Row = tuple[Callable[[nn.Module, Batch], Tensor], Callable[[nn.Module, Batch, int], Batch]]


class RowBlocks:
    """Blocks over the weights `columns`; vectors are over these, in their order.

    Inside, the blocks are adjacent and of one length: a place of which `present` is False has no weight, and F is λ
    there. θ is zero in such a place, so nothing moves because of it.
    """

    def __init__(
        self, inner: PrimalBlocks | DualBlocks, columns: Int[Tensor, " n"], present: Bool[Tensor, "blocks length"],
        couple: Couple | None = None,
    ):  # fmt: skip
        self.inner, self.columns, self.couple = inner, columns, couple
        self.run = inner.run
        self.present: Bool[Tensor, " places"] = present.flatten()

    def diagonal(self) -> Float[Tensor, " n"]:
        return self.inner.diagonal()[self.present]

    def apply(self, x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return self.inner.apply(self.spread(x))[self.present]

    def joint_removal(
        self, theta: Float[Tensor, " n"], removed: Bool[Tensor, " n"]
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, ""]]:
        both = self.spread(theta), self.spread(removed)
        if self.couple is not None and isinstance(self.inner, PrimalBlocks):
            delta, cost = self.inner.coupled_removal(*both, self.couple)
        else:
            delta, cost = self.inner.joint_removal(*both)
        return delta[self.present], cost

    def cost(self, delta: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        return self.inner.cost(self.spread(delta))

    def elements(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        places = self.present.nonzero()[:, 0]
        return self.inner.elements(places[rows], places[columns])

    def group_costs(self, theta: Float[Tensor, " n"], ids: Int[Tensor, " n"], count: int) -> Float[Tensor, " count"]:
        return self.inner.group_costs(self.spread(theta), self.spread(ids, count), count + 1)[:-1]

    def inverses(self) -> Iterator[tuple[slice, Float[Tensor, "blocks b b"]]]:
        return self.inner.inverses()

    def spread(self, x: Shaped[Tensor, " n"], fill: float = 0) -> Shaped[Tensor, " places"]:
        """The vector with `fill` in the places that have no weight."""
        out = x.new_full((len(self.present),), fill)
        out[self.present] = x
        return out


class Prior:
    """K-FAC's S ⊗ A, from the output gradients and the inputs of a layer: a share of F that also joins outputs."""

    def __init__(self, shape: torch.Size, device: torch.device):
        self.S, self.A = (torch.zeros(n, n, dtype=torch.float64, device=device) for n in shape)  # outputs, inputs
        self.positions = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, calls: Sequence[LayerCall], root: float) -> None:
        for call in calls:
            S, A, count = call.moments()
            self.S += S * root**2
            self.A += A
            self.positions += count

    def finish(self, divisor: float, ranks: Ranks) -> None:
        self.S = ranks.sum_(self.S) / divisor
        self.A = ranks.sum_(self.A) / ranks.sum_(self.positions).clamp_min(1)

    def mix_(self, F: Float[Tensor, "outputs kept kept"], part: "Part") -> None:
        """(1 − α) F + α S_oo A for each output."""
        for o, (inside, present) in enumerate(zip(part.inside, part.present, strict=True)):
            A = self.A[inside[:, None], inside] * (present[:, None] & present)
            F[o].mul_(1 - PRIOR).add_(A, alpha=PRIOR * float(self.S[o, o]))

    def couple(self, part: "Part", x: Float[Tensor, "outputs kept"]) -> Float[Tensor, "outputs kept"]:
        """α S_oo' A x_o', summed over the other outputs o'."""
        X = x.new_zeros(len(x), len(self.A)).scatter_(1, part.inside, x * part.present)
        Y = (self.S - self.S.diagonal().diag()) @ X @ self.A * PRIOR
        return Y.gather(1, part.inside) * part.present


class Part:
    """Some outputs of a weight, whose matrices are held at once.

    `index` has the place of each weight among all kept ones, a row for each output, and −1 for removed ones.
    """

    def __init__(self, weight: Weight, index: Int[Tensor, "outputs inputs"], outputs: slice, kept: int):
        self.weight, self.outputs = weight, outputs
        index = index[outputs]
        self.inside = (index < 0).to(torch.uint8).argsort(dim=1, stable=True)[:, :kept]
        places = index.gather(1, self.inside)
        self.present: Bool[Tensor, "outputs kept"] = places >= 0
        self.columns: Int[Tensor, " n"] = places[self.present]
        self.whole = bool(self.present.all()) and kept == index.shape[1]
        self._sums: Tensor | None = None
        self._rows: Tensor | None = None
        self._filled = 0

    def start(self, rows: float, dtype: torch.dtype, device: torch.device) -> None:
        """Begins with nothing; `rows` will come."""
        count, kept = self.inside.shape
        self._filled = 0
        if rows < kept:
            self._rows = torch.zeros(int(rows), count, kept, dtype=dtype, device=device)
        else:
            self._sums = torch.zeros(count, kept, kept, dtype=torch.float64, device=device)

    def add(self, pick: Pick, rows: int) -> None:
        """Adds `rows` rows; pick(outputs, inside) gives them over the inputs `inside` of some outputs (None: all)."""
        count, kept = self.inside.shape
        step = max(1, WIDE_PIECE // (rows * kept))
        for first in range(0, count, step):
            some = slice(first, min(first + step, count))
            outputs = slice(self.outputs.start + some.start, self.outputs.start + some.stop)
            X = pick(outputs, None) if self.whole else pick(outputs, self.inside[some]) * self.present[some, :, None]
            if self._sums is not None:
                self._sums[some] += products.gram(X, X.dtype)
            elif self._rows is not None:
                self._rows[self._filled : self._filled + rows, some] = X.permute(2, 0, 1).to(self._rows.dtype)
        self._filled += rows

    def blocks(self, divisor: float, damping: float, ranks: Ranks, prior: Prior | None = None) -> RowBlocks:
        """The blocks of λI + Σ g gᵀ/divisor, which is mixed with a prior; the sums are used up."""
        run = BlockRun(0, self.inside.shape[1], len(self.inside))
        sums, rows, self._sums, self._rows = self._sums, self._rows, None, None
        inner: PrimalBlocks | DualBlocks
        if rows is None:
            assert sums is not None
            F = ranks.sum_(sums).div_(divisor)
            if prior is not None:
                prior.mix_(F, self)
            inner = PrimalBlocks.from_sums(run, F, damping)
        else:
            rows = rows[: self._filled].mul_((self._filled / divisor) ** 0.5)
            inner = DualBlocks(run, Pages(rows.flatten(1), rows.device), damping)
        return RowBlocks(inner, self.columns, self.present, None if prior is None else partial(prior.couple, self))


@dataclass
class RowFisher:
    """The Fisher matrix over the weights of each output, from the inputs and the output gradients of layers.

    Convolutions have a row for each sample, linear layers over tokens one for each token; weights that are used in
    other ways have a row for each sample from a `collection` of theirs. Outputs are measured in groups that fit in
    `memory` bytes, with a pass over the batches for each; with several ranks, sums are those of all of them.

    `row` is (loss, draw): the gradient of loss(model, draw(model, batch, seed)) is the sum of a batch's rows, which are
    those of a mean over the samples if `is_mean`. `damping` is λ, or None: relative to each weight's mean diagonal.
    """

    model: nn.Module
    weights: Mapping[str, Weight]
    layout: ParameterLayout
    batches: Sequence[Batch]
    row: Row
    is_mean: bool
    collection: Callable[[Sequence[str], int], Collection]
    damping: float | None
    memory: int | None
    seed: int
    ranks: Ranks
    prior: bool = False

    def __post_init__(self) -> None:
        places = torch.arange(1, self.layout.dim + 1, device=self.layout.device)
        by_name = self.layout.unflatten(places).items()
        self._index = {name: self.weights[name].by_output(index) - 1 for name, index in by_name}
        self._samples = self.ranks.total(sum(map(num_samples, self.batches)))
        self._num_batches = self.ranks.total(len(self.batches))
        with self.ranks.together("finding the layers"):
            self._by_layer = self._understood()
        self._mixed = {name for name in self._by_layer if self._is_mixed(self.weights[name])} if self.prior else set()
        self.groups = self._grouped()
        self.dampings: dict[str, float] = {}
        self._only: list[RowBlocks] | None = None

    def blocks(self) -> Iterator[list[RowBlocks]]:
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
            kept = int((index >= 0).sum(1).max())
            rows = self._rows(name)
            each = max(1, 8 * COPIES * kept**2 if rows >= kept else 8 * rows * kept + 8 * COPIES * rows**2)
            first = 0
            while kept and first < len(index):
                if groups[-1] and room < each:
                    groups.append([])
                    room = budget
                last = min(len(index), first + max(1, int(min(room, each * len(index)) // each)))
                last = len(index) if name in self._mixed else last  # the prior joins all outputs of a layer
                groups[-1].append(Part(self.weights[name], index, slice(first, last), kept))
                room -= each * (last - first)
                first = last
        return groups

    def _rows(self, name: str) -> float:
        """How many rows will come, where they can be kept; those of tokens and of several ranks are summed."""
        summed = self._by_layer.get(name) or self.ranks.size > 1 or name in self._mixed
        return math.inf if summed else self._samples

    def _measured(self, parts: Sequence[Part]) -> list[RowBlocks]:
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
            name, index = part.weight.name, self._index[part.weight.name]
            divisor = self._num_batches if name in self._by_layer else self._samples
            mean = float(self.ranks.sum_(squares[name])[index >= 0].mean()) / divisor
            if not math.isfinite(mean):
                raise RuntimeError(f"the gradients of {name} are not finite; check the loss and the batches")
            self.dampings[name] = self.damping or DAMPING * mean or 1.0  # without a gradient nothing is costly
            if name in priors:
                priors[name].finish(divisor, self.ranks)
            found.append(part.blocks(divisor, self.dampings[name], self.ranks, priors.get(name)))
        return found

    def _backward(self, weights: Sequence[Weight]) -> Iterator[tuple[Calls, Sequence[Tensor | None]]]:
        """The uses of the weights in each batch, and their gradients."""
        loss, draw = self.row
        tensors, device = [weight.tensor for weight in weights], self.layout.device
        if not weights:
            return
        with evaluation(self.model, tensors), uses_of(weights) as uses:
            for seed, batch in enumerate(self.batches, self.seed):
                set_seed(seed, device)
                drawn = draw(self.model, placed(batch, device), seed)
                for calls in uses.values():  # drawing may have called the model
                    calls.clear()
                yield uses, torch.autograd.grad(loss(self.model, drawn), tensors, allow_unused=True)

    def _understood(self) -> dict[str, bool]:
        """The weights whose gradient follows from what their layers see, and whether that is tokens."""
        weights, found = [weight for weight in self.weights.values() if weight.modules], {}
        for uses, gradients in self._backward(weights):
            for weight, gradient in zip(weights, gradients, strict=True):
                calls = [use for use in uses[weight.name] if use.dy]
                if gradient is not None and calls:
                    true = weight.by_output(gradient)
                    error = sum((use.gradient() for use in calls), -true)
                    if float(error.norm()) <= TOLERANCE * float(true.norm()):
                        found[weight.name] = calls[0].has_positions
            break
        return found

    def _is_mixed(self, weight: Weight) -> bool:
        """Whether a prior is mixed in: not with groups of channels, nor where blocks are too large together."""
        outputs, kept = len(self._index[weight.name]), int((self._index[weight.name] >= 0).sum(1).max())
        return 8 * outputs * kept**2 <= LARGEST and all(getattr(m, "groups", 1) == 1 for m in weight.modules)

    def _add(
        self, part: Part, uses: Sequence[LayerCall], squares: Float[Tensor, "outputs inputs"], prior: Prior | None
    ) -> None:
        """Adds the rows of a batch to a part, and their squares."""
        calls = [use for use in uses if use.dy]
        root = len(calls[0].x) ** 0.5 if self.is_mean and calls else 1.0
        if prior is not None:
            prior.add(calls, root)
        if calls and calls[0].has_positions:
            for use in calls:
                a, dy = use.positions()
                squares += (dy.square().T @ a.square()).double() * root**2
                count = -(-TOKENS * part.inside.shape[1] // len(self.batches))
                chosen, weights = _sampled(a.square().sum(1).double() * dy.square().sum(1), count)
                dy = dy[chosen].T * (weights.sqrt() * root).to(dy.dtype)
                part.add(partial(_outer, a[chosen].T.contiguous(), dy), len(chosen))
        elif calls:
            G = sum((use.samples() for use in calls[1:]), calls[0].samples()) * root
            squares += G.square().sum(2)
            part.add(partial(_picked, G), G.shape[2])

    def _add_others(self, parts: Sequence[Part], squares: Mapping[str, Tensor]) -> None:
        """Adds the rows of weights whose layers are not understood, sample by sample."""
        if not parts:
            return
        collection = self.collection([part.weight.name for part in parts], self._samples)
        slots = dict(zip(collection.layout.names, collection.layout.slots, strict=True))
        with evaluation(self.model, collection.layout.tensors):
            for chunk in collection.chunks(iter(self.batches)):
                rows = torch.zeros(chunk.count, collection.layout.dim, dtype=collection.layout.dtype,
                                   device=self.layout.device)  # fmt: skip
                collection.fill(chunk, rows, zeroed=True)
                collection.check()
                for part in parts:
                    own = rows[:, slots[part.weight.name]].T
                    places = torch.arange(len(own), device=own.device).view(part.weight.tensor.shape)
                    G = torch.cat([own, own.new_zeros(1, chunk.count)])[part.weight.by_output(places, -1)]
                    squares[part.weight.name] += G.square().sum(2)
                    part.add(partial(_picked, G), chunk.count)


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
    a: Float[Tensor, "inputs rows"], dy: Float[Tensor, "outputs rows"], outputs: slice, inside: Tensor | None
) -> Float[Tensor, "outputs kept rows"]:
    return (a if inside is None else a[inside]) * dy[outputs, None]


def _picked(
    G: Float[Tensor, "outputs inputs rows"], outputs: slice, inside: Int[Tensor, "outputs kept"] | None
) -> Float[Tensor, "outputs kept rows"]:
    some = G[outputs]
    return some if inside is None else some.gather(1, inside[:, :, None].expand(-1, -1, G.shape[2]))


def num_samples(batch: Batch) -> int:
    """The leading dimension that a batch's tensors share; 1 if there is none."""
    lengths = {len(tensor) for tensor in sample_tensors(batch)}
    return lengths.pop() if len(lengths) == 1 else 1
