"""Layers that leave `vmap`, so that their per-sample weight gradients go straight into the rows of G.

Inside `vmap` the model sees one sample. A call of a linear, embedding or convolution layer is caught on the way and
runs outside, on plain tensors that hold all c samples, as one ordinary batch. The inputs and the place of the output in
the autograd graph are kept as a `Use`: once the gradient of the output is known, each sample's weight gradient follows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from torch.nn import grad as conv_grad
from torch.overrides import TorchFunctionMode

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_WEIGHT = {1: conv_grad.conv1d_weight, 2: conv_grad.conv2d_weight, 3: conv_grad.conv3d_weight}
CACHED = 1 << 18  # numbers of weight gradients that are formed at a time on a CPU
REFUSED = {
    torch.autograd.grad: "the loss function calls backward or grad itself",
    torch.autograd.backward: "the loss function calls backward or grad itself",
    Tensor.backward: "the loss function calls backward or grad itself",
    Tensor.register_hook: "a tensor has a backward hook, which expects the gradient of one sample",
}


class Rows:
    """The rows of c samples: the first contribution to a parameter overwrites, the others are added.

    `bound` is at least as large as any number in the rows: finite if they are, and much cheaper than reading them.

    Args:
        rows: one tensor for each sample.
        slots: {id of a parameter: its columns}.
        zeroed: whether the rows hold zeros already; fresh memory does, and need not be touched.
    """

    def __init__(self, rows: Sequence[Float[Tensor, "d"]], slots: dict[int, slice], zeroed: bool):
        self.rows, self.slots, self.zeroed = rows, slots, zeroed
        self.bound = torch.zeros((), device=rows[0].device)
        self._written: set[int] = set()

    def add(self, parameter: int, value: Float[Tensor, "c ..."]) -> None:
        self.bound += _largest(value)
        self._put(parameter, value, self._is_first(parameter))

    def add_products(self, parameter: int, A: Float[Tensor, "c t o"], B: Float[Tensor, "c t i"]) -> None:
        """Adds AᵀB for each sample: the weight gradient of a linear layer."""
        self.bound += _largest(A) * _largest(B) * A.shape[1]
        first, count = self._is_first(parameter), len(A)
        if A.device.type == "cpu":
            count = max(1, CACHED // (A.shape[2] * B.shape[2]))
        for start in range(0, len(A), count):
            left, right = A[start : start + count].mT, B[start : start + count].to(A.dtype)
            self._put(parameter, left * right if left.shape[2] == 1 else torch.bmm(left, right), first, start)

    def add_lines(self, parameter: int, lines: Int[Tensor, "c t"], values: Float[Tensor, "c t e"]) -> None:
        """Adds values[s, t] to line lines[s, t] of the parameter: the weight gradient of an embedding.

        Repeated lines are added in their order, so that the bits are the same in every run.
        """
        self.bound += _largest(values) * lines.shape[1]
        first, slot = self._is_first(parameter), self.slots[parameter]
        for row, at, value in zip(self.rows, lines.unbind(), values.unbind(), strict=True):
            table = row[slot].view(-1, values.shape[2])
            if first and not self.zeroed:
                table.zero_()
            if row.device.type == "cpu":
                table.index_add_(0, at, value.to(row.dtype))
            else:  # sorts there, where index_add_ does not keep the order
                table.index_put_((at,), value.to(row.dtype), accumulate=True)

    def finish(self) -> None:
        """Zeros for the parameters that nothing was added to."""
        if not self.zeroed:
            for parameter in self.slots.keys() - self._written:
                for row in self.rows:
                    row[self.slots[parameter]].zero_()

    def _is_first(self, parameter: int) -> bool:
        first = parameter not in self._written
        self._written.add(parameter)
        return first

    def _put(self, parameter: int, value: Float[Tensor, "n ..."], first: bool, start: int = 0) -> None:
        slot = self.slots[parameter]
        places = [row[slot] for row in self.rows[start : start + len(value)]]
        values = value.reshape(len(value), -1).to(places[0].dtype).unbind()
        write = torch._foreach_copy_ if first else torch._foreach_add_
        write(places, values)


class Use(NamedTuple):
    """A call of a layer: `write` takes the rows, this use and the gradient of the output."""

    output: GradientEdge
    x: Tensor
    samples: int
    weight: int
    bias: int | None
    options: Any
    write: Callable[[Rows, "Use", Tensor], None]


def _write_linear(rows: Rows, use: Use, dy: Float[Tensor, "n o"]) -> None:
    A, B = (tensor.reshape(use.samples, -1, tensor.shape[-1]) for tensor in (dy, use.x))
    rows.add_products(use.weight, A, B)
    if use.bias is not None:
        rows.add(use.bias, A.sum(1))


def _write_embedding(rows: Rows, use: Use, dy: Float[Tensor, "n e"]) -> None:
    if use.options is not None:
        dy = dy.masked_fill((use.x == use.options).unsqueeze(1), 0)
    rows.add_lines(use.weight, use.x.view(use.samples, -1), dy.reshape(use.samples, -1, dy.shape[-1]))


def _write_convolution(rows: Rows, use: Use, dy: Float[Tensor, "n o ..."]) -> None:
    shape, options = use.options
    x, dy = (tensor.unflatten(0, (use.samples, -1)) for tensor in (use.x, dy))
    weight = CONV_WEIGHT[len(shape) - 2]
    rows.add(use.weight, torch.func.vmap(lambda x, dy: weight(x, shape, dy, *options))(x.to(dy.dtype), dy))
    if use.bias is not None:
        rows.add(use.bias, dy.sum(dim=(1, *range(3, dy.ndim))))


class BranchError(Exception):
    """The samples of a chunk take different branches at an `if`; `taken` says which."""

    def __init__(self, taken: Bool[Tensor, "c"]):
        super().__init__("the samples of a chunk take different branches")
        self.taken = taken


class Interception(TorchFunctionMode):
    """Catches the calls of layers by their weights, attention, and branches on data.

    Args:
        caught: the ids of the parameters whose layers are caught.
        each: a tensor that `vmap` maps over, so that every caught call is a mapped one.
        uses: where the calls are noted.
    """

    def __init__(self, caught: set[int], each: Tensor, uses: list[Use]):
        super().__init__()
        self.caught, self.each, self.uses = caught, each, uses
        self._rules: dict[Any, Callable[..., Any]] = {
            F.linear: self._linear,
            F.embedding: self._embedding,
            torch.conv1d: self._convolution,
            torch.conv2d: self._convolution,
            torch.conv3d: self._convolution,
            F.scaled_dot_product_attention: self._attention,
            Tensor.__bool__: self._branch,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REFUSED:
            raise RuntimeError(REFUSED[func])
        if kwargs.get("generator") is not None:  # drawn once for a chunk, each sample would have other numbers
            raise RuntimeError(f"{func.__name__} draws from a generator of its own, whose state goes from call to call")
        rule = self._rules.get(func)
        result = NotImplemented if rule is None else rule(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _run(
        self,
        layer: Callable[..., Tensor],
        write: Callable[[Rows, Use, Tensor], None],
        x: Tensor,
        dims: int,
        weight: Tensor,
        bias: Tensor | None,
        options: Any,
    ) -> Tensor:
        """layer(x, weight, bias) outside of `vmap`, where `dims` dimensions of x belong to a single input."""
        caught = bias if id(bias) in self.caught else None

        def outside(x: Tensor) -> Tensor:
            flat = x.reshape(-1, *x.shape[x.ndim - dims :])
            y = layer(flat, weight.detach().requires_grad_(), None if caught is None else caught.detach())
            if y.requires_grad:  # not under no_grad
                to = None if caught is None else id(caught)
                self.uses.append(Use(get_gradient_edge(y), flat.detach(), len(x), id(weight), to, options, write))
            return y.view(*x.shape[: x.ndim - dims], *y.shape[1:])

        y: Tensor = Outside.apply(outside, x, self.each)
        return y if bias is None or caught is not None else y + bias.view(-1, *[1] * (weight.ndim - 2))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if id(weight) not in self.caught:
            return NotImplemented
        return self._run(F.linear, _write_linear, input, 1, weight, bias, None)

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
        padding = padding_idx % len(weight) if padding_idx is not None else None
        if id(weight) in self.caught and max_norm is None and not scale_grad_by_freq:
            layer = lambda index, weight, bias: F.embedding(index, weight)  # noqa: E731
            return self._run(layer, _write_embedding, input, 0, weight, None, padding)
        y = F.embedding(input, weight, None, max_norm, norm_type, scale_grad_by_freq, sparse)
        # vmap's rule takes the padding entry of the first sample only.
        return y if padding is None else torch.where((input == padding).unsqueeze(-1), y.detach(), y)

    def _convolution(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None,
        stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if id(weight) not in self.caught or isinstance(padding, str) or input.ndim != weight.ndim:
            return NotImplemented
        options = (stride, padding, dilation, groups)
        layer = lambda x, W, b: CONV[weight.ndim - 2](x, W, b, *options)  # noqa: E731
        return self._run(layer, _write_convolution, input, weight.ndim - 1, weight, bias, (weight.shape, options))

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
        """Nothing to keep: what is called outside has a backward of its own."""

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
