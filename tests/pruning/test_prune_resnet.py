"""The public ResNet20 checkpoint, where the data is there: a few gradients, real weights."""

import pytest
import torch

import mfac
from experiments.data import HALVES, ImageBatches, data_folder, load_cifar10
from experiments.models.resnet import mfac_resnet20
from mfac.pruning import prune

pytestmark = pytest.mark.skipif(
    not (data_folder() / "checkpoints").exists() or not (data_folder() / "cifar-10-batches-bin").exists(),
    reason="CIFAR-10 and the checkpoints are not under MFAC_DATA",
)
LOSS = mfac.criterion_loss(torch.nn.CrossEntropyLoss())


def loss_after(**options):
    model = mfac_resnet20()
    batches = ImageBatches(*load_cifar10("train"), 16, HALVES, seed=0)
    result = prune(model, LOSS, batches, num_grads=8, seed=0, progress=False, **options)
    return model, result


def test_the_joint_update_loses_less_than_none_and_than_magnitude():
    losses = {}
    for name, options in {"joint": {}, "none": {"update": "none"}, "magnitude": {"method": "magnitude"}}.items():
        _, result = loss_after(sparsity=0.6, recomputations=2, **options)
        assert result.num_removed == round(0.6 * result.num_weights) == round(0.6 * 270_896)
        losses[name] = result.history[-1].loss_after
    assert losses["joint"] < losses["none"]
    assert losses["joint"] < losses["magnitude"]


def test_two_of_four_in_every_group():
    model, result = loss_after(sparsity=None, pattern="2:4", ignore="conv1.weight", recomputations=2)
    weights = dict(model.named_parameters())
    for name in result.targets:
        assert (weights[name].movedim(1, -1).reshape(-1, 4).count_nonzero(1) == 2).all()
    assert result.sparsity == 0.5
