"""The weights that are pruned, their masks, and steps that happen as a whole or not at all."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mfac.layout import Masks, ParameterLayout


class MaskedWeights:
    """The targets and which of their weights are kept; `masks` {name: bool tensor on the weight's device}.

    Args:
        model: where the weights live.
        targets: {name: parameter}.
        masks: what is removed already; by name or by parameter.

    Raises:
        ValueError: a mask of no parameter, or of another shape or type; targets on several devices.
    """

    def __init__(self, model: nn.Module, targets: Mapping[str, Tensor], masks: Masks = None):
        self.model = model
        self.targets = dict(targets)
        devices = sorted({str(tensor.device) for tensor in targets.values()})
        if len(devices) > 1:
            raise ValueError(f"the targets lie on {', '.join(devices)}; prune needs them on one device")
        layout = ParameterLayout(model, list(targets), masks)
        self.masks = {
            name: _as_mask(tensor, kept)
            for name, tensor, kept in zip(layout.names, layout.tensors, layout.kept, strict=True)
        }
        self.other_masks = {
            key: mask for key, mask in (masks or {}).items() if isinstance(key, str) and key not in self.masks
        }

    @property
    def device(self) -> torch.device:
        return next(iter(self.targets.values())).device

    @property
    def sparsity(self) -> float:
        """The fraction of the weights that is removed."""
        kept = sum(int(mask.sum()) for mask in self.masks.values())
        return 1 - kept / sum(mask.numel() for mask in self.masks.values())

    def layout(self) -> ParameterLayout:
        """The coordinates that are left."""
        return ParameterLayout(self.model, list(self.targets), self.masks)

    def vector(self, layout: ParameterLayout) -> Float[Tensor, " d"]:
        """The kept weights in a row, in float64."""
        row = torch.empty(layout.dim, dtype=torch.float64, device=layout.device)
        layout.flatten([tensor.detach() for tensor in layout.tensors], row)
        return row

    def row_of(self, layout: ParameterLayout, values: Mapping[str, Tensor]) -> Tensor:
        """One value a weight, in the coordinates of the layout."""
        first = next(iter(values.values()))
        row = torch.empty(layout.dim, dtype=first.dtype, device=layout.device)
        layout.flatten([values[name] for name in layout.names], row)
        return row

    @torch.no_grad()
    def write(self, layout: ParameterLayout, theta: Float[Tensor, " d"], removed: Mapping[str, Tensor]) -> None:
        """Sets the weights, exactly 0 wherever one was ever removed, and the masks."""
        values = layout.unflatten(theta)
        for name, tensor in self.targets.items():
            mask = self.masks[name] & ~removed[name]
            tensor.copy_(torch.where(mask, values[name], 0.0))
            self.masks[name] = mask

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Weights, masks and the model's buffers as they were, if what happens inside does not come to its end."""
        weights = [(tensor, tensor.detach().clone()) for tensor in self.targets.values()]
        buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        masks = dict(self.masks)
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for tensor, value in weights + buffers:
                    tensor.copy_(value)
            self.masks = masks
            raise


def _as_mask(tensor: Tensor, kept: Tensor | None) -> Tensor:
    if kept is None:
        return torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
    mask = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
    mask[kept] = True
    return mask.view(tensor.shape)
