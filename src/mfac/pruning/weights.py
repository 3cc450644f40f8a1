"""The weights that are pruned: which they are, their layers and their masks; changes as a whole or not at all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from mfac.layout import Masks, ParameterLayout, matching, parameters_by_name, plain_name, some
from mfac.pruning.masks import matched_masks

Names = str | Iterable[str] | None
POSITIONS = 16  # of a sample are enough for the second moment of a convolution's inputs
OTHER_BLOCK = 128  # weights side by side, where it is not known which of them belong to one output


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
        given = matched_masks(model, masks) if masks else {}
        layout = ParameterLayout(model, list(targets), given)
        kept = layout.unflatten(torch.ones(layout.dim, dtype=torch.bool, device=layout.device))
        self.masks = {name: mask.clone() for name, mask in kept.items()}
        self.other_masks = {name: mask for name, mask in given.items() if name not in self.masks}
        for name, tensor in targets.items():
            if not bool(tensor[self.masks[name]].isfinite().all()):
                raise ValueError(f"{name} has weights that are not finite; repair them, or leave it out with ignore=")

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
            with restored_on_error([*self.model.parameters(), *self.model.buffers()]):
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
    named = {name: p for name, p in model.named_parameters() if p.is_floating_point() and p.numel()}
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
        left = "targets and ignore leave no weights, or frozen ones, which targets must name"
        raise ValueError(f"there is nothing to prune: {left}; the model has {names}")
    return chosen


def matching_ids(model: nn.Module, items: str | Iterable[str], argument: str) -> set[int]:
    """The ids of the parameters that names and patterns stand for; a tied weight answers to each of its names."""
    known = parameters_by_name(model)
    each = items if isinstance(items, Iterable) and not isinstance(items, str | Tensor) else [items]
    return {id(tensor) for item in each for tensor in matching(item, known, argument, "the model").values()}


@dataclass
class LayerCall:
    """A call of a layer: its input, the place of its output in the graph, and `dy`, the gradient there once known."""

    module: nn.Module
    x: Tensor
    output: GradientEdge
    dy: Tensor | None = None

    @cached_property
    def unfolded(self) -> Float[Tensor, "n inputs positions"]:
        """The inputs of each position of a convolution: channels x kernel."""
        layer: Any = self.module
        x = self.x.to(torch.promote_types(self.x.dtype, torch.float32))
        kernel, stride, dilation, padding = layer.kernel_size, layer.stride, layer.dilation, layer.padding
        sides: list[int] = []
        for dim in range(len(kernel) - 1, -1, -1):
            reach = dilation[dim] * (kernel[dim] - 1)
            before = padding[dim] if not isinstance(padding, str) else reach // 2 if padding == "same" else 0
            sides += [before, before if padding != "same" else reach - reach // 2]
        x = F.pad(x, sides, "constant" if layer.padding_mode == "zeros" else layer.padding_mode)
        if len(kernel) == 1:
            return F.unfold(x[:, :, None], (1, *kernel), (1, *dilation), 0, (1, *stride))
        return F.unfold(x, kernel, dilation, 0, stride)

    @property
    def has_positions(self) -> bool:
        """Whether the layer is linear over tokens: [samples, tokens, inputs]."""
        return self.x.ndim > 2 and not isinstance(self.module, nn.Conv1d | nn.Conv2d)

    def positions(self) -> tuple[Float[Tensor, "rows inputs"], Float[Tensor, "rows outputs"]]:
        dtype = torch.promote_types(self.x.dtype, torch.float32)
        return self.x.flatten(0, -2).to(dtype), self._dy(dtype).flatten(0, -2)

    def _dy(self, dtype: torch.dtype) -> Tensor:
        assert self.dy is not None
        return self.dy.to(dtype)

    def gradient(self) -> Float[Tensor, "outputs inputs"]:
        if not self.has_positions:
            return self.samples().sum(0)
        x, dy = self.positions()
        return dy.T @ x

    def moments(self, joined: bool) -> tuple[Tensor, Float[Tensor, "inputs inputs"], int]:
        """Σ δδᵀ (its diagonal, unless `joined`) and Σ aaᵀ over positions, of which the second has fewer: its count."""
        if isinstance(self.module, nn.Conv1d | nn.Conv2d):
            x = self.unfolded
            dy = self._dy(x.dtype).flatten(2).movedim(1, -1).flatten(0, 1)
            x = x[:, :, :: -(-x.shape[2] // POSITIONS)].movedim(1, -1).flatten(0, 1)
        else:
            x, dy = self.positions()
            x = x[dy.any(1)]  # not of padding
        return dy.T @ dy if joined else dy.square().sum(0), x.T @ x, len(x)

    def samples(self) -> Float[Tensor, "rows outputs inputs"]:
        """The gradient of the weight for each sample."""
        if not isinstance(self.module, nn.Conv1d | nn.Conv2d):
            x, dy = self.positions()
            x, dy = x.unflatten(0, (len(self.x), -1)), dy.unflatten(0, (len(self.x), -1))
            return torch.einsum("nto,nti->noi", dy, x)
        groups = self.module.groups
        x = self.unfolded.unflatten(1, (groups, -1))
        dy = self._dy(x.dtype).flatten(2).unflatten(1, (groups, -1))
        return (dy @ x.mT).flatten(1, 2)


class Weight(NamedTuple):
    """A weight, and the layers that use it; none, if it is not known what its dimensions mean."""

    name: str
    tensor: Tensor
    modules: tuple[nn.Module, ...] = ()

    @property
    def inputs(self) -> int:
        """The dimension of the inputs; that of the outputs is the other one of the first two."""
        return 0 if any(map(_is_transposed, self.modules)) else 1

    def by_output(self, values: Shaped[Tensor, "..."], fill: float = 0) -> Shaped[Tensor, "outputs inputs"]:
        """The entries of a tensor of the weight's shape, a row for each output."""
        if self.modules:
            return (values if self.inputs else values.T).reshape(values.shape[1 - self.inputs], -1)
        flat = values.reshape(-1)
        size = min(OTHER_BLOCK, len(flat))
        return F.pad(flat, (0, -len(flat) % size), value=fill).view(-1, size)


def weights_of(model: nn.Module, targets: Mapping[str, Tensor]) -> dict[str, Weight]:
    """The targets with their layers. Raises ValueError for a weight that a layer computes from other parameters."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) or _is_transposed(module):
            users.setdefault(id(module.weight), []).append(module)
    _check_parametrized(model, targets)
    return {name: Weight(name, tensor, tuple(users.get(id(tensor), ()))) for name, tensor in targets.items()}


@contextmanager
def uses_of(weights: Sequence[Weight]) -> Iterator[dict[str, list[LayerCall]]]:
    """The calls of the layers inside the block, by the name of the weight; the caller empties the lists."""
    uses: dict[str, list[LayerCall]] = {weight.name: [] for weight in weights}

    def record(name: str, module: Any, given: tuple[Tensor, ...], named: dict[str, Tensor], y: Tensor) -> None:
        x = given[0] if given else next(iter(named.values()))
        if y.requires_grad and x.ndim >= module.weight.ndim:  # with a dimension of samples
            uses[name].append(LayerCall(module, x.detach(), get_gradient_edge(y)))

    hooks = [
        module.register_forward_hook(lambda *call, name=weight.name: record(name, *call), with_kwargs=True)
        for weight in weights
        for module in weight.modules
    ]
    try:
        yield uses
    finally:
        for hook in hooks:
            hook.remove()


def _is_transposed(module: nn.Module) -> bool:
    """Whether it is the Conv1D of Hugging Face, a linear layer with weights [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _check_parametrized(model: nn.Module, targets: Mapping[str, Tensor]) -> None:
    for name in targets:
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        plain, remedy = plain_name(name), None
        if "parametrizations" in path.split("."):
            remedy = "torch.nn.utils.parametrize.remove_parametrizations"
            plain = ".".join(part for part in path.split(".") if part != "parametrizations")
        elif attribute.endswith("_orig") and hasattr(owner, attribute.removesuffix("_orig")):
            remedy = "torch.nn.utils.prune.remove, and pass its masks as masks=mfac.load_masks(model)"
        elif attribute.endswith(("_g", "_v")) and hasattr(owner, attribute[:-2]):
            remedy, plain = "torch.nn.utils.remove_weight_norm", name[:-2]
        if remedy is not None:
            found = f"{name} is no weight of a layer: {plain} is computed from it"
            raise ValueError(f"{found}; make {plain} a parameter again by {remedy}, or leave it out with ignore=")
