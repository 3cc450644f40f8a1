"""The M-FAC optimizer: SGD preconditioned by the inverse of the Fisher matrix of the last m gradients."""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import Optimizer, ParamsT

from mfac.columns import columns_of, like, local, parameter_ranks
from mfac.dynamic import Normalize
from mfac.parameter_groups import check_last, gradients_of, group_parameters, name_parameters, read_state
from mfac.parameter_window import Damping, NonFinite, ParameterWindow, Windowed, row_dtype, trainable
from mfac.precision import Precision
from mfac.saved import reading
from mfac.windows.storage import Window, window_bytes

WINDOW_ENTRIES = {"rows", "columns", "shape", "mask", "window"}  # of a parameter's saved state

OWN = ("_window", "seconds", "max_step_norm", "momentum_on", "shared")  # attributes beyond torch's


class WindowOptimizer(Windowed, Optimizer, ABC):
    """An optimizer over one window of the gradients of all its parameters: groups, closures, and states.

    The state of a parameter may have `buffers` of its own shape.
    """

    seconds: float
    buffers: tuple[str, ...]
    shared: tuple[str, ...] = ()  # options that all groups have in common

    @abstractmethod
    def _take(self, gradients: dict[Tensor, Tensor]) -> None:
        """One step with these gradients, all of whose parameters are in the window."""

    def _needs_buffers(self, group: Mapping[str, Any]) -> bool:
        return True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, also in mid-training: past gradients are zero for its parameters.

        Raises:
            ValueError: an option out of its range, or one that belongs to the whole window.
            MemoryError: the wider window does not fit. Nothing was added.
        """
        if hasattr(self, "_window"):  # where a schedule may have changed the options that groups have in common
            param_group = {name: self.param_groups[0][name] for name in self.shared} | param_group
        super().add_param_group(param_group)
        try:
            check_last(self.param_groups, self.shared)
            if hasattr(self, "_window"):  # not while torch's constructor adds the first groups
                self._cover(tensor for tensor in self.param_groups[-1]["params"] if tensor.requires_grad)
        except BaseException:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step with the gradients in `.grad`; a parameter without one does not move.

        `closure`, if given, is called first; it computes the loss and its gradients, and returns the loss.

        Raises:
            RuntimeError: a gradient is not finite (with `nonfinite="raise"`) or sparse. Nothing has changed.

        A damping that is too small for the window, even in float64, is raised for this step; the first time warns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        began = time.perf_counter()
        gradients = gradients_of(self.param_groups)
        if gradients:
            self._cover(tensor for tensor in gradients if tensor not in self._window.columns.covered)
            self._take(gradients)
        self.seconds += time.perf_counter() - began
        return loss

    def diagnostics(self) -> dict[str, float]:
        """Figures of the last step and the window, computed when called, in O(m³).

        `gradient_norm` (of the row that entered the window), `step_norm` (before the learning rate and momentum),
        `cosine` between the two, `effective_rank` of the window, `num_seen` gradients in it, `damping`, `skipped`
        gradients, `raised` (steps with more damping, for float64's sake), `compiled` (1.0 if compiled code makes the
        products with the window), `seconds` in `step`.
        """
        return {**self._window.diagnostics(), "seconds": self.seconds}

    def state_dict(self) -> dict[str, Any]:
        """The whole state. Its rows are the window's own memory: save or deep-copy it before the next step."""
        self._begin_all()
        held, (shared, states) = self.state, self._window.state()
        full = defaultdict(dict, held) | {tensor: {**held[tensor], **state} for tensor, state in states.items()}
        full[next(iter(states))]["window"] = shared  # belongs to no parameter
        try:
            self.state = full
            return super().state_dict()  # with its hooks, which see the window too
        finally:
            self.state = held

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state; a window stored in another dtype or on another device is converted.

        Raises:
            ValueError: it is the state of other parameters, or of another window. Nothing has changed.
        """
        # After the hooks of users, which may change the dict.
        handle = self.register_load_state_dict_pre_hook(lambda _, state_dict: self._load_window(state_dict))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: self.__dict__[name] for name in OWN if name in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state may have been saved before an option existed
            for name in self.defaults.keys() - {"differentiable"}:  # which torch adds by itself
                group.setdefault(name, self.defaults[name])

    def _cover(self, tensors: Iterable[Tensor]) -> None:
        wanted = set(tensors)
        if wanted:
            named = name_parameters(self.param_groups)
            self._window.cover({name: tensor for name, tensor in named.items() if tensor in wanted})

    def _begin_all(self) -> None:
        """Gives every parameter the entries of its state, which checkpoints that load in place need before any step."""
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor in self._window.columns.covered:
                    self._begin(tensor, group)

    def _begin(self, tensor: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[tensor]
        state.setdefault("step", 0)
        for name in self.buffers if self._needs_buffers(group) else ():
            if name not in state:
                dtype, contiguous = self._window.operator.dtype, torch.contiguous_format
                state[name] = torch.zeros_like(tensor, dtype=dtype, memory_format=contiguous)
        return state

    def _move(self, steps: Mapping[Tensor, Tensor]) -> None:
        """w ← (1 − lr·decay) w − lr·d for the step d of each parameter w; decay that is not decoupled is in d."""
        for group in self.param_groups:
            params = [tensor for tensor in dict.fromkeys(group["params"]) if tensor in steps]
            if params:
                lr, weights = float(group["lr"]), [local(tensor) for tensor in params]
                if group["weight_decay"] and group.get("decoupled_weight_decay", True):
                    torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
                torch._foreach_add_(weights, [steps[tensor] for tensor in params], alpha=-lr)
            for tensor in params:
                self._begin(tensor, group)["step"] += 1

    def _load_window(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Loads the window of a saved state; returns the rest, by parameter, so that torch does not cast it."""
        with reading("the state of the optimizer"):
            shared, entries = read_state(state_dict, self.param_groups)
        rows = {tensor: entry for tensor, entry in entries.items() if entry.keys() & {"rows", "columns"}}
        for tensor, entry in entries.items():
            kept = {key: deepcopy(value) for key, value in entry.items() if key not in WINDOW_ENTRIES}
            for name in kept.keys() & set(self.buffers):
                kept[name] = like(f"the {name}", kept[name], tensor, self._window.operator.dtype)
            entries[tensor] = kept
        self._window.load_state(shared, rows, name_parameters(self.param_groups))
        return {**state_dict, "state": entries}

    def _options(self) -> list[dict[str, Any]]:
        """The options of all groups, as ranks can compare them."""
        names = sorted(self.defaults.keys() - {"differentiable"})
        return [{name: group[name] if name == "betas" else float(group[name]) for name in names}
                for group in self.param_groups]  # fmt: skip


def memory_of(
    groups: Sequence[Mapping[str, Any]], num_grads: int, window: Window | None, masks: Mapping[Any, Tensor] | None,
    process_group: ProcessGroup | None, buffered: Iterable[Tensor],
) -> int:  # fmt: skip
    """The bytes of a window, its m x m algebra, and a buffer for each of the `buffered` parameters, on this rank."""
    named, found = trainable(groups, masks)
    columns = columns_of(named, found, parameter_ranks(named, process_group))
    dtype = row_dtype(columns.layout)
    buffers = sum(local(tensor).numel() for tensor in buffered if tensor.requires_grad) * dtype.itemsize
    return window_bytes(num_grads, columns.dim, window or dtype) + buffers


class MFAC(WindowOptimizer):
    """M-FAC (Frantar, Kurtic, Alistarh, NeurIPS 2021): w ← w − lr F⁻¹g over a window of the last m gradients.

        g ← ∇loss (+ weight_decay · w)
        F = λ I + (1/m) Σ g gᵀ        over the window, in which g replaces the oldest gradient
        v ← μ v + (1−μ) F⁻¹g
        w ← w − lr v

    m is `num_grads`, λ `damping`, μ `momentum`. One window holds all parameters of all groups, so F is the full matrix;
    it takes m times the memory of the trained weights (`memory_needed`). `lr`, `momentum`, `nesterov`, `weight_decay`,
    `decoupled_weight_decay` and `maximize` can differ between groups.

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer.
        lr: with `normalize="full"` the step grows like lr · m; with "sum" one learning rate suits every m.
        num_grads: m.
        damping: λ, a function of the number of steps so far, or "auto": a tenth of the window's mean eigenvalue.
            `optimizer.damping` can be assigned.
        momentum: μ, of the average of preconditioned gradients.
        momentum_on: "step": v as above; "gradient": v = F⁻¹ḡ, where ḡ averages the window, with weights μ^age / Σ. It
            needs no buffer, and F is today's for old gradients too.
        nesterov: use Nesterov momentum.
        weight_decay: added to the gradient before it enters the window (L2), unless it is decoupled.
        decoupled_weight_decay: w ← (1 − lr · weight_decay) w instead, outside the window.
        maximize: ascend instead of descend.
        normalize: divide Σ g gᵀ by m from the start ("full"), by the gradients seen ("seen"), or by nothing ("sum").
        window: how gradients are stored: a dtype, torch.int8 or `Int8`, `TopK`; None: float32 (float64 if a parameter
            has it).
        masks: {parameter: bool tensor}, or {name: ...} with named parameters; True = kept. Only kept weights are in the
            window; the others must be zero, and stay zero.
        update_every: only one gradient in this many enters the window.
        max_step_norm: a longer step lr F⁻¹g (over all groups) is scaled down to this before it enters the momentum.
        nonfinite: a gradient that is not finite raises an error ("raise"), or is skipped and counted ("skip").
        precision: of products with the window; as for `DynamicInverseFisher`.
        device: of the window; None: that of the first parameter.
        process_group: shard the window over its ranks, which all have the same weights and gradients (data parallel).
            DTensor parameters (`fully_shard`) bring their own ranks instead.
        devices: of this process, over which the window is sharded, instead of `device`.

    Raises:
        ValueError: an argument out of its range, a mask that does not fit, or arguments that differ between ranks.
        MemoryError: the window does not fit; the message has the figures.
    """

    buffers = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        num_grads: int = 1024,
        damping: Damping = 1e-5,
        *,
        momentum: float = 0.0,
        momentum_on: Literal["step", "gradient"] = "step",
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
        if max_step_norm is not None and not (isinstance(max_step_norm, float | int | Tensor) and max_step_norm > 0):
            raise ValueError(f"max_step_norm must be positive, or None for steps of any length, not {max_step_norm!r}")
        if momentum_on not in ("step", "gradient"):
            raise ValueError(f"momentum_on must be 'step' or 'gradient', not {momentum_on!r}")
        if momentum_on == "gradient" and (nesterov or update_every != 1):
            raise ValueError(
                "momentum_on='gradient' averages the rows of the window, so every gradient must enter it, and there is "
                "no buffer for nesterov; use momentum_on='step', or update_every=1 and nesterov=False"
            )
        self.max_step_norm, self.momentum_on, self.seconds = max_step_norm, momentum_on, 0.0
        self.shared = ("momentum",) if momentum_on == "gradient" else ()
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        defaults |= {"decoupled_weight_decay": decoupled_weight_decay, "maximize": maximize}
        super().__init__(params, defaults)
        agreed = {"max_step_norm": max_step_norm, "momentum_on": momentum_on, "groups": self._options()}
        self._window = ParameterWindow(
            self.param_groups, num_grads, damping, normalize, window, masks, update_every, nonfinite, precision,
            device, process_group, devices, agreed,
        )  # fmt: skip
        self._begin_all()

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
        """The bytes that the optimizer will hold (on this rank) for its window, the m x m algebra and momentum."""
        groups = group_parameters(params, momentum=momentum)
        buffered = {tensor for group in groups if group["momentum"] for tensor in group["params"]}
        return memory_of(groups, num_grads, window, masks, process_group, buffered)

    def _take(self, gradients: dict[Tensor, Tensor]) -> None:
        average = self.param_groups[0]["momentum"] if self.momentum_on == "gradient" else 0.0
        steps = self._window.precondition(gradients, average=average)
        if steps is None:
            return
        if self.max_step_norm is not None:
            self._shorten(steps, self.max_step_norm)
        for group in filter(self._needs_buffers, self.param_groups):
            params = [tensor for tensor in dict.fromkeys(group["params"]) if tensor in steps]
            if params:
                buffers = [local(self._begin(tensor, group)["momentum_buffer"]) for tensor in params]
                parts = [steps[tensor] for tensor in params]
                torch._foreach_lerp_(buffers, parts, 1 - group["momentum"])
                if group["nesterov"]:
                    torch._foreach_lerp_(parts, buffers, group["momentum"])
                else:
                    steps |= zip(params, buffers, strict=True)
        self._move(steps)

    def _needs_buffers(self, group: Mapping[str, Any]) -> bool:
        return bool(group["momentum"]) and self.momentum_on == "step"

    def _shorten(self, steps: dict[Tensor, Tensor], longest: float) -> None:
        rates = {tensor: float(group["lr"]) for group in self.param_groups for tensor in group["params"]}
        norms = zip(steps, torch._foreach_norm(list(steps.values()), dtype=torch.float64), strict=True)
        lengths = [rates[tensor] * norm.to(self._window.operator.device) for tensor, norm in norms]
        length = self._window.columns.total(torch.stack(lengths).square().sum()).sqrt()
        scale = (longest / length).clamp_max(1.0)  # stays on the device: no sync
        for part in steps.values():
            part.mul_(scale.to(part.device))
