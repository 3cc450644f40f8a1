"""Text for train_transformers.py: made-up film reviews, which need no download, or the pairs of GLUE's MRPC."""

import csv
import json
import os
import random
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

GOOD, BAD = ["good", "great", "fine", "lovely", "clever", "funny"], ["bad", "awful", "dull", "weak", "silly", "boring"]
SUBJECTS = ["the film", "the plot", "the cast", "the music", "the second half", "her acting"]


def write_review(draw: random.Random) -> tuple[str, int]:
    """(review, 1 if it is a kind one)."""
    kind = draw.random() < 0.5
    judgement = f"{draw.choice(['', 'really ', 'so '])}{draw.choice(GOOD if kind else BAD)}"
    return f"{draw.choice(SUBJECTS)} was {judgement}{draw.choice(['', ' , i think', ' , they say'])}", int(kind)


def load_reviews(count: int = 640):
    """(tokenizer, train, dev, model): reviews and a BERT of 20,000 weights built from a config."""
    draw = random.Random(0)
    reviews = [write_review(draw) for _ in range(count)]
    words = sorted({word for review, _ in reviews for word in review.split()})
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
    tokenizer = BertTokenizer(vocab=vocab)
    data = [{**tokenizer(review), "labels": label} for review, label in reviews]
    config = BertConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.1,  # the usual 0.02 is for wider layers: here it would make gradients tiny
    )
    return tokenizer, data[128:], data[:128], BertForSequenceClassification(config)


def load_mrpc():
    """(tokenizer, train, dev, model): is the second sentence a paraphrase of the first? MiniLM, embeddings frozen."""
    root = Path(os.environ.get("MFAC_DATA") or "~/.cache/mfac/data").expanduser()
    folder = root / "minilm-l3"
    if not (folder / "config.json").exists() or not (root / "glue" / "MRPC" / "train.tsv").exists():
        raise SystemExit(f"--glue MRPC needs glue/MRPC and minilm-l3 under {root}; set MFAC_DATA to where they are")
    tokenizer = BertTokenizer(vocab=str(folder / "vocab.txt"))
    train, dev = (read_mrpc(root / "glue" / "MRPC" / f"{split}.tsv", tokenizer) for split in ("train", "dev"))
    return tokenizer, train, dev, load_minilm(folder)


def read_mrpc(path: Path, tokenizer: BertTokenizer) -> list[dict]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        lines = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    encoded = tokenizer(
        [line["#1 String"] for line in lines], [line["#2 String"] for line in lines], truncation=True, max_length=128
    )
    names = list(encoded)
    columns = zip(*encoded.values(), lines, strict=True)
    return [{**dict(zip(names, row, strict=True)), "labels": int(line["Quality"])} for *row, line in columns]


def load_minilm(folder: Path) -> BertForSequenceClassification:
    """The pretrained encoder, a fresh pooler and classifier; 5.5 of 17.3 million weights are left to train."""
    settings = json.loads((folder / "config.json").read_text())
    model = BertForSequenceClassification(BertConfig(**settings))
    with np.load(next(folder.glob("*.npz"))) as weights:
        tensors = {name: torch.from_numpy(weights[name]).float() for name in weights}
    missing, unexpected = model.bert.load_state_dict(tensors, strict=False)
    assert not unexpected, f"not weights of this BERT: {unexpected}"
    assert all("pooler" in name or "position_ids" in name for name in missing), missing
    model.bert.embeddings.requires_grad_(False)  # the window would hold num_grads copies of them, nearly all zeros
    return model
