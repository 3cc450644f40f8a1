"""Layers that leave `vmap`, so that their per-sample weight gradients go straight into the rows of G.

Inside `vmap` the model sees one sample. A call of a linear, embedding or convolution layer is caught on the way and
runs outside, on plain tensors that hold all c samples, as one ordinary batch. Its inputs and the place of its output in
the autograd graph are kept: once the gradient of the output is known, each sample's weight gradient follows from them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.nn import grad as conv_grad
from torch.overrides import TorchFunctionMode

BACKWARD = "the loss function calls backward or grad itself"
REFUSED = {
    torch.autograd.grad: BACKWARD,
    torch.autograd.backward: BACKWARD,
    Tensor.backward: BACKWARD,
    Tensor.register_hook: "a tensor has a backward hook, which expects the gradient of one sample",
}


class RowWriter:
    """The rows of c samples, which hold zeros: the first gradient of a parameter (an id) is copied, others are added.

    `bound` is at least as large as any number in the rows: finite if they are, and much cheaper than reading them.
    """

    def __init__(self, rows: Float[Tensor, "c d"], slots: dict[int, slice]):
        self.rows, self.slots = rows, slots
        self.bound = torch.zeros((), device=rows.device)
        self._written: set[int] = set()

    def add(self, parameter: int, value: Float[Tensor, "c ..."]) -> None:
        self.bound += _largest(value)
        place, is_first = self._place(parameter)
        (place.copy_ if is_first else place.add_)(value.reshape(place.shape))

    def add_linear(self, parameter: int, x: Float[Tensor, "c t i"], dy: Float[Tensor, "c t o"]) -> None:
        """Adds dyᵀx for each sample, straight into the rows: the product is as large as they are."""
        if dy.dtype != self.rows.dtype:  # as under autocast
            self.add(parameter, torch.bmm(dy.mT, x.to(dy.dtype)))
            return
        self.bound += _largest(dy) * _largest(x) * x.shape[1]
        place, is_first = self._place(parameter)
        place.unflatten(1, (dy.shape[2], -1)).baddbmm_(dy.mT, x.to(dy.dtype), beta=0 if is_first else 1)

    def add_embedding(
        self, parameter: int, lines: Int[Tensor, "c t"], dy: Float[Tensor, "c t e"], padding: int | None
    ) -> None:
        """Adds dy[s, t] to line lines[s, t]; repeated lines in their order, so that bits are the same in every run."""
        if padding is not None:
            dy = dy.masked_fill((lines == padding).unsqueeze(2), 0)
        self.bound += _largest(dy) * lines.shape[1]
        tables = self._place(parameter)[0].unflatten(1, (-1, dy.shape[2]))
        for table, at, value in zip(tables, lines, dy.to(tables.dtype), strict=True):
            if table.device.type == "cpu":
                table.index_add_(0, at, value)
            else:  # sorts there, where index_add_ does not keep the order
                table.index_put_((at,), value, accumulate=True)

    def _place(self, parameter: int) -> tuple[Float[Tensor, "c n"], bool]:
        """Where the parameter lies in the rows, and whether nothing has been written there yet."""
        is_first = parameter not in self._written
        self._written.add(parameter)
        return self.rows[:, self.slots[parameter]], is_first


Write = Callable[..., None]


class Use(NamedTuple):
    """A call of a layer: `write(rows, dy)` adds its weight gradients, given that of the output."""

    output: GradientEdge
    write: Write


class BranchError(Exception):
    """The samples of a chunk take different branches at an `if`; its argument is a bool for each."""


class Interception(TorchFunctionMode):
    """Catches layers by the ids of their weights, attention and branches; `each` makes caught calls mapped ones."""

    def __init__(self, caught: set[int], each: Tensor, uses: list[Use]):
        super().__init__()
        self.caught, self.each, self.uses = caught, each, uses
        self._rules: dict[Any, Callable[..., Any]] = {
            F.linear: self._linear,
            F.embedding: self._embedding,
            torch.conv1d: partial(self._convolution, torch.conv1d, conv_grad.conv1d_weight),
            torch.conv2d: partial(self._convolution, torch.conv2d, conv_grad.conv2d_weight),
            torch.conv3d: partial(self._convolution, torch.conv3d, conv_grad.conv3d_weight),
            F.scaled_dot_product_attention: self._attention,
            Tensor.__bool__: self._branch,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REFUSED:
            raise RuntimeError(REFUSED[func])
        if kwargs.get("generator") is not None:  # drawn once for a chunk, each sample would have other numbers
            raise RuntimeError(f"{func.__name__} draws from its own generator, whose state carries over between calls")
        rule = self._rules.get(func)
        result = NotImplemented if rule is None else rule(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _run(
        self, layer: Callable[..., Tensor], add: Write, x: Tensor, dims: int, weight: Tensor, bias: Tensor | None
    ) -> Any:
        """layer(x, weight, bias) outside of `vmap`, where a single input has `dims` dimensions."""
        if id(weight) not in self.caught:
            return NotImplemented
        caught = bias if id(bias) in self.caught else None

        def outside(x: Tensor) -> Tensor:
            c, at = len(x), x.ndim - dims
            flat = x.reshape(-1, *x.shape[at:])

            def write(rows: RowWriter, dy: Tensor) -> None:
                dy = dy.unflatten(0, (c, -1))
                add(rows, id(weight), flat.detach().unflatten(0, (c, -1)), dy)
                if caught is not None:
                    rows.add(id(caught), dy.sum((1, *range(3, dy.ndim))))

            y = layer(flat, weight.detach().requires_grad_(), None if caught is None else caught.detach())
            if y.requires_grad:  # not under no_grad
                self.uses.append(Use(get_gradient_edge(y), write))
            return y.view(*x.shape[:at], *y.shape[1:])

        y: Tensor = Outside.apply(outside, x, self.each)
        return y if bias is None or caught is not None else y + bias.view(-1, *[1] * (weight.ndim - 2))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return self._run(F.linear, RowWriter.add_linear, input, 1, weight, bias)

    def _embedding(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Any:  # fmt: skip
        padding = padding_idx % len(weight) if padding_idx is not None else None
        if id(weight) in self.caught and max_norm is None and not scale_grad_by_freq:
            return self._run(F.embedding, partial(RowWriter.add_embedding, padding=padding), input, 0, weight, None)
        y = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
        # vmap's rule takes the padding entry of the first sample only.
        return y if padding is None else torch.where((input == padding).unsqueeze(-1), y.detach(), y)

    def _convolution(
        self, layer: Any, gradient: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if isinstance(padding, str) or input.ndim != weight.ndim:
            return NotImplemented
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}

        def add(rows: RowWriter, parameter: int, x: Tensor, dy: Tensor) -> None:
            of_weight = torch.func.vmap(lambda x, dy: gradient(x, weight.shape, dy, **options))
            rows.add(parameter, of_weight(x.to(dy.dtype), dy))

        return self._run(partial(layer, **options), add, input, weight.ndim - 1, weight, bias)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Any:
        """As one batch: `vmap` has no rule for the fused kernels and would run them sample by sample."""
        if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
            return NotImplemented
        if attn_mask is not None:
            shape = (1,) * (4 - attn_mask.ndim) + attn_mask.shape
            attn_mask = attn_mask.reshape(shape).expand(len(query), -1, -1, -1)

        def outside(query: Tensor, *others: Tensor | None) -> Tensor:
            c = len(query)
            folded = [None if x is None else (x if x.ndim > 4 else x.expand(c, *x.shape)).flatten(0, 1) for x in others]
            attention: Any = F.scaled_dot_product_attention
            y: Tensor = attention(query.flatten(0, 1), *folded, *rest, **options)
            return y.unflatten(0, query.shape[:2])

        return Outside.apply(outside, query, self.each, key, value, attn_mask)

    def _branch(self, condition: Tensor) -> Any:
        if condition.numel() != 1:
            return NotImplemented
        answers: list[bool] = []

        def outside(condition: Tensor) -> Tensor:
            taken = condition.detach().reshape(-1).bool()
            answers.append(bool(taken.any()))
            if answers[0] != bool(taken.all()):
                raise BranchError(taken)
            return condition

        Outside.apply(outside, condition, self.each)
        return answers[0]


class Outside(Function):
    """function(x, *rest) outside of `vmap`, on plain tensors with the mapped dimension first; x is always expanded."""

    @staticmethod
    def forward(function: Any, x: Tensor, each: Tensor, *rest: Any) -> Tensor:
        raise AssertionError("a layer was caught outside vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Any, x: Tensor, each: Tensor, *rest: Any) -> Any:
        whole = _first(x, in_dims[1]) if in_dims[1] is not None else x.expand(info.batch_size, *x.shape)
        return function(whole, *(_first(value, dim) for value, dim in zip(rest, in_dims[3:], strict=True))), 0


def _first(value: Any, dim: int | None) -> Any:
    return value if dim is None else value.movedim(dim, 0)


def _largest(x: Tensor) -> Float[Tensor, ""]:
    """The largest absolute value; NaN if there is one."""
    low, high = x.aminmax()
    return torch.maximum(-low, high)
