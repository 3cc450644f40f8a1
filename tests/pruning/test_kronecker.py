"""K-FAC's factors as a part of F, or all of it: equal to the dense Kronecker product of a layer."""

import copy
import math

import pytest
import torch
from layer_cases import LOSS, dense_rows, problem
from pruning_cases import PAPER, dense_joint
from torch import nn
from torch.nn import functional as F

import mfac
from mfac.pruning import kronecker, layer_sums, row_fisher
from mfac.pruning.kronecker import KroneckerBlocks
from mfac.pruning.layer_sums import PRIOR

PRIORS = [("linear", None, PRIOR), ("linear", "11kB", PRIOR), ("linear", "1kB", PRIOR), ("convolution", None, PRIOR),
          ("linear", None, 1), ("linear", "1kB", 1), ("convolution", None, 1), ("many outputs", None, 1)]  # fmt: skip


@pytest.mark.parametrize(("name", "memory", "share"), PRIORS)
def test_a_kronecker_prior_joins_the_outputs_of_a_layer_and_is_all_of_a_wide_one(name, memory, share, monkeypatch):
    monkeypatch.setattr("mfac.woodbury.TOLERANCE", 1e-12)
    if share == 1:
        monkeypatch.setattr(row_fisher, "LARGEST", 0)
        monkeypatch.setattr(kronecker, "ITERATED", torch.float64)
    if many := name == "many outputs":
        monkeypatch.setattr(layer_sums, "WIDEST", -1)
        name = "linear"
    model, batches = problem(name, 40)
    dense = copy.deepcopy(model)
    options = PAPER | {"damping": 1e-3, "prior": "kron", "targets": "0.weight", "recomputations": 1, "memory": memory}
    result = mfac.prune(model, LOSS, batches, 0.5, **options)
    rows, x, y = dense_rows(dense, batches, "0.weight"), *(torch.cat(parts) for parts in zip(*batches, strict=True))
    hidden = dense[0](x)
    (d,) = torch.autograd.grad(F.cross_entropy(dense[1:](hidden.clone()), y, reduction="sum"), hidden)
    d = d.flatten(2).movedim(1, -1).flatten(0, 1) if d.ndim > 2 else d
    a = x if name == "linear" else F.unfold(x, 3, padding=1, stride=2).movedim(1, -1).flatten(0, 1)
    S = d.T @ d / len(x)
    apart = many or (memory == "1kB" and share != 1)
    kron = torch.kron(S.diagonal().diag() if apart else S, a.T @ a / len(a))
    H = torch.block_diag(*(torch.einsum("noi,noj->oij", rows, rows) / len(rows)))
    full = share * kron + (1 - share) * H + 1e-3 * torch.eye(len(H)).double()
    theta = dense[0].weight.detach().flatten()
    delta, cost = dense_joint(full, theta, ~result.masks["0.weight"].flatten())
    assert torch.allclose(model[0].weight.flatten(), theta + delta, atol=1e-8)
    assert result.predicted_increase == pytest.approx(cost, rel=1e-6)


@pytest.mark.parametrize("apart", [False, True])
def test_kronecker_blocks_answer_as_the_dense_matrix_of_a_layer(apart):
    """Of which some weights are removed already: costs are as if they could still move."""
    S, A = (torch.cov(torch.randn(n, 3 * n)).double() for n in (4, 6))
    A[2], A[:, 2] = 0, 0  # an input that is always zero
    full = torch.linalg.inv(torch.kron(S.diagonal().diag() if apart else S, A) + 1e-2 * torch.eye(24).double())
    inside = torch.tensor([[0, 1, 2, 3, 5], [0, 2, 4, 5, 6], [1, 6, 6, 6, 6], [0, 1, 2, 3, 4]])
    blocks, present = KroneckerBlocks(S.diagonal() if apart else S, A, inside, 1e-2), (inside < 6).flatten()
    at = (torch.arange(4)[:, None] * 6 + inside).flatten()[present]
    dense = torch.eye(20).double() / 1e-2
    dense[present.nonzero(), present.nonzero().T] = full[at[:, None], at]
    x = torch.where(present, torch.randn(20).double(), 0)
    assert torch.allclose(blocks.diagonal(), dense.diagonal())
    assert torch.allclose(blocks.apply(x)[present], (dense @ x)[present])
    assert torch.allclose(blocks.forward(x)[present], torch.linalg.inv(full)[at[:, None], at] @ x[present])
    own = torch.block_diag(*(dense[i : i + 5, i : i + 5] for i in range(0, 20, 5)))
    pairs = torch.cartesian_prod(*[present.nonzero()[:, 0]] * 2).T
    assert torch.allclose(blocks.elements(*pairs), own[pairs[0], pairs[1]])
    assert torch.allclose(torch.block_diag(*(each for _, some in blocks.inverses() for each in some)), own)
    F_kept, theta, removed = torch.linalg.inv(full)[at[:, None], at], x[present], torch.arange(len(at)) % 2 == 0
    _, least = dense_joint(F_kept, theta, removed)
    Q = torch.zeros_like(present).masked_scatter_(present, removed)
    for size in (1.0, 1e-25):  # removals are iterated in float32, whose squares end at 1e-38
        delta, cost = blocks.joint_removal(size * x, Q)
        assert torch.equal(delta[Q], -size * x[Q])
        assert float(cost) == pytest.approx(size**2 * least, rel=1e-4, abs=0)
    ids = torch.arange(20) % 3
    for group, cost in enumerate(blocks.group_costs(x, ids, 3)):
        Q = ids == group
        assert cost == pytest.approx(float(x[Q] @ torch.linalg.solve(own[Q][:, Q], x[Q])) / 2)
    with pytest.raises(torch.linalg.LinAlgError, match="raise the damping"):
        KroneckerBlocks(S, A, inside, 1e-14).diagonal()


@pytest.mark.parametrize("change", [{"pattern": "2:4"}, {"pattern": "channel"}, {"order": "greedy"}, {"update": "obs"}])
def test_wide_layers_over_tokens_are_pruned_in_every_way(change, monkeypatch):
    monkeypatch.setattr(row_fisher, "LARGEST_OVER_TOKENS", 0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
    batches = [(torch.randn(8, 4, 8), torch.randint(3, (8, 4))) for _ in range(3)]
    loss = mfac.criterion_loss(lambda y, labels: F.cross_entropy(y.flatten(0, 1), labels.flatten()))
    options = {"recomputations": 3, "prior": "kron", "fisher": "empirical"} | change
    result = mfac.prune(model, loss, batches, None if options.get("pattern") == "2:4" else 0.5, **options)
    assert result.sparsity == pytest.approx(0.5, abs=0.1)
    assert math.isfinite(result.predicted_increase)
