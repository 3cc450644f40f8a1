"""Per-sample weight gradients of linear, embedding and convolution layers, written straight into the rows of G.

Each function below runs a layer on c samples at once. Its backward gives the gradient of the inputs as usual; the
gradient of the weights it writes sample by sample into a `RowWriter`, with no tensor of size c x d in between.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional as F
from torch.nn import grad as conv_grad

from mfac.gradients.row_products import RowProducts

CONV_WEIGHT = {1: conv_grad.conv1d_weight, 2: conv_grad.conv2d_weight, 3: conv_grad.conv3d_weight}
CONV_INPUT = {1: conv_grad.conv1d_input, 2: conv_grad.conv2d_input, 3: conv_grad.conv3d_input}
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class RowWriter:
    """Adds up the gradients of c samples in their rows: the first contribution to a parameter overwrites.

    Args:
        rows: where they go.
        slots: {id of a parameter: its columns}.
        zeroed: whether the rows hold zeros already (memory fresh from the system does, and need not be touched).
        products: what multiplies matrices.
        index: the row of each sample; None: sample i has row i.
    """

    def __init__(
        self,
        rows: Float[Tensor, "n d"],
        slots: Mapping[int, slice],
        zeroed: bool,
        products: RowProducts,
        index: Int[Tensor, "c"] | None = None,
    ):
        self.rows = rows
        self.slots = slots
        self.zeroed = zeroed
        self.products = products
        self.index = index
        self.open = False
        self.bound = torch.zeros((), device=rows.device)
        """At least as large as any number in the rows: finite if they are, and much cheaper than reading them."""
        self._written: set[int] = set()
        self._later: dict[Target, list[tuple[Tensor, Tensor]]] = {}

    @property
    def count(self) -> int:
        """c, the number of samples."""
        return len(self.rows if self.index is None else self.index)

    def add(self, parameter: int, value: Float[Tensor, "c ..."]) -> None:
        """Adds a gradient that has been formed."""
        self.bound += largest(value)
        self._add(parameter, value)

    def _add(self, parameter: int, value: Float[Tensor, "c ..."]) -> None:
        region = self._region(parameter)
        value = value.reshape(len(value), -1).to(region.dtype)
        first = self._is_first(parameter)
        if self.index is not None:
            _ = region.index_copy_(0, self.index, value) if first else region.index_add_(0, self.index, value)
        elif first:
            region.copy_(value)
        else:
            region.add_(value)

    def add_linear(self, to: "Target", A: Float[Tensor, "c t o"], B: Float[Tensor, "c t i"]) -> None:
        """Adds the gradients of a linear layer: its inputs are B, the gradients of its outputs A."""
        self.add_product(to.weight, A, B)
        if to.bias is not None:
            self.add(to.bias, A.sum(1))

    def add_later(self, to: "Target", A: Float[Tensor, "c t o"], B: Float[Tensor, "c t i"]) -> None:
        """The same, together with all others of this layer in `finish`: one pass over the rows, not one a step."""
        self._check_open()
        self._later.setdefault(to, []).append((A.detach(), B.detach()))

    def add_product(self, parameter: int, A: Float[Tensor, "c t o"], B: Float[Tensor, "c t i"]) -> None:
        """Adds Aᵀ B of every sample: the weight gradient of a linear layer."""
        self.bound += largest(A) * largest(B) * A.shape[1]
        A, B = A.to(self.rows.dtype).transpose(1, 2), B.to(self.rows.dtype)
        region = self._region(parameter).view(len(self.rows), A.shape[1], B.shape[2])
        self.products.add(A, B, region, self.index, self._is_first(parameter))

    def add_at(self, parameter: int, line: Int[Tensor, "c t"], value: Float[Tensor, "c t e"]) -> None:
        """Adds value[s, t] to line[s, t] of the parameter in the row of s: the weight gradient of an embedding.

        Lines that come up several times are added in their order, so that the bits are the same in every run.
        """
        region = self._region(parameter)
        if self._is_first(parameter) and not self.zeroed:
            _ = region.zero_() if self.index is None else region.index_fill_(0, self.index, 0)
        self.bound += largest(value) * line.shape[1]
        table, value = region.view(len(region), -1, value.shape[2]), value.to(region.dtype)
        if region.device.type == "cpu":
            for into, at, part in zip(self._rows_of(table), line.unbind(), value.unbind(), strict=True):
                add_lines(into, at, part)
        else:
            row = torch.arange(len(line), device=line.device) if self.index is None else self.index
            table.index_put_((row.unsqueeze(1), line), value, accumulate=True)

    def finish(self) -> None:
        """What was left for later, and zeros for the parameters that nothing was added to."""
        for to, pairs in self._later.items():
            A, B = (torch.cat(steps, 1) for steps in zip(*pairs, strict=True))
            self.add_linear(to, A, B)
        if self.zeroed:
            return
        for parameter in self.slots.keys() - self._written:
            region = self._region(parameter)
            _ = region.zero_() if self.index is None else region.index_fill_(0, self.index, 0)

    def _region(self, parameter: int) -> Float[Tensor, "n size"]:
        return self.rows[:, self.slots[parameter]]

    def _rows_of(self, region: Float[Tensor, "n ..."]) -> Sequence[Tensor]:
        """The part of each sample."""
        return region.unbind() if self.index is None else [region[i] for i in self.index.tolist()]

    def _is_first(self, parameter: int) -> bool:
        self._check_open()
        first = parameter not in self._written
        self._written.add(parameter)
        return first

    def _check_open(self) -> None:
        if not self.open:
            # A loss that differentiates by itself would have its own gradients written into the rows.
            raise RuntimeError("the loss function calls backward or grad itself")


def add_lines(table: Float[Tensor, "v e"], line: Int[Tensor, "t"], value: Float[Tensor, "t e"]) -> None:
    """Adds value[t] to table[line[t]], lines that come up several times in their order."""
    if table.device.type == "cpu":
        table.index_add_(0, line, value)
    else:  # there this one sorts, and the other does not keep the order
        table.index_put_((line,), value, accumulate=True)


def largest(x: Tensor) -> Float[Tensor, ""]:
    """The largest absolute value; NaN if there is one."""
    low, high = x.aminmax()
    return torch.maximum(-low, high)


# The anchor is a scalar that needs a gradient: through it autograd reaches every layer, whatever its inputs need.
# Functions have no dimension of samples and give no views: those of a Function's result cannot be changed in place.


def linear(x: Float[Tensor, "c ... i"], W: Tensor, b: Tensor | None, anchor: Tensor, to: "Target") -> Tensor:
    """y = x Wᵀ + b."""
    y: Tensor = Linear.apply(x.reshape(-1, x.shape[-1]), W, b, anchor, to, len(x))
    return y.view(*x.shape[:-1], len(W))


def embedding(index: Int[Tensor, "c ..."], W: Tensor, anchor: Tensor, padding: int | None, to: "Target") -> Tensor:
    """y = W[index]."""
    y: Tensor = Embedding.apply(index.reshape(-1), W, anchor, padding, to, len(index))
    return y.view(*index.shape, W.shape[1])


def convolution(
    x: Float[Tensor, "c k ..."], W: Tensor, b: Tensor | None, anchor: Tensor, options: tuple[Any, ...], to: "Target"
) -> Tensor:
    """A convolution in 1, 2 or 3 dimensions of c samples of k images each; stride, padding, dilation and groups."""
    y: Tensor = Convolution.apply(x.flatten(0, 1), W, b, anchor, options, to, len(x))
    return y.unflatten(0, x.shape[:2])


class Linear(Function):
    """y = x Wᵀ + b for x [c n, i]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, b: Tensor | None, anchor: Tensor, to: "Target", c: int) -> Tensor:
        """y, with x kept for the backward."""
        ctx.save_for_backward(x, W)
        ctx.to, ctx.c = to, c
        return F.linear(x, W, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x; those of W and b go into the rows."""
        x, W = ctx.saved_tensors
        writer = ctx.to.writer
        add = writer.add_later if ctx.to.is_recurrent else writer.add_linear
        add(ctx.to, dy.reshape(ctx.c, -1, dy.shape[-1]), x.reshape(ctx.c, -1, x.shape[-1]))
        dx = (dy.to(W.dtype) @ W).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


class Embedding(Function):
    """y = W[index] for index [c n]."""

    @staticmethod
    def forward(
        ctx: Any, index: Tensor, W: Tensor, anchor: Tensor, padding: int | None, to: "Target", c: int
    ) -> Tensor:
        """y, with the indices kept for the backward."""
        ctx.save_for_backward(index)
        ctx.padding = padding
        ctx.to, ctx.c = to, c
        return F.embedding(index, W)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        """The gradient of W goes into the rows; that of the padding entry is zero."""
        (index,) = ctx.saved_tensors
        index = index.reshape(ctx.c, -1)
        dy = dy.reshape(*index.shape, dy.shape[-1])
        if ctx.padding is not None:
            dy = dy.masked_fill((index == ctx.padding).unsqueeze(2), 0)
        ctx.to.writer.add_at(ctx.to.weight, index, dy)
        return None, None, None, None, None, None


class Convolution(Function):
    """A convolution for x [c k, channels, ...]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, b: Tensor | None, anchor: Tensor, options: tuple[Any, ...], to: "Target", c: int
    ) -> Tensor:
        """y, with x kept for the backward."""
        ctx.save_for_backward(x, W)
        ctx.options = options
        ctx.to, ctx.c = to, c
        return CONV[W.ndim - 2](x, W, b, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x; those of W and b go into the rows."""
        x, W = ctx.saved_tensors
        spatial = W.ndim - 2
        # The native kernel, a sample at a time: faster than unfolding the images and one batched product.
        weight = CONV_WEIGHT[spatial]
        samples = zip(x.unflatten(0, (ctx.c, -1)), dy.unflatten(0, (ctx.c, -1)), strict=True)
        dW = [weight(x_s, W.shape, dy_s, *ctx.options) for x_s, dy_s in samples]
        ctx.to.writer.add(ctx.to.weight, torch.stack(dW))
        if ctx.to.bias is not None:
            ctx.to.writer.add(ctx.to.bias, dy.unflatten(0, (ctx.c, -1)).sum(dim=(1, *range(3, dy.ndim + 1))))
        dx = CONV_INPUT[spatial](x.shape, W, dy, *ctx.options) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None, None


@dataclass(frozen=True)
class Target:
    """Which parameters a layer's gradients belong to, by id, and the writer they go to.

    A recurrent layer is used many times over, so its gradients are left for later: those of equal targets together.
    """

    writer: RowWriter
    weight: int
    bias: int | None = None
    is_recurrent: bool = False
