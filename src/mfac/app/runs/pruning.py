"""Pruning runs: several methods and sparsities, each from the same dense weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn

from mfac.app.runs.environment import process_peak_bytes
from mfac.app.runs.folder import DENSE, Record, inside, load_checkpoint, save_weights, writing
from mfac.app.runs.run import Run, check_settings, refuse
from mfac.app.runs.task_batches import TaskBatches, finite, measure
from mfac.app.runs.training import OptimizerSettings, TrainingLoop, make_optimizer
from mfac.app.tasks import Task
from mfac.gradients.model_state import seeded
from mfac.pruning import GradualPruner, Pruner, PruningOptions, StepRecord, geometric_schedule, polynomial_schedule
from mfac.pruning.compact_file import save_compact
from mfac.pruning.masks import save_masks
from mfac.pruning.patterns import NOfM, parse_pattern
from mfac.pruning.selection import check_sparsity
from mfac.pruning.weights import choose_targets

SCHEDULES = {"geometric": geometric_schedule, "polynomial": polynomial_schedule}
FINE_TUNING_LR, OPTIONS = 0.01, PruningOptions()
NOT_RECORDED, OF_GRADUAL = ("options", "save_every"), ("schedule", "steps", "epochs", "lr", "momentum")
OWN_OPTIONS = ("method", "floor", "output_fn", "bn_batches", "memory", "rows_dir", "seed", "progress", "process_group")


@dataclass(frozen=True)
class PruningSettings:
    """The settings of a pruning run."""

    kind: ClassVar[str] = "prune"
    options: Annotated[PruningOptions, "those of `mfac.prune`; the run sets its method, seed and progress"] = OPTIONS
    methods: Annotated[tuple[str, ...], "how weights are chosen; repeat to compare methods"] = ("mfac",)
    sparsities: Annotated[tuple[float, ...], "fraction to remove; may be repeated. An N:M pattern implies one"] = ()
    gradual: Annotated[bool, "train between pruning steps"] = False
    steps: Annotated[int, "number of pruning steps, with training after each"] = 5
    schedule: Annotated[str, "sparsities: geometric (equal fractions of what remains) or polynomial"] = "geometric"
    epochs: Annotated[int, "epochs of training after each pruning step"] = 1
    lr: Annotated[float | None, "learning rate of SGD; default: the task's own optimizer, or SGD at 0.01"] = None
    momentum: Annotated[float, "momentum of that SGD"] = 0.9
    checkpoint: Annotated[str | None, "a state_dict saved by torch.save or safetensors to start from"] = None
    seed: Annotated[int, "seed of all random numbers"] = 0
    device: Annotated[str, "where to compute: cpu, cuda, cuda:1 ..."] = "cpu"
    save_every: Annotated[float, "seconds between saves during training"] = 30.0

    @property
    def seeds(self) -> tuple[int, ...]:
        return (self.seed,)

    @property
    def fixed_sparsity(self) -> float | None:
        pattern = parse_pattern(self.options.pattern)
        return pattern.sparsity if isinstance(pattern, NOfM) else None

    @property
    def asked(self) -> tuple[float, ...]:
        return self.sparsities or (self.fixed_sparsity or 0.9,)

    def flat(self) -> dict[str, Any]:
        """The settings that determine the result, for run.json."""
        left_out = NOT_RECORDED if self.gradual else (*NOT_RECORDED, *OF_GRADUAL)
        own = {key: value for key, value in vars(self).items() if key not in left_out}
        options = {key: value for key, value in vars(self.options).items() if key not in OWN_OPTIONS}
        return {**own, "sparsities": self.asked, **options}

    def check(self, task: Task, model: nn.Module) -> None:
        check_settings(self, ("steps", "epochs"), method=self.methods, sparsity=self.asked)
        for method in self.methods:
            replace(self.options, method=method)
        fixed = self.fixed_sparsity
        refuse(self, not self.gradual, OF_GRADUAL, "only for gradual pruning; add --gradual, or omit this")
        refuse(self, fixed is not None, ("steps", "schedule"), "an N:M pattern is pruned in one step; omit this")
        by_task = self.lr is None and task.optimizer is not None
        refuse(self, by_task, ("momentum",), "only for SGD, not for the task's optimizer; add --lr, or omit this")
        if fixed is not None and self.asked != (fixed,):
            raise ValueError(f"pattern {self.options.pattern} implies a sparsity of {fixed:g}; omit the sparsity")
        for sparsity in self.asked:
            check_sparsity(sparsity)
        choose_targets(model, self.options.targets, self.options.ignore)

    def carry_out(self, run: Run, model: nn.Module) -> None:
        self._pretrain(run, model)
        if "dense" not in run.folder.record:
            run.folder.put(dense=measure(run.task, model, run.device))
        dense = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        for method, sparsity in product(self.methods, self.asked):
            model.load_state_dict(dense)
            model.zero_grad()
            work = partial(_gradual if self.gradual else _one_shot, self, model, method, sparsity)
            run.cell(f"{method}-{sparsity:g}", {"label": method, "method": method, "asked": sparsity}, self.seed, work)

    def _pretrain(self, run: Run, model: nn.Module) -> None:
        """Trains the model once, if the task can, so that all cells start from the same weights."""
        if run.task.pretrain is None or self.checkpoint is not None:
            return
        path = inside(run.folder.path, DENSE)
        if not path.exists():
            run.watcher.say(f"training {run.task.name} first, since no checkpoint is given")
            with seeded(self.seed):
                run.task.pretrain(model)
            save_weights(model, path)
        load_checkpoint(path, model)


def _one_shot(settings: PruningSettings, model: nn.Module, method: str, sparsity: float, run: Run) -> Record:
    options = replace(settings.options, method=method, seed=settings.seed, progress=False)
    batches = TaskBatches(run.task, run.device)
    pruner = Pruner(model, run.task.loss, batches, sparsity, options)
    run.begin(pruner.total, lambda: pruner.steps_done, model=model, pruner=pruner)
    stream, start, at = pruner.stream, 0, run.watcher.at
    # Progress within a step, if gradients are one per batch.
    batches.on_batch = lambda: at(pruner.steps_done + min(1.0, (stream.drawn + 1 - start) / pruner.num_batches))
    while not pruner.done:
        start = stream.drawn
        loss = pruner.step().loss_after
        run.at(pruner.steps_done, f"loss {loss:.4g}", save=True)
    return _results(model, run, pruner.result.masks, pruner.result.history, [])


def _gradual(settings: PruningSettings, model: nn.Module, method: str, sparsity: float, run: Run) -> Record:
    task, batches = run.task, TaskBatches(run.task, run.device)
    chosen = OptimizerSettings("sgd", FINE_TUNING_LR if settings.lr is None else settings.lr, settings.momentum)
    if settings.lr is None and task.optimizer is not None:
        chosen = OptimizerSettings("task")
    optimizer = make_optimizer(chosen, task, model)
    schedule = [sparsity]  # an N:M pattern has one sparsity, and one step
    if settings.fixed_sparsity is None:
        schedule = SCHEDULES[settings.schedule](0.0, sparsity, settings.steps)
    options = vars(replace(settings.options, method=method, seed=settings.seed, progress=False))
    pruner = GradualPruner(model, task.loss, batches, schedule, optimizer=optimizer, reset_momentum=True, **options)
    each, total = settings.epochs * len(batches), len(schedule)
    loop = TrainingLoop(task, model, run.device, optimizer, total * each, settings.seed)
    run.begin(total, lambda: loop.done / each, loop=loop, pruner=pruner)
    while loop.done < loop.total:
        if loop.done == pruner.steps_done * each:
            result = pruner.step()
            assert result is not None
            run.at(loop.done / each, f"loss {result.history[-1].loss_after:.4g}", save=True)
            continue
        loop.advance()
        if loop.is_diverged:
            where = f"step {loop.done} of the training between pruning steps"
            raise RuntimeError(f"the loss was not finite at {where}; use a lower learning rate (--lr)")
        run.at(loop.done / each, "training")
    history = [record for records in pruner.history for record in records]
    pairs = enumerate(zip(loop.seconds, loop.losses, strict=True), 1)
    training = [{"step": step, "second": round(second, 4), "loss": loss} for step, (second, loss) in pairs]
    return _results(model, run, pruner.masks, history, training)


def _results(
    model: nn.Module, run: Run, masks: dict[str, Tensor], history: Sequence[StepRecord], training: list[Record]
) -> Record:
    """Evaluates the pruned model and writes its files; returns the entries of the cell in run.json."""
    run.watcher.end()
    found = measure(run.task, model, run.device)
    save_weights(model, run.file("weights.safetensors"))
    with writing(run.file("masks.safetensors")) as draft:
        save_masks(masks, draft)
    with writing(run.file("compact.safetensors")) as draft:
        size = save_compact(model, draft, masks)
    kept = {name: int(mask.sum()) for name, mask in masks.items()}
    seconds = sum(record.seconds for record in history) + (training[-1]["second"] if training else 0.0)
    return {
        "sparsity": 1 - sum(kept.values()) / sum(mask.numel() for mask in masks.values()),
        **found,
        "seconds": round(seconds, 4),
        "gradient_seconds": round(sum(record.gradient_seconds for record in history), 4),
        "peak_bytes": process_peak_bytes(),
        "layers": [{"name": name, "weights": mask.numel(), "kept": kept[name]} for name, mask in masks.items()],
        "steps": [
            {"sparsity": record.sparsity, "seconds": round(record.seconds, 4)}
            | {key: finite(getattr(record, key)) for key in ("predicted_increase", "loss_before", "loss_after")}
            for record in history
        ],
        "training": training,
        "files": {what: f"{run.name}/{what}.safetensors" for what in ("weights", "masks", "compact")},
        "bytes": {"dense": size.dense, "compact": size.compact},
    }
