"""The learning rate between pruning steps: high after each step, low before the next, decaying after the last."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


@dataclass
class CycleFactor:
    """The factor of the learning rate at an epoch; a class, since `LambdaLR.state_dict` saves an object's fields."""

    period: int
    cycles: int
    low: int
    factor: float
    drops: tuple[int, ...]

    def __call__(self, epoch: int) -> float:
        if epoch < self.period * self.cycles:
            return self.factor if epoch % self.period >= self.period - self.low else 1.0
        return float(self.factor ** sum(epoch >= drop for drop in self.drops))


def learning_rate_cycle(
    optimizer: Optimizer,
    period: int,
    cycles: int,
    *,
    low: int = 1,
    factor: float = 0.1,
    drops: Sequence[int] = (),
    last_epoch: int = -1,
) -> LambdaLR:
    """A scheduler for fine-tuning between pruning steps, as in the paper's practical runs.

    Each period starts with the optimizer's own learning rate and ends with `low` epochs at `factor` times it: a model
    that has settled is a better start for pruning. After the last cycle the rate falls at `drops`.
    MobileNetV1 is `period=3, cycles=15, drops=(75, 90)`, ResNet50 `period=4, cycles=20, drops=(90, 95)`, both at 0.005.

    Args:
        optimizer: whose learning rates are scaled, group by group.
        period: epochs (or whatever `scheduler.step()` counts) from one pruning step to the next.
        cycles: how many periods there are before the last pruning step.
        low: epochs at the end of each period with the small rate.
        factor: of the small rate, and of each drop.
        drops: epochs, counted from the start, at which the rate drops permanently.
        last_epoch: as in any torch scheduler.

    Raises:
        ValueError: an empty period, a `low` longer than it, or drops that do not rise after the cycles.
    """
    if period < 1 or cycles < 0:
        raise ValueError(f"period must be at least 1 and cycles at least 0, not {period} and {cycles}")
    if not 0 <= low <= period:
        raise ValueError(f"low must be between 0 and the period of {period}, not {low}")
    if not factor > 0:
        raise ValueError(f"factor must be above 0, not {factor}")
    if list(drops) != sorted(set(drops)) or any(drop < period * cycles for drop in drops):
        raise ValueError(
            f"drops are epochs after the cycles, rising; the cycles end at epoch {period * cycles}, "
            f"these are {tuple(drops)}"
        )
    return LambdaLR(optimizer, CycleFactor(period, cycles, low, factor, tuple(drops)), last_epoch)
