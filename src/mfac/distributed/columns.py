"""The columns of a window that one process holds, and what passes between them and the parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor

from mfac.distributed.groups import Ranks
from mfac.layout import ParameterLayout

Figures = Float[Tensor, "3"]  # the norm of the gradient, that of the step, and their product


class Columns(Protocol):
    """The columns of this process, and what passes between them and the parameters."""

    @property
    def ranks(self) -> Ranks:
        """Who holds the others."""

    @property
    def layout(self) -> ParameterLayout:
        """Of the parameters as this process sees them: their pieces, where they are DTensors."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parameters."""

    @property
    def spans(self) -> tuple[slice, ...]:
        """Where the columns of each parameter lie in a row of this process."""

    @property
    def dim(self) -> int:
        """How many columns a row of this process has; at least one."""

    def meet(self) -> None:
        """Learns what it has to know of the other ranks, which do the same."""

    def place(self, number: int) -> tuple[int, int]:
        """From which to which of a parameter's columns, counted over all ranks, are here."""

    def flatten(self, values: Sequence[Tensor | None], out: Float[Tensor, " d"]) -> None:
        """Writes this process's columns of one value a parameter into `out`; None is zero."""

    def finish(self, step: Float[Tensor, " d"], figures: Figures) -> tuple[list[Tensor], Figures]:
        """By what each parameter moves, from the step in these columns, and the figures as far as they are known."""

    def total(self, figures: Figures) -> Figures:
        """The figures over all ranks."""

    def length(self, norm: Tensor) -> Tensor:
        """The norm of a whole step from that of the parts that `finish` gave."""

    def to_state(self, number: int, rows: Float[Tensor, "m n"]) -> Tensor:
        """Columns of a parameter, as a state has them: [m, *shape], or [m, kept weights]."""

    def of_state(self, number: int, state: Mapping[str, Any]) -> Float[Tensor, "m n"]:
        """This process's columns of a parameter, from its saved state."""


def saved_shape(layout: ParameterLayout, number: int) -> tuple[int, ...]:
    """The shape of a parameter's columns in a state: its own, or that of its kept weights; never none."""
    if layout.kept[number] is not None:
        return (layout.sizes[number],)
    return tuple(layout.tensors[number].shape) or (1,)
