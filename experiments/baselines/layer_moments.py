"""Second moments of the inputs of layers and of the gradients at their outputs, for layer-wise baselines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mfac.gradients.batches import Batch, move
from mfac.gradients.losses import LossFn
from mfac.gradients.model_state import evaluation
from mfac.pruning.options import PruningOptions
from mfac.pruning.step import Step

Layer = nn.Linear | nn.Conv2d


@dataclass
class Moments:
    """Of one layer, over samples and positions: `inputs` Σ a aᵀ for each group, `outputs` Σ g gᵀ."""

    layer: Layer
    inputs: Tensor
    outputs: Tensor
    samples: int = 0
    positions: int = 0


class LayerMethod:
    """A pruning method that measures the second moments of layers over `num_grads` batches."""

    name = ""
    backward = False  # the gradients at the outputs, too

    def __init__(self, loss_fn: LossFn, options: PruningOptions):
        self.loss_fn, self.options = loss_fn, options

    def measure(self, step: Step) -> dict[str, Moments]:
        model = step.weights.model
        layers = find_layers(model, step.weights.targets, self.name)
        return layer_moments(model, self.loss_fn, step.stream, self.options.num_grads, layers, self.backward)


def find_layers(model: nn.Module, targets: Mapping[str, Tensor], method: str) -> dict[str, Layer]:
    """The linear or convolution layer that each target is the weight of."""
    owners = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Linear) or is_plain(m)}
    for name, tensor in targets.items():
        if id(tensor) not in owners:
            raise ValueError(
                f"method {method!r} works on the weights of linear and convolution layers (Linear, and Conv2d padded "
                f"with a given number of zeros), and {name} is none; leave it out with ignore=[{name!r}]"
            )
    return {name: owners[id(tensor)] for name, tensor in targets.items()}


def is_plain(module: nn.Module) -> bool:
    plain = isinstance(module, nn.Conv2d) and module.padding_mode == "zeros"
    return plain and not isinstance(module.padding, str)


def layer_moments(
    model: nn.Module, loss_fn: LossFn, batches: Iterable[Batch], count: int, layers: Mapping[str, Layer], backward: bool
) -> dict[str, Moments]:
    """The moments over `count` batches.

    Gradients are those of single samples: the gradient of a mean over n samples is multiplied by n.
    """
    found = {name: _empty(layer) for name, layer in layers.items()}
    handles = [
        moments.layer.register_forward_hook(lambda layer, args, out, m=moments: _take(m, args[0], out, backward))
        for moments in found.values()
    ]
    try:
        with evaluation(model):
            stream = iter(batches)
            for _ in range(count):
                batch = move(next(stream), next(model.parameters()).device)
                with torch.set_grad_enabled(backward):
                    loss = loss_fn(model, batch)
                if backward:
                    model.zero_grad(set_to_none=True)
                    loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    return found


def patches(layer: Layer, x: Tensor) -> Tensor:
    """The inputs of each weight [groups, samples and positions, weights]."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])
    columns = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return columns.unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)


def output_rows(layer: Layer, gradient: Tensor) -> Tensor:
    """Gradients at the outputs [samples and positions, outputs], of a loss averaged over the samples."""
    rows = gradient if isinstance(layer, nn.Linear) else gradient.movedim(1, -1)
    return rows.reshape(-1, rows.shape[-1]) * len(gradient)


def _empty(layer: Layer) -> Moments:
    weight = layer.weight
    k, out = weight[0].numel(), weight.shape[0]
    make: dict[str, Any] = {"dtype": torch.float64, "device": weight.device}
    return Moments(layer, torch.zeros(getattr(layer, "groups", 1), k, k, **make), torch.zeros(out, out, **make))


def _take(moments: Moments, inputs: Tensor, output: Tensor, backward: bool) -> None:
    """Adds one call of the layer; the output's gradient is added when it arrives."""
    rows = patches(moments.layer, inputs.detach())
    moments.inputs += (rows.transpose(1, 2) @ rows).double()
    moments.samples += len(inputs)
    moments.positions += rows.shape[1]
    if backward:

        def add(gradient: Tensor) -> None:
            rows = output_rows(moments.layer, gradient)
            moments.outputs.add_((rows.T @ rows).double())

        output.register_hook(add)
