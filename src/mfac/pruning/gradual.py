"""Gradual pruning: one sparsity of a schedule after another, with training by the user's own loop in between."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from mfac.gradients.batches import Batch
from mfac.gradients.losses import LossFn, OutputFn
from mfac.pruning.batch_stream import generator_state, set_generator_state
from mfac.pruning.mask_keeper import MaskKeeper, check_trained, innermost
from mfac.pruning.masks import apply_masks, matched_masks
from mfac.pruning.options import PruningOptions, Scope
from mfac.pruning.result import PruningResult, StepRecord
from mfac.pruning.schedules import checked_schedule
from mfac.pruning.step import Pruner
from mfac.pruning.weights import Names, choose_targets
from mfac.saved import count_of, reading

Batches = Iterable[Batch] | Callable[[int], Iterable[Batch]]
MOMENTUM = {"momentum_buffer", "exp_avg"}  # its names in torch's optimizers


class GradualPruner:
    """Prunes a model to one sparsity of a schedule after another with `step()`; train it in between as you like.

    With an optimizer, removed weights stay at zero while it trains (see `attach_masks`). A run resumed between steps
    from the `state_dict()` of the pruner, the model and the optimizer has the same masks and weights as an undisturbed
    one: each step draws its batches from random states that `seed` and the number of the step determine.

    The arguments are those of `mfac.prune`, except:

    Args:
        batches: for the gradients; or a function from the number of the step (from 0) to such an iterable.
        schedule: rising sparsities: a list, `polynomial_schedule(...)` or `geometric_schedule(...)`.
        optimizer: the one that trains the model in between.
        reset_momentum: set the optimizer's momentum to zero after each pruning step, as the paper does.
        seed: of the first step; each further one adds 1.

    Raises:
        ValueError: the schedule does not rise, or an option or a mask is not valid.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, batches: Batches, schedule: Iterable[float], *,
        optimizer: Optimizer | None = None, reset_momentum: bool = False, seed: int = 0,
        masks: Mapping[str, Tensor] | None = None, num_grads: int | None = None, block_size: int | str | None = "row",
        damping: float | str = "auto", recomputations: int = 16, update: str = "auto",
        prior: str | None = None, scope: Scope = "global",
        pattern: str | None = None, targets: Names = None, ignore: Names = None, method: str = "mfac",
        order: str = "scores", floor: float = 1, per_sample: bool = False, fisher: str = "auto",
        output_fn: OutputFn | None = None, recalibrate: bool | str | Iterable[Batch] = "auto",
        refit: bool | str = "auto", bn_batches: Iterable[Batch] | None = None, loss_batches: int = 4,
        rows_dir: str | os.PathLike[str] | None = None, memory: int | str | None = None, progress: bool | None = None,
        on_step: Callable[[PruningResult], None] | None = None, process_group: dist.ProcessGroup | None = None,
    ):  # fmt: skip
        options = PruningOptions.among(locals())
        if seed is None:
            raise ValueError("seed must be an int, which a resumed run needs, not None")
        # Training moves the weights anyway, and starts better from where they were.
        self._options = replace(options, update="none") if update == "auto" else options
        self.schedule = checked_schedule(schedule)
        self.steps_done = 0
        self.history: list[list[StepRecord]] = []
        self._model, self._loss_fn, self._batches = model, loss_fn, batches
        self._optimizer = None if optimizer is None else innermost(optimizer)
        self._reset_momentum, self._seed, self._on_step = reset_momentum, seed, on_step
        self._keeper: MaskKeeper | None = None
        targets = choose_targets(model, options.targets, options.ignore)
        if self._optimizer is not None:
            check_trained(self._optimizer, targets.values(), "weights to prune")
        self.masks: dict[str, Tensor] = {}  # {name: bool tensor, True = kept}; empty before the first step
        if masks:
            self._hold(matched_masks(model, masks))

    @property
    def next_sparsity(self) -> float | None:
        return self.schedule[self.steps_done] if self.steps_done < len(self.schedule) else None

    def step(self) -> PruningResult | None:
        """Prunes to the next sparsity of the schedule, as `mfac.prune` does; returns None after the last.

        If it fails, weights and masks are those of its last complete recomputation; it can be called again.
        """
        sparsity = self.next_sparsity
        if sparsity is None:
            return None
        batches = self._batches(self.steps_done) if callable(self._batches) else self._batches
        options = replace(self._options, seed=self._seed + self.steps_done)
        result = Pruner(self._model, self._loss_fn, batches, sparsity, options, self.masks or None).run(self._took)
        self._hold(result.masks)
        self._forget_momentum()
        self.history.append(result.history)
        self.steps_done += 1
        return result

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors for `torch.save`; the model and the optimizer have their own state."""
        return {
            "schedule": list(self.schedule),
            "steps_done": self.steps_done,
            "seed": self._seed,
            "masks": {name: mask.clone() for name, mask in self.masks.items()},
            "history": [[asdict(record) for record in records] for records in self.history],
            "generators": [generator_state(self._batches), generator_state(self._options.bn_batches)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state; load those of the model and the optimizer as well, in any order."""
        with reading("the state of the pruner"):
            for name, ours in (("schedule", list(self.schedule)), ("seed", self._seed)):
                if state[name] != ours:
                    raise ValueError(f"saved with {name} {state[name]}, this pruner has {ours}; build it with the same")
            masks = matched_masks(self._model, state["masks"]) if state["masks"] else {}
            steps_done = count_of(state, "steps_done", 0, len(self.schedule))
            history = [[StepRecord(**record) for record in records] for records in state["history"]]
            loaders = [(self._batches, state["generators"][0]), (self._options.bn_batches, state["generators"][1])]
            for loader, saved in loaders:
                if saved is not None and generator_state(loader) is not None:
                    torch.Generator(loader.generator.device).set_state(saved)  # type: ignore[union-attr]
        if masks:
            self._hold(masks)
        self.steps_done, self.history = steps_done, history
        for loader, saved in loaders:
            set_generator_state(loader, saved)

    def _took(self, result: PruningResult) -> None:
        self._hold(result.masks)
        if self._on_step is not None:
            self._on_step(result)

    def _hold(self, masks: Mapping[str, Tensor]) -> None:
        apply_masks(self._model, masks)
        if self._optimizer is not None and self._keeper is None:
            self._keeper = MaskKeeper(self._optimizer, masks, self._model)
        elif self._keeper is not None:
            self._keeper.update(masks)
        self.masks = dict(masks)

    @torch.no_grad()
    def _forget_momentum(self) -> None:
        if self._optimizer is not None and self._reset_momentum:
            for values in self._optimizer.state.values():
                for name in MOMENTUM & values.keys():
                    if isinstance(values[name], Tensor):
                        values[name].zero_()
