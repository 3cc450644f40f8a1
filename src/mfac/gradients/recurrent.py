"""Recurrent layers of c samples at once, their recurrences written out: torch's own cannot be mapped over samples.

Gates come in the order of torch's weights. `again` multiplies the hidden state by W_hh and adds its bias.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.gradients.weight_gradients import Target, linear

Product = Callable[[Float[Tensor, "c n i"]], Float[Tensor, "c n o"]]
State = tuple[Float[Tensor, "c b h"], ...]
Cell = Callable[[Float[Tensor, "c b gates"], State, Product], State]


def lstm(gates: Tensor, state: State, again: Product) -> State:
    """c' = σ(f) c + σ(i) tanh(g), h' = σ(o) tanh(c')."""
    h, c = state
    i, f, g, o = (gates + again(h)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(gates: Tensor, state: State, again: Product) -> State:
    """h' = (1 − z) n + z h with n = tanh(n_x + r n_h)."""
    (h,) = state
    (r_x, z_x, n_x), (r_h, z_h, n_h) = gates.chunk(3, -1), again(h).chunk(3, -1)
    r, z = (r_x + r_h).sigmoid(), (z_x + z_h).sigmoid()
    n = (n_x + r * n_h).tanh()
    return (n + z * (h - n),)


def rnn_tanh(gates: Tensor, state: State, again: Product) -> State:
    """h' = tanh(gates)."""
    return ((gates + again(state[0])).tanh(),)


def rnn_relu(gates: Tensor, state: State, again: Product) -> State:
    """h' = relu(gates)."""
    return ((gates + again(state[0])).relu(),)


@dataclass(frozen=True)
class Factor:
    """Weight number `weight` of a module, with bias number `bias`; where their gradients go, if they are caught."""

    weight: int
    bias: int | None
    to: Target | None

    def product(self, weights: Sequence[Tensor], anchor: Tensor) -> Product:
        """x -> x Wᵀ + b. Weights that are not caught may differ from sample to sample: [c, o, i] and [c, o]."""
        W, b = weights[self.weight], None if self.bias is None else weights[self.bias]
        to = self.to
        if to is not None and (b is None or to.bias is not None):
            return lambda x: linear(x, W, b, anchor, to)
        of_weight: Product = (lambda x: x @ W.mT) if to is None else (lambda x: linear(x, W, None, anchor, to))
        return of_weight if b is None else lambda x: of_weight(x) + b.unsqueeze(-2)


@dataclass(frozen=True)
class Layers:
    """A recurrent module without dropout, of one or more layers in one or two directions.

    Args:
        cell: one step.
        factors: of each direction of each layer: for the input, for the hidden state, and to project the latter.
        num_directions: in each layer.
        batch_first: whether inputs and outputs are [b, t, ...], not [t, b, ...].
        num_states: two for an LSTM, else one.
    """

    cell: Cell
    factors: Sequence[Sequence[Factor]]
    num_directions: int
    batch_first: bool
    num_states: int

    def __call__(self, x: Float[Tensor, "c ..."], anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The outputs, and the last states [c, layers · directions, b, ...]; from inputs, states and weights."""
        states, weights = tensors[: self.num_states], tensors[self.num_states :]
        whole = [state if state.ndim == 4 else state.expand(len(x), *state.shape) for state in states]
        first = zip(*(state.unbind(1) for state in whole), strict=True)
        x = x.transpose(1, 2) if self.batch_first else x
        last: list[State] = []
        for start in range(0, len(self.factors), self.num_directions):
            outputs = []
            for backwards, factors in enumerate(self.factors[start : start + self.num_directions]):
                products = [factor.product(weights, anchor) for factor in factors]
                output, state = self._direction(products, x, next(first), bool(backwards))
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, -1)
        x = x.transpose(1, 2) if self.batch_first else x
        return x, *(torch.stack(parts, 1) for parts in zip(*last, strict=True))

    def _direction(
        self, products: Sequence[Product], x: Float[Tensor, "c t b i"], state: State, backwards: bool
    ) -> tuple[Tensor, State]:
        """The outputs [c, t, b, h] and the last state."""
        enter, again, *project = products
        gates = enter(x.flatten(1, 2)).unflatten(1, x.shape[1:3]).unbind(1)
        outputs = []
        for step in reversed(gates) if backwards else gates:
            h, *rest = self.cell(step, state, again)
            state = (project[0](h) if project else h, *rest)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if backwards else outputs, 1), state
