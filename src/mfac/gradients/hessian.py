"""Products with the Hessian of an objective, by differentiating its gradient."""

from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mfac.gradients.batches import Batch, num_samples, passes, placed
from mfac.gradients.losses import LossFn
from mfac.gradients.model_state import evaluation
from mfac.layout import ParameterLayout, Params
from mfac.precision import check_dense

COLUMNS = 16  # are differentiated at once: each takes as much memory as the backward pass of a batch


def hessian_product(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Batch], damping: float, *, params: Params = None
) -> Callable[[Float[Tensor, "d k"]], Float[Tensor, "d k"]]:
    """The function X -> H X, with H the Hessian of the mean loss of all samples plus ½ damping ‖θ‖², in eval mode.

    Each call goes through all batches, and uses the weights that the model then has. Nothing of the model is changed.

    Args:
        model: any module; it computes in its own dtype.
        loss_fn: (model, batch) -> the mean loss of the batch, twice differentiable; as for `collect_gradients`.
        batches: a list or a DataLoader, to be gone through again and again.
        damping: λ, the weight decay of the objective.
        params: as for `collect_gradients`, so that the coordinates are those of its rows.

    Raises:
        ValueError: in a call, batches that are empty or spent, or an X of another shape.
    """
    layout = ParameterLayout(model, params)

    def product(x: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
        check_dense("x", x)
        if x.ndim != 2 or len(x) != layout.dim or not x.shape[1]:
            raise ValueError(f"x must be [{layout.dim}, k], one column for each vector, not {list(x.shape)}")
        with evaluation(model, layout.tensors):
            total, count = torch.zeros_like(x), 0
            for index, batch in enumerate(passes(batches)):
                samples = num_samples(batch, index)
                loss = loss_fn(model, placed(batch, layout.device))
                total += samples * _second_derivative(loss, layout, x)
                count += samples
        if not count:
            raise ValueError("batches gave no sample; an iterator can be read only once: pass a list or a DataLoader")
        return total / count + damping * x

    return product


def _second_derivative(loss: Tensor, layout: ParameterLayout, x: Float[Tensor, "d k"]) -> Float[Tensor, "d k"]:
    slopes = torch.autograd.grad(loss, layout.tensors, create_graph=True, materialize_grads=True)
    found = []
    for rows in x.T.to(layout.dtype).split(COLUMNS):
        parts = zip(rows.split(layout.sizes, 1), layout.tensors, strict=True)
        along = [part.reshape(-1, *tensor.shape).to(tensor) for part, tensor in parts]
        changes = torch.autograd.grad(
            slopes, layout.tensors, along, retain_graph=True, is_grads_batched=True, materialize_grads=True
        )
        found.append(torch.cat([change.flatten(1).to(x) for change in changes], 1))
    return torch.cat(found).T
