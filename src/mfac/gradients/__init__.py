"""Model, loss and batches become the rows of G: in memory, on disk, or summed into blocks of the Fisher matrix."""

from mfac.gradients.accumulate import accumulate_fisher
from mfac.gradients.collect import collect_gradients
from mfac.gradients.hessian import hessian_product
from mfac.gradients.losses import criterion_loss, model_loss

__all__ = ["accumulate_fisher", "collect_gradients", "criterion_loss", "hessian_product", "model_loss"]
