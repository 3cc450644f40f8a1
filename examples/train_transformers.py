"""MFAC in Hugging Face's Trainer, given as an object or as a class with arguments; checkpoint and resume.

    python examples/train_transformers.py                                        # optimizers=(MFAC(...), scheduler)
    python examples/train_transformers.py --by-name full_matrix_adam             # or mfac: optimizer_cls_and_kwargs
    python examples/train_transformers.py --resume checkpoints/checkpoint-40     # the same weights in the end
    python examples/train_transformers.py --glue MRPC --steps 115                # real text, a pretrained MiniLM
    torchrun --nproc-per-node 2 examples/train_transformers.py                   # data parallel, half a window each

A tiny BERT learns whether made-up reviews are kind; nothing is downloaded. normalize="sum" lets one learning rate serve
every num_grads. For MRPC lr=0.1 and damping=1e-3 are the paper's for BERT (1e-4 and 1e-6 with 1,024 gradients, their
sum divided by 1,024) in that form; for the tiny BERT 0.3 and 0.1 were the best of a dozen tried. --adamw is for
comparison; its 3e-3 for the tiny BERT is the best of three.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import DataCollatorWithPadding, Trainer, TrainingArguments, get_scheduler, set_seed

from mfac import MFAC
from mfac.integrations.transformers import OPTIMIZERS, optimizer_by_name
from sentences import load_mrpc, load_reviews


def parse(argv):
    parser = argparse.ArgumentParser(description="MFAC in Hugging Face's Trainer")
    parser.add_argument("--by-name", choices=OPTIMIZERS, help="hand over a class by its name, not an optimizer")
    parser.add_argument(
        "--glue", choices=["MRPC"], help="real text, and a pretrained MiniLM, from the folder MFAC_DATA"
    )
    parser.add_argument("--adamw", action="store_true", help="AdamW instead, for comparison")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, help="default: 0.3, for AdamW 3e-3; with --glue 0.1 and 5e-5")
    parser.add_argument("--damping", type=float, help="default: 0.1, with --glue 1e-3")
    parser.add_argument("--num-grads", type=int, default=64, help="m, the gradients in the window")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", type=Path, help="a folder checkpoint-… to go on from")
    return parser.parse_args(argv)


def choose_optimizer(args, model):
    """The arguments of Trainer that say how to optimize."""
    lr, damping, adamw_lr = (0.1, 1e-3, 5e-5) if args.glue else (0.3, 0.1, 3e-3)
    group = dist.group.WORLD if dist.is_initialized() else None
    if args.by_name == "full_matrix_adam":
        options = {"lr": args.lr or 3e-3, "num_grads": args.num_grads, "process_group": group}
        return {"optimizer_cls_and_kwargs": optimizer_by_name(args.by_name, **options)}
    if args.adamw:
        return {"optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": args.lr or adamw_lr})}
    kwargs = {
        "lr": args.lr or lr,
        "num_grads": args.num_grads,
        "damping": args.damping or damping,
        "normalize": "sum",
        "process_group": group,
    }
    if args.by_name:
        return {
            "optimizer_cls_and_kwargs": optimizer_by_name("mfac", **kwargs)
        }  # Trainer makes groups with and without weight decay
    optimizer = MFAC(model.named_parameters(), **kwargs)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=args.steps)
    return {"optimizers": (optimizer, scheduler)}


def main(argv=None):
    args = parse(argv)
    set_seed(0)
    tokenizer, train, dev, model = load_mrpc() if args.glue else load_reviews()
    settings = TrainingArguments(
        output_dir=args.folder,
        max_steps=args.steps,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        lr_scheduler_type="linear",
        max_grad_norm=0,  # Trainer clips at 1 unless told not to; a row of the window should be the gradient itself
        logging_steps=10,
        # Trainer writes the first process's state alone: half a window, which MFAC would refuse to load.
        save_strategy="no" if dist.is_torchelastic_launched() else "steps",
        save_steps=max(1, args.steps // 2),
        save_total_limit=2,  # each checkpoint holds the window: num_grads times the trained weights
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    _ = settings.device  # joins the processes that torchrun has started, before the optimizer is built
    trainer = Trainer(
        model,
        settings,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=train,
        eval_dataset=dev,
        compute_metrics=lambda out: {"accuracy": float((np.argmax(out.predictions, 1) == out.label_ids).mean())},
        **choose_optimizer(args, model),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    figures = trainer.evaluate()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; dev: loss {figures['eval_loss']:.3f}, ", end="")
    print(f"accuracy {100 * figures['eval_accuracy']:.1f} %")
    return model, losses, figures


if __name__ == "__main__":
    main()
