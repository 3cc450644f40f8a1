"""Pruning runs: several methods and sparsities, each from the same dense weights."""

import time
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mfac.app.runs.environment import choose_device, process_peak_bytes
from mfac.app.runs.files import load_checkpoint, load_state, save_state, save_weights, writing
from mfac.app.runs.folder import DENSE, STATE, Record, RunFolder, open_run
from mfac.app.runs.measures import finite, measure
from mfac.app.runs.optimizers import OptimizerSettings, make_optimizer
from mfac.app.runs.random_state import seeded
from mfac.app.runs.run import Watcher, build_model, check_distinct, check_positive, describe
from mfac.app.runs.task_batches import TaskBatches
from mfac.app.runs.training_loop import TrainingLoop
from mfac.app.tasks import Task
from mfac.pruning.budget import check_sparsity
from mfac.pruning.compact_file import CompactSize, save_compact
from mfac.pruning.gradual import GradualPruner
from mfac.pruning.masks import save_masks
from mfac.pruning.options import PruningOptions
from mfac.pruning.patterns import NOfM, parse_pattern
from mfac.pruning.result import StepRecord
from mfac.pruning.schedules import geometric_schedule, polynomial_schedule
from mfac.pruning.step import Pruner
from mfac.pruning.targets import choose_targets

SCHEDULES = {"geometric": geometric_schedule, "polynomial": polynomial_schedule}
FINE_TUNING_LR = 0.01
NOT_RECORDED = ("method", "floor", "bn_batches", "rows_dir", "seed", "progress", "process_group")


@dataclass(frozen=True)
class PruningSettings:
    """The settings of a pruning run.

    Args:
        options: those of `mfac.prune`; the run sets its method, seed and progress.
        methods: how weights are chosen; may be repeated, to compare.
        sparsities: fraction of weights to remove; may be repeated. An N:M pattern has its own.
        gradual: train between pruning steps.
        steps: number of these pruning steps.
        schedule: of their sparsities: geometric (equal fractions of the remaining weights) or polynomial.
        epochs: epochs of training after each of them.
        lr: learning rate, to train by SGD; by default the task's own optimizer trains, or SGD at 0.01.
        momentum: of that SGD.
        checkpoint: a state_dict saved by torch.save or safetensors to start from.
        seed: of everything random.
        device: where to compute: cpu, cuda, cuda:1 ...
        save_every: seconds between saves during training.
    """

    options: PruningOptions = field(default_factory=PruningOptions)
    methods: tuple[str, ...] = ("mfac",)
    sparsities: tuple[float, ...] = ()
    gradual: bool = False
    steps: int = 5
    schedule: str = "geometric"
    epochs: int = 1
    lr: float | None = None
    momentum: float = 0.9
    checkpoint: str | None = None
    seed: int = 0
    device: str = "cpu"
    save_every: float = 30.0

    @property
    def fixed_sparsity(self) -> float | None:
        """That of an N:M pattern."""
        pattern = parse_pattern(self.options.pattern)
        return pattern.sparsity if isinstance(pattern, NOfM) else None

    @property
    def asked(self) -> tuple[float, ...]:
        """The sparsities; 0.9 if none is given."""
        return self.sparsities or (0.9 if self.fixed_sparsity is None else self.fixed_sparsity,)

    def flat(self) -> dict[str, Any]:
        """The settings that determine the result, for run.json."""
        options = {key: value for key, value in vars(self.options).items() if key not in NOT_RECORDED}
        left_out = {"options", "save_every"} | (set() if self.gradual else {"schedule", "steps", "epochs", "lr", "momentum"})
        own = {key: value for key, value in vars(self).items() if key not in left_out}
        return {**own, "sparsities": self.asked, **options}

    def optimizer(self, task: Task) -> OptimizerSettings:
        """For gradual pruning."""
        if self.lr is None and task.optimizer is not None:
            return OptimizerSettings("task")
        return OptimizerSettings("sgd", FINE_TUNING_LR if self.lr is None else self.lr, self.momentum)

    def check(self, model: nn.Module) -> None:
        """Raises ValueError for invalid settings."""
        check_distinct(method=self.methods, sparsity=self.asked)
        check_positive(self, "steps", "epochs")
        for method in self.methods:
            replace(self.options, method=method)
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        fixed = self.fixed_sparsity
        if fixed is not None and self.asked != (fixed,):
            raise ValueError(f"pattern {self.options.pattern} has a sparsity of its own, {fixed:g}; leave sparsity out")
        for sparsity in self.asked:
            check_sparsity(sparsity)
        choose_targets(model, self.options.targets, self.options.ignore)


def run_pruning(
    task: Task,
    settings: PruningSettings,
    path: Path,
    *,
    command: str = "",
    fresh: bool = False,
    watcher: Watcher | None = None,
) -> Record:
    """Prunes, or resumes the interrupted run in the folder; returns the record of run.json.

    Raises:
        ValueError: invalid settings, a checkpoint of another model, or the folder of another run.
        OSError: a file could not be written; the old one is left in place.
    """
    device = choose_device(settings.device)
    model = build_model(task, device, settings.seed, settings.checkpoint)
    settings.check(model)
    description = describe("prune", command, task, model, device, settings.flat())
    with open_run(path, description, fresh=fresh) as folder:
        if not folder.is_finished:
            _prune_all(_Run(task, settings, folder, model, device, watcher or Watcher()))
        return folder.record


@dataclass(frozen=True)
class _Run:
    """One model, which is reset to its dense weights for each cell."""

    task: Task
    settings: PruningSettings
    folder: RunFolder
    model: nn.Module
    device: torch.device
    watcher: Watcher


def _prune_all(run: _Run) -> None:
    settings, folder, model = run.settings, run.folder, run.model
    _pretrain(run)
    if "dense" not in folder.record:
        folder.put("dense", asdict(measure(run.task, model, run.device)))
    dense = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for method, sparsity in product(settings.methods, settings.asked):
        path = folder.cell_folder(f"{method}-{sparsity:g}")
        if not folder.has(method=method, asked=sparsity):
            model.load_state_dict(dense)
            model.zero_grad()
            with seeded(settings.seed):
                work = _Work(run, method, sparsity)
                work.finish(path)
                folder.add({"label": method, "method": method, "asked": sparsity, **_results(run, work, path)})
        (path / STATE).unlink(missing_ok=True)
    folder.finish()


def _pretrain(run: _Run) -> None:
    """Trains the model once, if the task can, so that all cells start from the same weights."""
    if run.task.pretrain is None or run.settings.checkpoint is not None:
        return
    path = run.folder.path / DENSE
    if not path.exists():
        run.watcher.say(f"training {run.task.name} first, since no checkpoint is given")
        with seeded(run.settings.seed):
            run.task.pretrain(run.model)
        save_weights(run.model, path)
    load_checkpoint(path, run.model)


class _Work:
    """One cell: a `Pruner`, or with `gradual` a `GradualPruner` and a training loop; saved after each step."""

    def __init__(self, run: _Run, method: str, sparsity: float):
        self._run, self._drawn, self._saved = run, 0, time.monotonic()
        settings, task, model = run.settings, run.task, run.model
        options = replace(settings.options, method=method, seed=settings.seed, progress=False)
        self.one_shot: Pruner | None = None
        if not settings.gradual:
            batches = TaskBatches(task, run.device, self._on_batch)
            wanted = sparsity if settings.fixed_sparsity is None else None
            self.one_shot = Pruner(model, task.loss, batches, wanted, options)
            self.total = self.one_shot.total
            return
        batches = TaskBatches(task, run.device)
        schedule = [sparsity]  # an N:M pattern has one sparsity, and one step
        if settings.fixed_sparsity is None:
            schedule = SCHEDULES[settings.schedule](0.0, sparsity, settings.steps)
        optimizer = make_optimizer(settings.optimizer(task), task, model)
        plain = {option.name: getattr(options, option.name) for option in fields(options)}
        self.total, self._steps_each = len(schedule), settings.epochs * batches.count()
        self.gradual = GradualPruner(
            model, task.loss, batches, schedule, optimizer=optimizer, reset_momentum=True, **plain
        )
        self.loop = TrainingLoop(model, task.loss, batches, optimizer, seed=settings.seed)

    @property
    def steps_done(self) -> float:
        """Pruning steps with the training after them; fractions count."""
        if self.one_shot is not None:
            return self.one_shot.steps_done
        return min(self.gradual.steps_done, self.loop.step / self._steps_each)

    @property
    def history(self) -> list[StepRecord]:
        return self.one_shot.result.history if self.one_shot is not None else sum(self.gradual.history, [])

    @property
    def masks(self) -> dict[str, Tensor]:
        return self.one_shot.result.masks if self.one_shot is not None else self.gradual.masks

    def finish(self, path: Path) -> None:
        """Takes all remaining steps, from the start or from the state saved in the folder of the cell."""
        watcher = self._run.watcher
        saved = load_state(path / STATE)
        if saved is not None and saved["run"] == self._run.folder.identity:
            self._load(saved)
            watcher.say(f"{path.name}: resuming after {self.steps_done:.3g} of {self.total} steps")
        watcher.begin(path.name, self.total, "steps")
        watcher.at(self.steps_done)
        while self._advance(path):
            self._save(path)
            watcher.at(self.steps_done, f"loss {self.history[-1].loss_after:.4g}")
        watcher.end()

    def _advance(self, path: Path) -> bool:
        """Takes the next step; False at the end."""
        self._drawn = 0
        if self.one_shot is not None:
            return not self.one_shot.done and bool(self.one_shot.step())
        self.loop.run(self.gradual.steps_done * self._steps_each, lambda: self._on_training(path))
        if self.loop.is_diverged:
            raise RuntimeError(
                f"the loss was not finite at step {self.loop.step} of the training between pruning steps; "
                "use a lower learning rate (--lr)"
            )
        return self.gradual.step() is not None

    def _on_batch(self) -> None:
        """Progress within a step, if gradients are one per batch."""
        self._drawn += 1
        if self.one_shot is not None:
            self._run.watcher.at(self.steps_done + min(1.0, self._drawn / self.one_shot.options.num_grads))

    def _on_training(self, path: Path) -> None:
        self._run.watcher.at(self.steps_done, "training")
        if time.monotonic() - self._saved >= self._run.settings.save_every:
            self._save(path)

    def _save(self, path: Path) -> None:
        state: Record = {"run": self._run.folder.identity}
        if self.one_shot is not None:
            state |= {"model": self._run.model.state_dict(), "pruner": self.one_shot.state_dict()}
        else:
            state |= {"loop": self.loop.state_dict(), "pruner": self.gradual.state_dict()}
        save_state(state, path / STATE)
        self._saved = time.monotonic()

    def _load(self, state: Record) -> None:
        if self.one_shot is not None:
            self._run.model.load_state_dict(state["model"])
            self.one_shot.load_state_dict(state["pruner"])
        else:
            self.loop.load_state_dict(state["loop"])
            self.gradual.load_state_dict(state["pruner"])


def _results(run: _Run, work: _Work, path: Path) -> Record:
    """Evaluates the pruned model and writes its files; returns the entries of its cell in run.json."""
    masks, history = work.masks, work.history
    training: list[Record] = []
    if run.settings.gradual:
        pairs = enumerate(zip(work.loop.seconds, work.loop.losses, strict=True), 1)
        training = [{"step": step, "second": round(second, 4), "loss": loss} for step, (second, loss) in pairs]
    found = measure(run.task, run.model, run.device)
    size = _write(run.model, masks, path)
    layers = [{"name": name, "weights": mask.numel(), "kept": int(mask.sum())} for name, mask in masks.items()]
    seconds = sum(record.seconds for record in history) + (training[-1]["second"] if training else 0.0)
    return {
        "sparsity": 1 - sum(layer["kept"] for layer in layers) / sum(layer["weights"] for layer in layers),
        **asdict(found),
        "seconds": round(seconds, 4),
        "gradient_seconds": round(sum(record.gradient_seconds for record in history), 4),
        "peak_bytes": process_peak_bytes(),
        "layers": layers,
        "steps": [_step(record) for record in history],
        "training": training,
        "files": {what: f"{path.name}/{what}.safetensors" for what in ("weights", "masks", "compact")},
        "bytes": {"dense": size.dense, "compact": size.compact},
    }


def _step(record: StepRecord) -> Record:
    facts = {key: finite(getattr(record, key)) for key in ("predicted_increase", "loss_before", "loss_after")}
    return {"sparsity": record.sparsity, **facts, "seconds": round(record.seconds, 4)}


def _write(model: nn.Module, masks: dict[str, Tensor], path: Path) -> CompactSize:
    save_weights(model, path / "weights.safetensors")
    with writing(path / "masks.safetensors") as draft:
        save_masks(masks, draft)
    with writing(path / "compact.safetensors") as draft:
        return save_compact(model, draft, masks)
