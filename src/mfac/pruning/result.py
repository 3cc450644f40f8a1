"""What a pruning run gives back: masks, sparsity, and a record of every step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class StepRecord:
    """One recomputation.

    `loss_before` and `loss_after` are means over the same few batches, in eval mode; `predicted_increase` is ½ δᵀFδ of
    the quadratic model for the change δ that was made, None for methods that have no such model; `damping` is λ as it
    was used. Of the `seconds`, `gradient_seconds` went into gradients (or layer statistics).
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
        """By how much the loss has grown."""
        return self.loss_after - self.loss_before


@dataclass
class PruningResult:
    """What `prune` did: `masks` {name: bool tensor, True = kept}, and `history`, one record a recomputation."""

    masks: dict[str, Tensor]
    targets: tuple[str, ...]
    history: list[StepRecord] = field(default_factory=list)

    @property
    def num_weights(self) -> int:
        """Weights of the targets."""
        return sum(self.masks[name].numel() for name in self.targets)

    @property
    def num_removed(self) -> int:
        """Weights of the targets that are removed."""
        return self.num_weights - sum(int(self.masks[name].sum()) for name in self.targets)

    @property
    def sparsity(self) -> float:
        """The fraction of the targets' weights that is removed."""
        return self.num_removed / self.num_weights

    @property
    def layer_sparsity(self) -> Mapping[str, float]:
        """The same for each target."""
        return {name: 1 - float(self.masks[name].double().mean()) for name in self.targets}

    @property
    def predicted_increase(self) -> float | None:
        """The sum of what the steps predicted; None where the method predicts nothing."""
        parts = [record.predicted_increase for record in self.history]
        return None if None in parts else sum(part for part in parts if part is not None)

    @property
    def true_increase(self) -> float:
        """From the first loss to the last; 0 where nothing was removed."""
        return self.history[-1].loss_after - self.history[0].loss_before if self.history else 0.0

    @property
    def damping(self) -> float | None:
        """λ of the last step."""
        return self.history[-1].damping if self.history else None

    @property
    def seconds(self) -> float:
        """In all."""
        return sum(record.seconds for record in self.history)

    def __repr__(self) -> str:
        losses = (
            f", loss {self.history[0].loss_before:.4g} -> {self.history[-1].loss_after:.4g}" if self.history else ""
        )
        return (
            f"PruningResult({self.num_removed} of {self.num_weights} weights removed ({self.sparsity:.2%}) in "
            f"{len(self.history)} steps{losses}, {self.seconds:.1f} s)"
        )
