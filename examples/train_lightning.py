"""MFAC in Lightning: configure_optimizers, automatic or manual optimization, checkpoint and resume.

    python examples/train_lightning.py
    python examples/train_lightning.py --manual                                    # backward and step by hand
    python examples/train_lightning.py --resume checkpoints/digits-step=92.ckpt    # the same weights in the end
    torchrun --nproc-per-node 2 examples/train_lightning.py --ranks 2              # data parallel, half a window each

Digits, with the settings of train_plain.py, which explains them.
"""

import argparse
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader

from digits import EpochOrder, accuracy, build_model, build_optimizer, load_data


class Digits(lightning.LightningModule):
    def __init__(self, num_grads, steps, manual=False, optimizer="mfac"):
        super().__init__()
        self.num_grads, self.steps, self.optimizer = num_grads, steps, optimizer
        self.automatic_optimization = not manual
        self.model = build_model()
        self.losses = []

    def configure_optimizers(self):
        group = dist.group.WORLD if dist.is_initialized() else None
        optimizer = build_optimizer(self.optimizer, self.named_parameters(), self.num_grads, group)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            self.step_by_hand(loss)
        return loss

    def step_by_hand(self, loss):
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        scheduler.step()
        self.log_dict(optimizer.diagnostics())


def parse(argv):
    parser = argparse.ArgumentParser(description="digits with MFAC in Lightning")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--optimizer", choices=["mfac", "full_matrix_adam"], default="mfac")
    parser.add_argument("--num-grads", type=int, default=64, help="m, the gradients in the window")
    parser.add_argument("--ranks", type=int, default=1, help="processes, as many as torchrun has started")
    parser.add_argument("--manual", action="store_true", help="manual optimization")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    train, test = load_data()
    loader = DataLoader(train, batch_size=64, sampler=EpochOrder(train))  # Lightning calls set_epoch
    module = Digits(args.num_grads, args.epochs * len(loader), args.manual, args.optimizer)

    # A checkpoint holds the window, num_grads times the size of the model: think of how many to keep (save_top_k).
    checkpoints = ModelCheckpoint(args.folder, "digits-{step}", every_n_epochs=max(1, args.epochs // 2), save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=args.ranks,
        strategy="ddp" if args.ranks > 1 else "auto",
        # Lightning writes the first process's state alone: a part of the window, which MFAC would refuse to load.
        callbacks=[checkpoints] if args.ranks == 1 else [],
        enable_checkpointing=args.ranks == 1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, ckpt_path=args.resume)
    print(f"loss {module.losses[0]:.3f} -> {module.losses[-1]:.3f}, accuracy {accuracy(module.model, test):.1f} %")
    return module.model, module.losses


if __name__ == "__main__":
    main()
