"""Training runs: several optimizers side by side, from the same weights and with the same batches."""

from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from mfac.app.runs.environment import process_peak_bytes
from mfac.app.runs.files import save_weights
from mfac.app.runs.folder import Record
from mfac.app.runs.measures import measure
from mfac.app.runs.optimizers import OptimizerSettings, make_optimizer
from mfac.app.runs.run import Run, build_model, check_distinct, check_settings
from mfac.app.runs.task_batches import TaskBatches
from mfac.app.runs.training_loop import TrainingLoop
from mfac.app.tasks import Task

SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training run.

    Args:
        optimizers: optimizers to compare; task is the task's own; may be repeated.
        epochs: passes over the data.
        steps: optimizer steps, instead of epochs.
        eval_every: steps between evaluations.
        schedule: schedule of the learning rate: cosine (to zero) or constant.
        checkpoint: a state_dict saved by torch.save or safetensors to start from.
        seeds: seed of initial weights, order of batches and dropout; may be repeated.
        device: where to compute: cpu, cuda, cuda:1 ...
        save_every: seconds between saves.
    """

    kind: ClassVar[str] = "train"
    optimizers: tuple[OptimizerSettings, ...]
    epochs: int = 5
    steps: int | None = None
    eval_every: int | None = None
    schedule: str = "cosine"
    checkpoint: str | None = None
    seeds: tuple[int, ...] = (0,)
    device: str = "cpu"
    save_every: float = 30.0

    def flat(self) -> dict[str, Any]:
        """The settings that determine the result, for run.json."""
        own = {key: value for key, value in vars(self).items() if key not in ("optimizers", "save_every")}
        each = {f"{o.name}_{key}": value for o in self.optimizers for key, value in o.filled().items()}
        return {"optimizers": [o.name for o in self.optimizers], **own, **each}

    def check(self, task: Task, model: nn.Module) -> None:
        """Raises ValueError for invalid settings."""
        check_distinct(optimizer=tuple(optimizer.name for optimizer in self.optimizers), seed=self.seeds)
        check_settings(self, ("epochs", "steps", "eval_every"), SCHEDULES)
        for optimizer in self.optimizers:
            make_optimizer(optimizer, task, model)

    def carry_out(self, run: Run, model: nn.Module) -> None:
        """Trains by all optimizers with all seeds."""
        every = TaskBatches(run.task, run.device).count() if self.steps is None else max(1, self.steps // 10)
        total = self.epochs * every if self.steps is None else self.steps
        for seed, optimizer in product(self.seeds, self.optimizers):
            run.cell(
                f"{optimizer.name}-seed{seed}",
                {"label": optimizer.name, "optimizer": optimizer.name, "seed": seed},
                seed=seed,
                save_every=self.save_every,
                make=partial(Training, run, self, optimizer, seed, total, self.eval_every or every),
                results=_results,
            )


class Training:
    """One optimizer with one seed."""

    is_milestone = False

    def __init__(
        self, run: Run, settings: TrainingSettings, optimizer: OptimizerSettings, seed: int, total: int, eval_every: int
    ):
        self.run, self.optimizer, self.total = run, optimizer, total
        self.evaluations: list[Record] = []
        self.model = build_model(run.task, run.device, seed, settings.checkpoint)
        self.loop = TrainingLoop(
            self.model,
            run.task.loss,
            TaskBatches(run.task, run.device),
            make_optimizer(optimizer, run.task, self.model),
            seed=seed,
            cosine_steps=total if settings.schedule == "cosine" else None,
        )
        self._eval_every = eval_every

    @property
    def done(self) -> float:
        return self.loop.step

    @property
    def note(self) -> str:
        loss = self.loop.losses[-1]
        return "loss not finite" if loss is None else f"loss {loss:.4g}"

    def advance(self) -> bool:
        loop = self.loop
        if loop.step == self.total or loop.is_diverged:
            return False
        loop.take_step()
        if loop.step == self.total or loop.is_diverged or loop.step % self._eval_every == 0:
            found = measure(self.run.task, self.model, self.run.device)
            self.evaluations.append({"step": loop.step, "second": round(loop.seconds[-1], 4), **asdict(found)})
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"loop": self.loop.state_dict(), "evaluations": self.evaluations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loop.load_state_dict(state["loop"])
        self.evaluations = list(state["evaluations"])


def _results(work: Training, path: Path) -> Record:
    """Writes the weights; returns the entries of the cell in run.json."""
    save_weights(work.model, path / "weights.safetensors")
    loop = work.loop
    record = {
        "settings": work.optimizer.filled(),
        "steps": loop.step,
        "losses": loop.losses,
        "seconds": [round(second, 4) for second in loop.seconds],
        "evaluations": work.evaluations,
        "seconds_total": round(loop.seconds[-1], 4),
        "peak_bytes": process_peak_bytes(),
        "files": {"weights": f"{path.name}/weights.safetensors"},
    }
    if loop.is_diverged:
        record["stopped"] = f"the loss was not finite at step {loop.step}"
        work.run.watcher.say(f"{path.name}: stopped, {record['stopped']}; try a lower learning rate")
    return record
