"""`mfac.prune` with the baselines among its methods: "wanda" (also by row), "lobs", "kfac" (also without π) and
"woodfisher".
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from experiments.baselines.kronecker import Kronecker
from experiments.baselines.layerwise import LayerwiseOBS, Wanda
from experiments.baselines.woodfisher import WoodFisher
from mfac.gradients.batches import Batch
from mfac.gradients.losses import LossFn
from mfac.layout import Masks
from mfac.pruning.options import PruningOptions
from mfac.pruning.result import PruningResult
from mfac.pruning.selection import Sparsity
from mfac.pruning.step import Pruner

PAPER: dict[str, Any] = {"num_grads": 64, "block_size": 128, "damping": 1e-5, "fisher": "empirical", "update": "joint",
                         "recalibrate": False}  # fmt: skip
BASELINES: dict[str, Any] = {
    "wanda": Wanda,
    "wanda by row": partial(Wanda, by_row=True),
    "lobs": LayerwiseOBS,
    "kfac": Kronecker,
    "kfac without π": partial(Kronecker, balance=False),
    "woodfisher": WoodFisher,
}


def prune(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Batch], sparsity: Sparsity, *, method: str = "mfac",
    masks: Masks = None, **options: Any,
) -> PruningResult:  # fmt: skip
    """Prunes by a method of `mfac.prune` or by a baseline; `options` has the paper's defaults."""
    options = PAPER | options
    if method not in BASELINES:
        return Pruner(model, loss_fn, batches, sparsity, PruningOptions(method=method, **options), masks).run()
    if options.get("damping") == "auto":
        raise ValueError(f"damping=\"auto\" requires method 'mfac'; give method {method!r} a number")
    chosen = PruningOptions(**options)
    return Pruner(model, loss_fn, batches, sparsity, chosen, masks, BASELINES[method](loss_fn, chosen)).run()
