"""How a loss uses its large weights, read off its graph, so that their gradients go into the row as they are formed.

Autograd makes the gradient of a weight as a tensor of its own, in fresh memory, and it has to be copied into the row
from there: of an embedding, a table of zeros but for some lines. Where a weight is used in nothing but products
(linear layers) and look-ups (embeddings), autograd is asked for the gradients of what comes out of these instead, and
the rest is done here. The model runs as it is; whatever is not surely understood is left to autograd.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as modules

from mfac.gradients.row_products import RowProducts
from mfac.gradients.weight_gradients import add_lines, largest
from mfac.layout import ParameterLayout

Node = Any  # of the graph: torch makes their classes at run time, and they can be told apart by name only
LARGE_WEIGHT = 1 << 20  # numbers; smaller gradients are copied from the cache in less time than it takes to look
NUMBERS_A_NODE = 1 << 13  # of large weights, for each node of the graph: so that looking at it is worth the while


class Product(NamedTuple):
    """y = x Wᵀ, or y = x W if W `is_flipped`."""

    node: Node
    x: Float[Tensor, "n i"]
    is_flipped: bool

    def add(
        self,
        dy: Float[Tensor, "n o"],
        place: Float[Tensor, "o i"],
        is_first: bool,
        zeroed: bool,
        products: RowProducts,
    ) -> Float[Tensor, ""]:
        """Adds the gradient of W to the place, which the first one overwrites; gives what its numbers do not exceed."""
        left, right = (self.x, dy) if self.is_flipped else (dy, self.x)
        products.add(left.t().unsqueeze(0), right.unsqueeze(0), place.unsqueeze(0), None, is_first)
        return len(dy) * largest(dy) * largest(self.x)


class Lookup(NamedTuple):
    """y = W[lines], where the line `padding` has no gradient."""

    node: Node
    lines: Int[Tensor, "..."]
    padding: int

    def add(
        self,
        dy: Float[Tensor, "... e"],
        place: Float[Tensor, "v e"],
        is_first: bool,
        zeroed: bool,
        products: RowProducts,
    ) -> Float[Tensor, ""]:
        """The same; nothing needs to be overwritten if the place is `zeroed`."""
        if is_first and not zeroed:
            place.zero_()
        lines, dy = self.lines.reshape(-1), dy.reshape(-1, place.shape[1])
        if self.padding < len(place):  # none is told by a number that is out of reach
            dy = dy.masked_fill((lines == self.padding).unsqueeze(1), 0)
        add_lines(place, lines, dy)
        return len(dy) * largest(dy)


Use = Product | Lookup


class WeightUses:
    """Finds them in the graph of a loss.

    Args:
        model: what the loss is of.
        layout: whose parameters are looked for.

    `are_sought` says whether any of them are large enough.
    """

    def __init__(self, model: nn.Module, layout: ParameterLayout):
        self._positions = {
            id(tensor): position
            for position, tensor in enumerate(layout.tensors)
            if tensor.ndim == 2 and tensor.numel() >= LARGE_WEIGHT and type(tensor) is nn.Parameter
        }
        if layout.masked or first_with_hook(model, layout) is not None:
            self._positions = {}
        self._products = RowProducts()
        self.are_sought = bool(self._positions)
        self._most_nodes = sum(layout.full_sizes[at] for at in self._positions.values()) // NUMBERS_A_NODE

    def find(self, root: Node, places: Sequence[Tensor]) -> dict[int, list[Use]]:
        """{position of a weight: all its uses}, for those whose gradients can be formed in their places.

        Which these are depends on the graph alone: the same row is always made in the same way.
        """
        if root is None or not self.are_sought:
            return {}
        uses: dict[int, list[Use]] = {}
        others: set[int] = set()
        seen, waiting = {root}, [root]
        while waiting:
            node = waiting.pop()
            if type(node).__name__ == "AccumulateGrad":
                others.add(self._positions.get(id(node.variable), -1))
            for after, _ in self._take(node, places, uses):
                if after is not None and after not in seen:
                    seen.add(after)
                    waiting.append(after)
            if len(seen) > self._most_nodes:
                return {}
        return {position: some for position, some in uses.items() if position not in others}

    def write(self, uses: list[Use], outputs: list[Tensor | None], place: Tensor, zeroed: bool) -> Float[Tensor, ""]:
        """Writes the gradient of a weight where it belongs, from those of what comes out of its uses (None: zero).

        Returns a number that is finite only if all that is written is: much cheaper than reading it.
        """
        present = [(use, dy) for use, dy in zip(uses, outputs, strict=True) if dy is not None]
        if not present and not zeroed:
            place.zero_()
        limit = torch.zeros((), device=place.device)
        for count, (use, dy) in enumerate(present):
            limit = limit + use.add(dy, place, count == 0, zeroed, self._products)
        return (2 * limit).to(place.dtype)  # twice: sums are rounded on the way

    def _take(self, node: Node, places: Sequence[Tensor], uses: dict[int, list[Use]]) -> Any:
        """Adds the use of a weight by this node, and returns its edges: all but the one to that weight."""
        kind, edges = type(node).__name__, node.next_functions
        if kind not in READERS:
            return edges
        *before, (last, _) = edges
        is_flipped = type(last).__name__ != "TBackward0"
        leaf = last if is_flipped else last.next_functions[0][0]
        if type(leaf).__name__ != "AccumulateGrad" or id(leaf.variable) not in self._positions:
            return edges
        weight, position = leaf.variable, self._positions[id(leaf.variable)]
        place = places[position]
        if weight._backward_hooks or weight.dtype != place.dtype or weight.device != place.device:
            return edges
        use = READERS[kind](node, place, is_flipped)
        if use is None:
            return edges
        uses.setdefault(position, []).append(use)
        return before


# What is held until the backward pass is over is no more than the gradient that autograd would make.


def _product(x_name: str, node: Node, place: Float[Tensor, "o i"], is_flipped: bool) -> Product | None:
    x = _saved(node, x_name)
    if x is None or getattr(node, "_saved_alpha", 1) != 1:
        return None
    outputs = place.shape[1 if is_flipped else 0]
    return Product(node, x, is_flipped) if 0 < x.numel() + len(x) * outputs <= place.numel() else None


def _lookup(node: Node, place: Float[Tensor, "v e"], is_flipped: bool) -> Lookup | None:
    lines = _saved(node, "indices")
    if lines is None or not is_flipped or node._saved_scale_grad_by_freq:
        return None
    return Lookup(node, lines, node._saved_padding_idx) if 0 < lines.numel() <= len(place) else None


READERS: dict[str, Callable[[Node, Tensor, bool], Use | None]] = {
    "AddmmBackward0": partial(_product, "mat1"),
    "MmBackward0": partial(_product, "self"),
    "EmbeddingBackward0": _lookup,
}


def _saved(node: Node, name: str) -> Tensor | None:
    """What a node has kept; None if it is no plain tensor, or packed by hooks: it may have to be computed again."""
    kept = getattr(node, f"_raw_saved_{name}", None)
    if getattr(kept, "unpack_hook", kept) is not None:
        return None
    tensor = getattr(node, f"_saved_{name}")
    return tensor.detach() if type(tensor) in (Tensor, nn.Parameter) else None


def first_with_hook(model: nn.Module, layout: ParameterLayout) -> str | None:
    """The name of a parameter or a module whose gradients go through a hook."""
    if modules._global_backward_hooks or modules._global_backward_pre_hooks:
        return "every module"
    for name, parameter in zip(layout.names, layout.tensors, strict=True):
        if parameter._backward_hooks:
            return name
    hooked = (name for name, module in model.named_modules() if module._backward_hooks or module._backward_pre_hooks)
    return next((f"the module {name}" if name else "the model" for name in hooked), None)
