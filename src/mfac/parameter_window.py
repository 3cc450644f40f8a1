"""A sliding window over the gradients of parameters: gradients in, F⁻¹ times them out, tensor by tensor."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mfac.columns import Columns, columns_of, is_placed, like, local, parameter_ranks
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
        process_group: over whose ranks the columns are cut. Parameters that are DTensors bring their own.
        devices: of this process, over which its columns are cut; then there is no `device`.
        agreed: what else must be the same on all ranks.

    With several ranks every method is called on all of them, but `parameter_states` and `shared_state`.
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
        process_group: ProcessGroup | None = None,
        devices: Sequence[torch.device | str] | None = None,
        agreed: Mapping[str, object] | None = None,
    ):
        first = damping(0) if callable(damping) else damping
        schedule = first if callable(damping) else None
        options = {"update_every": update_every, "nonfinite": nonfinite, "schedule": schedule, **(agreed or {})}
        ranks = parameter_ranks(named, process_group)
        if ranks.size > 1:
            from mfac.distributed.groups import describe

            ranks.agree_on({"the options of the window": options, **describe(named, masks)})
        _check_options(update_every, nonfinite)
        self._group = process_group
        self.masks = {name: mask.detach().clone() for name, mask in masks.items()}  # theirs may change later
        self.columns = self._lay(named)
        self._covered = set(self.columns.tensors)
        self.schedule = damping if callable(damping) else None
        if device is None and devices is None:
            device = self.columns.layout.device
        self.operator = DynamicInverseFisher(
            num_grads,
            self.columns.dim,
            first,
            dtype=row_dtype(self.columns.layout),
            device=device,
            normalize=normalize,
            window=window,
            precision=precision,
            process_group=self.columns.ranks.group,
            devices=devices,
        )
        self.update_every = update_every
        self.nonfinite = nonfinite
        self.calls = 0
        self.skipped = 0
        self._sums = torch.full((3,), torch.nan)  # g·g, s·s and g·s of the last gradient and its step

    @property
    def named(self) -> dict[str, Tensor]:
        """The parameters, in the order of the row."""
        return dict(zip(self.columns.layout.names, self.columns.tensors, strict=True))

    @property
    def _key(self) -> str | None:
        """What this rank's own part of a state is called; None where there is only one."""
        ranks = self.columns.ranks
        return None if ranks.size == 1 else f"rank {ranks.rank} of {ranks.size}"

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
        wider = self._lay({**self.named, **named})
        if wider.dim > self.columns.dim:  # a rank may have no piece of them
            self.operator.widen(wider.dim - self.columns.dim)
        self.columns, self._covered = wider, set(wider.tensors)

    @torch.no_grad()
    def precondition(self, gradients: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor] | None:
        """{parameter: its part of F⁻¹g}, after g has entered the window (if it is its turn); None if g was skipped.

        A parameter without a gradient is a zero in the row, and has no part in the result.

        Raises:
            RuntimeError: the gradient is not finite, and `nonfinite` is "raise". Nothing has changed.
        """
        row = torch.empty(self.columns.dim, dtype=self.operator.dtype, device=self.operator.device)
        self.columns.flatten([gradients.get(tensor) for tensor in self.columns.tensors], out=row)
        if self.schedule is not None:
            self._follow_schedule(self.schedule(self.calls), row)
        step = self._multiply(row)
        if step is None:
            self.skipped += 1
            return None
        self.calls += 1
        sums = torch.stack((row @ row, step @ step, row @ step))
        parts, self._sums = self.columns.finish(step, sums)
        pairs = zip(self.columns.tensors, parts, strict=True)
        return {tensor: part.to(tensor.device) for tensor, part in pairs if tensor in gradients}

    def diagnostics(self) -> dict[str, float]:
        """Norms of the last gradient and of F⁻¹ times it, their cosine, and what the window holds."""
        squares = self.columns.total(self._sums).tolist()
        gradient, step = math.sqrt(squares[0]), math.sqrt(squares[1])
        lengths = gradient * step
        return {
            "gradient_norm": gradient,
            "step_norm": step,
            # Of F⁻¹g never below 0; a step of rows that are compressed is F⁻¹ of something else than g.
            "cosine": min(1.0, squares[2] / lengths) if lengths else float("nan"),
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
        elif self._key is not None:  # else a checkpoint would take it for the same on every rank
            state["rows"] = {self._key: state["rows"]}
        return {**state, "calls": self.calls, "skipped": self.skipped}

    def parameter_states(self) -> dict[Tensor, dict[str, Any]]:
        """{parameter: its part of the window, and its "mask"}.

        Its part is its "rows", [m, *shape] or [m, kept weights], in the window's own memory; or, where rows are
        compressed, its "columns", from and to, and its "shape".
        """
        rows, states, part = self.operator.state_dict()["rows"], {}, dict[str, Any]()
        for number, (name, tensor) in enumerate(self.named.items()):
            mask, span = self.masks.get(name), self.columns.spans[number]
            if isinstance(rows, Tensor):
                part = {"rows": self.columns.to_state(number, rows[:, span])}
            else:
                columns = torch.tensor([span.start, span.stop])
                part = {"columns": columns if self._key is None else {self._key: columns}}
                part["shape"] = torch.tensor(tensor.shape)
            states[tensor] = part if mask is None else {**part, "mask": mask}
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
        with self.columns.ranks.together("loading the window"):
            for name, tensor in named.items():
                if tensor in states:
                    self._check_state(name, tensor, states[tensor])
        if not states.keys() <= self._covered:
            self.cover({name: tensor for name, tensor in named.items() if tensor in states})
        with self.columns.ranks.together("loading the window"):
            rows = self._compressed(shared["rows"], states) if "rows" in shared else self._pieces(shared, states)
        operator_state = {key: value for key, value in shared.items() if key not in ("calls", "skipped")}
        self.operator.load_state_dict({**operator_state, "dim": self.columns.dim, "rows": rows})
        self.calls, self.skipped = int(shared["calls"]), int(shared["skipped"])

    def _pieces(self, shared: Mapping[str, Any], states: Mapping[Tensor, Mapping[str, Tensor]]) -> list[Tensor]:
        """The saved rows of every parameter, in the order of the row; zeros where there is nothing."""
        dtype, m = next(iter(states.values()))["rows"].dtype, int(shared["num_grads"])
        pieces, stop = [], 0
        for number, (tensor, span) in enumerate(zip(self.columns.tensors, self.columns.spans, strict=True)):
            pieces.append(torch.zeros(1, 1, dtype=dtype).expand(m, span.start - stop))
            nothing = torch.zeros(1, 1, dtype=dtype).expand(m, span.stop - span.start)
            pieces.append(self.columns.of_state(number, states[tensor]) if tensor in states else nothing)
            stop = span.stop
        pieces.append(torch.zeros(1, 1, dtype=dtype).expand(m, self.columns.dim - stop))
        return [piece for piece in pieces if piece.shape[1]]

    def _compressed(self, rows: Mapping[str, Any], states: Mapping[Tensor, Mapping[str, Any]]) -> SavedRows:
        """The saved rows, of this rank or of one process; as they are where their columns are those of here."""
        mine = self._key is not None and self._key in rows
        if not mine and "kind" not in rows:
            raise ValueError(
                f"the saved rows are compressed, and cut for {', '.join(rows)}, which cannot be cut anew; load them on "
                "as many ranks, or save a window of torch.bfloat16"
            )
        saved, spans, stop = saved_rows(rows[str(self._key)] if mine else dict(rows)), [], 0
        for number, (tensor, span) in enumerate(zip(self.columns.tensors, self.columns.spans, strict=True)):
            spans += [span.start - stop] if span.start > stop else []
            stop = span.stop
            if tensor not in states:
                spans.append(span.stop - span.start)
            elif mine:
                spans.append(tuple(states[tensor]["columns"][self._key].tolist()))
            else:
                first, (start, end) = int(states[tensor]["columns"][0]), self.columns.place(number)
                spans.append((first + start, first + end))
        spans += [self.columns.dim - stop] if self.columns.dim > stop else []
        alike = [(span.start, span.stop) for span in self.columns.spans]
        present = [span for span in spans if not isinstance(span, int)]
        return saved if present == alike and (mine or self._key is None) else ChosenColumns(saved, spans)

    def _lay(self, named: Mapping[str, Tensor]) -> Columns:
        masks = {name: mask for name, mask in self.masks.items() if name in named}
        with parameter_ranks(named, self._group).together("the layout of the window"):
            columns = self._checked_columns(named, masks)
        columns.meet()
        return columns

    def _checked_columns(self, named: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> Columns:
        columns = columns_of(named, masks, self._group)
        for name, tensor in named.items():
            if name in masks and is_placed(tensor):
                self.masks[name] = like(name, masks[name], tensor, torch.bool)
            _check_parameter(name, local(tensor), local(self.masks[name]) if name in masks else None)
        return columns

    def _check_state(self, name: str, tensor: Tensor, state: Mapping[str, Tensor]) -> None:
        saved, present = state.get("mask"), self.masks.get(name)
        if "columns" in state:
            shape = state["shape"].tolist()
        else:
            shape = list(state["rows"].shape[1:] if saved is None else saved.shape)
        if shape != (list(tensor.shape) or [1] * len(shape)):
            raise ValueError(
                f"the state has gradients of shape {shape} for {name}, which is {list(tensor.shape)} here; was it "
                "saved with another model, or the parameters in another order?"
            )
        if (saved is None) != (present is None):
            with_or_without = "without a mask" if saved is None else "with a mask"
            raise ValueError(f"the state was saved {with_or_without} of {name}; build the optimizer that way")
        if saved is None or present is None:
            return
        if not torch.equal(local(like(name, saved, tensor, torch.bool)).cpu(), local(present).cpu()):
            raise ValueError(f"the state was saved with another mask of {name}; build the optimizer with that one")

    def _follow_schedule(self, damping: float, row: Tensor) -> None:
        # An equal value must cost nothing: another one costs a Cholesky. For a row that will be refused it must wait.
        if damping != self.operator.damping and self._is_finite(row):
            self.operator.damping = damping

    def _multiply(self, row: Tensor) -> Tensor | None:
        try:
            if self.calls % self.update_every == 0:
                return self.operator.update_and_apply(row)
            if not self._is_finite(row):
                raise NonFiniteGradientError("the gradient is not finite; nothing has changed: skip this step")
            return self.operator @ row
        except NonFiniteGradientError:
            if self.nonfinite == "raise":
                raise
            return None

    def _is_finite(self, row: Tensor) -> bool:
        return bool(self.columns.ranks.sum_(torch.linalg.vector_norm(row, dtype=torch.float64)).isfinite())


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
