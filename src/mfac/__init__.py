"""Second-order information for PyTorch, matrix-free: exact products with the inverse of the empirical Fisher."""

from mfac.blocks import FisherBlocks
from mfac.dynamic import DynamicInverseFisher
from mfac.gradient_file import GradientFile
from mfac.gradients import accumulate_fisher, collect_gradients, criterion_loss, model_loss
from mfac.inverse_fisher import InverseFisher
from mfac.optimizer import MFAC
from mfac.preconditioner import MFACPreconditioner
from mfac.static import StaticInverseFisher

__version__ = "0.1.0.dev0"

__all__ = [
    "MFAC",
    "DynamicInverseFisher",
    "FisherBlocks",
    "GradientFile",
    "InverseFisher",
    "MFACPreconditioner",
    "StaticInverseFisher",
    "accumulate_fisher",
    "collect_gradients",
    "criterion_loss",
    "model_loss",
]
