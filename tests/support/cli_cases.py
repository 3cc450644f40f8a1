"""Commands in this process, and a task file."""

from pathlib import Path

from typer.testing import CliRunner

from mfac.app.cli.commands import app

TASK = """
from run_cases import data
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train_batches():
    return DataLoader(data(), 8, shuffle=True)


def eval_batches():
    return DataLoader(data(), 32)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])
"""
QUICK = ["--recomputations", "2", "--num-grads", "8", "--block-size", "16"]


def write_task(folder, text=TASK, name="small.py"):
    path = Path(folder) / name
    path.write_text(text)
    return str(path)


def mfac(*arguments):
    """A command in this process: its exit code, stdout and stderr."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="mfac")
