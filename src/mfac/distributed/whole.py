"""All columns in one process."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from mfac.distributed.columns import Figures, saved_shape
from mfac.distributed.groups import Ranks
from mfac.distributed.placements import uncut
from mfac.layout import ParameterLayout


class WholeColumns:
    """All columns, in this process."""

    def __init__(self, named: Mapping[str, Tensor], masks: Mapping[str, Tensor]):
        self.ranks = Ranks()
        self.layout = ParameterLayout.of_tensors(named, masks)
        self.tensors = self.layout.tensors
        self.spans = self.layout.slots
        self.dim = self.layout.dim

    def meet(self) -> None:
        """There are none."""

    def place(self, number: int) -> tuple[int, int]:
        """All."""
        return 0, self.layout.sizes[number]

    def flatten(self, values: Sequence[Tensor | None], out: Float[Tensor, " d"]) -> None:
        """The row."""
        self.layout.flatten(values, out=out)

    def finish(self, step: Float[Tensor, " d"], figures: Figures) -> tuple[list[Tensor], Figures]:
        """Views of the step."""
        return list(self.layout.unflatten(step).values()), figures

    def total(self, figures: Figures) -> Figures:
        """They are."""
        return figures

    def length(self, norm: Tensor) -> Tensor:
        """It is."""
        return norm

    def to_state(self, number: int, rows: Float[Tensor, "m n"]) -> Tensor:
        """A view."""
        return rows.view(len(rows), *saved_shape(self.layout, number))

    def of_state(self, number: int, state: Mapping[str, Any]) -> Float[Tensor, "m n"]:
        """As it was saved."""
        return uncut(self.layout.names[number], state["rows"]).flatten(1)
