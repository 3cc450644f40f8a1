"""Training: a loop that can be resumed to the bit, and runs of several optimizers from the same weights and batches."""

import inspect
import math
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from mfac.app.runs.environment import process_peak_bytes
from mfac.app.runs.folder import Record, save_weights
from mfac.app.runs.run import Run, build_model, check_settings, refuse
from mfac.app.runs.task_batches import TaskBatches, epochs, finite, measure
from mfac.app.tasks import Task
from mfac.full_matrix_adam import ADAM_LR, ORTHOGONAL_LR, FullMatrixAdam
from mfac.gradients.collect import differentiable
from mfac.gradients.model_state import random_state, set_random_state
from mfac.optimizer import MFAC
from mfac.pruning.mask_keeper import check_trained
from mfac.windows.int8 import Int8
from mfac.windows.storage import Window
from mfac.windows.topk import TopK

WINDOWS: dict[str, Window] = {
    "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "int8": Int8(), "topk": TopK(),
}  # fmt: skip
# The optimizers, and what they are called with unless something else is given; all other defaults are their own.
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "full-matrix-adam": (FullMatrixAdam, {"lr": ADAM_LR}),
    "full-matrix-adam-orthogonalized": (FullMatrixAdam, {"lr": ORTHOGONAL_LR, "orthogonalize": True}),
    "mfac": (MFAC, {}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
}
OPTIMIZERS, SCHEDULES = (*CLASSES, "task"), ("cosine", "constant")


@dataclass(frozen=True)
class OptimizerSettings:
    """One optimizer; None means its default. Settings that do not apply to it are ignored."""

    name: Annotated[str, "one of `OPTIMIZERS`"]
    lr: Annotated[float | None, "learning rate, for all optimizers or one; may be repeated, as may all of these"] = None
    momentum: Annotated[float | None, "momentum of mfac and sgd"] = None
    weight_decay: Annotated[float | None, "weight decay"] = None
    num_grads: Annotated[int | None, "gradients in the window of full-matrix-adam and mfac"] = None
    damping: Annotated[float | str | None, "relative to the mean eigenvalue; in mfac λ itself, or auto"] = None
    normalize: Annotated[str | None, "divisor of the sum of mfac's window: full, seen or sum"] = None
    window: Annotated[str | None, "storage of gradients: float32, bfloat16, float16, int8, topk (1 % of each)"] = None

    def filled(self) -> dict[str, Any]:
        """All settings that this optimizer has."""
        kind, own = CLASSES.get(self.name, (None, {}))
        known = inspect.signature(kind).parameters if kind else {}
        given = {key: getattr(self, key) for key in KINDS if key in known}
        return {key: own.get(key, known[key].default) if value is None else value for key, value in given.items()}


KINDS: dict[str, Any] = dict.fromkeys(("lr", "momentum", "weight_decay"), float)  # what is set for all, or for one
KINDS |= {"damping": lambda text: text if text == "auto" else float(text), "num_grads": int, "normalize": str}
KINDS |= {"window": str}


def make_optimizer(settings: OptimizerSettings, task: Task, model: nn.Module) -> Optimizer:
    """The optimizer for a model's trainable parameters; errors are those of its class."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if settings.name == "task":
        if task.optimizer is None:
            raise ValueError(f"the task {task.name} defines no optimizer; choose one of {', '.join(CLASSES)}")
        made = task.optimizer([parameter for _, parameter in named])
        check_trained(made, list(model.parameters()), "parameters of the model")
        return made
    kind, own = CLASSES[settings.name]
    values = own | settings.filled()
    if values.get("window") is not None:
        if values["window"] not in WINDOWS:
            raise ValueError(f"window must be one of {', '.join(WINDOWS)}, not {values['window']!r}")
        values["window"] = WINDOWS[values["window"]]
    return kind(named, **values)


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of a training run."""

    kind: ClassVar[str] = "train"
    optimizers: Annotated[tuple[OptimizerSettings, ...], "optimizer to compare; task: the task's own; may be repeated"]
    epochs: Annotated[int, "passes over the data"] = 5
    steps: Annotated[int | None, "number of optimizer steps, instead of epochs"] = None
    eval_every: Annotated[int | None, "steps between evaluations"] = None
    schedule: Annotated[str, "schedule of the learning rate: cosine (to zero) or constant"] = "cosine"
    checkpoint: Annotated[str | None, "a state_dict saved by torch.save or safetensors to start from"] = None
    seeds: Annotated[tuple[int, ...], "seed of initial weights, order of batches and dropout; may be repeated"] = (0,)
    device: Annotated[str, "where to compute: cpu, cuda, cuda:1 ..."] = "cpu"
    save_every: Annotated[float, "seconds between saves"] = 30.0

    def flat(self) -> dict[str, Any]:
        """The settings that determine the result, for run.json."""
        own = {key: value for key, value in vars(self).items() if key not in ("optimizers", "save_every")}
        each = {f"{o.name}_{key}": value for o in self.optimizers for key, value in o.filled().items()}
        return {"optimizers": [o.name for o in self.optimizers], **own, **each}

    def check(self, task: Task, model: nn.Module) -> None:
        names = tuple(optimizer.name for optimizer in self.optimizers)
        check_settings(self, ("epochs", "steps", "eval_every"), optimizer=names, seed=self.seeds)
        refuse(self, self.steps is not None, ("epochs",), "give either steps or epochs")
        for optimizer in self.optimizers:
            make_optimizer(optimizer, task, model)

    def carry_out(self, run: Run, model: nn.Module) -> None:
        every = max(1, self.steps // 10) if self.steps else len(TaskBatches(run.task, run.device))
        for seed, optimizer in product(self.seeds, self.optimizers):
            facts = {"label": optimizer.name, "optimizer": optimizer.name, "seed": seed}
            work = partial(self._train, optimizer, seed, self.steps or self.epochs * every, every)
            run.cell(f"{optimizer.name}-seed{seed}", facts, seed, work)

    def _train(self, optimizer: OptimizerSettings, seed: int, total: int, every: int, run: Run) -> Record:
        model = build_model(run.task, run.device, seed, self.checkpoint)
        made, cosine = make_optimizer(optimizer, run.task, model), self.schedule == "cosine"
        loop = TrainingLoop(run.task, model, run.device, made, total, seed, cosine, self.eval_every or every)
        run.begin(total, lambda: loop.done, loop=loop)
        while loop.advance():
            run.at(loop.done, "loss not finite" if loop.is_diverged else f"loss {loop.losses[-1]:.4g}")
        run.watcher.end()
        save_weights(model, run.file("weights.safetensors"))
        record = {
            "settings": optimizer.filled(),
            "steps": loop.done,
            "losses": loop.losses,
            "seconds": [round(second, 4) for second in loop.seconds],
            "evaluations": loop.evaluations,
            "seconds_total": round(loop.seconds[-1], 4),
            "peak_bytes": process_peak_bytes(),
            "files": {"weights": f"{run.name}/weights.safetensors"},
        }
        if loop.is_diverged:
            record["stopped"] = f"the loss was not finite at step {loop.done}"
            run.watcher.say(f"{run.name}: stopped, {record['stopped']}; try a lower learning rate")
        return record


@dataclass(eq=False)
class TrainingLoop:
    """`total` steps of an optimizer over epochs of batches, with an evaluation every `eval_every` steps (None: never).

    Resumed in the middle of an epoch, it draws the epoch again and skips the batches it has seen. Dropout draws from
    the global random state, which is part of the state. With `cosine`, the learning rates fall to zero.
    """

    task: Task
    model: nn.Module
    device: torch.device
    optimizer: Optimizer
    total: int
    seed: int
    cosine: bool = False
    eval_every: int | None = None
    losses: list[float | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # since the start
    evaluations: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._begin(0, 0)

    def _begin(self, epoch: int, batch: int) -> None:
        self._epoch, self._batch = epoch, batch
        self._stream = epochs(TaskBatches(self.task, self.device), self.seed, epoch, batch)

    @property
    def done(self) -> int:
        return len(self.losses)

    @property
    def is_diverged(self) -> bool:
        return bool(self.losses) and self.losses[-1] is None

    def advance(self) -> bool:
        """Trains on the next batch; False if there is nothing left to do."""
        if self.done == self.total or self.is_diverged:
            return False
        self.model.train()
        began = time.perf_counter()
        self._epoch, self._batch, batch = next(self._stream)
        if self.cosine:
            factor = 0.5 * (1 + math.cos(math.pi * self.done / self.total))
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        self.optimizer.zero_grad()
        loss = self.task.scalar_loss(self.model, batch)
        self.losses.append(finite(float(loss.detach())))
        if not self.is_diverged:
            differentiable(loss).backward()
            self.optimizer.step()
        self.seconds.append((self.seconds[-1] if self.seconds else 0.0) + time.perf_counter() - began)
        is_over = self.done == self.total or self.is_diverged
        if self.eval_every is not None and (is_over or self.done % self.eval_every == 0):
            found = measure(self.task, self.model, self.device)
            self.evaluations.append({"step": self.done, "second": round(self.seconds[-1], 4), **found})
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": random_state(),
            "lists": (self.losses, self.seconds, self.evaluations),
            "place": (self._epoch, self._batch),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.seconds, self.evaluations = state["lists"]
        self._begin(*state["place"])
        set_random_state(state["random"])
