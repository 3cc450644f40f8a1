"""The weights that are pruned: which they are, their masks, and changes that happen as a whole or not at all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from mfac.layout import Masks, ParameterLayout, matching, parameters_by_name, some
from mfac.pruning.layers import weights_of

Names = str | Iterable[str] | None


class MaskedWeights:
    """The targets and the masks of them; `other_masks` are those of other parameters, passed through."""

    def __init__(self, model: nn.Module, targets: Mapping[str, Tensor], masks: Masks = None):
        self.model = model
        self.targets = dict(targets)
        self.layers = weights_of(model, targets)
        self.inputs = {name: weight.inputs for name, weight in self.layers.items()}  # dimensions
        devices = sorted({str(tensor.device) for tensor in targets.values()})
        if len(devices) > 1:
            raise ValueError(f"the targets are on {', '.join(devices)}; prune needs them on one device")
        layout = ParameterLayout(model, list(targets), masks)
        kept = layout.unflatten(torch.ones(layout.dim, dtype=torch.bool, device=layout.device))
        self.masks = {name: mask.clone() for name, mask in kept.items()}
        self.other_masks = {k: m for k, m in (masks or {}).items() if isinstance(k, str) and k not in self.masks}

    @property
    def device(self) -> torch.device:
        return next(iter(self.targets.values())).device

    @property
    def sparsity(self) -> float:
        kept = sum(int(mask.sum()) for mask in self.masks.values())
        return 1 - kept / sum(mask.numel() for mask in self.masks.values())

    def layout(self) -> ParameterLayout:
        return ParameterLayout(self.model, list(self.targets), self.masks)

    def vector(self, layout: ParameterLayout) -> Float[Tensor, " d"]:
        return self.row_of(layout, {name: tensor.detach().double() for name, tensor in self.targets.items()})

    def row_of(self, layout: ParameterLayout, values: Mapping[str, Tensor]) -> Tensor:
        first = next(iter(values.values()))
        row = torch.empty(layout.dim, dtype=first.dtype, device=layout.device)
        layout.flatten([values[name] for name in layout.names], row)
        return row

    @torch.no_grad()
    def write(self, layout: ParameterLayout, theta: Float[Tensor, " d"], removed: Bool[Tensor, " d"]) -> None:
        values, gone = layout.unflatten(theta), layout.unflatten(removed)
        for name, tensor in self.targets.items():
            mask = self.masks[name] & ~gone[name]
            tensor.copy_(torch.where(mask, values[name], 0.0))
            self.masks[name] = mask

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Restores weights, masks and the model's buffers if the block inside raises."""
        masks = dict(self.masks)
        try:
            with restored_on_error([*self.targets.values(), *self.model.buffers()]):
                yield
        except BaseException:
            self.masks = masks
            raise


@contextmanager
def restored_on_error(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Puts back what the tensors held if the block inside raises."""
    saved = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)
        raise


def choose_targets(model: nn.Module, targets: Names = None, ignore: Names = None) -> dict[str, Tensor]:
    """{name: parameter}, in the model's order; tied weights once. Raises ValueError if there is nothing to prune."""
    named = {name: tensor for name, tensor in model.named_parameters() if tensor.is_floating_point()}
    every = {name: tensor for name, tensor in named.items() if targets is not None or tensor.requires_grad}
    if targets is None:
        kinds = nn.Embedding | nn.EmbeddingBag
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
        wanted = {id(tensor) for tensor in every.values() if tensor.ndim >= 2 and id(tensor) not in embeddings}
    else:
        wanted = matching_ids(model, targets, "targets")
    left_out = set() if ignore is None else matching_ids(model, ignore, "ignore")
    chosen: dict[str, Tensor] = {name: tensor for name, tensor in every.items() if id(tensor) in wanted - left_out}
    if not chosen:
        names = some(dict(model.named_parameters()))
        raise ValueError(f"there is nothing to prune: targets and ignore leave no weights; the model has {names}")
    return chosen


def matching_ids(model: nn.Module, items: str | Iterable[str], argument: str) -> set[int]:
    """The ids of the parameters that names and patterns stand for; a tied weight answers to each of its names."""
    known = parameters_by_name(model)
    each = [items] if isinstance(items, str) else items
    return {id(tensor) for item in each for tensor in matching(item, known, argument, "the model").values()}
