"""What optimizers are compared on: an MLP, ResNet20, and language models, each with a part of its data to search on."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mfac
from experiments import data
from experiments.datasets.folder import data_folder
from experiments.models.resnet import mfac_resnet20, plain_resnet
from experiments.training import RUNS, cross_entropy


@dataclass(frozen=True)
class Task:
    model: Callable[[int], nn.Module]
    batches: Callable[[int], Iterable[Any]]
    test: Callable[[nn.Module], dict[str, float]]
    steps: int
    search_steps: int
    seeds: int
    test_every: int
    loss_fn: Callable[[nn.Module, Any], Tensor] = cross_entropy
    search: "Task | None" = None  # the same with a part of the training data, tested on the rest
    masks: Callable[[nn.Module], dict[str, Tensor]] | None = None  # of weights that stay zero


def digits() -> Task:
    images, labels = data.digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))

    def task(train: Tensor, held_out: Tensor) -> Task:
        def batches(seed: int) -> Iterable[tuple[Tensor, Tensor]]:
            generator = torch.Generator().manual_seed(seed)
            while True:
                for chosen in train[torch.randperm(len(train), generator=generator)].split(32)[:-1]:
                    yield images[chosen], labels[chosen]

        def model(seed: int) -> nn.Module:
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

        @torch.no_grad()
        def test(model: nn.Module) -> dict[str, float]:
            return {"accuracy": 100 * float((model(images[held_out]).argmax(1) == labels[held_out]).float().mean())}

        return Task(model, batches, test, steps=440, search_steps=220, seeds=5, test_every=44)

    return replace(task(order[:1437], order[1437:]), search=task(order[:1200], order[1200:1437]))


def autocast_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """In bfloat16 where the processor has instructions for it; elsewhere that takes two to ten times as long."""
    fast = any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))
    with torch.autocast("cpu", torch.bfloat16, enabled=fast):
        images = batch[0].to(memory_format=torch.channels_last) if fast else batch[0]
        return F.cross_entropy(model(images).float(), batch[1])


def cifar10() -> Task:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return plain_resnet(20)

    images, labels = data.cifar10("train")
    part = partial(data.ImageBatches, images[:45000], labels[:45000], 128, data.CIFAR10, augment=True)
    search = Task(model, lambda seed: part(seed=seed),
                  data.make_test(data.CIFAR10, load=lambda _: (images[45000:], labels[45000:])),
                  steps=351, search_steps=351, seeds=1, test_every=351, loss_fn=autocast_loss)  # fmt: skip
    return replace(search, batches=lambda seed: data.cifar_batches(128, data.CIFAR10, seed),
                   test=data.make_test(data.CIFAR10), steps=3900, seeds=3, test_every=195, search=search)  # fmt: skip


def sparse() -> Task:
    """The paper's authors' ResNet20, pruned to 90 % by `mfac.prune`, once; its file is kept."""
    images, labels = data.cifar10("train")
    batches = partial(data.ImageBatches, batch_size=128, normalisation=data.HALVES, augment=True)
    path = RUNS / "resnet20_sparse_90.pt"

    def model(seed: int) -> nn.Module:
        pruned = mfac_resnet20()
        if path.exists():
            pruned.load_state_dict(torch.load(path, weights_only=True))
        else:
            few = list(islice(batches(images[:45000], labels[:45000], seed=0), 8))
            mfac.prune(pruned, cross_entropy, few, 0.9, seed=0, refit=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(pruned.state_dict(), path)
        return pruned

    held_out = data.make_test(data.HALVES, load=lambda _: (images[45000:], labels[45000:]))
    search = Task(model, lambda seed: batches(images[:45000], labels[:45000], seed=seed), held_out,
                  steps=390, search_steps=130, seeds=3, test_every=39, loss_fn=autocast_loss,
                  masks=mfac.masks_from_zeros)  # fmt: skip
    return replace(search, batches=lambda seed: batches(images, labels, seed=seed),
                   test=data.make_test(data.HALVES), search=search)  # fmt: skip


class Windows:
    """Batches of 16 windows of a text [n] of tokens, drawn with a seed; a pass has as many tokens as the text."""

    def __init__(self, text: Tensor, length: int, seed: int):
        self.text, self.length = text, length
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(max(1, len(self.text) // (16 * self.length))):
            yield self.at(torch.randint(len(self.text) - self.length, (16,), generator=self.generator))

    def at(self, starts: Tensor) -> Tensor:
        return self.text[starts[:, None] + torch.arange(self.length + 1)]


def next_token_loss(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).logits.flatten(0, 1), text[:, 1:].flatten())


def language(train: Tensor, valid: Tensor, length: int, sizes: dict[str, Any]) -> Task:
    """A Llama; the validation loss is of 32,000 tokens."""
    import transformers

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))

    def task(train: Tensor, valid: Tensor) -> Task:
        part = Windows(valid, length, 0)
        places = torch.linspace(0, len(valid) - length - 1, 32_000 // length).long()

        @torch.no_grad()
        def test(model: nn.Module) -> dict[str, float]:
            losses = [float(next_token_loss(model, part.at(starts))) for starts in places.split(25)]
            return {"loss": sum(losses) / len(losses)}

        return Task(model, lambda seed: Windows(train, length, seed), test, 1500, 300, 3, 150, next_token_loss)

    held_out = len(train) // 10
    return replace(task(train, valid), search=task(train[:-held_out], train[-held_out:]))


def stories(**sizes: int) -> Task:
    import numpy as np

    config = json.loads((data_folder() / "stories260K/stories260K.config.json").read_text())
    tokens = np.load(data_folder() / "tinystories/tinystories.stories260K.npz")
    train, valid = (torch.from_numpy(tokens[name].astype(np.int64)) for name in ("train", "valid"))
    return language(train, valid, 128, {**config, **sizes})


def shakespeare() -> Task:
    text = (data_folder() / "text/tinyshakespeare.txt").read_text()
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    tokens, cut = torch.tensor([letters[letter] for letter in text]), len(text) * 9 // 10
    sizes = {"vocab_size": len(letters), "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3}
    return language(
        tokens[:cut], tokens[cut:], 128, sizes | {"num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 0}
    )
