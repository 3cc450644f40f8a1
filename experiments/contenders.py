"""The optimizers of the paper's tables with the paper's hyperparameters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import mfac
from experiments import data
from experiments.baselines.ggt import GGT
from experiments.baselines.kfac import KFAC
from experiments.training import Training, cosine, drops

# M-FAC in the units of normalize="sum", in which one learning rate serves every length of the window: with 512
# gradients these are the paper's 1e-3 and 1e-5 exactly.
PAPER_WINDOW, PAPER_DAMPING = 512, 1e-5


@dataclass(frozen=True)
class Contender:
    """An optimizer and its settings, in the paper's units."""

    name: str
    lr: float
    decay: float = 0.0  # of the weights
    num_grads: int = PAPER_WINDOW  # of the window of M-FAC and GGT
    damping: float = 0.0  # of K-FAC and M-FAC
    batch_size: int = 128  # K-FAC's best is 1,000
    schedule: str = "drops"  # at 50 and 75 %, or "cosine"
    every: int = 10  # steps between updates of K-FAC's factors, one of the two frequencies in the paper's grid

    def make(self, model: nn.Module) -> torch.optim.Optimizer:
        return _MAKERS[self.name](self, model)

    def train(
        self, make_model: Callable[[], nn.Module], seed: int, steps: int | None, test_images: int, tests: int = 3
    ) -> dict[str, Any]:
        """The record of a run on CIFAR-10, of one pass if `steps` is None, with so many tests, if there are images."""
        torch.manual_seed(seed)
        model, batches = make_model(), data.cifar_batches(self.batch_size, data.CIFAR10, seed)
        steps = steps or len(batches)
        test = data.make_test(data.CIFAR10, test_images) if test_images else None
        factor = cosine if self.schedule == "cosine" else drops(0.5, 0.75)
        run = Training(model, self.make(model), batches, steps, factor, test=test, test_every=max(1, steps // tests))
        return run.run()


def _mfac(c: Contender, model: nn.Module) -> torch.optim.Optimizer:
    lr, damping = c.lr * PAPER_WINDOW, c.damping * PAPER_WINDOW
    return mfac.MFAC(model.named_parameters(), lr, c.num_grads, damping, weight_decay=c.decay, normalize="sum")


def _adahessian(c: Contender, model: nn.Module) -> torch.optim.Optimizer:
    from pytorch_optimizer import AdaHessian

    return AdaHessian(model.parameters(), lr=c.lr, weight_decay=c.decay)


_MAKERS: dict[str, Any] = {
    "SGD": lambda c, model: torch.optim.SGD(model.parameters(), c.lr, momentum=0.9, weight_decay=c.decay),
    "Adam": lambda c, model: torch.optim.Adam(model.parameters(), c.lr),
    "AdamW": lambda c, model: torch.optim.AdamW(model.parameters(), c.lr, weight_decay=c.decay),
    "K-FAC": lambda c, model: KFAC(model, c.lr, c.damping, weight_decay=c.decay, every=c.every),
    "GGT": lambda c, model: GGT(model.parameters(), c.lr, c.num_grads, weight_decay=c.decay),
    "AdaHessian": _adahessian,
    "M-FAC": _mfac,
}


def resnet_contenders(depth: int) -> dict[str, Contender]:
    """Table 4, left, for ResNet20 or ResNet32.

    The paper gives K-FAC's learning rate and damping for ResNet32 only; ResNet20 has the middle of its grid.
    """
    rates = (0.075, 0.1887) if depth == 32 else (0.1, 0.2887)
    return {
        "SGD": Contender("SGD", 0.1, 1e-4),
        "Adam": Contender("Adam", 1e-3),
        "AdamW": Contender("AdamW", 1e-2, 1e-2),
        "K-FAC": Contender("K-FAC", rates[0], damping=rates[1], batch_size=1000, schedule="cosine"),
        "GGT": Contender("GGT", 0.05, num_grads=100, schedule="cosine"),
        "AdaHessian": Contender("AdaHessian", 0.015, 5e-4 if depth == 32 else 3e-3),
        "M-FAC": Contender("M-FAC", 1e-3, 3e-3, damping=PAPER_DAMPING),
    }


def plain_contenders(num_grads: int = 1024, batch_size: int = 256) -> dict[str, Contender]:
    """Table 4, right: no tuning, no weight decay."""
    return {
        "SGD": Contender("SGD", 0.1, batch_size=batch_size),
        "Adam": Contender("Adam", 1e-3, batch_size=batch_size),
        "M-FAC": Contender("M-FAC", 1e-3, num_grads=num_grads, damping=PAPER_DAMPING, batch_size=batch_size),
    }
