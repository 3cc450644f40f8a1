"""Gradual pruning inside the Hugging Face Trainer: a tiny BERT, built from a config, on a made-up task.

The task: is a certain word in the sentence? Run: python examples/gradual_pruning_transformers.py
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

import mfac
from mfac.integrations.transformers import PruningCallback
from mfac.pruning import GradualPruner, geometric_schedule, sparsity_report


def sentences(count, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 12, (count, 8), generator=generator)
    labels = (tokens == 7).any(1).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def stacked(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=12, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    data = sentences(1024, 0)
    gradient_batches = [stacked(data[i : i + 16]) for i in range(0, len(data), 16)]

    def build(model, optimizer):
        schedule = geometric_schedule(0, 0.7, 4)
        return GradualPruner(
            model, mfac.model_loss, gradient_batches, schedule, optimizer=optimizer, num_grads=32, recomputations=2
        )

    callback = PruningCallback(build, every=30, start=60)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=200, per_device_train_batch_size=32, learning_rate=3e-3, save_steps=100, use_cpu=True,
            report_to="none", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
        trainer.train()

    test = stacked(sentences(512, 1))
    model.eval()
    with torch.no_grad():
        right = (model(input_ids=test["input_ids"]).logits.argmax(1) == test["labels"]).float().mean().item()
    print(sparsity_report(model, callback.pruner.masks))
    print(f"{callback.pruner.steps_done} pruning steps, {100 * right:.1f} % of 512 new sentences right")


if __name__ == "__main__":
    main()
