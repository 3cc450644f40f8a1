"""FullMatrixAdam against AdamW on ten small models: default arguments, and the best of three learning rates for each.

    python -m experiments.ten_models            # 150 steps, two seeds: about 15 minutes on one core
    python -m experiments.ten_models variants   # other settings than the defaults, on six of the models
    python -m experiments.ten_models table      # the committed results

Texts are tinyshakespeare, WikiText-2 and TinyStories, under MFAC_DATA; images are scikit-learn's digits, and the
regression is on its diabetes data. That each tensor's step has the length of Adam's was chosen on these models, nothing
else of FullMatrixAdam was.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.data import digits
from experiments.datasets.folder import data_folder
from experiments.ledger import Ledger
from mfac import FullMatrixAdam

STEPS, SEEDS = 150, (1, 2)
RATES: dict[str, tuple[Any, tuple[float, ...]]] = {  # the first is the default
    "AdamW": (torch.optim.AdamW, (1e-3, 3e-3, 1e-2)),
    "FullMatrixAdam": (FullMatrixAdam, (3e-3, 1e-2, 3e-2)),
    "orthogonalized": (partial(FullMatrixAdam, orthogonalize=True), (1e-2, 3e-3, 3e-2)),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {}, "power 0": {"power": 0.0}, "power 1/4": {"power": 0.25}, "power 1": {"power": 1.0},
    "damping 0.01": {"damping": 0.01}, "damping 1": {"damping": 1.0}, "32 gradients": {"num_grads": 32},
    "128 gradients": {"num_grads": 128}, "eps 0.01": {"eps": 0.01}, "beta2 0.999": {"betas": (0.9, 0.999)},
    "bfloat16 window": {"window": torch.bfloat16}, "int8 window": {"window": torch.int8},
}  # fmt: skip
VARIED = ("MLP", "CNN, batch norm", "LSTM", "regression", "autoencoder", "BERT")
Loss = Callable[[nn.Module, Tensor], Tensor]  # of a model on the samples drawn with these numbers in [0, 1)


@cache
def characters(name: str = "text/tinyshakespeare.txt") -> Tensor:
    """The first 500,000 bytes of a text, of which ASCII is kept."""
    text = (data_folder() / name).read_bytes()[:500_000]
    return torch.tensor([byte for byte in text if byte < 128])


def chosen(draws: Tensor, count: int) -> Tensor:
    return (draws * count).long()


def classify(model: nn.Module, draws: Tensor, shape: tuple[int, ...] = (64,)) -> Tensor:
    images, labels = digits()
    samples, dtype = chosen(draws, len(images)), next(model.parameters()).dtype
    logits = model(images[samples].view(-1, *shape).to(dtype))
    return F.cross_entropy(getattr(logits, "logits", logits).float(), labels[samples])


def reconstruct(model: nn.Module, draws: Tensor) -> Tensor:
    images = digits()[0][chosen(draws, len(digits()[0]))]
    return F.mse_loss(model(images), images)


def regress(model: nn.Module, draws: Tensor) -> Tensor:
    from sklearn.datasets import load_diabetes

    inputs, targets = (torch.from_numpy(part).float() for part in load_diabetes(return_X_y=True))
    samples = chosen(draws, len(inputs))
    inputs, targets = inputs / inputs.std(), (targets - targets.mean()) / targets.std()
    return F.mse_loss(model(inputs[samples]).squeeze(1), targets[samples])


def windows(draws: Tensor, name: str, length: int) -> Tensor:
    text = characters(name)
    return text[chosen(draws, len(text) - length)[:, None] + torch.arange(length)]


def predict(model: nn.Module, draws: Tensor) -> Tensor:
    """The next character."""
    text = windows(draws[:16], "text/tinyshakespeare.txt", 65)
    logits = model(text[:, :-1])
    return F.cross_entropy(getattr(logits, "logits", logits).flatten(0, 1), text[:, 1:].flatten())


def attribute(model: nn.Module, draws: Tensor) -> Tensor:
    """Which of three texts 48 characters are from."""
    names = ("text/tinyshakespeare.txt", "text/wikitext2_valid.txt", "tinystories/train.txt")
    parts = [windows(part, name, 48) for part, name in zip(draws[:30].split(10), names, strict=True)]
    return F.cross_entropy(model(torch.cat(parts)).logits, torch.arange(3).repeat_interleave(10))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(128, 48), nn.LSTM(48, 96, batch_first=True), nn.Linear(96, 128)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(text))[0])


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


def convolutional() -> nn.Module:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

    blocks = [*block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def transformer(kind: str) -> nn.Module:
    import transformers as hf

    common = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    common |= {"intermediate_size": 128, "max_position_embeddings": 64}
    if kind == "BERT":
        return hf.BertForSequenceClassification(hf.BertConfig(**common, num_labels=3))
    if kind == "GPT-2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64))
    if kind == "Llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**common))
    sizes = {**common, "image_size": 8, "patch_size": 2, "num_channels": 1}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, num_labels=10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "MLP": (partial(mlp, 64, 128, 64, 10), classify),
    "CNN, batch norm": (convolutional, partial(classify, shape=(1, 8, 8))),
    "BERT": (partial(transformer, "BERT"), attribute),
    "GPT-2": (partial(transformer, "GPT-2"), predict),
    "Llama": (partial(transformer, "Llama"), predict),
    "ViT": (partial(transformer, "ViT"), partial(classify, shape=(1, 8, 8))),
    "LSTM": (Recurrent, predict),
    "regression": (partial(mlp, 10, 64, 64, 1, activation=nn.Tanh), regress),
    "autoencoder": (partial(mlp, 64, 48, 8, 48, 64, activation=nn.GELU), reconstruct),
    "bfloat16": (lambda: mlp(64, 128, 64, 10).bfloat16(), classify),
}


def train(name: str, make: Callable[..., torch.optim.Optimizer], seed: int, scale: float = 1.0) -> dict[str, float]:
    """The first loss, and the mean of the last tenth; infinite if it was not finite."""
    torch.manual_seed(seed)
    build, loss_fn = MODELS[name]
    model = build().train()
    optimizer, draws, losses = make(model.parameters()), torch.Generator().manual_seed(seed), list[float]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model, torch.rand(32, generator=draws))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return {"start": losses[0], "end": math.inf}
        (loss * scale).backward()
        optimizer.step()
    tail = STEPS // 10
    return {"start": sum(losses[:3]) / 3, "end": sum(losses[-tail:]) / tail}


def geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table(cells: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{model: {optimizer: its loss over AdamW's, by default and at the best of three rates}}, means over seeds."""

    def end(optimizer: str, rate: float, name: str) -> float:
        return geometric([cells[f"{name}, {optimizer}, lr {rate:g}, seed {seed}"]["end"] for seed in SEEDS])

    found = {}
    for name in MODELS:
        ends = {optimizer: [end(optimizer, rate, name) for rate in rates] for optimizer, (_, rates) in RATES.items()}
        theirs = ends.pop("AdamW")
        found[name] = {f"{optimizer}, default": values[0] / theirs[0] for optimizer, values in ends.items()}
        found[name] |= {f"{optimizer}, best of three": min(values) / min(theirs) for optimizer, values in ends.items()}
    return found


def variants(ledger: Ledger) -> None:
    """The loss of each variant over that of the defaults, at the default learning rate."""
    found: dict[str, list[float]] = {}
    for (label, options), name in itertools.product(VARIANTS.items(), VARIED):
        make = partial(FullMatrixAdam, **options)
        cells = [ledger.cell(f"{label}, {name}, seed {seed}", partial(train, name, make, seed)) for seed in SEEDS]
        found.setdefault(label, []).append(geometric([cell["end"] for cell in cells]))
    print("| over the defaults | " + " | ".join(VARIED) + " | geometric mean |\n" + "| --- " * (len(VARIED) + 2) + "|")
    for label, ends in found.items():
        ratios = [end / default for end, default in zip(ends, found["defaults"], strict=True)]
        print(f"| {label} | " + " | ".join(f"{ratio:.2f}" for ratio in [*ratios, geometric(ratios)]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["run", "variants", "table"], default="run")
    what = parser.parse_args().what
    if what == "variants":
        variants(Ledger("ten_models_variants", "python -m experiments.ten_models variants"))
        return
    ledger = Ledger("ten_models", "python -m experiments.ten_models")
    if what == "run":
        for (optimizer, (make, rates)), name in itertools.product(RATES.items(), MODELS):
            for rate, seed in itertools.product(rates, SEEDS):
                key = f"{name}, {optimizer}, lr {rate:g}, seed {seed}"
                ledger.cell(key, partial(train, name, partial(make, lr=rate), seed))
    found = table(ledger.cells)
    columns = list(found["MLP"])
    found["geometric mean"] = {column: geometric([row[column] for row in found.values()]) for column in columns}
    print("| loss over AdamW's | " + " | ".join(columns) + " |\n" + "| --- " * (len(columns) + 1) + "|")
    for name, row in found.items():
        print(f"| {name} | " + " | ".join(f"{row[column]:.2f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
