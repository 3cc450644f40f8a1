"""The result of pruning: masks, sparsity, and a record of every step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class StepRecord:
    """One recomputation.

    `loss_before` and `loss_after` are means over the same few batches, in eval mode; `predicted_increase` is ½ δᵀFδ of
    the quadratic model, None for methods without one; `gradient_seconds` is the part of `seconds` spent on gradients.
    """

    step: int
    removed: int
    sparsity: float
    loss_before: float
    loss_after: float
    predicted_increase: float | None
    damping: float | None
    seconds: float
    gradient_seconds: float

    @property
    def true_increase(self) -> float:
        return self.loss_after - self.loss_before


@dataclass
class PruningResult:
    """The masks {name: bool tensor, True = kept}, and the `history`: one record per recomputation.

    Counts and sparsities are those of the targets, `damping` is that of the last step, and `predicted_increase` the sum
    over the steps: None where the method predicts nothing.
    """

    masks: dict[str, Tensor]
    targets: tuple[str, ...]
    history: list[StepRecord] = field(default_factory=list)

    @property
    def num_weights(self) -> int:
        return sum(self.masks[name].numel() for name in self.targets)

    @property
    def num_removed(self) -> int:
        return self.num_weights - sum(int(self.masks[name].sum()) for name in self.targets)

    @property
    def sparsity(self) -> float:
        return self.num_removed / self.num_weights

    @property
    def layer_sparsity(self) -> Mapping[str, float]:
        return {name: 1 - float(self.masks[name].double().mean()) for name in self.targets}

    @property
    def predicted_increase(self) -> float | None:
        parts = [record.predicted_increase for record in self.history]
        return None if None in parts else sum(part for part in parts if part is not None)

    @property
    def true_increase(self) -> float:
        return self.history[-1].loss_after - self.history[0].loss_before if self.history else 0.0

    @property
    def damping(self) -> float | None:
        return self.history[-1].damping if self.history else None

    @property
    def seconds(self) -> float:
        return sum(record.seconds for record in self.history)

    def __repr__(self) -> str:
        counts = f"{self.num_removed} of {self.num_weights} weights removed ({self.sparsity:.2%})"
        h = self.history
        losses = f", loss {h[0].loss_before:.4g} -> {h[-1].loss_after:.4g}" if h else ""
        return f"PruningResult({counts} in {len(h)} steps{losses}, {self.seconds:.1f} s)"
