"""The Fisher matrix of each output's weights: measured layer by layer as batches come, in groups that fit."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mfac.gradients.batches import Batch, placed, sample_tensors
from mfac.gradients.collect import Collection, differentiable, scalar
from mfac.gradients.model_state import evaluation, set_seed
from mfac.inverse_fisher import Ranks
from mfac.layout import ParameterLayout
from mfac.pruning.curvature import PlacedBlocks
from mfac.pruning.layer_sums import PRIOR, WIDEST, Known, Part, Prior, TokenSums
from mfac.pruning.weights import LayerCall, MaskedWeights, Weight, uses_of

DAMPING = 1e-2  # of the mean diagonal of a weight
LARGEST = 1 << 28  # bytes of a layer's blocks that are mixed with a prior; beyond it, there is the prior alone
LARGEST_OVER_TOKENS = 1 << 26  # where blocks gain less over the prior, and take as long
UNUSED = 1e-30  # damping of a weight without a gradient, so that it costs less than any other
TOLERANCE = 0.05  # of a weight's gradient: layers that use their weights otherwise than they should are far beyond it
COPIES = 4  # of a block in float64: its sum, its factor, and two in the making

Calls = dict[str, list[LayerCall]]


@dataclass
class RowFisher:
    """The Fisher matrix over the weights of each output, from the inputs and the output gradients of layers.

    Convolutions have a row for each sample, linear layers over tokens one for each token; weights that are used in
    other ways have a row for each sample from the `collection`. Outputs are taken in groups that fit in `memory` bytes,
    with a pass over the batches for each; the sums over tokens serve all groups, as far as half of the memory is enough
    for them. With several ranks, sums are those of all of them.

    `damping` is λ, or None: relative to each weight's mean diagonal. With a `prior`, the outputs of a layer are joined
    if their blocks fit in `memory` together; of layers that are too wide for blocks, the prior is all there is.
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
        d, self._budget = self.layout.dim, math.inf if self.memory is None else self.memory
        by_name = self.layout.unflatten(torch.arange(1, d + 1, device=self.layout.device)).items()
        places = {name: self.weights.layers[name].by_output(index) - 1 for name, index in by_name}
        self._index = {name: torch.where(index < 0, d, index) for name, index in places.items()}
        count = sum(map(num_samples, self.batches))
        self._samples = sum(self.ranks.tell(count))
        ready = getattr(self.collection.loss, "ready", self.collection.loss)
        reduction = getattr(getattr(ready, "criterion", None), "reduction", "mean")
        self._summed = (count / len(self.batches)) ** 0.5 if reduction == "sum" else None  # F is that of a batch's loss
        with self.ranks.together("finding the layers"):
            self._by_layer = self._understood()
        self._mixed, self._alone = set[str](), set[str]()
        for name, over_tokens in self._by_layer.items() if self.prior else ():
            index, largest = self._index[name], LARGEST_OVER_TOKENS if over_tokens else LARGEST
            if any(getattr(module, "groups", 1) > 1 for module in self.weights.layers[name].modules):
                continue
            if 8 * len(index) * self._kept(name) ** 2 <= largest:
                self._mixed.add(name)
            elif index.shape[1] <= WIDEST:
                self._alone.add(name)
        self._tokens = [name for name in self._index if self._by_layer.get(name) and name not in self._alone]
        self.groups = self._grouped()
        self.dampings: dict[str, float] = {}
        self._known: dict[str, Known] = {}
        self._only: list[PlacedBlocks] | None = None

    def blocks(self) -> Iterator[list[PlacedBlocks]]:
        """The blocks, group by group; those of a single group are measured once."""
        if len(self.groups) > 1:
            yield from map(self._measured, self.groups)
        else:
            self._only = self._only or self._measured(self.groups[0])
            self._known.clear()  # the sums have served
            yield self._only

    @property
    def passes(self) -> int:
        """Over the batches, for the scores and again for the removal, as far as nothing is kept in between."""
        count, known = 0, set[str]()
        for group in self.groups * (1 if len(self.groups) == 1 else 2):
            if not self._names(group) <= known:
                count, known = count + 1, self._over_tokens(self._names(group))
        return count

    def _grouped(self) -> list[list[Part]]:
        """The outputs of all weights in groups whose matrices fit; half of the memory is for sums over tokens."""
        groups: list[list[Part]] = [[]]
        room = budget = self._budget / (2 if self._tokens else 1)
        for name, index in self._index.items():
            kept, outputs, alone = self._kept(name), len(index), name in self._alone
            each = self._bytes_of_output(name)
            joined = alone or (name in self._mixed and each * outputs <= budget)
            first = 0
            while kept and first < outputs:
                if groups[-1] and room < (each * outputs if joined else each):
                    groups.append([])
                    room = budget
                last = outputs if alone else first + max(1, int(min(room // each, outputs - first)))
                groups[-1].append(Part(self.weights.layers[name], index, self.layout.dim, slice(first, last), joined))
                room -= each * (last - first)
                first = last
        return groups

    def _bytes_of_output(self, name: str) -> float:
        """What the matrices of an output take."""
        kept, rows = self._kept(name), self._rows(name)
        if name in self._alone:
            outputs, inputs = self._index[name].shape
            return 8 * COPIES * (min(outputs, WIDEST) * outputs + inputs**2 + outputs * inputs) / outputs
        return max(1, 8 * COPIES * kept**2 if rows >= kept else 8 * rows * kept + 8 * COPIES * rows**2)

    def _names(self, group: Sequence[Part]) -> set[str]:
        return {part.weight.name for part in group}

    def _over_tokens(self, needed: set[str]) -> set[str]:
        """The weights over tokens to measure together: those that are needed, and those after them that fit."""
        found, room = set[str](), self._budget / 2
        for name in self._tokens:
            if found or name in needed:
                room -= TokenSums.num_bytes(self._index[name].shape)
                if room < 0 and name not in needed:
                    break
                found.add(name)
        return found

    def _kept(self, name: str) -> int:
        return int((self._index[name] < self.layout.dim).sum(1).max())

    def _rows(self, name: str) -> float:
        """How many rows will come, where they can be kept; those of tokens and of several ranks are summed."""
        summed = self._by_layer.get(name) or self.ranks.size > 1 or name in self._mixed
        return math.inf if summed else self._samples

    def _measured(self, parts: Sequence[Part]) -> list[PlacedBlocks]:
        """The blocks of a group, with a pass over the batches unless it is known from that of another one."""
        if not self._names(parts) <= self._known.keys():
            self._pass(parts)
        found = [part.blocks(self._known[part.weight.name], self.ranks) for part in parts]
        self._known = {name: known for name, known in self._known.items() if known.tokens is not None}
        return found

    def _pass(self, parts: Sequence[Part]) -> None:
        """One pass over the batches: for some parts, and for weights over tokens that later ones need."""
        self._known.clear()
        device, tokens = self.layout.device, self._over_tokens(self._names(parts))
        shapes = {name: self._index[name].shape for name in self._index if name in tokens | self._names(parts)}
        squares = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}
        shares = dict.fromkeys(self._mixed, PRIOR) | dict.fromkeys(self._alone, 1.0)
        priors = {name: Prior(shapes[name], device, share) for name, share in shares.items() if name in shapes}
        sums: dict[str, Part | TokenSums] = {part.weight.name: part for part in parts}
        for name in shapes:
            dtype = torch.promote_types(self.weights.layers[name].tensor.dtype, torch.float32)
            if name in tokens:
                sums[name] = TokenSums(shapes[name], dtype, device)
            elif name not in self._alone and isinstance(part := sums[name], Part):
                part.start(self._rows(name), dtype, device)
        with self.ranks.together("measuring"):
            layers = [name for name in shapes if name in self._by_layer]
            backward = self._backward([self.weights.layers[name] for name in layers])
            for (uses, _), batch in zip(backward, self.batches, strict=False):
                for name in layers:
                    self._add(sums[name], uses[name], squares[name], priors.get(name), num_samples(batch))
            self._add_others([part for part in parts if part.weight.name not in self._by_layer], squares)
        for name, found in sums.items():
            if name in priors:
                priors[name].finish(self._samples, self.ranks)
            diagonal = priors[name].diagonal if name in self._alone else self.ranks.sum_(squares[name]) / self._samples
            mean = float(diagonal[self._index[name] < self.layout.dim].mean())
            if not math.isfinite(mean):
                raise RuntimeError(f"the gradients of {name} are not finite; check the loss and the batches")
            self.dampings[name] = self.damping or DAMPING * mean or UNUSED
            kept = found if isinstance(found, TokenSums) else None
            self._known[name] = Known(self.dampings[name], self._samples, priors.get(name), kept)

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
                loss = differentiable(scalar(self.collection.loss(self.weights.model, drawn)))
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
                if gradient is not None and len({len(call.x) for call in calls}) == 1:
                    true = weight.by_output(gradient)
                    error = sum((use.gradient() for use in calls), -true)
                    if float(error.norm()) <= TOLERANCE * float(true.norm()):
                        found[weight.name] = calls[0].has_positions
            break
        return found

    def _add(
        self, sums: Part | TokenSums, calls: Sequence[LayerCall], squares: Float[Tensor, "outputs inputs"],
        prior: Prior | None, samples: int,
    ) -> None:  # fmt: skip
        """Adds the rows of a batch, and their squares; of single samples, not of their mean."""
        root = self._summed or (samples**0.5 if self.collection.fisher == "gauss-newton" else float(samples))
        if prior is not None:
            prior.add(calls, root)
            if prior.share == 1:
                return
        if isinstance(sums, TokenSums):
            for use in calls:
                a, dy = use.positions()
                squares += (dy.square().T @ a.square()).double() * root**2
                sums.add(a, dy * root)
        elif calls:
            rows = map(LayerCall.samples, calls)
            by_sample = {len(use.x) for use in calls} == {samples}  # else it is not known which rows belong together
            for G in [reduce(torch.add, rows)] if by_sample else rows:
                self._add_samples(sums, G * root, squares)

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
                    self._add_samples(part, G * (self._summed or 1.0), squares[part.weight.name])

    def _add_samples(self, part: Part, G: Float[Tensor, "rows outputs inputs"], squares: Tensor) -> None:
        squares += G.square().sum(0)
        part.add(G)


def num_samples(batch: Batch) -> int:
    """The leading dimension that a batch's tensors share; 1 if there is none, or nothing in it."""
    lengths = {len(tensor) for tensor in sample_tensors(batch)}
    return max(1, *lengths) if len(lengths) == 1 else 1
