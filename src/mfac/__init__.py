"""Second-order information for PyTorch, matrix-free: exact products with the inverse of the empirical Fisher."""

from mfac.distributed.shares import ColumnShare, column_shares
from mfac.dynamic import DynamicInverseFisher
from mfac.fisher_blocks import FisherBlocks
from mfac.full_matrix_adam import FullMatrixAdam
from mfac.gradient_file import GradientFile
from mfac.gradients import accumulate_fisher, collect_gradients, criterion_loss, hessian_product, model_loss
from mfac.influence import influence, leave_out, leverages
from mfac.inverse_fisher import InverseFisher
from mfac.optimizer import MFAC
from mfac.preconditioner import MFACPreconditioner
from mfac.pruning import (
    GradualPruner,
    PruningResult,
    SparsityReport,
    apply_masks,
    attach_masks,
    geometric_schedule,
    learning_rate_cycle,
    load_compact,
    load_masks,
    masks_from_zeros,
    mobilenet_schedule,
    polynomial_schedule,
    prune,
    refit,
    resnet50_schedule,
    save_compact,
    save_masks,
    sparsity_report,
    to_torch_ao,
    to_torch_prune,
)
from mfac.static import StaticInverseFisher
from mfac.windows import native as native
from mfac.windows.int8 import Int8
from mfac.windows.topk import TopK

__version__ = "0.1.0"

__all__ = [
    "MFAC",
    "ColumnShare",
    "DynamicInverseFisher",
    "FisherBlocks",
    "FullMatrixAdam",
    "GradientFile",
    "GradualPruner",
    "Int8",
    "InverseFisher",
    "MFACPreconditioner",
    "PruningResult",
    "SparsityReport",
    "StaticInverseFisher",
    "TopK",
    "accumulate_fisher",
    "apply_masks",
    "attach_masks",
    "collect_gradients",
    "column_shares",
    "criterion_loss",
    "geometric_schedule",
    "hessian_product",
    "influence",
    "learning_rate_cycle",
    "leave_out",
    "leverages",
    "load_compact",
    "load_masks",
    "masks_from_zeros",
    "mobilenet_schedule",
    "model_loss",
    "polynomial_schedule",
    "prune",
    "refit",
    "resnet50_schedule",
    "save_compact",
    "save_masks",
    "sparsity_report",
    "to_torch_ao",
    "to_torch_prune",
]
