"""MRPC, RTE and SST-2 of GLUE for a small pretrained BERT with a classifier."""

import itertools
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.datasets.folder import data_folder
from experiments.datasets.sentence_batches import Batch, SentenceBatches, Tokens, encode
from experiments.datasets.sentences import COLUMNS
from experiments.models.minilm import minilm_classifier, tokenizer
from mfac.app.tasks import Task
from mfac.gradients import model_loss
from mfac.gradients.batches import passes

BATCH_SIZE = 16
LENGTH = 128  # tokens; longer pairs are cut
# Of the fine-tuning that `pretrain` does: one epoch, but a seventh of one for SST-2, which is the largest by far.
# More of it gains hardly anything on MRPC.
PRETRAINING_STEPS = {"mrpc": 230, "rte": 155, "sst2": 600}
WARM_UP = 0.1


def glue_task(task: str) -> Task:
    """MiniLM (3 layers, 5.5 million weights to train) on "mrpc", "rte" or "sst2".

    The measure is accuracy on the development set. `pretrain` is a short fine-tuning of some minutes. It suits SST-2;
    three layers with frozen embeddings learn little of pairs of sentences: bring a checkpoint where the score matters.
    """

    def batches(split: str) -> SentenceBatches:
        return SentenceBatches(_encode(task, split, data_folder()), BATCH_SIZE, shuffle=split == "train")

    return Task(
        name=f"glue-{task}",
        model=lambda: minilm_classifier(len(COLUMNS[task].classes)),
        train_batches=partial(batches, "train"),
        loss=model_loss,
        evaluate=lambda model: correct(*_predict(model, batches("dev"))),
        eval_batches=partial(batches, "dev"),
        optimizer=partial(torch.optim.AdamW, lr=5e-5),
        pretrain=lambda model: _fine_tune(model, batches("train"), PRETRAINING_STEPS[task]),
    )


def correct(outputs: Tensor, labels: Tensor) -> float:
    """The fraction of examples whose class has the highest score."""
    return float((outputs.argmax(1) == labels).double().mean())


@torch.no_grad()
def _predict(model: nn.Module, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """(outputs, labels) of all batches, in eval mode; the mode is as before afterwards."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    outputs, labels = [], []
    for batch in batches:
        outputs.append(model(**{key: value.to(device) for key, value in batch.items()}).logits)
        labels.append(batch["labels"].to(device))
    model.train(training)
    return torch.cat(outputs), torch.cat(labels)


def _fine_tune(model: nn.Module, batches: SentenceBatches, steps: int, lr: float = 2e-4) -> None:
    """AdamW; the learning rate rises for a tenth of the steps, then falls to zero. The mode is as before afterwards."""
    device = next(model.parameters()).device
    training = model.training
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min((k + 1) / (WARM_UP * steps), (1 - k / steps) / (1 - WARM_UP))
    )
    for batch in itertools.islice(passes(batches, cycle=True), steps):
        optimizer.zero_grad()
        model_loss(model, {key: value.to(device) for key, value in batch.items()}).backward()
        optimizer.step()
        rate.step()
    model.train(training)


@cache
def _encode(task: str, split: str, folder: Path) -> list[Tokens]:
    """Read and cut into tokens once for each folder, which is asked for only so that another MFAC_DATA is another."""
    return encode(task, split, tokenizer(), LENGTH)
