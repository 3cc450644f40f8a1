"""A sliding window over the gradients of parameters: gradients in, F⁻¹ times them out, tensor by tensor."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mfac.dynamic import DynamicInverseFisher, NonFiniteGradientError, Normalize
from mfac.layout import ParameterLayout
from mfac.precision import Precision

Damping = float | Callable[[int], float]
NonFinite = Literal["raise", "skip"]


class ParameterWindow:
    """The layout of some parameters in a row, and the operator over the rows of their last m gradients.

    Args:
        named: the parameters, {name: tensor}; one row holds all of them, whatever their shapes, dtypes and devices.
        masks: {name: bool tensor}; only coordinates that are True are in a row. Names of other parameters may be there.
        num_grads: m.
        damping: λ, or a function of the number of steps so far that gives it.
        normalize, window, precision: as for `DynamicInverseFisher`.
        device: where the window lives; None: where the first parameter is.
        update_every: only every so many gradients enter the window; the others are just multiplied.
        nonfinite: what a gradient that is not finite does: "raise", or "skip" (and count).
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        masks: Mapping[str, Tensor],
        num_grads: int,
        damping: Damping,
        *,
        normalize: Normalize = "full",
        window: torch.dtype | None = None,
        precision: Precision = "auto",
        device: torch.device | str | None = None,
        update_every: int = 1,
        nonfinite: NonFinite = "raise",
    ):
        _check_options(update_every, nonfinite)
        self.masks = dict(masks)
        self.layout = self._lay(named)
        self._covered = set(self.layout.tensors)
        self.schedule = damping if callable(damping) else None
        self.operator = DynamicInverseFisher(
            num_grads,
            self.layout.dim,
            damping(0) if callable(damping) else damping,
            dtype=row_dtype(self.layout),
            device=self.layout.device if device is None else device,
            normalize=normalize,
            window=window,
            precision=precision,
        )
        self.update_every = update_every
        self.nonfinite = nonfinite
        self.calls = 0
        self.skipped = 0
        self._figures: tuple[Tensor, Tensor, Tensor] | None = None

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._covered

    def cover(self, named: Mapping[str, Tensor]) -> None:
        """Adds parameters, whose gradients so far are taken as zero.

        Raises:
            ValueError: a mask does not fit its parameter.
            MemoryError: the wider window does not fit; it is as it was.
        """
        wider = self._lay({**dict(zip(self.layout.names, self.layout.tensors, strict=True)), **named})
        self.operator.widen(wider.dim - self.layout.dim)
        self.layout, self._covered = wider, set(wider.tensors)

    @torch.no_grad()
    def precondition(self, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor] | None:
        """{parameter: its part of F⁻¹g}, after g has entered the window (if it is its turn); None if g was skipped.

        A parameter without a gradient is a zero in the row, and has no part in the result.

        Raises:
            RuntimeError: the gradient is not finite, and `nonfinite` is "raise". Nothing has changed.
        """
        if self.schedule is not None:
            self._follow_schedule(self.schedule(self.calls))
        row = torch.empty(self.layout.dim, dtype=self.operator.dtype, device=self.operator.device)
        self.layout.flatten([gradients.get(tensor) for tensor in self.layout.tensors], out=row)
        step = self._multiply(row)
        if step is None:
            self.skipped += 1
            return None
        self.calls += 1
        self._figures = row.norm(), step.norm(), row @ step
        parts = self.layout.unflatten(step).values()
        pairs = zip(self.layout.tensors, parts, strict=True)
        return {tensor: part.to(tensor.device) for tensor, part in pairs if tensor in gradients}

    def diagnostics(self) -> dict[str, float]:
        """Norms of the last gradient and of F⁻¹ times it, their cosine, and what the window holds."""
        figures = self._figures or (torch.tensor(float("nan")),) * 3
        gradient, step, product = (float(figure) for figure in figures)
        lengths = gradient * step
        return {
            "gradient_norm": gradient,
            "step_norm": step,
            "cosine": product / lengths if lengths else float("nan"),
            "effective_rank": effective_rank(self.operator.gram),
            "num_seen": float(self.operator.num_seen),
            "damping": self.operator.damping,
            "skipped": float(self.skipped),
        }

    def shared_state(self) -> dict[str, Any]:
        """The state that belongs to no single parameter."""
        state = self.operator.state_dict()
        del state["rows"], state["dim"]
        return {**state, "calls": self.calls, "skipped": self.skipped}

    def parameter_states(self) -> dict[Tensor, dict[str, Tensor]]:
        """{parameter: its "rows" [m, kept coordinates] (columns of the window's own memory), and its "mask"}."""
        columns = self.operator.rows.split(self.layout.sizes, dim=1)
        states = {}
        for name, tensor, rows in zip(self.layout.names, self.layout.tensors, columns, strict=True):
            states[tensor] = {"rows": rows} | ({"mask": self.masks[name]} if name in self.masks else {})
        return states

    def load_state(self, shared: Mapping[str, Any], states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Takes over a saved state; parameters that it has no rows of get zeros.

        Raises:
            ValueError: it is the state of another window, which has not changed this one.
        """
        pieces = []
        for name, tensor, size in zip(self.layout.names, self.layout.tensors, self.layout.sizes, strict=True):
            state = states.get(tensor, {})
            if state:
                self._check_state(name, size, state)
            nothing = torch.zeros(1, 1, dtype=self.operator.rows.dtype).expand(int(shared["num_grads"]), size)
            pieces.append(state.get("rows", nothing))
        operator_state = {key: value for key, value in shared.items() if key not in ("calls", "skipped")}
        self.operator.load_state_dict({**operator_state, "dim": self.layout.dim, "rows": pieces})
        self.calls, self.skipped = int(shared["calls"]), int(shared["skipped"])

    def _lay(self, named: Mapping[str, Tensor]) -> ParameterLayout:
        masks = {name: mask for name, mask in self.masks.items() if name in named}
        layout = ParameterLayout.of_tensors(named, masks)
        for name, tensor in named.items():
            _check_parameter(name, tensor, masks.get(name))
        return layout

    def _check_state(self, name: str, size: int, state: Mapping[str, Tensor]) -> None:
        saved, present = state["rows"].shape[1], self.masks.get(name)
        if saved != size:
            raise ValueError(
                f"the state has gradients of {saved} weights for {name}, which has {size} here; was it saved with "
                "another model, other masks, or the parameters in another order?"
            )
        mask = state.get("mask")
        if (mask is None) != (present is None) or (
            mask is not None and present is not None and not torch.equal(mask.cpu(), present.cpu())
        ):
            raise ValueError(f"the state was saved with another mask of {name}; build the optimizer with that one")

    def _follow_schedule(self, damping: float) -> None:
        # An equal value must cost nothing: another one costs a Cholesky.
        if damping != self.operator.damping:
            self.operator.damping = damping

    def _multiply(self, row: Tensor) -> Tensor | None:
        try:
            if self.calls % self.update_every == 0:
                return self.operator.update_and_apply(row)
            if not bool(row.norm().isfinite()):
                raise NonFiniteGradientError("the gradient is not finite; nothing has changed: skip this step")
            return self.operator @ row
        except NonFiniteGradientError:
            if self.nonfinite == "raise":
                raise
            return None


def row_dtype(layout: ParameterLayout) -> torch.dtype:
    """What rows are computed in: float32, or float64 where a parameter has it."""
    return torch.promote_types(layout.dtype, torch.float32)


def effective_rank(gram: Tensor) -> float:
    """The exponential of the entropy of G's normalised squared singular values: n equal directions count as n."""
    if len(gram) == 0:
        return 0.0
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    shares = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    return float(torch.special.entr(shares).sum().exp())


def name_parameters(groups: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """{name: parameter} over all groups: the names that torch.optim was given, or the place in the order."""
    named: dict[str, Tensor] = {}
    for group in groups:
        names = group.get("param_names", [None] * len(group["params"]))
        for name, tensor in zip(names, group["params"], strict=True):
            named[f"parameter {len(named)}" if name is None else name] = tensor
    return named


def name_masks(masks: Mapping[Any, Tensor] | None, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks by name, whether they were given by name or by parameter.

    Raises:
        ValueError: a key is no parameter of the optimizer.
    """
    names = {tensor: name for name, tensor in named.items()}
    found = {}
    for key, mask in (masks or {}).items():
        name = key if isinstance(key, str) else names.get(key, "")
        if name not in named:
            label = repr(key) if isinstance(key, str) else f"a tensor of shape {tuple(key.shape)}"
            known = "give the optimizer model.named_parameters() to use names"
            known = known if all(n.startswith("parameter ") for n in named) else f"it has {', '.join(list(named)[:5])}"
            raise ValueError(f"masks: {label} is not a parameter of the optimizer; {known}")
        found[name] = mask
    return found


def _check_parameter(name: str, tensor: Tensor, mask: Tensor | None) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype}; only real floating-point parameters can be trained")
    if mask is None:
        return
    left = int(tensor.detach()[~mask.to(tensor.device)].count_nonzero())
    if left:
        raise ValueError(
            f"{name} has {left} weights that are not zero where its mask is False (pruned); multiply it by its mask "
            "first: pruned weights are kept at zero, and these would be frozen where they are"
        )


def _check_options(update_every: int, nonfinite: str) -> None:
    if not isinstance(update_every, int) or isinstance(update_every, bool) or update_every < 1:
        raise ValueError(f"update_every must be a positive int, not {update_every!r}")
    if nonfinite not in ("raise", "skip"):
        raise ValueError(f"nonfinite must be 'raise' or 'skip', not {nonfinite!r}")
