"""Three tasks of GLUE for a small pretrained BERT with a classifier: MRPC, RTE and SST-2."""

import itertools
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mfac.datasets.folder import data_folder
from mfac.datasets.sentences import COLUMNS, load_glue
from mfac.gradients import model_loss
from mfac.gradients.batches import numbered
from mfac.tasks.minilm import minilm_classifier, tokenizer
from mfac.tasks.task import Task

BATCH_SIZE = 16
LENGTH = 128  # tokens; longer pairs are cut
# Of the fine-tuning that `pretrain` does: one epoch, but a seventh of one for SST-2, which is the largest by far.
# More of it gains hardly anything on MRPC.
PRETRAINING_STEPS = {"mrpc": 230, "rte": 155, "sst2": 600}
WARM_UP = 0.1
Batch = dict[str, Tensor]


def glue(task: str) -> Task:
    """MiniLM (3 layers, 5.5 million weights to train) on "mrpc", "rte" or "sst2".

    The measure is accuracy on the development set. `pretrain` is a short fine-tuning of some minutes. It suits SST-2;
    three layers with frozen embeddings learn little of pairs of sentences: bring a checkpoint where the score matters.
    """

    def batches(split: str) -> SentenceBatches:
        return SentenceBatches(_encode(task, split, data_folder()), shuffle=split == "train")

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


class SentenceBatches:
    """Batches as a Hugging Face model takes them, each padded to its longest sentence.

    The order of a shuffled pass is drawn from torch's global random state when the pass begins, and its last batch is
    left out if it is smaller.

    Args:
        examples: (token ids, token types, label) of every example.
        shuffle: a new order in each pass.
    """

    def __init__(self, examples: list[tuple[list[int], list[int], float]], *, shuffle: bool):
        self.examples, self.shuffle = examples, shuffle

    def __len__(self) -> int:
        whole, rest = divmod(len(self.examples), BATCH_SIZE)
        return whole + bool(rest and not self.shuffle)

    def __iter__(self) -> Iterator[Batch]:
        count = len(self.examples)
        order = (torch.randperm(count) if self.shuffle else torch.arange(count)).tolist()
        for i in range(len(self)):
            yield self._collate([self.examples[k] for k in order[i * BATCH_SIZE : (i + 1) * BATCH_SIZE]])

    def _collate(self, chosen: list[tuple[list[int], list[int], float]]) -> Batch:
        width = max(len(ids) for ids, _, _ in chosen)
        ids, types, mask = (torch.zeros(len(chosen), width, dtype=torch.int64) for _ in range(3))  # 0 is [PAD]
        for row, (tokens, kinds, _) in enumerate(chosen):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            types[row, : len(tokens)] = torch.tensor(kinds)
            mask[row, : len(tokens)] = 1
        labels = torch.tensor([label for _, _, label in chosen], dtype=torch.int64)
        return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask, "labels": labels}


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
    for _, batch in itertools.islice(numbered(batches, cycle=True), steps):
        optimizer.zero_grad()
        model_loss(model, {key: value.to(device) for key, value in batch.items()}).backward()
        optimizer.step()
        rate.step()
    model.train(training)


@cache
def _encode(task: str, split: str, folder: Path) -> list[tuple[list[int], list[int], float]]:
    """Read and cut into tokens once for each folder, which is asked for only so that another MFAC_DATA is another."""
    examples = load_glue(task, split)
    second: Any = [example.second for example in examples] if examples[0].second is not None else None
    encoded = tokenizer()([example.first for example in examples], second, truncation=True, max_length=LENGTH)
    labels = [example.label for example in examples]
    return list(zip(encoded["input_ids"], encoded["token_type_ids"], labels, strict=True))
