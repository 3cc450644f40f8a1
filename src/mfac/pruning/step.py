"""Pruning one step at a time: measure, score, choose, remove, and look at the loss; as a whole or not at all."""

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mfac.distributed.exchange import Exchange, check_ranks
from mfac.distributed.shares import ColumnShare, column_shares, shares_at
from mfac.fisher_blocks import FisherBlocks
from mfac.gradient_file import GradientFile
from mfac.gradients.accumulate import sum_blocks
from mfac.gradients.batches import Batch, move
from mfac.gradients.collect import Collection, collect_rows, loss_value
from mfac.gradients.gauss_newton import has_output
from mfac.gradients.losses import CriterionLoss, LossFn, ModelLoss, ready_loss
from mfac.gradients.model_state import evaluation
from mfac.gradients.to_file import collect_to_file
from mfac.inverse_fisher import Ranks, ranks_of
from mfac.layout import Masks, ParameterLayout, as_mask
from mfac.memory import available_memory, parse_bytes
from mfac.pruning.batch_norm import average_statistics, check_sizes, recalibrate, running_norms
from mfac.pruning.batch_stream import BatchStream, generator_state, set_generator_state
from mfac.pruning.curvature import Curvature, FisherCurvature
from mfac.pruning.masks import apply_masks
from mfac.pruning.options import PruningOptions
from mfac.pruning.patterns import Slices, parse_pattern
from mfac.pruning.refit import copied, fingerprint, refit_if_closer
from mfac.pruning.result import PruningResult, StepRecord
from mfac.pruning.row_fisher import DAMPING, RowFisher, num_samples
from mfac.pruning.selection import Pool, Selection, Sparsity, least_kept, plan_steps
from mfac.pruning.weights import MaskedWeights, choose_targets
from mfac.saved import reading

STEP_SEEDS = 1 << 16  # between the seeds of two steps; more than the batches of any
RANK_SEEDS = 1_000_003  # between the random states of two ranks; more than the steps of any run
ROWS_PER_BLOCK_SIZE = 2  # float32 rows beyond twice the block size take more memory than float64 sums of the blocks
DEFAULTS = PruningOptions()
# Options that must be the same on every rank, besides those of the gradients.
SHARED = ("recomputations", "scope", "floor", "block_size", "damping", "update", "order", "pattern", "method",
          "num_grads", "memory")  # fmt: skip
NUM_GRADS = 64
ROWS_PER_WEIGHT, LEAST_SAMPLES, MOST_SAMPLES = 2, 256, 1024  # of the widest block, if num_grads is not given

Rows = Tensor | GradientFile | FisherBlocks


@dataclass(frozen=True)
class Step:
    """What a method sees of one step: its number (from 1), the weights, those that are kept, and the batches."""

    number: int
    weights: MaskedWeights
    layout: ParameterLayout
    stream: BatchStream
    folder: str | None = None


class Method(Protocol):
    """How weights are judged: `measure` takes gradients or other data, `curvature` makes scores and updates of them."""

    def measure(self, step: Step) -> Any: ...

    def curvature(self, step: Step, measured: Any) -> Curvature: ...


class Pruner:
    """Prunes a model in place, one step at a time, and can be saved and resumed between steps.

    If a step fails, the model and the masks are as the step before left them. A resumed run, built with the same
    arguments, has the same masks and weights as an undisturbed one, bit for bit.
    The arguments are those of `mfac.prune`; a `method` takes the place of `options.method`.
    """

    @torch.inference_mode(False)
    def __init__(
        self, model: nn.Module, loss_fn: LossFn, batches: Iterable[Batch], sparsity: Sparsity,
        options: PruningOptions = DEFAULTS, masks: Masks = None, method: Method | None = None,
    ):  # fmt: skip
        self._ranks = ranks = ranks_of(options.process_group)
        with ranks.together("checking the arguments"):
            if isinstance(sparsity, Mapping) and options.targets is not None:
                raise ValueError("sparsity by name selects the weights to prune; omit targets")
            targets = list(sparsity) if isinstance(sparsity, Mapping) else options.targets
            self.weights = MaskedWeights(model, choose_targets(model, targets, options.ignore), masks)
            floors = least_kept(self.weights.masks, options.floor)
            self.plan = plan_steps(self.weights, sparsity, options, floors)
            self._selection = Selection(parse_pattern(options.pattern), options.order, floors, self.weights.inputs)
            # Loaders that shuffle by the random state give different batches on every rank.
            seed = None if options.seed is None else options.seed + RANK_SEEDS * ranks.rank
            self.stream = batches if isinstance(batches, BatchStream) else BatchStream(batches, seed)
            self._start = self.stream.drawn
            self._loss_fn, self._loss_batches = loss_fn, self.stream.peek(options.loss_batches)
            if options.fisher == "auto":
                first = move(self._loss_batches[0], self.weights.device)
                known = options.output_fn is not None or isinstance(loss_fn, CriterionLoss | ModelLoss)
                known = known and has_output(loss_fn, options.output_fn, model, first)
                options = replace(options, fisher="gauss-newton" if known else "empirical")
            fisher = (RowMethod if options.by_output else FisherMethod)(loss_fn, options, ranks)
            self._method: Method = method or (Magnitude() if options.method == "magnitude" else fisher)
            start = Step(0, self.weights, self.weights.layout(), self.stream)
            self.num_batches = fisher.num_batches(start)
            self.stream.needed = f" ({self.total} recomputations need {self.total * self.num_batches} batches)"
            # Checks what the gradients are taken of, before anything is done.
            collection = fisher.collection(start)
            self.options = options
            refits = options.refits if method is None else options.refit is True
            if refits:  # before anything is done
                ready_loss(loss_fn, options.output_fn, "refit=True")
            if refits or running_norms(model):
                self.stream.remember(self.num_batches)
            wants_norms = options.bn_batches is not None or options.recalibrate not in ("auto", False)
            if wants_norms and not running_norms(model):
                raise ValueError("the model has no batch norm with running statistics; drop recalibrate and bn_batches")
            recalibrates = options.bn_batches is None and options.recalibrate in ("auto", True)
            if running_norms(model) and (refits or recalibrates):
                counts = (options.loss_batches, self.num_batches)  # the second if the first, read already, do not do
                check_sizes(model, chain.from_iterable(map(self.stream.peek, counts)), partial(loss_fn, model))
        if ranks.size > 1:
            shared = {"sparsity": sparsity} | {name: getattr(options, name) for name in SHARED}
            check_ranks(ranks, collection, shared | {"bn_batches": options.bn_batches is not None})
            for buffer in model.buffers():  # running statistics differ after training under DDP
                ranks.from_first_(buffer)
        self.result = PruningResult({**self.weights.other_masks, **self.weights.masks}, tuple(self.weights.targets))
        if masks:
            apply_masks(model, self.result.masks)
        self._dense = copied(model) if refits else None

    @property
    def total(self) -> int:
        return len(self.plan)

    @property
    def steps_done(self) -> int:
        return len(self.result.history)

    @property
    def done(self) -> bool:
        return self.steps_done == self.total

    def run(self, on_step: Callable[[PruningResult], None] | None = None) -> PruningResult:
        """Takes all steps that are left; `on_step` is called with the result so far after each of them."""
        while not self.done:
            self.step()
            if on_step is not None:
                with self._ranks.together("on_step"):
                    on_step(self.result)
        return self.result

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> StepRecord:
        if self.done:
            raise RuntimeError(f"all {self.total} steps are done; build another Pruner for a higher sparsity")
        history = self.result.history
        loss = history[-1].loss_after if history else self._mean_loss()
        if not math.isfinite(loss):
            raise ValueError(f"the loss of the model is {loss} before anything is pruned; check it and its batches")
        rows_dir = self.options.rows_dir
        with tempfile.TemporaryDirectory(prefix="mfac-rows-", dir=rows_dir) if rows_dir else nullcontext() as folder:
            step = Step(self.steps_done + 1, self.weights, self.weights.layout(), self.stream, folder)
            history.append(self._take(step, self.plan[self.steps_done], loss))
            self.result.masks.update(self.weights.masks)
        return history[-1]

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, as plain values and tensors for `torch.save`; the model's weights are not part of it."""
        return {
            "plan": self._plain_plan(),
            "masks": {name: mask.clone() for name, mask in self.weights.masks.items()},
            "history": [asdict(record) for record in self.result.history],
            "start": self._start,
            "stream": self.stream.state_dict(),
            "bn_generator": generator_state(self.options.bn_batches),
            "dense": fingerprint(self._dense),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state, skipping batches drawn before; load the model's weights as well."""
        if state.get("plan") != self._plain_plan():
            raise ValueError("the state was saved by a run with other arguments; build the Pruner with the same")
        if state.get("dense") != fingerprint(self._dense):
            raise ValueError("the state was saved by a run that began with other weights; build the Pruner with the "
                             "model as it was before pruning, then load the weights of both")  # fmt: skip
        with reading("the state of the pruner"):
            shapes = self.weights.masks.items()
            masks = {name: as_mask(name, state["masks"][name], mask.shape).to(mask.device) for name, mask in shapes}
            history = [StepRecord(**record) for record in state["history"]]
            stream = {name: state["stream"][name] for name in ("random", "generator", "drawn")}
            start, generator = state["start"], state["bn_generator"]
        self.stream.load_state_dict(stream, start)
        self._start = start
        self._loss_batches = self.stream.peek(self.options.loss_batches)
        self.stream.skip_to(stream["drawn"])
        set_generator_state(self.options.bn_batches, generator)
        self.weights.masks = masks
        self.result.masks.update(masks)
        self.result.history[:] = history

    def _plain_plan(self) -> list[list[Any]]:
        return [[[list(pool.names), pool.keep] for pool in pools] for pools in self.plan]

    def _take(self, step: Step, pools: Sequence[Pool], loss: float) -> StepRecord:
        start = time.perf_counter()
        measured = self._method.measure(step)
        gradient_seconds = time.perf_counter() - start
        weights, layout = step.weights, step.layout
        theta = weights.vector(layout)
        curvature = self._method.curvature(step, measured)
        chosen = self._selection.choose(curvature, theta, layout, weights.masks, pools)
        # All ranks choose by the same numbers; ties are broken as on the first one.
        removed: Bool[Tensor, " d"] = self._ranks.from_first_(weights.row_of(layout, chosen))
        update = "joint" if self.options.update == "auto" else self.options.update
        delta, predicted = curvature.remove(theta, removed, update)
        loss_after = self._write(layout, theta + delta, removed, step.number == self.total)
        seconds, count = time.perf_counter() - start, int(removed.sum())
        known = weights.sparsity, loss, loss_after, predicted, curvature.damping
        return StepRecord(step.number, count, *known, seconds, gradient_seconds)

    def _write(
        self, layout: ParameterLayout, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], is_last: bool
    ) -> float:
        with self.weights.all_or_nothing():
            with self._ranks.together("writing the weights"):
                self.weights.write(layout, theta, removed)
            self._recalibrate(is_last)
            if is_last and self._dense is not None:
                batches, masks = self.stream.peek(self.num_batches), {**self.weights.other_masks, **self.weights.masks}
                output_fn = self.options.output_fn
                if refit_if_closer(self.weights.model, self._dense, self._loss_fn, batches, masks, output_fn):
                    self._recalibrate(is_last)
            loss = self._mean_loss()
            if not math.isfinite(loss):
                hint = "use a larger damping or more recomputations"
                raise RuntimeError(f"the loss became {loss} in this step, which is undone; {hint}")
            return loss

    def _recalibrate(self, is_last: bool) -> None:
        asked, model, forward = self.options.recalibrate, self.weights.model, None
        batches: Any = self.options.bn_batches
        if batches is None and is_last and asked is not False and running_norms(model):
            batches = asked
            if isinstance(asked, bool | str):
                batches, forward = self.stream.peek(self.num_batches), partial(self._loss_fn, model)
        if batches is not None:
            with self._ranks.together("batch-norm statistics"):
                norms = recalibrate(model, batches, forward)
            if self._ranks.size > 1:
                average_statistics(norms, self._ranks.sum_)

    def _mean_loss(self) -> float:
        """The mean over a few batches that stay the same, those of all ranks, in eval mode."""
        model = self.weights.model
        devices = {parameter.device for parameter in model.parameters()}
        with self._ranks.together("the loss"), evaluation(model):
            batches = [move(batch, *devices) if len(devices) == 1 else batch for batch in self._loss_batches]
            losses = [loss_value(self._loss_fn, model, batch) for batch in batches]
        total = torch.tensor([sum(losses), len(losses)], dtype=torch.float64, device=self.weights.device)
        loss, count = self._ranks.sum_(total).tolist()
        return float(loss / count)


class FisherMethod:
    """M-FAC: F = λI + GᵀG/m over `num_grads` gradients, in blocks or in full; its diagonal is blocks of one weight."""

    def __init__(self, loss_fn: LossFn, options: PruningOptions, ranks: Ranks):
        self.loss_fn, self.options, self.ranks = loss_fn, options, ranks
        size = 1 if options.method == "diagonal" else options.block_size
        self.block_size = NUM_GRADS if isinstance(size, str) else size
        self.num_grads = options.num_grads or NUM_GRADS
        self.pattern = parse_pattern(options.pattern)

    def num_batches(self, step: Step) -> int:
        return -(-self.num_grads // self.ranks.size)

    def collection(self, step: Step) -> Collection:
        """What the gradients of a step are taken of; raises ValueError if something does not fit."""
        o = self.options
        return _collection(step, self.loss_fn, o, self.num_grads, o.per_sample, (o.seed or 0) + step.number, o.progress)

    def measure(self, step: Step) -> Rows:
        """The gradients, in this rank's columns: as rows, or where that takes less memory, as sums over blocks."""
        o, layout, size, collection = self.options, step.layout, self.block_size, self.collection(step)
        keep_rows = isinstance(self.pattern, Slices) or o.damping == "auto" or o.rows_dir is not None
        summed = None if keep_rows or size is None or self.num_grads <= ROWS_PER_BLOCK_SIZE * size else size
        if self.ranks.size > 1:
            exchange = Exchange(collection, step.stream, self.ranks, self._shares(step))
            if summed is not None:
                return exchange.blocks(summed, layout.device)
            return exchange.rows(layout.dtype, layout.device)
        if summed is not None:
            return sum_blocks(collection, step.stream, summed, layout.device)
        if step.folder is not None:
            return collect_to_file(collection, step.stream, Path(step.folder, "gradients.rows"), layout.dtype)
        try:
            return collect_rows(collection, step.stream, layout.dtype, layout.device)
        except MemoryError as error:
            raise MemoryError(f"{error}; to keep them on disk, pass rows_dir='a folder with room'") from None

    def curvature(self, step: Step, measured: Rows) -> Curvature:
        ranks, sizes, damping, start = self.ranks, step.layout.sizes, self.options.damping, 0
        if ranks.size > 1:
            share = self._shares(step)[ranks.rank]
            sizes, start = share.sizes, share.start
        if isinstance(damping, str):
            assert isinstance(measured, Tensor)
            squares = measured.new_tensor([float(measured.double().square().sum()), measured.numel()]).double()
            total, count = ranks.sum_(squares).tolist()
            damping = DAMPING * total / count or 1.0
        return FisherCurvature.of_rows(measured, damping, self.block_size, sizes, step.layout.device, ranks, start)

    def _shares(self, step: Step) -> tuple[ColumnShare, ...]:
        """How the kept weights are divided among the ranks; the full matrix with a pattern, between rows of weights."""
        if self.block_size is not None or self.pattern is None:
            return column_shares(step.layout.sizes, self.ranks.size, self.block_size)
        if not all(step.weights.inputs.values()):
            raise ValueError("a pattern with the full matrix on several ranks needs weights [outputs, inputs, ...]; "
                             "give a block_size")  # fmt: skip
        cuts = [0]
        for name in step.layout.names:
            mask = step.weights.masks[name]
            cuts += (cuts[-1] + mask.reshape(len(mask), -1).sum(1).cumsum(0)).tolist()
        return shares_at(cuts, step.layout.sizes, self.ranks.size)


class RowMethod:
    """F over the inputs of each output, in blocks of all their kept weights; see `RowFisher`."""

    def __init__(self, loss_fn: LossFn, options: PruningOptions, ranks: Ranks):
        self.loss_fn, self.options, self.ranks = loss_fn, options, ranks

    def num_batches(self, step: Step) -> int:
        """Enough for some rows per weight of the widest block, if the batches have them: one pass at most."""
        if self.options.num_grads is not None:
            return -(-self.options.num_grads // self.ranks.size)
        widest = max(weight.by_output(weight.tensor).shape[1] for weight in step.weights.layers.values())
        samples = min(max(ROWS_PER_WEIGHT * widest, LEAST_SAMPLES), MOST_SAMPLES)
        needed = -(-samples // (num_samples(step.stream.peek(1)[0]) * self.ranks.size))
        return min(needed, step.stream.pass_length or needed)

    def collection(self, step: Step) -> Collection:
        """What the gradients of a step are taken of; raises ValueError if something does not fit."""
        seed = ((self.options.seed or 0) + step.number) * STEP_SEEDS
        return _collection(step, self.loss_fn, self.options, 1, True, seed, False)

    def measure(self, step: Step) -> RowFisher:
        o = self.options
        batches = [next(step.stream) for _ in range(self.num_batches(step))]
        memory = parse_bytes(o.memory) or (available_memory(step.layout.device) or 0) // 2 or None
        if self.ranks.size > 1 and memory is not None:
            memory = int(self.ranks.from_first_(torch.tensor(memory, device=step.layout.device)))
        damping, prior = None if isinstance(o.damping, str) else o.damping, o.prior == "kron" or o.update == "auto"
        return RowFisher(step.weights, step.layout, self.collection(step), batches, damping, memory, self.ranks, prior)

    def curvature(self, step: Step, measured: RowFisher) -> Curvature:
        blocks = list(measured.blocks()) if len(measured.groups) == 1 else []
        damping = sum(measured.dampings.values()) / len(measured.dampings) if blocks else self.options.damping
        return FisherCurvature(measured.blocks, damping if isinstance(damping, float) else DAMPING, step.layout.dim)


class Magnitude:
    """The smallest weights are removed and the others do not move; method and curvature in one, without data."""

    damping = None

    def measure(self, step: Step) -> None:
        return None

    def curvature(self, step: Step, measured: None) -> "Magnitude":
        return self

    def scores(self, theta: Float[Tensor, " d"]) -> Float[Tensor, " d"]:
        return theta.square()

    def remove(
        self, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"], update: str
    ) -> tuple[Float[Tensor, " d"], None]:
        return torch.where(removed, -theta, 0.0), None


def _collection(
    step: Step, loss_fn: LossFn, options: PruningOptions, num_grads: int, per_sample: bool, seed: int,
    progress: bool | None,
) -> Collection:  # fmt: skip
    output_fn = None if options.fisher == "empirical" else options.output_fn
    return Collection(step.weights.model, loss_fn, step.layout, num_grads, per_sample, options.fisher,
                      progress=progress, seed=seed, output_fn=output_fn)  # fmt: skip
