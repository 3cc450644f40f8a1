"""A sliding window over the gradients of parameters: gradients in, F⁻¹ times them out, tensor by tensor."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from mfac.dynamic import DynamicInverseFisher, NonFiniteGradientError, Normalize
from mfac.layout import ParameterLayout
from mfac.precision import Precision
from mfac.windows import ChosenColumns, SavedRows, Window, saved_rows

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
        window: Window | None = None,
        precision: Precision = "auto",
        device: torch.device | str | None = None,
        update_every: int = 1,
        nonfinite: NonFinite = "raise",
    ):
        _check_options(update_every, nonfinite)
        self.masks = {name: mask.detach().clone() for name, mask in masks.items()}  # theirs may change later
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

    def assign_damping(self, damping: Damping) -> None:
        """Another λ, in the place of any schedule; or another schedule, from the next step on.

        Raises:
            ValueError: λ is not positive. Nothing has changed.
        """
        if callable(damping):
            self.schedule = damping
        else:
            self.operator.damping, self.schedule = damping, None

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
        row = torch.empty(self.layout.dim, dtype=self.operator.dtype, device=self.operator.device)
        self.layout.flatten([gradients.get(tensor) for tensor in self.layout.tensors], out=row)
        if self.schedule is not None:
            self._follow_schedule(self.schedule(self.calls), row)
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
            # Of F⁻¹g never below 0; a step of rows that are compressed is F⁻¹ of something else than g.
            "cosine": min(1.0, product / lengths) if lengths else float("nan"),
            "effective_rank": effective_rank(self.operator.gram),
            "num_seen": float(self.operator.num_seen),
            "damping": self.operator.damping,
            "skipped": float(self.skipped),
        }

    def shared_state(self) -> dict[str, Any]:
        """The state that belongs to no single parameter; rows too, where they are no matrix that could be cut."""
        state = self.operator.state_dict()
        del state["dim"]
        if isinstance(state["rows"], Tensor):
            del state["rows"]
        return {**state, "calls": self.calls, "skipped": self.skipped}

    def parameter_states(self) -> dict[Tensor, dict[str, Tensor]]:
        """{parameter: its part of the window, and its "mask"}.

        Its part is its "rows", [m, *shape] or [m, kept weights], in the window's own memory; or, where rows are
        compressed, its "columns", from and to, and its "shape".
        """
        rows, states, start = self.operator.state_dict()["rows"], {}, 0
        for name, tensor, size in zip(self.layout.names, self.layout.tensors, self.layout.sizes, strict=True):
            mask, stop = self.masks.get(name), start + size
            if isinstance(rows, Tensor):
                part = {
                    "rows": rows[:, start:stop] if mask is not None else rows[:, start:stop].view(-1, *tensor.shape)
                }
            else:
                part = {"columns": torch.tensor([start, stop]), "shape": torch.tensor(tensor.shape)}
            states[tensor] = part if mask is None else {**part, "mask": mask}
            start = stop
        return states

    def load_state(
        self, shared: Mapping[str, Any], states: Mapping[Tensor, Mapping[str, Tensor]], named: Mapping[str, Tensor]
    ) -> None:
        """Takes over a saved state; parameters that it has no rows of get zeros.

        Args:
            shared: what `shared_state` gave.
            states: what `parameter_states` gave.
            named: the names of these parameters, which need not be in the window yet.

        Raises:
            ValueError: it is the state of another window, which has not changed this one.
        """
        for name, tensor in named.items():
            if tensor in states:
                self._check_state(name, tensor, states[tensor])
        if not states.keys() <= self._covered:
            self.cover({name: tensor for name, tensor in named.items() if tensor in states})
        rows = self._compressed(shared["rows"], states) if "rows" in shared else self._pieces(shared, states)
        operator_state = {key: value for key, value in shared.items() if key not in ("calls", "skipped")}
        self.operator.load_state_dict({**operator_state, "dim": self.layout.dim, "rows": rows})
        self.calls, self.skipped = int(shared["calls"]), int(shared["skipped"])

    def _pieces(self, shared: Mapping[str, Any], states: Mapping[Tensor, Mapping[str, Tensor]]) -> list[Tensor]:
        """The saved rows of every parameter, in the order of the layout."""
        dtype = next(iter(states.values()))["rows"].dtype
        pieces = []
        for tensor, size in zip(self.layout.tensors, self.layout.sizes, strict=True):
            nothing = torch.zeros(1, 1, dtype=dtype).expand(int(shared["num_grads"]), size)
            pieces.append(states[tensor]["rows"].flatten(1) if tensor in states else nothing)
        return pieces

    def _compressed(self, rows: dict[str, Any], states: Mapping[Tensor, Mapping[str, Tensor]]) -> SavedRows:
        """The saved rows; as they are where their columns are those of the layout."""
        saved, spans = saved_rows(rows), []
        for tensor, size in zip(self.layout.tensors, self.layout.sizes, strict=True):
            spans.append(tuple(states[tensor]["columns"].tolist()) if tensor in states else size)
        ends = itertools.accumulate(self.layout.sizes)
        alike = [(stop - size, stop) for stop, size in zip(ends, self.layout.sizes, strict=True)]
        return saved if spans == alike else ChosenColumns(saved, spans)

    def _lay(self, named: Mapping[str, Tensor]) -> ParameterLayout:
        masks = {name: mask for name, mask in self.masks.items() if name in named}
        layout = ParameterLayout.of_tensors(named, masks)
        for name, tensor in named.items():
            _check_parameter(name, tensor, masks.get(name))
        return layout

    def _check_state(self, name: str, tensor: Tensor, state: Mapping[str, Tensor]) -> None:
        saved, present = state.get("mask"), self.masks.get(name)
        if "columns" in state:
            shape = state["shape"].tolist()
        else:
            shape = list(state["rows"].shape[1:] if saved is None else saved.shape)
        if shape != list(tensor.shape):
            raise ValueError(
                f"the state has gradients of shape {shape} for {name}, which is {list(tensor.shape)} here; was it "
                "saved with another model, or the parameters in another order?"
            )
        if (saved is None) != (present is None):
            with_or_without = "without a mask" if saved is None else "with a mask"
            raise ValueError(f"the state was saved {with_or_without} of {name}; build the optimizer that way")
        if saved is not None and present is not None and not torch.equal(saved.cpu(), present.cpu()):
            raise ValueError(f"the state was saved with another mask of {name}; build the optimizer with that one")

    def _follow_schedule(self, damping: float, row: Tensor) -> None:
        # An equal value must cost nothing: another one costs a Cholesky. For a row that will be refused it must wait.
        if damping != self.operator.damping and _is_finite(row):
            self.operator.damping = damping

    def _multiply(self, row: Tensor) -> Tensor | None:
        try:
            if self.calls % self.update_every == 0:
                return self.operator.update_and_apply(row)
            if not _is_finite(row):
                raise NonFiniteGradientError("the gradient is not finite; nothing has changed: skip this step")
            return self.operator @ row
        except NonFiniteGradientError:
            if self.nonfinite == "raise":
                raise
            return None


def _is_finite(row: Tensor) -> bool:
    return bool(torch.linalg.vector_norm(row, dtype=torch.float64).isfinite())


def row_dtype(layout: ParameterLayout) -> torch.dtype:
    """What rows are computed in: float32, or float64 where a parameter has it."""
    return torch.promote_types(layout.dtype, torch.float32)


def effective_rank(gram: Tensor) -> float:
    """The exponential of the entropy of G's normalised squared singular values: n equal directions count as n."""
    if len(gram) == 0:
        return 0.0
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    if not values.any():
        return 0.0
    return float(torch.special.entr(values / values.sum()).sum().exp())


class _Listed(Optimizer):
    """Parameters as torch sorts any form of them into groups."""


def group_parameters(params: ParamsT, **defaults: Any) -> list[dict[str, Any]]:
    """The groups that an optimizer of torch would make of `params`, which are tensors, named tensors or groups."""
    return _Listed(params, defaults).param_groups


def name_parameters(groups: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """{name: parameter} over all groups: the names that torch.optim was given, or the place in the order.

    Raises:
        ValueError: two parameters have the same name.
    """
    names: dict[Tensor, str] = {}
    for group in groups:
        for i, tensor in enumerate(group["params"]):  # torch only warns of one that is there twice
            names.setdefault(tensor, group["param_names"][i] if "param_names" in group else f"parameter {len(names)}")
    named = {name: tensor for tensor, name in names.items()}
    for tensor, name in names.items():
        if named[name] is not tensor:
            raise ValueError(f"two parameters are called {name!r}; give them different names, or none")
    return named


def name_masks(masks: Mapping[Any, Tensor] | None, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks by name, whether they were given by name or by parameter.

    Raises:
        ValueError: a key is no parameter of the optimizer, or a mask no tensor.
    """
    if masks is not None and not isinstance(masks, Mapping):
        raise ValueError(f"masks must be {{parameter or name: bool tensor}}, not {type(masks).__name__}")
    names = {tensor: name for name, tensor in named.items()}
    found = {}
    for key, mask in (masks or {}).items():
        name = names.get(key, "") if isinstance(key, Tensor) else key
        if name not in named:
            label = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            known = "give the optimizer model.named_parameters() to use names"
            known = known if all(n.startswith("parameter ") for n in named) else f"it has {', '.join(list(named)[:5])}"
            raise ValueError(f"masks: {label} is not a parameter of the optimizer; {known}")
        if not isinstance(mask, Tensor):
            raise ValueError(f"masks: {name!r} needs a bool tensor (True = kept), not {type(mask).__name__}")
        found[name] = mask
    return found


def read_state(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], dict[Tensor, dict[str, Any]]]:
    """What `shared_state` gave, and {parameter: its entry}, of the saved state of an optimizer with these groups.

    Raises:
        ValueError: there is no window in it, or the groups are not those.
    """
    saved, state = state_dict.get("param_groups", ()), state_dict.get("state", {})
    entries = {i: _entry(state, i) for group in saved for i in group["params"]}
    windows = [entry["window"] for entry in entries.values() if "window" in entry]
    if len(windows) != 1:
        raise ValueError(
            "this is not a state of MFAC: it has no window of gradients; was it saved by another optimizer?"
        )
    _check_groups(saved, groups)
    places = zip((i for group in saved for i in group["params"]), (t for g in groups for t in g["params"]), strict=True)
    return windows[0], {tensor: entries[i] for i, tensor in places if entries[i]}


def _entry(state: Mapping[Any, Any], place: Any) -> dict[str, Any]:
    """What a state has for one parameter."""
    entry, rest = state.get(place, {}), state.get(str(place), {})
    # torch.distributed.checkpoint gives back what is no tensor under str(place), and leaves the old value where it was.
    return _merged(entry, rest)


def _merged(some: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second one's where it is in both, and dicts entry by entry."""
    both = {**some, **others}
    for key in some.keys() & others.keys():
        if isinstance(some[key], Mapping) and isinstance(others[key], Mapping):
            both[key] = _merged(some[key], others[key])
    return both


def _check_groups(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses a state whose groups of parameters are not those of the optimizer, as far as sizes and names tell."""
    there, here = ([len(group["params"]) for group in each] for each in (saved, groups))
    if there != here:
        raise ValueError(
            f"the state was saved with groups of {there} parameters, and this optimizer has groups of {here}; build it "
            "with the same parameters in the same groups"
        )
    for theirs, ours in zip(saved, groups, strict=True):
        for name, present in zip(theirs.get("param_names", ()), ours.get("param_names", ()), strict=False):
            if name != present:
                raise ValueError(
                    f"the state was saved with {name!r} where this optimizer has {present!r}; give the parameters in "
                    "the order in which they were when it was saved"
                )


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
