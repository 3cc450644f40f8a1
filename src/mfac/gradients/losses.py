"""Ready loss functions (model, batch) -> scalar, which also draw labels from the model's output."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from mfac.gradients.batches import Batch
from mfac.gradients.labels import Noise, draw_classes, draw_normal, draw_targets

LossFn = Callable[[Any, Any], Tensor]
SampleFn = Callable[[Any, Any], Any]
Draw = Callable[[Any, Any, Noise], Any]
OutputFn = Callable[[Any, Any], Tensor]


class CriterionLoss:
    """criterion(model(inputs), targets) for batches (inputs, targets); inputs may be a tuple or a dict of arguments."""

    def __init__(self, criterion: Callable[[Any, Any], Tensor]):
        self.criterion = criterion

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = self._split(batch)
        return self.criterion(_call(model, inputs), targets)

    def draw_labels(self, model: nn.Module, batch: Batch, noise: Noise) -> Batch:
        inputs, targets = self._split(batch)
        drawn = draw_targets(self.criterion, _call(model, inputs), targets, noise)
        return type(batch)((inputs, drawn)) if type(batch) in (list, tuple) else (inputs, drawn)

    def _split(self, batch: Batch) -> tuple[Any, Any]:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            found = f"criterion_loss needs batches (inputs, targets), this one is {_described(batch)}"
            raise ValueError(f"{found}; write your own loss_fn(model, batch), or use model_loss")
        return batch[0], batch[1]

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

    def draw_labels(self, model: nn.Module, batch: Batch, noise: Noise) -> Batch:
        logits = getattr(self._output(model, batch), "logits", None)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(logits, Tensor) or not isinstance(labels, Tensor) or logits.ndim != 2 or labels.ndim > 2:
            needs = "needs logits of shape [samples, classes] and labels in the batch; or pass sample_fn(model, batch)"
            raise ValueError(f'fisher="sampled" with model_loss {needs}')
        new: Any = batch.copy()
        if labels.is_floating_point():
            new["labels"] = draw_normal(logits.reshape(labels.shape), noise)
        else:
            new["labels"] = draw_classes(logits, noise).reshape(labels.shape).to(labels.dtype)
        return new

    def _output(self, model: nn.Module, batch: Batch) -> Any:
        try:
            return _call(model, batch)
        except TypeError as error:
            refused = _refused(model, batch)
            if refused is None:
                raise  # the model's own
            raise ValueError(
                f"model_loss calls model(**batch), and {type(model).__name__} does not take {_described(batch)}: "
                f"{refused}; use criterion_loss(criterion) for batches (inputs, targets), or your own loss_fn"
            ) from error

    def __repr__(self) -> str:
        return "model_loss"


def criterion_loss(criterion: Callable[[Any, Any], Tensor]) -> CriterionLoss:
    """A loss_fn for batches (inputs, targets): `criterion_loss(torch.nn.CrossEntropyLoss())`."""
    return CriterionLoss(criterion)


model_loss = ModelLoss()


class OutputLoss:
    """Cross-entropy of output_fn(model, batch), for pairs (batch, labels) that `draw_labels` makes of batches."""

    def __init__(self, output_fn: OutputFn):
        self.output_fn = output_fn

    def __call__(self, model: nn.Module, pair: tuple[Batch, Tensor]) -> Tensor:
        return F.cross_entropy(self._logits(model, pair[0]), pair[1])

    def draw_labels(self, model: nn.Module, batch: Batch, noise: Noise) -> tuple[Batch, Tensor]:
        return batch, draw_classes(self._logits(model, batch), noise)

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = self.output_fn(model, batch)
        if logits.ndim < 2:
            raise ValueError(f"output_fn must return logits [samples, classes, ...], it returned {tuple(logits.shape)}")
        return logits


def sampled_loss(
    loss_fn: Callable[[Any, Any], Tensor], sample_fn: SampleFn | None, output_fn: OutputFn | None
) -> tuple[Callable[[Any, Any], Tensor], Draw]:
    """(loss_fn, draw), where draw(model, batch, noise) returns the batch for loss_fn, with drawn labels in it."""
    if sample_fn is not None and output_fn is not None:
        raise ValueError("sample_fn and output_fn do the same in two ways; pass one of them")
    if sample_fn is not None:
        return loss_fn, lambda model, batch, noise: sample_fn(model, batch)
    if output_fn is not None:
        output_loss = OutputLoss(output_fn)
        return output_loss, output_loss.draw_labels
    if isinstance(loss_fn, CriterionLoss | ModelLoss):
        return loss_fn, loss_fn.draw_labels
    ways = "pass output_fn(model, batch) -> logits, or sample_fn(model, batch) -> the batch with labels"
    raise ValueError(f'fisher="sampled" cannot tell from this loss_fn how labels are drawn; {ways}')


def _refused(model: nn.Module, batch: Batch) -> TypeError | None:
    """Why the model's forward does not accept the batch as its arguments; None if it does."""
    try:
        _call(inspect.signature(model.forward).bind, batch)
    except TypeError as error:
        return error
    return None


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
