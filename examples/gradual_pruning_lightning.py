"""Gradual pruning inside Lightning's Trainer: a small convolutional network on handwritten digits.

Run: python examples/gradual_pruning_lightning.py
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mfac.integrations.lightning import PruningCallback
from mfac.pruning import GradualPruner, polynomial_schedule, sparsity_report


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, index):
        return loss(self, batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=4e-3)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main():
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    train = TensorDataset(images[:1400], labels[:1400])

    def build(module, optimizer):
        batches = DataLoader(train, batch_size=16, shuffle=True)
        schedule = polynomial_schedule(0, 0.9, 4)
        return GradualPruner(module, loss, batches, schedule, optimizer=optimizer, num_grads=32, recomputations=2)

    module, callback = Digits(), PruningCallback(build, every=40, start=80)
    trainer = pl.Trainer(
        max_steps=260, accelerator="cpu", devices=1, logger=False, callbacks=[callback], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(train, batch_size=32, shuffle=True))

    module.eval()
    with torch.no_grad():
        right = (module(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
    print(sparsity_report(module, callback.pruner.masks))
    print(f"{callback.pruner.steps_done} pruning steps, {100 * right:.1f} % of {len(images) - 1400} images right")


if __name__ == "__main__":
    main()
