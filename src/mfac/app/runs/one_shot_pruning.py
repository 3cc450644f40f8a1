"""One-shot pruning, one recomputation at a time, so that each depends on weights, masks and its number alone."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from mfac.app.runs.task_batches import CountedStream
from mfac.gradients.losses import LossFn
from mfac.pruning.prune import prune
from mfac.pruning.result import PruningResult, StepRecord


class _StepDone(Exception):  # noqa: N818 (it is no error)
    """Stops `prune` after its first step, which stays done."""

    def __init__(self, result: PruningResult):
        super().__init__()
        self.result = result


class OneShotPruning:
    """What `mfac.prune` does, in pieces.

    `prune` over k recomputations keeps the same fraction of the weights at each. Its first step of k, then the first
    step of k − 1 with the masks so far, and so on, are the same steps up to the rounding of their sizes, for every
    scope and pattern; and each is a call of its own, after which a run can stop.

    Args:
        model: pruned in place.
        loss_fn: (model, batch) -> scalar.
        stream: the batches; each step goes on where the one before stopped.
        sparsity: the last one; None where the pattern has its own.
        recomputations: how many steps.
        seed: of labels that are drawn.
        options: all else that `prune` takes.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        stream: CountedStream,
        sparsity: float | None,
        *,
        recomputations: int,
        seed: int,
        options: Mapping[str, Any],
    ):
        self.masks: dict[str, Tensor] = {}
        self.history: list[StepRecord] = []
        self.training: list[dict[str, Any]] = []  # there is none; gradual pruning has some
        self.steps_done, self.total = 0, recomputations
        self._model, self._loss_fn, self.stream = model, loss_fn, stream
        self._sparsity, self._seed, self._options = sparsity, seed, dict(options)

    def advance(self) -> bool:
        """Takes the next step; False, and nothing done, at the end."""
        if self.steps_done == self.total:
            return False
        try:
            result = prune(
                self._model,
                self._loss_fn,
                self.stream,
                self._sparsity,
                recomputations=self.total - self.steps_done,
                masks=self.masks or None,
                seed=self._seed + self.steps_done,
                on_step=_stop,
                **self._options,
            )
        except _StepDone as done:
            result = done.result
        self.masks = dict(result.masks)
        self.history += result.history
        self.steps_done += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """Everything that going on needs."""
        return {
            "model": self._model.state_dict(),
            "masks": dict(self.masks),
            "steps_done": self.steps_done,
            "history": [asdict(record) for record in self.history],
            "drawn": self.stream.drawn,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state."""
        self._model.load_state_dict(state["model"])
        device = next(self._model.parameters()).device
        self.masks = {name: mask.to(device) for name, mask in state["masks"].items()}
        self.steps_done = state["steps_done"]
        self.history = [StepRecord(**record) for record in state["history"]]
        self.stream.resume_at(state["drawn"], self._options["loss_batches"])


def _stop(result: PruningResult) -> None:
    raise _StepDone(result)
