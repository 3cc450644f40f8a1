"""Ready loss functions (model, batch) -> scalar, which know the model's outputs and draw labels from them."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from mfac.gradients.batches import Batch

Family = Literal["softmax", "sigmoid", "squared error"]
LossFn = Callable[[Any, Any], Tensor]
SampleFn = Callable[[Any, Any], Any]
Draw = Callable[[Any, Any, Sequence[int]], Any]
OutputFn = Callable[[Any, Any], Tensor]
Parts = tuple[Callable[..., Tensor], Tensor, Any]  # criterion, outputs, targets: the loss is f(z, y)
Reading = Callable[[Any, Any], Parts]  # of a model and a batch
SAMPLED = 'fisher="sampled"'


class CriterionLoss:
    """criterion(model(inputs), targets) for batches (inputs, targets); inputs may be a tuple or a dict of arguments."""

    def __init__(self, criterion: Callable[[Any, Any], Tensor]):
        self.criterion = criterion

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        criterion, z, targets = self._parts(model, batch)
        return criterion(z, targets)

    def reading(self, model: nn.Module, batch: Batch, asker: str) -> Reading:
        family(self.criterion, asker)
        return self._parts

    def _parts(self, model: nn.Module, batch: Batch) -> Parts:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            found = f"criterion_loss needs batches (inputs, targets), this one is {_described(batch)}"
            raise ValueError(f"{found}; write your own loss_fn(model, batch), or use model_loss")
        return self.criterion, _call(model, batch[0]), batch[1]

    def __repr__(self) -> str:
        return f"criterion_loss({getattr(self.criterion, '__name__', self.criterion)})"


class ModelLoss:
    """model(**batch).loss, as Hugging Face models have it; a batch is a dict or an encoding with the labels in it."""

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        loss = getattr(self._output(model, batch), "loss", None)
        if not isinstance(loss, Tensor):
            found = "are the labels in the batch? Or use criterion_loss(criterion)"
            raise ValueError(f"model_loss needs a model whose output has .loss; {found}")
        return loss

    def reading(self, model: nn.Module, batch: Batch, asker: str) -> Reading:
        reading, error = _closest_reading(self._output(model, batch), batch)
        if not error < 0.01:
            needs = "a loss that is the cross-entropy or the squared error of logits and labels"
            raise ValueError(f"{asker} with model_loss needs {needs}; or pass output_fn(model, batch)")
        return lambda model, batch: _readings(self._output(model, batch), batch)[reading]

    def _output(self, model: nn.Module, batch: Batch) -> Any:
        try:
            return _call(model, batch)
        except TypeError as error:
            try:
                _call(inspect.signature(model.forward).bind, batch)
            except TypeError as refused:
                raise ValueError(
                    f"model_loss calls model(**batch), and {type(model).__name__} does not take {_described(batch)}: "
                    f"{refused}; use criterion_loss(criterion) for batches (inputs, targets), or your own loss_fn"
                ) from error
            raise  # the model's own

    def __repr__(self) -> str:
        return "model_loss"


def criterion_loss(criterion: Callable[[Any, Any], Tensor]) -> CriterionLoss:
    """A loss_fn for batches (inputs, targets): `criterion_loss(torch.nn.CrossEntropyLoss())`."""
    return CriterionLoss(criterion)


model_loss = ModelLoss()


class OutputLoss:
    """Cross-entropy of output_fn(model, batch), whatever the labels."""

    def __init__(self, output_fn: OutputFn):
        self.output_fn = output_fn

    def reading(self, model: nn.Module, batch: Batch, asker: str) -> Reading:
        return self._parts

    def _parts(self, model: nn.Module, batch: Batch) -> Parts:
        logits = self.output_fn(model, batch)
        if not isinstance(logits, Tensor) or logits.ndim < 2 or logits.shape[-1] < 2:
            found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            other = "a softmax needs two classes or more; for other outputs pass criterion_loss(criterion)"
            raise ValueError(f"output_fn must return logits [samples, ..., classes], it returned {found}; {other}")
        return F.cross_entropy, logits.movedim(-1, 1), None


Ready = CriterionLoss | ModelLoss | OutputLoss


class DrawnLoss:
    """The criterion of outputs and drawn labels, for pairs (batch, labels) that `draw` makes of batches.

    The batch keeps its own labels: an encoder-decoder makes the inputs of its decoder from them.
    """

    def __init__(self, ready: Ready):
        self.ready = ready
        self._parts: Any = None

    def draw(self, model: nn.Module, batch: Batch, seeds: Sequence[int]) -> tuple[Batch, Tensor]:
        self._parts = self._parts or self.ready.reading(model, batch, SAMPLED)
        criterion, z, targets = self._parts(model, batch)
        return batch, draw_targets(criterion, z, targets, seeds)

    def __call__(self, model: nn.Module, pair: tuple[Batch, Tensor]) -> Tensor:
        criterion, z, _ = self._parts(model, pair[0])
        return criterion(z, pair[1])


def ready_loss(loss_fn: LossFn, output_fn: OutputFn | None, asker: str) -> Ready:
    """A loss that knows the model's outputs; ValueError if neither loss_fn nor output_fn does."""
    if output_fn is not None:
        return OutputLoss(output_fn)
    if isinstance(loss_fn, CriterionLoss | ModelLoss):
        return loss_fn
    ways = "pass output_fn(model, batch) -> logits [samples, ..., classes]"
    ways += ", or sample_fn(model, batch) -> the batch with labels" if "sampled" in asker else ""
    raise ValueError(f"{asker} cannot tell the model's outputs from this loss_fn; {ways}")


def sampled_loss(loss_fn: LossFn, sample_fn: SampleFn | None, output_fn: OutputFn | None) -> tuple[LossFn, Draw]:
    """(loss_fn, draw), where draw(model, batch, seeds) returns the batch for loss_fn, with drawn labels in it."""
    if sample_fn is not None and output_fn is not None:
        raise ValueError("sample_fn and output_fn are alternatives; pass one of them")
    if sample_fn is not None:
        return loss_fn, lambda model, batch, seeds: sample_fn(model, batch)
    loss = DrawnLoss(ready_loss(loss_fn, output_fn, SAMPLED))
    return loss, loss.draw


def drawn_by_seed(draw: Callable[..., Tensor], like: Float[Tensor, "n ..."], seeds: Sequence[int]) -> Tensor:
    """Random numbers of the shape and dtype of `like`, in as many equal parts as there are seeds, each from its own."""
    seeds = seeds if len(like) % len(seeds) == 0 else seeds[:1]  # parts that cannot be told apart
    shape = (len(like) // len(seeds), *like.shape[1:])
    parts = [draw(shape, generator=torch.Generator().manual_seed(s), dtype=like.dtype, device="cpu") for s in seeds]
    return torch.cat(parts).to(like.device)


def draw_classes(logits: Float[Tensor, "n classes ..."], seeds: Sequence[int]) -> Int[Tensor, "n ..."]:
    """One class from the softmax over dimension 1: the first up to which the probabilities add up to more than u."""
    sums = logits.detach().double().movedim(1, -1).softmax(-1).cumsum(-1)
    u = drawn_by_seed(torch.rand, sums[..., 0], seeds) * sums[..., -1]
    return torch.searchsorted(sums, u.unsqueeze(-1), right=True).squeeze(-1).clamp_max(sums.shape[-1] - 1)


def family(criterion: Any, asker: str) -> Family:
    """The distribution whose negative log-likelihood the criterion is; ValueError if none is known."""
    called = getattr(type(criterion), "forward", criterion)  # a subclass may compute another loss
    if called in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward, F.cross_entropy, F.nll_loss):
        return "softmax"  # the softmax of log-probabilities is the probabilities
    if called in (nn.BCEWithLogitsLoss.forward, F.binary_cross_entropy_with_logits):
        return "sigmoid"
    if called in (nn.MSELoss.forward, F.mse_loss):
        return "squared error"
    name = getattr(criterion, "__name__", type(criterion).__name__)
    known = "cross-entropy, NLL, binary cross-entropy with logits and squared error"
    way = "sample_fn(model, batch) -> labelled batch" if "sampled" in asker else "output_fn(model, batch) -> logits"
    raise ValueError(f"{asker} knows {known}, not {name}; pass {way}")


def draw_targets(criterion: Any, output: Tensor, targets: Any, seeds: Sequence[int]) -> Tensor:
    """Targets from the distribution of the criterion's family."""
    kind = family(criterion, SAMPLED)
    if kind == "sigmoid":
        return (drawn_by_seed(torch.rand, output.double(), seeds) < output.detach().sigmoid()).to(targets.dtype)
    if kind == "squared error":
        # (y - z)² is the negative log-likelihood of a normal distribution of variance 1/2.
        return output.detach() + drawn_by_seed(torch.randn, output, seeds) * 0.5**0.5
    drawn = draw_classes(output, seeds)
    if targets is None or targets.is_floating_point():
        return drawn
    return torch.where(targets == getattr(criterion, "ignore_index", -100), targets, drawn.to(targets.dtype))


def _readings(output: Any, batch: Batch) -> list[Parts]:
    """What Hugging Face models make of logits and labels: a loss per position, per next token; squared, by sigmoid."""
    logits = getattr(output, "logits", None)
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if isinstance(logits, Tensor) and isinstance(labels, Tensor) and logits.ndim > 1:
        if labels.is_floating_point() and labels.numel() == logits.numel():
            z = logits.reshape(labels.shape)
            return [(F.mse_loss, z, labels), (F.binary_cross_entropy_with_logits, z, labels)]
        if not labels.is_floating_point() and labels.numel() * logits.shape[-1] == logits.numel():
            z, y = logits.movedim(-1, 1), labels.reshape(logits.shape[:-1])
            by_next_token: list[Parts] = [(F.cross_entropy, z[:, :, :-1], y[:, 1:])] if y.ndim == 2 else []
            return [(F.cross_entropy, z, y), *by_next_token]
    needs = "needs logits of shape [samples, ..., classes] and labels in the batch, one for each"
    raise ValueError(f"to get the model's outputs, model_loss {needs}; or pass output_fn(model, batch) -> logits")


def _closest_reading(output: Any, batch: Batch) -> tuple[int, float]:
    """The index of the reading whose loss is closest to the model's own, and the relative error of that loss."""
    readings, loss = _readings(output, batch), getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        return 0, math.inf
    wide = [(f, z.to(torch.promote_types(z.dtype, torch.float32)), y) for f, z, y in readings]
    errors = torch.stack([(criterion(z, y) - loss).abs() for criterion, z, y in wide]).nan_to_num(math.inf)
    error, reading = errors.min(0)
    return int(reading), float((error / (loss.abs() + 1e-6)).detach())


def _described(batch: Batch) -> str:
    if isinstance(batch, Mapping):
        return f"a batch of {', '.join(map(str, batch)) or 'nothing'}"
    length = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
    return f"a {type(batch).__name__}{length}"


def _call(model: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, list | tuple):
        return model(*inputs)
    return model(inputs)
