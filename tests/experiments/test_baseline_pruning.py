"""The baselines of pruning, each against its literal formula."""

import pytest
import torch
from models import cross_entropy
from pruning_cases import DAMPING, dense_update, lowest, quadratic, small
from torch import nn
from torch.nn import functional as F

from experiments.baselines.layer_moments import find_layers, layer_moments
from experiments.baselines.pruning import prune
from experiments.baselines.sparse_gpt import prune_rows, sparse_gpt
from experiments.baselines.woodfisher import rank_one_steps
from mfac.reference import woodbury_recursion


def pruned(model, batches, sparsity, **options):
    options = {"num_grads": 3, "recomputations": 1, "progress": False} | options
    return prune(model, cross_entropy, batches, sparsity, **options)


def test_wanda_is_weight_times_the_norm_of_its_input_in_a_layer_or_a_row():
    model, batches = small()
    images = torch.cat([images for images, _ in batches])
    hidden = model[:3](images).detach()
    patches = F.unfold(images, 3, padding=1, stride=2).transpose(1, 2).flatten(0, 1)
    scores = [
        model[0].weight.detach().abs() * patches.square().mean(0).sqrt().view(1, 2, 3, 3),
        model[3].weight.detach().abs() * hidden.square().mean(0).sqrt(),
    ]
    result = pruned(model, batches, 0.5, method="wanda", scope="layer")
    for score, mask in zip(scores, result.masks.values(), strict=True):
        assert torch.equal(~mask, lowest([score], 0.5)[0])
    for mask in pruned(small()[0], batches, 0.5, method="wanda by row", scope="layer").masks.values():
        assert (mask.flatten(1).sum(1) == mask[0].numel() // 2).all()


@pytest.mark.parametrize("update", ["joint", "obs", "none"])
def test_woodfisher_is_mfac_by_another_way(update):
    models, options = [], {"num_grads": 8, "block_size": 7, "damping": DAMPING, "recomputations": 2, "update": update}
    for method in ("mfac", "woodfisher"):
        problem = quadratic(8, 7)
        prune(problem.model, problem.loss_fn, problem.batches, 0.5, method=method, **options)
        models.append(problem.model.vector())
    assert torch.allclose(*models, atol=1e-8)
    rows = torch.randn(3, 6, 4).double()
    torch.testing.assert_close(rank_one_steps(rows, 0.01, 6), woodbury_recursion(rows, 0.01))


def test_layer_wise_obs_keeps_the_outputs_of_each_layer():
    """For one linear layer the joint update is least squares of the output on the inputs that are kept."""
    model = nn.Sequential(nn.Linear(6, 3, bias=False)).double()
    weight = model[0].weight.detach().clone()
    x = torch.randn(50, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    result = pruned(model, [(x, torch.zeros(50, dtype=torch.long))], 0.5, method="lobs", damping=1e-12, num_grads=1)
    H = x.T @ x / 50
    scores = weight.square() / (2 * torch.linalg.inv(H).diagonal())
    assert torch.equal(~result.masks["0.weight"], lowest([scores], 0.5)[0])
    for row, kept, new in zip(weight, result.masks["0.weight"], model[0].weight, strict=True):
        assert torch.allclose(new[kept], torch.linalg.lstsq(x[:, kept], x @ row).solution, atol=1e-6)


@pytest.mark.parametrize(("update", "method"), [("joint", "kfac"), ("obs", "kfac without π"), ("none", "kfac")])
def test_kronecker_factors_against_the_dense_product(update, method):
    model = nn.Sequential(nn.Linear(5, 4, bias=False)).double()
    theta = model[0].weight.detach().flatten().clone()
    x, y = torch.randn(30, 5, dtype=torch.float64), torch.randint(4, (30,))
    output = model(x)
    grads = torch.autograd.grad(F.cross_entropy(output, y, reduction="sum"), output)[0]
    A, S = x.T @ x / 30, grads.T @ grads / 30
    pi = float((A.diagonal().mean() / S.diagonal().mean()).sqrt()) if method == "kfac" else 1.0
    A, S = A + pi * 0.1 * torch.eye(5), S + 0.1 / pi * torch.eye(4)
    dense = torch.kron(S, A)
    result = pruned(model, [(x, y)], 0.4, method=method, damping=0.01, num_grads=1, update=update)
    gone = lowest([theta.square() / torch.linalg.inv(dense).diagonal()], 0.4)[0]
    assert torch.equal(~gone, result.masks["0.weight"].flatten())
    truth = dense_update(dense, theta, gone, update)
    assert torch.allclose(model[0].weight.flatten(), theta + truth, atol=1e-5)
    assert result.predicted_increase == pytest.approx(0.5 * float(truth @ dense @ truth), rel=1e-4)


def test_moments_of_convolutions_are_those_of_their_patches():
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2))
    layers = find_layers(model, {"0.weight": model[0].weight}, "lobs")
    x = torch.randn(5, 4, 6, 6)
    found = layer_moments(model, lambda m, b: m(b).square().mean(), [x], 1, layers, backward=True)["0.weight"]
    patches = F.unfold(x, 3, padding=1, stride=2).view(5, 2, 18, 9)
    assert torch.allclose(found.inputs, torch.einsum("ngkt,nglt->gkl", patches, patches).double(), atol=1e-3)
    assert (found.samples, found.positions) == (5, 45)
    output = model(x)
    grad = torch.autograd.grad(output.square().mean(), output)[0] * 5
    assert torch.allclose(found.outputs, torch.einsum("ncij,ndij->cd", grad, grad).double(), rtol=1e-3)


def test_what_the_baselines_refuse():
    model, batches = small()
    grouped = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6, 3))
    with pytest.raises(ValueError, match="knows no grouped convolutions"):
        pruned(grouped, [(torch.randn(5, 4, 3, 3), torch.randint(3, (5,)))], 0.5, method="kfac")
    with pytest.raises(ValueError, match="works on the weights of linear and convolution layers"):
        pruned(model, batches, 0.5, method="wanda", targets=["0.bias"])
    with pytest.raises(ValueError, match="keeps dense blocks and rows in memory: give block_size"):
        pruned(model, batches, 0.5, method="woodfisher", block_size=None)
    with pytest.raises(ValueError, match="requires method 'mfac'; give method 'kfac' a number"):
        pruned(model, batches, 0.5, method="kfac", damping="auto")


@pytest.mark.parametrize("groups", [False, True])
def test_sparse_gpt_is_obs_column_by_column(groups):
    """Removing column j moves the columns after it by OBS on H of the columns from j on, which never comes back."""
    W, x = torch.randn(3, 136, dtype=torch.float64), torch.randn(200, 136, dtype=torch.float64)
    H = x.T @ x / 200
    found = prune_rows(W, H, 0.5, 0.01, groups)
    damped, expected = H + 0.01 * H.diagonal().mean() * torch.eye(136), W.clone()
    for j in range(136):
        inverse = torch.linalg.inv(damped[j:, j:])
        step = torch.where(found[:, j] == 0, expected[:, j], 0.0) / inverse[0, 0]
        expected[:, j:] -= torch.outer(step, inverse[0])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    counts = (found == 0).view(3, -1, 4).sum(2) if groups else (found == 0)[:, :128].sum()
    assert (counts == (2 if groups else 192)).all()


def test_sparse_gpt_prunes_every_layer_alike():
    model, batches = small()
    masks = sparse_gpt(model, cross_entropy, batches, 0.5)
    assert [round(float((~mask).double().mean()), 2) for mask in masks.values()] == [0.5] * len(masks)
    assert all(torch.equal(model.get_parameter(name) != 0, mask) for name, mask in masks.items())
