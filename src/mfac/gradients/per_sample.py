"""One gradient a sample: the forward pass mapped over a chunk of samples, one backward, rows filled in place.

`vmap` hands the loss function one sample at a time (a batch of one), so any loss works as it is. The parameters of
linear, embedding, convolution and recurrent layers are caught on the way (`interception`); every other parameter is
repeated c times, which is cheap for the small ones that are left, and differentiated as c separate copies.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mfac.gradients.batches import Batch, sample_tensors, with_sample_tensors
from mfac.gradients.interception import BranchError, Interception
from mfac.gradients.one_batch import Filled, LossFn, scalar_loss
from mfac.gradients.row_products import RowProducts
from mfac.gradients.weight_gradients import RowWriter
from mfac.layout import ParameterLayout


class MappedGradients:
    """Fills rows with the gradients of the samples of a chunk.

    Args:
        model: in eval mode.
        loss_fn: (model, batch) -> scalar.
        layout: the parameters; rows are those of the layout without its masks.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, layout: ParameterLayout):
        self.layout = layout
        self.bytes_per_sample = 0
        self._bound = _Bound(model, loss_fn)
        self._products = RowProducts()
        self._hooked = first_with_hook(model, layout)
        self._has_recurrent = any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
        # Matrices, and biases of layers that are caught, are repeated only if a use turns out not to be caught.
        biases = {id(bias) for module in model.modules() for bias in _biases(module)}
        self._repeated = {id(p) for p in layout.tensors if p.ndim < 2 and id(p) not in biases}

    @property
    def is_plain(self) -> bool:
        """Whether all the work is in linear and embedding layers that were caught: mapping is surely faster then."""
        matrices = [p for p in self.layout.tensors if p.ndim > 1]
        return not self._has_recurrent and all(p.ndim == 2 and id(p) not in self._repeated for p in matrices)

    def fill(
        self,
        batch: Batch,
        rows: Float[Tensor, "n d"],
        zeroed: bool = False,
        index: Int[Tensor, "c"] | None = None,
    ) -> Filled:
        """Writes the gradient of sample i into row i (row index[i], if given).

        Raises:
            Exception: whatever an operation that cannot be mapped raises.
        """
        if self._hooked is not None:
            raise RuntimeError(f"{self._hooked} has a backward hook, which expects the gradient of one sample")
        slots = {id(p): slot for p, slot in zip(self.layout.tensors, self.layout.full_slots, strict=True)}
        writer = RowWriter(rows, slots, zeroed, self._products, index)
        try:
            losses, missed = self._attempt(batch, writer)
        except BranchError as branches:
            return self._fill_apart(batch, writer, branches.taken)
        if not missed:
            *values, bound = torch.cat([losses, writer.bound.reshape(1)]).tolist()
            return Filled(values, math.isfinite(sum(values)) and bound < torch.finfo(rows.dtype).max)
        self._repeated |= missed
        return self.fill(batch, rows, index=index)

    def _attempt(self, batch: Batch, writer: RowWriter) -> tuple[Tensor, set[int]]:
        """The losses, and the ids of the parameters that are also used in a way that is not caught.

        Raises:
            RuntimeError: a parameter is used where its copies cannot be put.
        """
        layout, c = self.layout, writer.count
        caught = [p for p in layout.tensors if id(p) not in self._repeated]
        repeated = {name: p for name, p in zip(layout.names, layout.tensors, strict=True) if id(p) in self._repeated}
        anchor = torch.zeros((), device=writer.rows.device, requires_grad=True)
        copies = {f"model.{name}": p.detach().expand(c, *p.shape).requires_grad_() for name, p in repeated.items()}
        with self._counting(c):
            losses = self._losses(batch, writer, set(map(id, caught)), anchor, copies)
        inputs = (anchor, *copies.values(), *caught, *repeated.values())
        writer.open = True
        grads = iter(torch.autograd.grad(losses.sum(), inputs, allow_unused=True)[1:])
        for p, grad in zip(repeated.values(), islice(grads, len(copies)), strict=True):
            if grad is not None:
                writer.add(id(p), grad)
        missed = {id(p) for p, grad in zip(caught, islice(grads, len(caught)), strict=True) if grad is not None}
        for name, grad in zip(repeated, grads, strict=True):
            if grad is not None:
                raise RuntimeError(f"{name} is used by another reference than the module's own (a list, a closure)")
        writer.finish()
        return losses.detach(), missed

    def _losses(
        self, batch: Batch, writer: RowWriter, caught: set[int], anchor: Tensor, copies: dict[str, Tensor]
    ) -> Float[Tensor, "c"]:
        def loss_of_one(each: Tensor, values: dict[str, Tensor], *leaves: Tensor) -> Tensor:
            single = with_sample_tensors(batch, [leaf.unsqueeze(0) for leaf in leaves])
            with Interception(writer, caught, each, anchor):
                loss: Tensor = functional_call(self._bound, values, (single,))
            return scalar_loss(loss)

        each = torch.zeros(writer.count, device=writer.rows.device)
        with warnings.catch_warnings():
            # Where an operation has no rule, vmap loops over it alone; whether that pays is measured.
            warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
            losses: Tensor = vmap(loss_of_one, randomness="different")(each, copies, *sample_tensors(batch))
        return losses

    def _fill_apart(self, batch: Batch, writer: RowWriter, taken: Tensor) -> Filled:
        """The samples that take a branch, and those that do not, as chunks of their own."""
        losses, is_finite = [0.0] * len(taken), True
        for side in (taken, ~taken):
            part = side.nonzero().squeeze(1)
            index = part if writer.index is None else writer.index[part]
            samples = with_sample_tensors(batch, [tensor.index_select(0, part) for tensor in sample_tensors(batch)])
            filled = self.fill(samples, writer.rows, writer.zeroed, index)
            for position, loss in zip(part.tolist(), filled.losses, strict=True):
                losses[position] = loss
            is_finite &= filled.is_finite
        return Filled(losses, is_finite)

    @contextmanager
    def _counting(self, count: int) -> Iterator[None]:
        """Measures, the first time, how much memory the forward pass keeps for the backward, a sample."""
        if self.bytes_per_sample:
            yield
            return
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        weights = {p.untyped_storage().data_ptr() for p in self._bound.parameters()}
        self.bytes_per_sample = sum(size for key, size in kept.items() if key not in weights) // count + 1


def _biases(module: nn.Module) -> list[Tensor]:
    """Those that are added to a product with a matrix of the same module."""
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return [p for p in module.parameters(recurse=False) if p.ndim == 1]
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return [bias] if isinstance(weight, Tensor) and weight.ndim > 1 and isinstance(bias, Tensor) else []


class _Bound(nn.Module):
    """The loss as a module that holds the model, so that `functional_call` can put other parameters into it."""

    def __init__(self, model: nn.Module, loss_fn: LossFn):
        super().__init__()
        self.model = model
        self._loss_fn = (loss_fn,)  # in a tuple: a loss that is a module must not become a child

    def forward(self, batch: Batch) -> Tensor:
        return self._loss_fn[0](self.model, batch)


def first_with_hook(model: nn.Module, layout: ParameterLayout) -> str | None:
    """The name of a parameter or a module whose gradients go through a hook."""
    for name, parameter in zip(layout.names, layout.tensors, strict=True):
        if parameter._backward_hooks:
            return name
    hooked = (name for name, module in model.named_modules() if module._backward_hooks or module._backward_pre_hooks)
    return next((f"the module {name}" if name else "the model" for name in hooked), None)
