"""The M-FAC optimizer: SGD preconditioned by the inverse of the Fisher matrix of the last m gradients."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, ParamsT

from mfac.columns import columns_of, like, local, local_gradients, local_pieces
from mfac.dynamic import Normalize
from mfac.parameter_groups import (
    GROUP_OPTIONS,
    check_group,
    group_options,
    group_parameters,
    name_masks,
    name_parameters,
    read_state,
)
from mfac.parameter_window import Damping, NonFinite, ParameterWindow, row_dtype
from mfac.precision import Precision
from mfac.windows import Window, window_bytes

WINDOW_ENTRIES = {"rows", "columns", "shape", "mask", "window"}  # of a parameter's state, all of them the window's


def mfac_update(
    params: Sequence[Tensor],
    steps: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    lr: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
) -> None:
    """Moves parameters by their parts d of F⁻¹g: v ← μ v + (1−μ) d;  w ← (1 − lr·decay) w − lr·v.

    With Nesterov's momentum μ v + (1−μ) d takes the place of v in the second; without momentum there is no v, and d
    does. `weight_decay` is the decoupled one here. `steps` are used up.
    """
    if momentum:
        torch._foreach_lerp_(list(buffers), list(steps), 1 - momentum)
        if nesterov:
            torch._foreach_lerp_(list(steps), list(buffers), momentum)
        else:
            steps = buffers
    if weight_decay:
        torch._foreach_mul_(list(params), 1 - lr * weight_decay)
    torch._foreach_add_(list(params), list(steps), alpha=-lr)


class MFAC(Optimizer):
    """M-FAC (Frantar, Kurtic, Alistarh, NeurIPS 2021): w ← w − lr F⁻¹g over a window of the last m gradients.

        g ← ∇loss (+ weight_decay · w)
        F = λ I + (1/m) Σ g gᵀ        over the window, g in the place of the oldest gradient
        v ← μ v + (1−μ) F⁻¹g
        w ← w − lr v

    m is `num_grads`, λ `damping`, μ `momentum`. One window holds all parameters of all groups, so F is the full matrix;
    it takes m times the memory of the trained weights (`memory_needed`). `lr`, `momentum`, `nesterov`, `weight_decay`,
    `decoupled_weight_decay` and `maximize` can differ by group.

    Args:
        params: parameters, named parameters or groups of them, as for any optimizer of torch.
        lr: with `normalize="full"` a step grows like lr · m; with "sum" one learning rate serves every m.
        num_grads: m.
        damping: λ, or a function of the number of steps so far; `optimizer.damping` can be assigned to.
        momentum: μ, of the average of preconditioned gradients.
        nesterov: look one step ahead of the average.
        weight_decay: added to the gradient before it enters the window (L2), unless it is decoupled.
        decoupled_weight_decay: w ← (1 − lr · weight_decay) w besides, and nothing of it in the window.
        maximize: go uphill.
        normalize: what Σ g gᵀ is divided by: m from the start ("full"), the gradients seen ("seen"), nothing ("sum").
        window: how gradients are stored: a dtype, torch.int8 or `Int8`, `TopK`; None: float32 (float64 where parameters
            have it).
        masks: {parameter: bool tensor}, or {name: ...} with named parameters; True = kept. Only kept coordinates are in
            the window; the others must be zero, and stay so.
        update_every: only every so many gradients enter the window.
        max_step_norm: a longer step lr F⁻¹g (over all groups) is shortened to this, before it enters the momentum.
        nonfinite: a gradient that is not finite is an error ("raise"), or skipped and counted ("skip").
        precision: of products with the window; as for `DynamicInverseFisher`.
        device: where the window lives; None: where the first parameter is.
        process_group: cut the window over its ranks, all of which have the same weights and gradients (data parallel):
            a step sends m numbers, and gathers itself. DTensor parameters (`fully_shard`) bring their own ranks, and a
            step sends m numbers.
        devices: of this process, over which the window is cut, instead of `device`.

    Raises:
        ValueError: an argument out of its range, a mask that does not fit, or arguments that differ between ranks.
        MemoryError: the window does not fit; the message has the figures.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        num_grads: int = 1024,
        damping: Damping = 1e-5,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        normalize: Normalize = "full",
        window: Window | None = None,
        masks: Mapping[Any, Tensor] | None = None,
        update_every: int = 1,
        max_step_norm: float | None = None,
        nonfinite: NonFinite = "raise",
        precision: Precision = "auto",
        device: torch.device | str | None = None,
        process_group: ProcessGroup | None = None,
        devices: Sequence[torch.device | str] | None = None,
    ):
        if max_step_norm is not None and not max_step_norm > 0:
            raise ValueError(f"max_step_norm must be positive, or None for steps of any length, not {max_step_norm!r}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)
        self.max_step_norm = max_step_norm
        self.seconds = 0.0
        named = name_parameters(self.param_groups)
        trained = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        if not trained:
            raise ValueError(
                "none of the parameters is trainable; call requires_grad_(True) on those you want to train"
            )
        # An attribute of instances only: Lightning's wrapper, a subclass, passes on what its class does not have.
        self._window = ParameterWindow(
            trained,
            name_masks(masks, named),
            num_grads,
            damping,
            normalize=normalize,
            window=window,
            precision=precision,
            device=device,
            update_every=update_every,
            nonfinite=nonfinite,
            process_group=process_group,
            devices=devices,
            agreed={"max_step_norm": max_step_norm, "groups": group_options(self.param_groups)},
        )
        self._begin_state(trained.values())

    @property
    def damping(self) -> float:
        """λ; assign a number, which costs a Cholesky factorisation of the m x m matrix, or a function of the steps."""
        return self._window.operator.damping

    @damping.setter
    def damping(self, damping: Damping) -> None:
        self._window.assign_damping(damping)

    @property
    def skipped(self) -> int:
        """How many gradients were not finite, and skipped."""
        return self._window.skipped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, in mid-training too: past gradients are zero for its parameters.

        Raises:
            ValueError: an option out of its range, or one that belongs to the whole window.
            MemoryError: the wider window does not fit. Nothing was added.
        """
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            if hasattr(self, "_window"):  # not while torch's constructor adds the first groups
                self._cover(tensor for tensor in self.param_groups[-1]["params"] if tensor.requires_grad)
        except BaseException:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step with the gradients in `.grad`; a parameter without one does not move.

        Args:
            closure: computes the loss and its gradients, and returns the loss.

        Raises:
            RuntimeError: a gradient is not finite (with `nonfinite="raise"`) or sparse. Nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        began = time.perf_counter()
        gradients = self._gradients()
        if gradients:
            self._cover(tensor for tensor in gradients if tensor not in self._window)
            steps = self._window.precondition(gradients)
            if steps is not None:
                self._move(steps)
        self.seconds += time.perf_counter() - began
        return loss

    def diagnostics(self) -> dict[str, float]:
        """Figures to plot, of the last step and the window; computed when asked for, in O(m³).

        `gradient_norm` (decay included), `step_norm` (of F⁻¹g), `cosine` between the two, `effective_rank` of the
        window, `num_seen` gradients in it, `damping`, `skipped` gradients, `seconds` spent in `step` so far.
        """
        return {**self._window.diagnostics(), "seconds": self.seconds}

    @staticmethod
    def memory_needed(
        params: ParamsT,
        num_grads: int = 1024,
        *,
        window: Window | None = None,
        masks: Mapping[Any, Tensor] | None = None,
        momentum: float = 0.0,
        process_group: ProcessGroup | None = None,
    ) -> int:
        """Bytes that the optimizer will hold (on this rank), before it is built: window, algebra and momentum."""
        groups = group_parameters(params, momentum=momentum)
        named = name_parameters(groups)
        trained = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        kept = {name: mask for name, mask in name_masks(masks, named).items() if name in trained}
        columns = columns_of(trained, kept, process_group)
        dtype = row_dtype(columns.layout)
        moving = {tensor for group in groups if group["momentum"] for tensor in group["params"] if tensor.requires_grad}
        buffers = sum(local(tensor).numel() for tensor in moving) * dtype.itemsize
        return window_bytes(num_grads, columns.dim, window or dtype) + buffers

    def state_dict(self) -> dict[str, Any]:
        """All of the state. Gradients of the window are its own memory: save it (or deep-copy it) before going on."""
        held, self.state = self.state, self._whole_state()
        try:
            return super().state_dict()  # with its hooks, which see the window too
        finally:
            self.state = held

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a saved state; a window stored in another dtype or on another device is converted.

        Raises:
            ValueError: it is the state of other parameters, or of another window. Nothing has changed.
        """
        # Behind the hooks of users, which may change the dict.
        handle = self.register_load_state_dict_pre_hook(lambda _, state_dict: self._take_window(state_dict))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        mine = {name: self.__dict__[name] for name in ("_window", "max_step_norm", "seconds")}
        return {**super().__getstate__(), **mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state may have been saved before an option was there
            for name in GROUP_OPTIONS:
                group.setdefault(name, self.defaults[name])

    def _whole_state(self) -> defaultdict[Tensor, Any]:
        """`state` with the window in it; the part that belongs to no parameter is with the first."""
        for group in self.param_groups:  # checkpoints that load in place ask for the same entries at any time
            for tensor in group["params"] if group["momentum"] else ():
                if tensor in self._window:
                    self._buffer(tensor)
        states = self._window.parameter_states()
        whole = defaultdict(dict, self.state)
        whole.update({tensor: {**self.state[tensor], **state} for tensor, state in states.items()})
        whole[next(iter(states))]["window"] = self._window.shared_state()
        return whole

    def _take_window(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Loads the window of a saved state, or refuses it; the rest is for torch, which would cast the tensors."""
        window, entries = read_state(state_dict, self.param_groups)
        rows = {tensor: entry for tensor, entry in entries.items() if entry.keys() & {"rows", "columns"}}
        self._window.load_state(window, rows, name_parameters(self.param_groups))
        for tensor, entry in entries.items():
            entries[tensor] = {key: deepcopy(entry[key]) for key in entry.keys() - WINDOW_ENTRIES}
            if "momentum_buffer" in entry:
                dtype = self._window.operator.dtype
                entries[tensor]["momentum_buffer"] = like("a momentum", entry["momentum_buffer"], tensor, dtype)
        return {**state_dict, "state": entries}

    def _begin_state(self, tensors: Iterable[Tensor]) -> None:
        # torch's checkpoints "initialise" an optimizer without state by a step with zero gradients.
        for tensor in tensors:
            self.state[tensor]["step"] = 0

    def _cover(self, tensors: Iterable[Tensor]) -> None:
        wanted = set(tensors)
        if wanted:
            named = name_parameters(self.param_groups)
            self._window.cover({name: tensor for name, tensor in named.items() if tensor in wanted})
            self._begin_state(wanted)

    def _gradients(self) -> dict[Tensor, Tensor]:
        """{parameter: what enters the row}: its gradient, uphill or down, with the decay that is not decoupled."""
        gradients: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            params = [tensor for tensor in group["params"] if tensor.grad is not None]
            if not params:
                continue
            found: Sequence[Tensor] = local_gradients(params)
            if any(gradient.is_sparse for gradient in found):
                self._refuse_sparse(params)
            if group["maximize"]:
                found = torch._foreach_neg(list(found))
            if group["weight_decay"] and not group["decoupled_weight_decay"]:
                found = [gradient.to(torch.promote_types(gradient.dtype, torch.float32)) for gradient in found]
                found = torch._foreach_add(list(found), local_pieces(params), alpha=group["weight_decay"])
            gradients.update(zip(params, found, strict=True))
        return gradients

    def _move(self, steps: dict[Tensor, Tensor]) -> None:
        if self.max_step_norm is not None:
            self._shorten(steps, self.max_step_norm)
        for group in self.param_groups:
            params = [tensor for tensor in dict.fromkeys(group["params"]) if tensor in steps]
            if not params:
                continue
            mfac_update(
                local_pieces(params),
                [steps[tensor] for tensor in params],
                local_pieces([self._buffer(tensor) for tensor in params]) if group["momentum"] else [],
                lr=float(group["lr"]),
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                weight_decay=group["weight_decay"] if group["decoupled_weight_decay"] else 0.0,
            )
            for tensor in params:
                self.state[tensor]["step"] = self.state[tensor].get("step", 0) + 1

    def _shorten(self, steps: dict[Tensor, Tensor], longest: float) -> None:
        device = self._window.operator.device
        norms = []
        for group in self.param_groups:
            parts = [steps[tensor] for tensor in dict.fromkeys(group["params"]) if tensor in steps]
            norms += [norm.to(device) * float(group["lr"]) for norm in torch._foreach_norm(parts)] if parts else []
        length = self._window.columns.total(torch.stack(norms).square().sum()).sqrt()
        scale = (longest / length).clamp_max(1.0)  # stays on the device: no sync
        for part in steps.values():
            part.mul_(scale.to(part.device))

    def _buffer(self, tensor: Tensor) -> Tensor:
        """The momentum of a parameter, in the dtype of the rows."""
        state = self.state[tensor]
        if "momentum_buffer" not in state:
            dtype = self._window.operator.dtype
            state["momentum_buffer"] = torch.zeros_like(
                tensor, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format
            )
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def _refuse_sparse(self, params: Sequence[Tensor]) -> None:
        names = {tensor: name for name, tensor in name_parameters(self.param_groups).items()}
        sparse = [names[tensor] for tensor in params if tensor.grad is not None and tensor.grad.is_sparse]
        raise RuntimeError(
            f"MFAC does not support sparse gradients, and {', '.join(sparse)} has one; build the embedding with "
            "sparse=False"
        )
