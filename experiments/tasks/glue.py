"""MRPC, RTE, SST-2 and STS-B of GLUE for a small pretrained BERT: with a classifier, or the cosine of two sentences."""

from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.correlations import spearman
from experiments.datasets.folder import data_folder
from experiments.datasets.sentences import COLUMNS, Batch, SentenceBatches, Tokens, encode
from experiments.models.minilm import tokenizer
from experiments.models.sentence_classifier import minilm_sentences
from experiments.training import Training
from mfac.app.tasks import Task
from mfac.gradients import model_loss
from mfac.gradients.batches import move
from mfac.gradients.model_state import evaluation

BATCH_SIZE = 16
LENGTH = 128  # tokens; longer pairs are cut
# One epoch, but a seventh of one for SST-2, by far the largest; STS-B comes trained.
PRETRAINING_STEPS = {"mrpc": 230, "rte": 155, "sst2": 600}
WARM_UP = 0.1


def glue_task(task: str) -> Task:
    """MiniLM (3 layers, 5.3 million weights to train) on a task of GLUE.

    The measure is accuracy on the development set, or Spearman's rank correlation. `pretrain` is a short fine-tuning of
    some minutes.
    """
    regression = not COLUMNS[task].classes

    def batches(split: str) -> SentenceBatches:
        examples = _encode(task, split, data_folder())
        return SentenceBatches(examples, BATCH_SIZE, shuffle=split == "train", regression=regression)

    def pretrain(model: nn.Module) -> None:
        """AdamW; the learning rate rises for a tenth of the steps, then falls linearly to zero."""
        steps = PRETRAINING_STEPS[task]
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
        factor = lambda done: min((done + 1 / steps) / WARM_UP, (1 - done) / (1 - WARM_UP))  # noqa: E731
        Training(model, optimizer, batches("train"), steps, factor, loss_fn=model_loss).run()
        model.eval()

    return Task(
        name=f"glue-{task}",
        model=partial(minilm_sentences, task),
        train_batches=partial(batches, "train"),
        loss=model_loss,
        evaluate=lambda model: (correlation if regression else accuracy)(model, batches("dev")),
        eval_batches=partial(batches, "dev"),
        optimizer=partial(torch.optim.AdamW, lr=2e-5 if regression else 5e-5),
        measure="spearman" if regression else "accuracy",
        pretrain=pretrain if task in PRETRAINING_STEPS else None,
    )


def accuracy(model: nn.Module, batches: Iterable[Batch]) -> float:
    """The fraction of correct predictions, in eval mode."""
    outputs, labels = predictions(model, batches)
    return float((outputs.argmax(1) == labels).double().mean())


def correlation(model: nn.Module, batches: Iterable[Batch]) -> float:
    return spearman(*predictions(model, batches))


def predictions(model: nn.Module, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """(outputs, labels) of all batches, in eval mode; the mode is restored."""
    device = next(model.parameters()).device
    with evaluation(model), torch.no_grad():
        outputs = [(model(**move(batch, device)).logits.cpu(), batch["labels"]) for batch in batches]
    found, labels = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    return found, labels


@cache
def _encode(task: str, split: str, folder: Path) -> list[Tokens]:
    """Once per folder: `folder` is only part of the cache's key."""
    return encode(task, split, tokenizer(), LENGTH)
