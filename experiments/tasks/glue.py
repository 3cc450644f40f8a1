"""MRPC, RTE and SST-2 of GLUE for a small pretrained BERT with a classifier."""

from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.datasets.folder import data_folder
from experiments.datasets.sentence_batches import Batch, SentenceBatches, Tokens, encode
from experiments.datasets.sentences import COLUMNS
from experiments.models.minilm import minilm_classifier, tokenizer
from experiments.training import Training
from mfac.app.tasks import Task
from mfac.gradients import model_loss

BATCH_SIZE = 16
LENGTH = 128  # tokens; longer pairs are cut
# One epoch, but a seventh of one for SST-2, by far the largest; more gains hardly anything on MRPC.
PRETRAINING_STEPS = {"mrpc": 230, "rte": 155, "sst2": 600}
WARM_UP = 0.1


def glue_task(task: str) -> Task:
    """MiniLM (3 layers, 5.5 million weights to train) on "mrpc", "rte" or "sst2".

    The measure is accuracy on the development set. `pretrain` is a short fine-tuning of some minutes. It is enough for
    SST-2; on pairs three layers with frozen embeddings learn little: use a checkpoint where the score matters.
    """

    def batches(split: str) -> SentenceBatches:
        return SentenceBatches(_encode(task, split, data_folder()), BATCH_SIZE, shuffle=split == "train")

    return Task(
        name=f"glue-{task}",
        model=lambda: minilm_classifier(len(COLUMNS[task].classes)),
        train_batches=partial(batches, "train"),
        loss=model_loss,
        evaluate=lambda model: accuracy(model, batches("dev")),
        eval_batches=partial(batches, "dev"),
        optimizer=partial(torch.optim.AdamW, lr=5e-5),
        pretrain=lambda model: _fine_tune(model, batches("train"), PRETRAINING_STEPS[task]),
    )


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[Batch]) -> float:
    """The fraction of correct predictions, in eval mode."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    right = [
        model(**{key: value.to(device) for key, value in batch.items()}).logits.argmax(1).cpu() == batch["labels"]
        for batch in batches
    ]
    model.train(training)
    return float(torch.cat(right).double().mean())


def _fine_tune(model: nn.Module, batches: SentenceBatches, steps: int, lr: float = 2e-4) -> None:
    """AdamW; the learning rate rises for a tenth of the steps, then falls linearly to zero."""
    device = next(model.parameters()).device
    training = model.training
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        return model_loss(model, {key: value.to(device) for key, value in batch.items()})

    def factor(progress: float) -> float:
        return min((progress + 1 / steps) / WARM_UP, (1 - progress) / (1 - WARM_UP))

    Training(model, optimizer, batches, steps, factor, loss_fn=loss_fn).run()
    model.train(training)


@cache
def _encode(task: str, split: str, folder: Path) -> list[Tokens]:
    """Once per folder: `folder` is only part of the cache's key."""
    return encode(task, split, tokenizer(), LENGTH)
