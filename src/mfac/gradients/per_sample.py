"""One gradient per sample: the forward pass mapped over a chunk of samples, then one backward pass.

`vmap` hands the loss function one sample at a time (a batch of one), so any loss works as it is. The parameters of
linear, embedding and convolution layers are caught on the way (`layers`); every other parameter is repeated c times and
differentiated as c separate copies, which is cheap for the small ones that are left.
"""

import warnings
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, vmap

from mfac.gradients.batches import Batch, sample_tensors, with_sample_tensors
from mfac.gradients.layers import BranchError, Interception, RowWriter, Use
from mfac.gradients.losses import LossFn
from mfac.gradients.model_state import kept_attributes
from mfac.layout import ParameterLayout
from mfac.memory import available_memory

ACTIVATION_BYTES = 96 * 2**20
STAGING_BYTES = 256 * 2**20
FIRST_CHUNK, LARGEST_CHUNK = 8, 128


class ChunkPlan(NamedTuple):
    """How samples become rows, which a resumed run keeps to: "vmap" or "loop", and the lengths of chunks."""

    method: str
    first: int
    others: int


class MappedGradients:
    """Fills rows with the gradients of a chunk of samples, unless its `plan` is to loop over them.

    With the method "auto" samples are mapped where that is possible and chunks of 8 fit the memory set aside for them.
    The first chunk decides, and measures how long the others are.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, layout: ParameterLayout, method: str, chunk_size: int | None,
        plan: ChunkPlan | None,
    ):  # fmt: skip
        self.layout, self.method, self.chunk_size = layout, method, chunk_size
        self._decided = plan is not None
        first = chunk_size or self._fitting(FIRST_CHUNK)
        self.plan = plan or ChunkPlan("loop" if method == "loop" or first == 1 else "vmap", first, first)
        self._bound = _Bound(model, loss_fn)
        self._obstacle = _obstacle(model, layout)
        self._slots = {id(p): slot for p, slot in zip(layout.tensors, layout.full_slots, strict=True)}
        # Matrices, and biases of layers that are caught, are repeated only if a use turns out not to be caught.
        with_matrix = [module for module in model.modules() if getattr(getattr(module, "weight", None), "ndim", 0) > 1]
        biases = {id(getattr(module, "bias", None)) for module in with_matrix}
        self._repeated = {id(p) for p in layout.tensors if p.ndim < 2 and id(p) not in biases}
        self._staging = torch.empty(0, layout.full_dim, dtype=layout.dtype, device=layout.device)
        self._sample_bytes, self._warned = 1, False

    def fill(self, batch: Batch, out: Tensor, zeroed: bool) -> tuple[Tensor, Tensor] | None:
        """The losses, and a number that is finite only if all of losses and rows are; None: take samples one by one."""
        if self.plan.method == "loop":
            return None
        layout = self.layout
        direct = not layout.masked and (out.dtype, out.device) == (layout.dtype, layout.device)
        if not direct and len(self._staging) < len(out):
            self._staging = self._staging.new_empty(len(out), layout.full_dim)
        full = out if direct else self._staging[: len(out)]
        if not (direct and zeroed):
            full.zero_()
        losses, bound = self._fill(batch, full)
        if not direct:
            layout.compress(full, out)
        if not self._decided:
            self._decide(staged=not (direct and zeroed))
            if self.plan.method == "loop":
                return None
        return losses, losses.sum() + bound.to(out.dtype)

    def refuse(self, error: Exception) -> None:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = line if len(line) <= 200 else line[:200] + " ..."
        if self.method == "vmap":
            raise ValueError(f'method="vmap" cannot map this model: {reason}; use method="auto"') from error
        if not self._decided:
            self.plan, self._decided = self.plan._replace(method="loop"), True
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"per-sample gradients are taken one by one, because vmap cannot map this model: {reason}", stacklevel=2
            )

    def _decide(self, staged: bool) -> None:
        """Plans the other chunks: the largest power of two whose activations, and rows if staged, fit."""
        self._decided = True
        if self.chunk_size is not None:
            return
        fitting = min(LARGEST_CHUNK, min(ACTIVATION_BYTES, self._budget()) // self._sample_bytes)
        fitting = max(1, self._fitting(fitting) if staged else fitting)
        if self.method == "auto" and fitting < FIRST_CHUNK:
            self.plan = self.plan._replace(method="loop")
        else:
            self.plan = self.plan._replace(others=1 << (fitting.bit_length() - 1))

    def _fitting(self, length: int) -> int:
        return max(1, min(length, self._budget() // (self.layout.full_dim * self.layout.dtype.itemsize)))

    def _budget(self) -> int:
        available = available_memory(self.layout.device)
        return STAGING_BYTES if available is None else max(1, min(STAGING_BYTES, available // 4))

    def _fill(self, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the gradient of sample i into rows[i]; the losses, and a bound on the numbers in the rows."""
        if self._obstacle is not None:
            raise RuntimeError(self._obstacle)
        while True:
            writer = RowWriter(rows, self._slots)
            try:
                losses, missed = self._attempt(batch, writer)
            except BranchError as branches:
                return self._fill_apart(batch, rows, branches.args[0])
            if not missed:
                return losses, writer.bound
            self._repeated |= missed

    def _fill_apart(self, batch: Batch, rows: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        """The samples that take a branch, and those that do not, as chunks of their own.

        The fewer ones change places with the last samples, so that both chunks are views of `rows`: no copy of them.
        """
        few = min(taken.nonzero(), (~taken).nonzero(), key=len).squeeze(1)
        first, order = len(taken) - len(few), torch.arange(len(taken), device=taken.device)
        others = order[first:][~torch.isin(order[first:], few)]
        few = few[few < first]
        order[few], order[others] = others, few
        samples = [tensor.index_select(0, order) for tensor in sample_tensors(batch)]
        parts = (slice(0, first), slice(first, len(taken)))
        found = [self._fill(with_sample_tensors(batch, [t[part] for t in samples]), rows[part]) for part in parts]
        for a, b in zip(few.tolist(), others.tolist(), strict=True):
            kept = rows[a].clone()
            rows[a], rows[b] = rows[b], kept
        losses, bounds = zip(*found, strict=True)
        return torch.cat(losses)[order], torch.stack(bounds).sum(0)

    def _attempt(self, batch: Batch, writer: RowWriter) -> tuple[Tensor, set[int]]:
        """The losses, and the ids of the parameters that are also used in a way that is not caught."""
        named, c = list(zip(self.layout.names, self.layout.tensors, strict=True)), len(writer.rows)
        caught = [p for _, p in named if id(p) not in self._repeated]
        repeated = {name: p for name, p in named if id(p) in self._repeated}
        copies = {f"model.{name}": p.detach().expand(c, *p.shape).requires_grad_() for name, p in repeated.items()}
        losses, uses = self._losses(batch, c, set(map(id, caught)), copies)
        inputs: Any = (*(use.output for use in uses), *copies.values(), *caught, *repeated.values())
        grads = iter(torch.autograd.grad(losses.sum(), inputs, allow_unused=True))
        of_outputs, of_copies = list(islice(grads, len(uses))), list(islice(grads, len(copies)))
        missed = {id(p) for p, grad in zip(caught, islice(grads, len(caught)), strict=True) if grad is not None}
        for name, grad in zip(repeated, grads, strict=True):
            if grad is not None:
                raise RuntimeError(f"{name} is used through a reference outside its module (a list, a closure)")
        if not missed:
            with torch.no_grad():
                for use, dy in zip(reversed(uses), reversed(of_outputs), strict=True):
                    if dy is not None:
                        use.write(writer, dy)
                for p, grad in zip(repeated.values(), of_copies, strict=True):
                    if grad is not None:
                        writer.add(id(p), grad)
        return losses.detach(), missed

    def _losses(self, batch: Batch, c: int, caught: set[int], copies: dict[str, Tensor]) -> tuple[Tensor, list[Use]]:
        """Also measures how much memory the forward pass keeps for each sample."""
        uses: list[Use] = []
        kept: dict[int, int] = {}

        def loss_of_one(each: Tensor, values: dict[str, Tensor], *leaves: Tensor) -> Tensor:
            single = with_sample_tensors(batch, [leaf.unsqueeze(0) for leaf in leaves])
            with Interception(caught, each, uses):
                loss: Tensor = functional_call(self._bound, values, (single,))
            return loss

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        each = torch.zeros(c, device=self.layout.device)
        measured = nullcontext() if self._decided else saved_tensors_hooks(pack, lambda tensor: tensor)
        with warnings.catch_warnings(), measured, kept_attributes(self._bound):
            warnings.filterwarnings("ignore", message="There is a performance drop because we have not yet implemented")
            losses: Tensor = vmap(loss_of_one, randomness="different")(each, copies, *sample_tensors(batch))
        weights = {parameter.untyped_storage().data_ptr() for parameter in self._bound.parameters() if kept}
        self._sample_bytes = sum(size for address, size in kept.items() if address not in weights) // c + 1
        return losses, uses


class _Bound(nn.Module):
    """The loss as a module that holds the model, so that `functional_call` can put other parameters into it."""

    def __init__(self, model: nn.Module, loss_fn: LossFn):
        super().__init__()
        self.model = model
        self._loss_fn = (loss_fn,)  # in a tuple: a loss that is a module must not become a child

    def forward(self, batch: Batch) -> Tensor:
        return self._loss_fn[0](self.model, batch)


def _obstacle(model: nn.Module, layout: ParameterLayout) -> str | None:
    """Why the model cannot be mapped, as far as one can see without running it."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "it has a scripted module, whose layers cannot be caught"
    probe = torch.zeros((), requires_grad=True)
    every = ["every module"] if nn.Identity()(probe) is not probe else []  # hooks of all modules wrap their inputs
    named = zip(layout.names, layout.tensors, strict=True)
    parameters = [name for name, parameter in named if parameter._backward_hooks]
    modules = [name for name, module in model.named_modules() if module._backward_hooks or module._backward_pre_hooks]
    hooked = [*every, *parameters, *(f"the module {name}" if name else "the model" for name in modules)]
    return f"{hooked[0]} has a backward hook, which expects the gradient of one sample" if hooked else None
