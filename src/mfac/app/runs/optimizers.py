"""The optimizers of `mfac train`, and their default settings."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mfac.app.tasks import Task
from mfac.optimizer import MFAC
from mfac.windows.int8 import Int8
from mfac.windows.storage import Window
from mfac.windows.topk import TopK

WINDOWS: dict[str, Window] = {
    "float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "int8": Int8(), "topk": TopK(),
}  # fmt: skip
# M-FAC in the units of normalize="sum", where one learning rate and one damping suit every number of gradients.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mfac": {"lr": 0.5, "num_grads": 64, "damping": 0.1, "momentum": 0.0, "weight_decay": 0.0, "window": "float32"},
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
    "adam": {"lr": 1e-3, "weight_decay": 0.0},
    "adamw": {"lr": 1e-3, "weight_decay": 0.01},
    "task": {},
}
OPTIMIZERS = tuple(DEFAULTS)
OTHERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class OptimizerSettings:
    """One optimizer; None means its default (see `DEFAULTS`). Settings that it does not have are ignored.

    Args:
        name: one of `OPTIMIZERS`.
        lr: learning rate, of all optimizers or of one; may be repeated.
        momentum: momentum of mfac and sgd; may be repeated.
        weight_decay: weight decay, of all optimizers or of one; may be repeated.
        num_grads: gradients in the window of mfac.
        damping: damping of mfac, in the units of normalize="sum".
        window: how mfac stores its gradients; topk keeps 1 % of each.
    """

    name: str
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    num_grads: int | None = None
    damping: float | None = None
    window: str | None = None

    def filled(self) -> dict[str, Any]:
        """All settings that this optimizer has."""
        given = {key: getattr(self, key) for key in DEFAULTS[self.name]}
        return DEFAULTS[self.name] | {key: value for key, value in given.items() if value is not None}


def make_optimizer(settings: OptimizerSettings, task: Task, model: nn.Module) -> Optimizer:
    """The optimizer for a model's trainable parameters.

    Raises:
        ValueError: an unknown name, or an invalid setting.
        MemoryError: the window of M-FAC does not fit in memory.
    """
    if settings.name not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {settings.name!r}")
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    params = [parameter for _, parameter in named]
    if settings.name == "task":
        if task.optimizer is None:
            raise ValueError(f"the task {task.name} defines no optimizer; choose one of {', '.join(OPTIMIZERS[:-1])}")
        return task.optimizer(params)
    values = settings.filled()
    if settings.name != "mfac":
        return OTHERS[settings.name](params, **values)
    window = values.pop("window")
    if window not in WINDOWS:
        raise ValueError(f"window must be one of {', '.join(WINDOWS)}, not {window!r}")
    return MFAC(named, **values, normalize="sum", window=WINDOWS[window])
