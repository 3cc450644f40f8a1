"""Second moments of what goes into layers and of what comes back to them, for layer-wise methods."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mfac.gradients.batches import Batch, move
from mfac.gradients.losses import LossFn
from mfac.gradients.model_state import evaluation

Layer = nn.Linear | nn.Conv1d | nn.Conv2d


@dataclass
class Moments:
    """Of one layer: `inputs` Σ a aᵀ over samples and positions, `outputs` Σ g gᵀ over the same, each group apart."""

    layer: Layer
    inputs: Tensor
    outputs: Tensor
    samples: int = 0
    positions: int = 0


def find_layers(model: nn.Module, targets: Mapping[str, Tensor], method: str) -> dict[str, Layer]:
    """The linear or convolution layer that each target is the weight of.

    Raises:
        ValueError: a target that is something else.
    """
    owners = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)}
    for name, tensor in targets.items():
        layer = owners.get(id(tensor))
        if layer is None or getattr(layer, "padding_mode", "zeros") != "zeros":
            raise ValueError(
                f"method {method!r} works on the weights of linear and convolution layers (Linear, Conv1d, "
                f"Conv2d, padded with zeros), and {name} is none; leave it out with ignore=[{name!r}]"
            )
    return {name: owners[id(tensor)] for name, tensor in targets.items()}


def layer_moments(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Batch],
    count: int,
    layers: Mapping[str, Layer],
    backward: bool,
) -> dict[str, Moments]:
    """The moments over `count` batches; those of the outputs' gradients only with `backward`.

    Gradients are those of single samples: that of a mean over n samples is taken times n.
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


def _empty(layer: Layer) -> Moments:
    weight = layer.weight
    groups = getattr(layer, "groups", 1)
    k, out = weight[0].numel(), weight.shape[0]
    make: dict[str, Any] = {"dtype": torch.float64, "device": weight.device}
    return Moments(layer, torch.zeros(groups, k, k, **make), torch.zeros(out, out, **make))


def _take(moments: Moments, inputs: Tensor, output: Tensor, backward: bool) -> None:
    """Adds what one call of the layer sees; the output's gradient is added when it comes."""
    patches = _patches(moments.layer, inputs.detach())
    samples = len(inputs)
    moments.inputs += (patches.transpose(1, 2) @ patches).double()
    moments.samples += samples
    moments.positions += patches.shape[1]
    if backward:
        channel = -1 if isinstance(moments.layer, nn.Linear) else 1

        def add(grad: Tensor) -> None:
            rows = grad.movedim(channel, -1).flatten(0, -2) * samples
            moments.outputs.add_((rows.T @ rows).double())

        output.register_hook(add)


def _patches(layer: Layer, x: Tensor) -> Tensor:
    """What each weight of the layer is multiplied with: one row a sample and position."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])
    padding = _amount(layer.padding, layer.kernel_size, layer.dilation)
    if isinstance(layer, nn.Conv1d):
        columns = F.unfold(
            x[:, :, None], (1, layer.kernel_size[0]), (1, layer.dilation[0]), (0, padding[0]), (1, layer.stride[0])
        )
    else:
        columns = F.unfold(x, layer.kernel_size, layer.dilation, padding, layer.stride)
    return columns.unflatten(1, (layer.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)


def _amount(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
    """Zeros on each side; "same" with an even kernel has one more on one side, which moments hardly see."""
    if padding == "valid":
        return (0,) * len(kernel)
    if padding == "same":
        return tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))
    return tuple(padding)
