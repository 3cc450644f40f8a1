"""Pruning by Optimal Brain Surgeon on the empirical Fisher matrix: scores, compensation, patterns, masks."""

from mfac.pruning.batch_stream import BatchStream
from mfac.pruning.compact_file import load_compact, save_compact
from mfac.pruning.gradual import GradualPruner
from mfac.pruning.mask_keeper import MaskKeeper, attach_masks
from mfac.pruning.masks import (
    SparsityReport,
    apply_masks,
    load_masks,
    masks_from_zeros,
    save_masks,
    sparsity_report,
    to_torch_ao,
    to_torch_prune,
)  # fmt: skip
from mfac.pruning.options import PruningOptions
from mfac.pruning.prune import prune
from mfac.pruning.refit import refit
from mfac.pruning.result import PruningResult, StepRecord
from mfac.pruning.schedules import (
    geometric_schedule,
    learning_rate_cycle,
    mobilenet_schedule,
    polynomial_schedule,
    resnet50_schedule,
)  # fmt: skip
from mfac.pruning.step import Pruner

__all__ = [
    "BatchStream", "GradualPruner", "MaskKeeper", "Pruner", "PruningOptions", "PruningResult", "SparsityReport",
    "StepRecord", "apply_masks", "attach_masks", "geometric_schedule", "learning_rate_cycle", "load_compact",
    "load_masks", "masks_from_zeros", "mobilenet_schedule", "polynomial_schedule", "prune", "refit",
    "resnet50_schedule", "save_compact", "save_masks", "sparsity_report", "to_torch_ao", "to_torch_prune",
]  # fmt: skip
