"""The optimizers of `mfac train`, with settings that suit each where none are given."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mfac.app.tasks import Task
from mfac.optimizer import MFAC
from mfac.windows import Int8, TopK, Window

WINDOWS: dict[str, Window] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": Int8(),
    "topk": TopK(),
}
OPTIMIZERS = ("mfac", "sgd", "adam", "adamw", "task")


@dataclass(frozen=True)
class OptimizerSettings:
    """One optimizer; None: what suits it (see `DEFAULTS`), and what it has no use for is left out."""

    name: str
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    num_grads: int | None = None
    damping: float | None = None
    window: str | None = None

    def filled(self) -> dict[str, Any]:
        """All settings that the optimizer has, as it gets them."""
        return {
            key: default if getattr(self, key) is None else getattr(self, key)
            for key, default in DEFAULTS[self.name].items()
        }


# M-FAC in the units of normalize="sum", where one learning rate and one damping serve every number of gradients.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mfac": {"lr": 0.5, "num_grads": 64, "damping": 0.1, "momentum": 0.0, "weight_decay": 0.0, "window": "float32"},
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "weight_decay": 0.01},
    "task": {},
}


def check_optimizer(name: str, task: Task) -> None:
    """Raises ValueError for a name that is none of `OPTIMIZERS`, or "task" where the task has no optimizer."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {name!r}")
    if name == "task" and task.optimizer is None:
        raise ValueError(f"the task {task.name} defines no optimizer; choose one of {', '.join(OPTIMIZERS[:-1])}")


def make_optimizer(settings: OptimizerSettings, task: Task, model: nn.Module) -> Optimizer:
    """The optimizer of a model's trainable parameters.

    Raises:
        ValueError: an unknown name, or a setting out of its range.
        MemoryError: the window of M-FAC does not fit.
    """
    check_optimizer(settings.name, task)
    if settings.window not in (None, *WINDOWS):
        raise ValueError(f"window must be one of {', '.join(WINDOWS)}, not {settings.window!r}")
    values = settings.filled()
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    params = [parameter for _, parameter in named]
    if settings.name == "task":
        assert task.optimizer is not None
        return task.optimizer(params)
    if settings.name == "mfac":
        return MFAC(
            named,
            float(values["lr"]),
            int(values["num_grads"]),
            float(values["damping"]),
            momentum=float(values["momentum"]),
            weight_decay=float(values["weight_decay"]),
            normalize="sum",
            window=WINDOWS[values["window"]],
        )
    lr, decay = float(values["lr"]), float(values["weight_decay"])
    if settings.name == "sgd":
        return torch.optim.SGD(params, lr, momentum=float(values["momentum"]), weight_decay=decay)
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(params, lr, weight_decay=decay)
