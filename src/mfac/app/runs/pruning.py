"""Pruning runs: several methods and sparsities, each from the same dense weights."""

from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from mfac.app.runs.environment import process_peak_bytes
from mfac.app.runs.files import load_checkpoint, save_weights, writing
from mfac.app.runs.folder import DENSE, Record
from mfac.app.runs.measures import finite, measure
from mfac.app.runs.optimizers import OptimizerSettings, make_optimizer
from mfac.app.runs.random_state import seeded
from mfac.app.runs.run import Run, check_distinct, check_settings
from mfac.app.runs.task_batches import TaskBatches
from mfac.app.runs.training_loop import TrainingLoop
from mfac.app.tasks import Task
from mfac.pruning.budget import check_sparsity
from mfac.pruning.compact_file import save_compact
from mfac.pruning.gradual import GradualPruner
from mfac.pruning.masks import save_masks
from mfac.pruning.options import PruningOptions
from mfac.pruning.patterns import NOfM, parse_pattern
from mfac.pruning.result import StepRecord
from mfac.pruning.schedules import geometric_schedule, polynomial_schedule
from mfac.pruning.step import Pruner
from mfac.pruning.weights import choose_targets

SCHEDULES = {"geometric": geometric_schedule, "polynomial": polynomial_schedule}
FINE_TUNING_LR = 0.01
OPTIONS = PruningOptions()
NOT_RECORDED = ("method", "floor", "bn_batches", "rows_dir", "seed", "progress", "process_group")


@dataclass(frozen=True)
class PruningSettings:
    """The settings of a pruning run.

    Args:
        options: those of `mfac.prune`; the run sets its method, seed and progress.
        methods: how weights are chosen; may be repeated, to compare.
        sparsities: fraction of weights to remove; may be repeated. An N:M pattern has its own.
        gradual: train between pruning steps.
        steps: number of pruning steps, with training after each.
        schedule: schedule of their sparsities: geometric (equal fractions of the remaining weights) or polynomial.
        epochs: epochs of training after each pruning step.
        lr: learning rate, to train by SGD; by default the task's own optimizer trains, or SGD at 0.01.
        momentum: momentum of that SGD.
        checkpoint: a state_dict saved by torch.save or safetensors to start from.
        seed: seed of everything random.
        device: where to compute: cpu, cuda, cuda:1 ...
        save_every: seconds between saves during training.
    """

    kind: ClassVar[str] = "prune"
    options: PruningOptions = OPTIONS
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
    def seeds(self) -> tuple[int, ...]:
        return (self.seed,)

    @property
    def fixed_sparsity(self) -> float | None:
        """That of an N:M pattern."""
        pattern = parse_pattern(self.options.pattern)
        return pattern.sparsity if isinstance(pattern, NOfM) else None

    @property
    def asked(self) -> tuple[float, ...]:
        """The sparsities; 0.9 if none is given."""
        return self.sparsities or (self.fixed_sparsity or 0.9,)

    def flat(self) -> dict[str, Any]:
        """The settings that determine the result, for run.json."""
        options = {key: value for key, value in vars(self.options).items() if key not in NOT_RECORDED}
        left_out = {"options", "save_every"} | (
            set() if self.gradual else {"schedule", "steps", "epochs", "lr", "momentum"}
        )
        own = {key: value for key, value in vars(self).items() if key not in left_out}
        return {**own, "sparsities": self.asked, **options}

    def cell_options(self, method: str) -> PruningOptions:
        return replace(self.options, method=method, seed=self.seed, progress=False)

    def optimizer(self, task: Task) -> OptimizerSettings:
        """That of gradual pruning."""
        if self.lr is None and task.optimizer is not None:
            return OptimizerSettings("task")
        return OptimizerSettings("sgd", FINE_TUNING_LR if self.lr is None else self.lr, self.momentum)

    def check(self, task: Task, model: nn.Module) -> None:
        """Raises ValueError for invalid settings."""
        check_distinct(method=self.methods, sparsity=self.asked)
        check_settings(self, ("steps", "epochs"), SCHEDULES)
        for method in self.methods:
            replace(self.options, method=method)
        fixed = self.fixed_sparsity
        if fixed is not None and self.asked != (fixed,):
            raise ValueError(f"pattern {self.options.pattern} has a sparsity of its own, {fixed:g}; leave sparsity out")
        for sparsity in self.asked:
            check_sparsity(sparsity)
        choose_targets(model, self.options.targets, self.options.ignore)

    def carry_out(self, run: Run, model: nn.Module) -> None:
        """Prunes by all methods to all sparsities, each from the same dense weights."""
        self._pretrain(run, model)
        if "dense" not in run.folder.record:
            run.folder.put("dense", asdict(measure(run.task, model, run.device)))
        dense = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        for method, sparsity in product(self.methods, self.asked):
            model.load_state_dict(dense)
            model.zero_grad()
            run.cell(
                f"{method}-{sparsity:g}",
                {"label": method, "method": method, "asked": sparsity},
                seed=self.seed,
                save_every=self.save_every,
                make=partial(Gradual if self.gradual else OneShot, run, self, model, method, sparsity),
                results=partial(_results, run, model),
            )

    def _pretrain(self, run: Run, model: nn.Module) -> None:
        """Trains the model once, if the task can, so that all cells start from the same weights."""
        if run.task.pretrain is None or self.checkpoint is not None:
            return
        path = run.folder.path / DENSE
        if not path.exists():
            run.watcher.say(f"training {run.task.name} first, since no checkpoint is given")
            with seeded(self.seed):
                run.task.pretrain(model)
            save_weights(model, path)
        load_checkpoint(path, model)


class OneShot:
    """A `Pruner`, whose state includes the model's."""

    is_milestone = True
    training: tuple[Record, ...] = ()

    def __init__(self, run: Run, settings: PruningSettings, model: nn.Module, method: str, sparsity: float):
        self._model, self._watcher = model, run.watcher
        self._drawn: int | None = None  # batches of the present step
        options = settings.cell_options(method)
        batches = TaskBatches(run.task, run.device, self._on_batch)
        self._pruner = Pruner(model, run.task.loss, batches, sparsity, options)
        self.total, self.history, self.masks = (
            self._pruner.total,
            self._pruner.result.history,
            self._pruner.result.masks,
        )

    @property
    def done(self) -> float:
        return self._pruner.steps_done

    @property
    def note(self) -> str:
        return f"loss {self.history[-1].loss_after:.4g}"

    def advance(self) -> bool:
        if self._pruner.done:
            return False
        self._drawn = 0
        self._pruner.step()
        self._drawn = None
        return True

    def _on_batch(self) -> None:
        """Shows progress within a step, if gradients are one per batch."""
        if self._drawn is not None:
            self._drawn += 1
            self._watcher.at(self.done + min(1.0, self._drawn / self._pruner.options.num_grads))

    def state_dict(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "pruner": self._pruner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state["model"])
        self._pruner.load_state_dict(state["pruner"])


class Gradual:
    """A `GradualPruner`, and a training loop after each of its steps."""

    def __init__(self, run: Run, settings: PruningSettings, model: nn.Module, method: str, sparsity: float):
        batches = TaskBatches(run.task, run.device)
        optimizer = make_optimizer(settings.optimizer(run.task), run.task, model)
        options = settings.cell_options(method)
        schedule = [sparsity]  # an N:M pattern has one sparsity, and one step
        if settings.fixed_sparsity is None:
            schedule = SCHEDULES[settings.schedule](0.0, sparsity, settings.steps)
        self._pruner = GradualPruner(
            model,
            run.task.loss,
            batches,
            schedule,
            optimizer=optimizer,
            reset_momentum=True,
            **{option.name: getattr(options, option.name) for option in fields(options)},
        )
        self._loop = TrainingLoop(model, run.task.loss, batches, optimizer, seed=settings.seed)
        self.total, self._steps_each, self.is_milestone = len(schedule), settings.epochs * batches.count(), True

    @property
    def done(self) -> float:
        """Pruning steps with the training after them; fractions count."""
        return min(self._pruner.steps_done, self._loop.step / self._steps_each)

    @property
    def note(self) -> str:
        return f"loss {self.history[-1].loss_after:.4g}" if self.is_milestone else "training"

    @property
    def history(self) -> list[StepRecord]:
        return [record for records in self._pruner.history for record in records]

    @property
    def masks(self) -> dict[str, Tensor]:
        return self._pruner.masks

    @property
    def training(self) -> tuple[Record, ...]:
        pairs = enumerate(zip(self._loop.seconds, self._loop.losses, strict=True), 1)
        return tuple({"step": step, "second": round(second, 4), "loss": loss} for step, (second, loss) in pairs)

    def advance(self) -> bool:
        """One step of training, or a pruning step if the training of the last one is complete."""
        self.is_milestone = self._loop.step == self._pruner.steps_done * self._steps_each
        if self.is_milestone:
            return self._pruner.step() is not None
        self._loop.take_step()
        if self._loop.is_diverged:
            raise RuntimeError(
                f"the loss was not finite at step {self._loop.step} of the training between pruning steps; "
                "use a lower learning rate (--lr)"
            )
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"loop": self._loop.state_dict(), "pruner": self._pruner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.load_state_dict(state["loop"])
        self._pruner.load_state_dict(state["pruner"])


def _results(run: Run, model: nn.Module, work: OneShot | Gradual, path: Path) -> Record:
    """Evaluates the pruned model and writes its files; returns the entries of the cell in run.json."""
    masks, history, training = work.masks, work.history, list(work.training)
    found = measure(run.task, model, run.device)
    save_weights(model, path / "weights.safetensors")
    with writing(path / "masks.safetensors") as draft:
        save_masks(masks, draft)
    with writing(path / "compact.safetensors") as draft:
        size = save_compact(model, draft, masks)
    layers: list[Record] = [
        {"name": name, "weights": mask.numel(), "kept": int(mask.sum())} for name, mask in masks.items()
    ]
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
