"""A sliding window over the gradients of parameters: gradients in, F⁻¹ times the last one out, tensor by tensor."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mfac.columns import Columns, columns_of, like, local, parameter_ranks
from mfac.dynamic import DynamicInverseFisher, NonFiniteGradientError, Normalize
from mfac.layout import ParameterLayout
from mfac.memory import check_count
from mfac.parameter_groups import Groups, name_masks, name_parameters
from mfac.precision import EPS64, PRODUCT_TOLERANCE, Precision
from mfac.saved import count_of, reading
from mfac.windows.rows import ChosenColumns, SavedRows
from mfac.windows.storage import Window, saved_rows

Damping = float | Callable[[int], float] | Literal["auto"]
Combination = Callable[[Tensor, Tensor, float], Tensor]
NonFinite = Literal["raise", "skip"]
AUTO_DAMPING = 0.1  # of the window's mean eigenvalue
AUTO_RANGE = 1.5  # by which λ may be off before it is set anew, which costs a Cholesky factorisation
COUNTS = ("calls", "skipped", "raised")
States = Mapping[Tensor, Mapping[str, Any]]


class ParameterWindow:
    """The layout of parameters in a row, and the operator over the rows of their last m gradients.

    Arguments are those of `MFAC`; `agreed` is what else must be the same on all ranks. With several ranks all of them
    must call every method except `state`.
    """

    def __init__(
        self, groups: Groups, num_grads: int, damping: Damping, normalize: Normalize, window: Window | None,
        masks: Mapping[Any, Tensor] | None, update_every: int, nonfinite: NonFinite, precision: Precision,
        device: torch.device | str | None, process_group: ProcessGroup | None,
        devices: Sequence[torch.device | str] | None, agreed: Mapping[str, object] | None = None,
    ):  # fmt: skip
        named, found = trainable(groups, masks)
        first = damping(0) if callable(damping) else 1.0 if damping == "auto" else damping
        self.ranks = parameter_ranks(named, process_group)
        if self.ranks.size > 1:
            from mfac.distributed.groups import describe

            schedule = first if callable(damping) else damping == "auto"
            options = {"update_every": update_every, "nonfinite": nonfinite, "schedule": schedule, **(agreed or {})}
            self.ranks.agree_on({"the options of the window": options, **describe(named, found)})
        check_count("update_every", update_every)
        if nonfinite not in ("raise", "skip"):
            raise ValueError(f"nonfinite must be 'raise' or 'skip', not {nonfinite!r}")
        # The name of this rank's own part of a state; None where there is only one.
        self._key = None if self.ranks.size == 1 else f"rank {self.ranks.rank} of {self.ranks.size}"
        self.masks = found
        self.columns = self._lay(named)
        self.schedule: Callable[[int], float] | str | None = damping if callable(damping) or damping == "auto" else None
        self.operator = DynamicInverseFisher(
            num_grads, self.columns.dim, first, dtype=row_dtype(self.columns.layout),
            device=self.columns.layout.device if device is None and devices is None else device,
            normalize=normalize, window=window, precision=precision, process_group=self.ranks.group, devices=devices,
        )  # fmt: skip
        self.update_every, self.nonfinite = update_every, nonfinite
        self.calls = self.skipped = self.raised = 0
        self._sums = torch.full((3,), torch.nan)  # g·g, s·s and g·s of the last gradient and its step

    def cover(self, named: Mapping[str, Tensor]) -> None:
        """Adds parameters, whose past gradients are taken as zero; on an error nothing has changed."""
        wider = self._lay({**self.columns.named, **named})
        if wider.dim > self.operator.shape[0]:  # a rank may have no piece of them
            self.operator.widen(wider.dim - self.operator.shape[0])
        self.columns = wider

    @torch.no_grad()
    def precondition(
        self, gradients: Mapping[Tensor, Tensor], combination: Combination | None = None, average: float = 0.0
    ) -> dict[Tensor, Tensor] | None:
        """{parameter: its part of F⁻¹g}, after g has entered the window (if it is its turn); None if g was skipped.

        With an `average` it is the part of F⁻¹ḡ, ḡ the average of the window. A parameter without a gradient is zero in
        the row, and not in the result. `combination(K, ages, damping)` returns the coefficients c [n] of the step Gᵀc,
        instead of those of F⁻¹g, from K = GGᵀ and the ages of the n rows, the newest of which has age 0; all on the
        CPU, in float64.
        """
        row = torch.empty(self.columns.dim, dtype=self.operator.dtype, device=self.operator.device)
        self.columns.flatten([gradients.get(tensor) for tensor in self.columns.tensors], out=row)
        try:
            step = self._multiply(row, combination, average)
        except (NonFiniteGradientError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
            if self.nonfinite == "raise":
                raise
            self.skipped += 1
            return None
        self.calls += 1
        parts, self._sums = self.columns.finish(step, inner_products(row, step))
        pairs = zip(self.columns.tensors, parts, strict=True)
        return {tensor: part.to(tensor.device) for tensor, part in pairs if tensor in gradients}

    def _multiply(self, row: Tensor, combination: Combination | None, average: float) -> Tensor:
        damping = self._next_damping(row)
        changes, enters = damping != self.operator.damping, self.calls % self.update_every == 0
        if (changes or not enters) and not math.isfinite(self._square(row)):  # else the operator checks it
            raise NonFiniteGradientError("the gradient is not finite; nothing has changed: skip this step")
        if changes:
            self.operator.set_damping(damping)
        if combination is not None:
            self.operator.update(row)
            K = self.operator.gram.cpu()
            places = torch.arange(len(K), dtype=K.dtype, device=K.device)
            ages = (self.operator._updates - 1 - places) % self.operator.num_grads
            return self.operator.combine(combination(K, ages, self.operator.damping).to(row.device))
        multiply = partial(self.operator.update_and_apply, average=average) if enters else self.operator.__matmul__
        try:
            return multiply(row)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return self._multiply_damped(row, multiply)

    def _next_damping(self, row: Tensor) -> float:
        if self.schedule is None:
            return self.operator.damping
        if callable(self.schedule):
            return self.schedule(self.calls)
        mean = fmean((*self.operator.gram.diagonal().tolist(), self._square(row)))
        wanted = AUTO_DAMPING * mean / self.operator._divisor(max(self.operator.num_seen, 1))
        known = self.calls > 0 and 1 / AUTO_RANGE < wanted / self.operator.damping < AUTO_RANGE
        least = 2 / torch.finfo(self.operator.dtype).max  # answers grow to 1/λ
        return self.operator.damping if known or not 0 < wanted < math.inf else max(wanted, least)

    def _multiply_damped(self, row: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        """F⁻¹g with as much more damping, for this step alone, as float64 needs: a finite gradient ends no run."""
        asked, step = self.operator.damping, None
        largest = max(self._square(row), *self.operator.gram.diagonal().tolist())
        damping = max(asked, 0.01 * EPS64 / PRODUCT_TOLERANCE * largest)
        try:
            while step is None:
                damping *= 10
                self.operator.set_damping(damping)
                with suppress(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
                    step = multiply(row)
        finally:
            self.operator.set_damping(asked)
        if not self.raised:
            warnings.warn(
                f"damping={asked:g} is too small for gradients of norm {math.sqrt(largest):.3g} that repeat one "
                f"another, even in float64; this step took {damping:.3g}, and others will take what they need, counted "
                "by diagnostics()['raised']; raise the damping, or scale the loss down",
                stacklevel=6,
            )
        self.raised += 1
        return step

    def _square(self, row: Tensor) -> float:
        """‖g‖² over all ranks."""
        return float(self.ranks.sum_(torch.linalg.vector_norm(row, dtype=torch.float64).square()))

    def diagnostics(self) -> dict[str, float]:
        squares = self.columns.total(self._sums).tolist()
        gradient, step = math.sqrt(squares[0]), math.sqrt(squares[1])
        return {
            "gradient_norm": gradient,
            "step_norm": step,
            # Never negative for F⁻¹g; with compressed rows the step is F⁻¹ of the stored row, not of g.
            "cosine": min(squares[2] / (gradient * step), 1.0) if gradient * step else math.nan,
            "effective_rank": effective_rank(self.operator.gram),
            "num_seen": float(self.operator.num_seen),
            "damping": self.operator.damping,
            "skipped": float(self.skipped),
            "raised": float(self.raised),
            "compiled": float(self.operator.compiled),
        }

    def state(self) -> tuple[dict[str, Any], dict[Tensor, dict[str, Any]]]:
        """The state that belongs to no single parameter, and {parameter: its part of the window, its "mask" if any}.

        The part is its "rows", [m, *shape] or [m, kept weights], in the window's own memory. Compressed rows belong to
        no parameter: its part is then its "columns" (start and stop) and its "shape".
        """
        shared, states = self.operator.state_dict() | {name: getattr(self, name) for name in COUNTS}, {}
        del shared["dim"]
        rows = shared.pop("rows")
        for number, (name, tensor) in enumerate(self.columns.named.items()):
            span = self.columns.spans[number]
            if isinstance(rows, Tensor):
                part = {"rows": self.columns.to_state(number, rows[:, span])}
            else:
                shared["rows"] = self._own(rows)
                part = {"columns": self._own(torch.tensor([span.start, span.stop], device="cpu"))}
                part["shape"] = torch.tensor(tensor.shape, device="cpu")
            states[tensor] = part | ({"mask": self.masks[name]} if name in self.masks else {})
        return shared, states

    def _own(self, value: Any) -> Any:
        """Under this rank's name: else a checkpoint would take it to be the same on every rank."""
        return value if self._key is None else {self._key: value}

    @torch.no_grad()
    def load_state(self, shared: Mapping[str, Any], states: States, named: Mapping[str, Tensor]) -> None:
        """Loads what `state` returned; parameters that have no rows in it get zeros.

        `named` are all parameters, which need not be in the window yet. On an error nothing has changed.
        """
        with self.ranks.together("loading the window"), reading("the state of the window"):
            counts = {name: count_of(shared, name) for name in COUNTS}
            for name, tensor in named.items():
                if tensor in states:
                    self._check_state(name, tensor, states[tensor])
        before = self.columns, self.masks.copy(), vars(self.operator).copy()
        try:
            if not states.keys() <= self.columns.covered:
                self.cover({name: tensor for name, tensor in named.items() if tensor in states})
            with self.ranks.together("loading the window"), reading("the state of the window"):
                rows = self._compressed(shared["rows"], states) if "rows" in shared else self._pieces(states)
            self.operator.load_state_dict({**shared, "dim": self.columns.dim, "rows": rows})
        except BaseException:
            self.columns, self.masks = before[:2]
            vars(self.operator).update(before[2])
            raise
        self.calls, self.skipped, self.raised = counts.values()

    def _pieces(self, states: States) -> list[Tensor]:
        parts = self._in_row(states, self.columns.of_state)
        zero = next(part for part in parts if isinstance(part, Tensor)).new_zeros(self.operator.num_grads, 1)
        pieces = [zero.expand(-1, part) if isinstance(part, int) else part for part in parts]
        return [piece for piece in pieces if piece.shape[1]]

    def _compressed(self, rows: Mapping[str, Any], states: States) -> SavedRows:
        """The saved rows of this rank, or this rank's columns of those that one process saved."""
        key = self._key if self._key in rows else None
        if key is None and "kind" not in rows:
            raise ValueError(
                f"the saved rows are compressed for {', '.join(rows)} and cannot be resharded; load them on as many "
                "ranks, or save a window of torch.bfloat16"
            )

        def saved_columns(number: int, state: Mapping[str, Any]) -> tuple[int, int]:
            if key is not None:
                return tuple(state["columns"][key].tolist())
            first, (start, stop) = int(state["columns"][0]), self.columns.place(number)
            return first + start, first + stop

        saved = saved_rows(dict(rows) if key is None else rows[key])
        spans = self._in_row(states, saved_columns)
        unchanged = [(span.start, span.stop) for span in self.columns.spans]
        same = key == self._key and [span for span in spans if not isinstance(span, int)] == unchanged
        return saved if same else ChosenColumns(saved, spans)

    def _in_row(self, states: States, part_of: Callable[[int, Mapping[str, Any]], Any]) -> list[Any]:
        """The parts of all parameters in the order of the row; an int is a number of zero columns."""
        parts, stop = list[Any](), 0
        for number, (tensor, span) in enumerate(zip(self.columns.tensors, self.columns.spans, strict=True)):
            parts.append(span.start - stop)
            parts.append(part_of(number, states[tensor]) if tensor in states else span.stop - span.start)
            stop = span.stop
        return [*parts, self.columns.dim - stop]

    def _lay(self, named: Mapping[str, Tensor]) -> Columns:
        with self.ranks.together("the layout of the window"):
            columns = columns_of(named, self.masks, self.ranks)
            for name, tensor in named.items():
                _check_parameter(name, local(tensor), local(columns.masks[name]) if name in columns.masks else None)
        columns.meet()
        self.masks |= columns.masks
        return columns

    def _check_state(self, name: str, tensor: Tensor, state: Mapping[str, Any]) -> None:
        saved, present = state.get("mask"), self.masks.get(name)
        rows = state["rows"].shape[1:] if "rows" in state else state["shape"].tolist()
        shape = list(rows if saved is None else saved.shape)
        if shape != (list(tensor.shape) or [1] * len(shape)):
            raise ValueError(
                f"the state has gradients of shape {shape} for {name}, which is {list(tensor.shape)} here; was it "
                "saved with another model, or with the parameters in another order?"
            )
        masks = [local(like(name, mask, tensor, torch.bool)) for mask in (saved, present) if mask is not None]
        if len(masks) == 1 or (masks and not torch.equal(*masks)):
            which = "no" if saved is None else "another"
            raise ValueError(f"a state saved with {which} mask of {name}; build the optimizer with the same masks")


class Windowed:
    """What users ask of the window of an optimizer or a preconditioner."""

    # Not assigned here: Lightning's wrapper of an optimizer is a subclass, and passes on what its class does not have.
    _window: ParameterWindow
    _relative = False  # whether the damping is a fraction, of the mean eigenvalue, by itself

    @property
    def damping(self) -> float:
        """λ; assign a number, which costs the next step a Cholesky factorisation, a function of steps, or "auto"."""
        return self._window.operator.damping

    @damping.setter
    def damping(self, damping: Damping) -> None:
        self._check_relative(damping)
        if callable(damping) or damping == "auto":
            self._window.schedule = damping
        else:
            self._window.operator.set_damping(damping)
            self._window.schedule = None

    def _check_relative(self, damping: Damping) -> None:
        if self._relative and isinstance(damping, str):
            raise ValueError(
                f"damping must be a number or a function of the steps, not {damping!r}: it is relative here"
            )

    @property
    def skipped(self) -> int:
        """The number of gradients that were skipped because they were not finite."""
        return self._window.skipped


def trainable(groups: Groups, masks: Mapping[Any, Tensor] | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trainable parameters of groups, by name, and the masks of all parameters."""
    named = name_parameters(groups)
    found = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
    if not found:
        raise ValueError("none of the parameters is trainable; call requires_grad_(True) on those you want to train")
    return found, name_masks(masks, named)


def row_dtype(layout: ParameterLayout) -> torch.dtype:
    """The dtype of rows: float32, or float64 where a parameter has it."""
    return torch.promote_types(layout.dtype, torch.float32)


def inner_products(g: Tensor, s: Tensor) -> Tensor:
    """g·g, s·s and g·s in float64: the squares of numbers that float32 can hold may be beyond it."""
    norms = torch.stack(torch._foreach_norm((g, s), dtype=torch.float64))
    length = norms[0].clamp_min(torch.finfo(g.dtype).tiny)
    return torch.cat((norms.square(), ((g / length) @ s * length)[None]))


def effective_rank(gram: Tensor) -> float:
    """The exponential of the entropy of G's normalised squared singular values: n equal directions count as n."""
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    return float(torch.special.entr(values / values.sum()).sum().exp()) if values.any() else 0.0


def _check_parameter(name: str, tensor: Tensor, mask: Tensor | None) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{name} is {tensor.dtype}; only real floating-point parameters can be trained")
    left = 0 if mask is None else int(tensor.detach()[~mask.to(tensor.device)].count_nonzero())
    if left:
        raise ValueError(f"{name} has {left} weights that are not zero where its mask is False; multiply by the mask")
