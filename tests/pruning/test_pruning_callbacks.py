"""Gradual pruning inside other people's trainers: on time, zeros kept, and the same after a resumed run."""

import importlib
import runpy
import sys
from pathlib import Path
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from models import bert, cross_entropy, mlp
from states import same, weights
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

import mfac
from mfac.integrations.lightning import PruningCallback as LightningPruning
from mfac.integrations.pace import PacedPruning
from mfac.integrations.transformers import STATE_FILE
from mfac.integrations.transformers import PruningCallback as TransformersPruning
from mfac.pruning.gradual import GradualPruner

SCHEDULE = [0.4, 0.6, 0.8]
SMALL = {"num_grads": 4, "block_size": 32, "recomputations": 2}


def zeros(model, names):
    return sum(int((model.get_parameter(name) == 0).sum()) for name in names)


def test_paces_and_trainers_that_cannot_be_paced():
    pace = PacedPruning(None, every=10, start=5)
    assert [pace.due(step) for step in (0, 4, 5, 14, 15, 100)] == [0, 0, 1, 1, 2, 10]
    assert [PacedPruning(None, every=3).due(step) for step in (0, 2, 3)] == [1, 1, 2]
    with pytest.raises(ValueError, match="every must be an int of at least 1"):
        PacedPruning(None, every=0)
    with pytest.raises(ValueError, match="start must be an int of at least 0"):
        PacedPruning(None, every=1, start=-1)
    with pytest.raises(ValueError, match="prunes in one process, and training runs in 4"):
        PacedPruning(lambda model, optimizer: None, every=1).begin(mlp().model, None, 4, 0, None, "")
    with pytest.raises(ValueError, match=r"build must return an mfac.GradualPruner, not a Sequential"):
        PacedPruning(lambda model, optimizer: model, every=1).begin(mlp().model, None, 1, 0, None, "")
    with pytest.raises(ValueError, match="follows one optimizer, this module has 2"):
        LightningPruning(None, every=1).on_train_start(Mock(optimizers=[None, None]), mlp().model)
    with pytest.raises(ValueError, match="load_best_model_at_end=True would restore"):  # a denser one
        TransformersPruning(None, every=1).on_train_begin(Mock(load_best_model_at_end=True), None, None, model=None)


def hugging_face(folder):
    """A Trainer that prunes before training, and after 3 and 6 steps."""
    case = bert(24, padded=False, tokens=5)
    rows = [{key: value[i] for key, value in case.batch.items()} for i in range(24)]
    batches = [{key: value[i : i + 4] for key, value in case.batch.items()} for i in range(0, 24, 4)]

    def build(model, optimizer):
        return GradualPruner(model, mfac.model_loss, batches, SCHEDULE, optimizer=optimizer, **SMALL)

    arguments = {"max_steps": 9, "save_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    arguments |= {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
    arguments = TrainingArguments(str(folder), **arguments)
    callback = TransformersPruning(build, every=3)
    return Trainer(case.model, arguments, train_dataset=rows, callbacks=[callback]), callback


def test_hugging_face_prunes_on_time_keeps_the_zeros_and_resumes_bit_for_bit(tmp_path):
    whole, whole_callback = hugging_face(tmp_path)
    whole.train()
    masks = whole_callback.pruner.masks
    assert whole_callback.pruner.steps_done == 3
    assert "bert.embeddings.word_embeddings.weight" not in masks
    assert zeros(whole.model, masks) == round(0.8 * sum(mask.numel() for mask in masks.values()))
    assert torch.load(tmp_path / "checkpoint-4" / STATE_FILE, weights_only=True)["steps_done"] == 2
    resumed, callback = hugging_face(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert callback.pruner.steps_done == 3
    assert same(weights(whole.model), weights(resumed.model))
    assert same(callback.pruner.masks, masks)
    (tmp_path / "checkpoint-4" / STATE_FILE).write_bytes(b"torn")
    trainer, _ = hugging_face(tmp_path)
    with pytest.raises(ValueError, match=r"mfac_pruning.pt is damaged \(.*\); resume from another checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    (tmp_path / "checkpoint-4" / STATE_FILE).unlink()
    trainer, _ = hugging_face(tmp_path)
    with pytest.raises(ValueError, match=r"resumes at step 4 .*without the masks; there is no .*mfac_pruning.pt: say"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = mlp().model

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, index):
        return cross_entropy(self, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def lightning(folder):
    data = TensorDataset(*mlp(24).batch)

    def build(module, optimizer):
        batches = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
        return GradualPruner(module, cross_entropy, batches, SCHEDULE, optimizer=optimizer, **SMALL)

    callback = LightningPruning(build, every=3, start=1)
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    trainer = pl.Trainer(
        max_steps=9, accelerator="cpu", devices=1, logger=False, callbacks=[checkpoint, callback],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    return trainer, Module(), callback, DataLoader(data, batch_size=4)


def test_lightning_prunes_on_time_keeps_the_zeros_and_resumes_bit_for_bit(tmp_path):
    trainer, whole, whole_callback, loader = lightning(tmp_path)
    trainer.fit(whole, loader)
    assert whole_callback.pruner.steps_done == 3
    assert zeros(whole, ["net.0.weight", "net.2.weight"]) == round(0.8 * 56)
    trainer, module, callback, loader = lightning(tmp_path)
    trainer.fit(module, loader, ckpt_path=str(tmp_path / "step=6.ckpt"))
    assert callback.pruner.steps_done == 3
    assert same(weights(whole), weights(module))
    assert same(callback.pruner.masks, whole_callback.pruner.masks)


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_what_to_install_where_the_library_is_missing(library, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == library]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"mfac.integrations.{library}")
    with pytest.raises(ImportError, match=rf"pip install 'torch-mfac\[{library}\]'"):
        importlib.import_module(f"mfac.integrations.{library}")


EXAMPLES = Path(__file__).parents[2] / "examples"


def shortened(monkeypatch):
    """Trainers of ten steps, callbacks that prune after every second of them, and pruners that see little."""
    pruner, few = GradualPruner, {"num_grads": 8, "recomputations": 1, "loss_batches": 2}
    monkeypatch.setattr("mfac.pruning.GradualPruner", lambda *given, **options: pruner(*given, **options | few))
    arguments, trainer = TrainingArguments, pl.Trainer
    short = lambda build: lambda *folder, **options: build(*folder, **options | {"max_steps": 10})  # noqa: E731
    monkeypatch.setattr("transformers.TrainingArguments", short(arguments))
    monkeypatch.setattr(pl, "Trainer", short(trainer))
    for name, callback in (("transformers", TransformersPruning), ("lightning", LightningPruning)):
        often = lambda build, every, start, callback=callback: callback(build, every=2, start=2)  # noqa: E731
        monkeypatch.setattr(f"mfac.integrations.{name}.PruningCallback", often)


@pytest.mark.parametrize(
    ("name", "said"),
    [("gradual_pruning", "read back"), ("gradual_pruning_transformers", "4 pruning steps"),
     ("gradual_pruning_lightning", "4 pruning steps")],
)  # fmt: skip
def test_the_examples_run(name, said, monkeypatch, capsys):
    shortened(monkeypatch)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    found = capsys.readouterr().out
    assert "total" in found
    assert said in found
