"""Layers caught on their way through `vmap`, and sent to the functions that write per-sample gradients.

Inside `vmap` the model sees one sample. A caught call steps outside, where all c samples are at hand in plain tensors
under plain autograd, and runs there as one batched layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mfac.gradients import recurrent
from mfac.gradients.outside import outside
from mfac.gradients.weight_gradients import RowWriter, Target, convolution, embedding, linear


class BranchError(Exception):
    """The samples of a chunk go different ways at an `if`; `taken` says which."""

    def __init__(self, taken: Bool[Tensor, "c"]):
        super().__init__("the samples of a chunk take different branches")
        self.taken = taken


class Interception(TorchFunctionMode):
    """Catches linear, embedding, convolution and recurrent layers by their weights, attention, and branches on data.

    Args:
        writer: where the gradients of the caught layers go.
        caught: the ids of the parameters whose layers are caught.
        each: a tensor that `vmap` maps over; it makes every caught call a mapped one.
        anchor: a scalar that needs a gradient.
    """

    def __init__(self, writer: RowWriter, caught: set[int], each: Tensor, anchor: Tensor):
        super().__init__()
        self.writer = writer
        self.caught = caught
        self.each = each
        self.anchor = anchor
        self._rules: dict[Any, Callable[..., Any]] = {
            F.linear: self._linear,
            F.embedding: self._embedding,
            torch.conv1d: self._convolution,
            torch.conv2d: self._convolution,
            torch.conv3d: self._convolution,
            F.scaled_dot_product_attention: self._attention,
            torch.lstm: partial(self._recurrent, recurrent.lstm),
            torch.gru: partial(self._recurrent, recurrent.gru),
            torch.rnn_tanh: partial(self._recurrent, recurrent.rnn_tanh),
            torch.rnn_relu: partial(self._recurrent, recurrent.rnn_relu),
            torch.lstm_cell: partial(self._cell, recurrent.lstm),
            torch.gru_cell: partial(self._cell, recurrent.gru),
            torch.rnn_tanh_cell: partial(self._cell, recurrent.rnn_tanh),
            torch.rnn_relu_cell: partial(self._cell, recurrent.rnn_relu),
            Tensor.__bool__: self._branch,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:  # drawn once for a chunk, it would give every sample other numbers
            raise RuntimeError(f"{func.__name__} draws from a generator of its own, whose state goes from call to call")
        rule = self._rules.get(func)
        result = NotImplemented if rule is None else rule(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _target(self, weight: Tensor, bias: Tensor | None = None, is_recurrent: bool = False) -> Target | None:
        if id(weight) not in self.caught:
            return None
        return Target(self.writer, id(weight), None if bias is None else id(bias), is_recurrent)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        caught = bias if id(bias) in self.caught else None
        to = self._target(weight, caught)
        if to is None:
            return NotImplemented
        b = None if caught is None else caught.detach()
        y = outside(linear, input, self.each, weight.detach(), b, self.anchor, to)
        return y if bias is None or caught is not None else y + bias

    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        to = self._target(weight)
        padding = padding_idx % len(weight) if padding_idx is not None else None
        if to is not None and max_norm is None and not scale_grad_by_freq:
            return outside(embedding, input, self.each, weight.detach(), self.anchor, padding, to)
        y = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
        # The rule of vmap knows the padding entry of the first sample only.
        return y if padding is None else torch.where((input == padding).unsqueeze(-1), y.detach(), y)

    def _convolution(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        caught = bias if id(bias) in self.caught else None
        to = self._target(weight, caught)
        if to is None or isinstance(padding, str) or input.ndim != weight.ndim:
            return NotImplemented
        options = (stride, padding, dilation, groups)
        b = None if caught is None else caught.detach()
        y = outside(convolution, input, self.each, weight.detach(), b, self.anchor, options, to)
        if bias is None or caught is not None:
            return y
        return y + bias.view(-1, *[1] * (weight.ndim - 2))

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Any:
        # vmap has no rule for the fused kernels and would run them a sample at a time.
        if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
            return NotImplemented
        mask = attn_mask
        if mask is not None:
            mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape).expand(len(query), *[-1] * 3)
        return outside(_attention_outside, query, self.each, key, value, mask, rest, options)

    def _recurrent(
        self,
        cell: recurrent.Cell,
        input: Tensor,
        hx: Any,
        weights: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        # With packed sequences the states come third, and the weights later.
        if not isinstance(weights, list) or (dropout and train):
            return NotImplemented
        size = len(weights) // (num_layers * (1 + bidirectional))
        factors = [self._factors(weights, at, size, has_biases) for at in range(0, len(weights), size)]
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        layers = recurrent.Layers(cell, factors, 1 + bidirectional, batch_first, len(states))
        return self._run(layers, input, states, weights)

    def _cell(
        self,
        cell: recurrent.Cell,
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Any:
        """A layer of one step, which is used many times over."""
        weights = [w_ih, w_hh] if b_ih is None or b_hh is None else [w_ih, w_hh, b_ih, b_hh]
        states = [state.unsqueeze(0) for state in ([hx] if isinstance(hx, Tensor) else hx)]
        factors = self._factors(weights, 0, len(weights), len(weights) == 4, is_single=True)
        layers = recurrent.Layers(cell, [factors], 1, False, len(states))
        _, *last = self._run(layers, input.unsqueeze(0), states, weights)
        last = [state.squeeze(0) for state in last]
        return last[0] if isinstance(hx, Tensor) else tuple(last)

    def _run(self, layers: recurrent.Layers, input: Tensor, states: list[Tensor], weights: list[Tensor]) -> Any:
        targets = [factor.to for factors in layers.factors for factor in factors if factor.to is not None]
        written = {key for to in targets for key in (to.weight, to.bias)}
        plain = [weight.detach() if id(weight) in written else weight for weight in weights]
        return outside(layers, input, self.each, self.anchor, *states, *plain)

    def _factors(
        self, weights: list[Tensor], at: int, size: int, has_biases: bool, is_single: bool = False
    ) -> list[recurrent.Factor]:
        """Those of the direction whose `size` weights begin at `at`: W_ih, W_hh, their biases, W_hr if it projects.

        W_ih is used once, or once a call if that `is_single`, a step of many.
        """
        factors = []
        for i in range(2):
            bias = at + 2 + i if has_biases else None
            caught = weights[bias] if bias is not None and id(weights[bias]) in self.caught else None
            factors.append(recurrent.Factor(at + i, bias, self._target(weights[at + i], caught, i == 1 or is_single)))
        if size % 2:
            last = at + size - 1
            factors.append(recurrent.Factor(last, None, self._target(weights[last], is_recurrent=True)))
        return factors

    def _branch(self, condition: Tensor) -> Any:
        if condition.numel() != 1:
            return NotImplemented
        answer = Answer()
        outside(_branch_outside, condition, self.each, answer)
        return answer.value


class Answer:
    """What all samples answer at a branch."""

    value: bool


def _attention_outside(
    query: Float[Tensor, "c b h t e"], key: Tensor, value: Tensor, mask: Tensor | None, rest: Any, options: Any
) -> Tensor:
    c, b = query.shape[:2]
    folded = [None if tensor is None else _fold(tensor, c, 4) for tensor in (query, key, value, mask)]
    attention: Any = F.scaled_dot_product_attention
    y: Tensor = attention(*folded, *rest, **options)
    return y.unflatten(0, (c, b))


def _fold(tensor: Tensor, c: int, ndim: int) -> Tensor:
    """[c, b, ...] as [c b, ...]; a tensor that is the same for all samples is repeated."""
    whole = tensor if tensor.ndim > ndim else tensor.unsqueeze(0).expand(c, *tensor.shape)
    return whole.flatten(0, 1)


def _branch_outside(condition: Tensor, answer: Answer) -> Tensor:
    taken = condition.detach().reshape(len(condition), -1)[:, 0].bool()
    if bool(taken.any()) != bool(taken.all()):
        raise BranchError(taken)
    answer.value = bool(taken[0])
    return condition
