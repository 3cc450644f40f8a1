"""The optimizer against the paper's literal algorithm, and the properties that define it."""

import pytest
import torch
from optimizers import loss_of, mask_of, train
from optimizers import network as small_network
from torch import nn

import mfac
from mfac import reference

M = 24


def network():
    return small_network().double()


def flat(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def train_literally(model, steps, lr, damping, masks, momentum=0.0, weight_decay=0.0, decoupled=False, nesterov=False):
    """w ← w − lr v over Algorithms 1 and 2, each step from scratch, on a window that starts with zeros."""
    params = list(model.parameters())
    kept = flat([(masks or {}).get(name, torch.ones_like(p)) for name, p in model.named_parameters()]).bool()
    G = torch.zeros(M, int(kept.sum()), dtype=torch.float64)
    v = torch.zeros(G.shape[1], dtype=torch.float64)
    for t in range(steps):
        gradients = torch.autograd.grad(loss_of(model, t), params)
        w = flat(params)
        g = (flat(gradients) + (0.0 if decoupled else weight_decay) * w)[kept]
        G[t % M] = g
        D, B = reference.dynamic_setup(G @ G.T, damping)
        new = (1 - momentum) * reference.dynamic_multiply(G, g, D, B, damping)
        v = momentum * v + new
        w[kept] = w[kept] * (1 - lr * weight_decay * decoupled) - lr * (momentum * v + new if nesterov else v)
        torch.nn.utils.vector_to_parameters(w, params)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 1e-2, "decoupled_weight_decay": True, "momentum": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 3e-3, "masks": True},
    ],
    ids=str,
)
def test_150_steps_are_those_of_the_literal_algorithm(options):
    ours, theirs = network(), network()
    masks = None
    if options.pop("masks", False):
        masks = {f"{layer}.weight": mask_of(ours[layer].weight) for layer in (0, 2)}
        for model in (ours, theirs):
            mfac.apply_masks(model, masks)
    optimizer = mfac.MFAC(ours.named_parameters(), 5e-3, M, 1e-3, masks=masks, **options)
    losses = train(ours, optimizer, range(150))
    decoupled = options.pop("decoupled_weight_decay", False)
    train_literally(theirs, 150, 5e-3, 1e-3, masks, decoupled=decoupled, **options)
    torch.testing.assert_close(flat(ours.parameters()), flat(theirs.parameters()), rtol=1e-7, atol=1e-9)
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])


def test_it_converges_on_an_ill_conditioned_quadratic_where_sgd_crawls():
    """Least squares with noise, condition number 10⁶: F is the Hessian, so F⁻¹g goes down every direction alike."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.logspace(0, -3, 20, dtype=torch.float64)
    A = torch.randn(1500, 20, dtype=torch.float64, generator=generator) * scales
    b = A @ (3 / scales) + torch.randn(1500, dtype=torch.float64, generator=generator)
    best = torch.linalg.lstsq(A, b[:, None]).solution[:, 0]

    w, sgd = nn.Parameter(torch.zeros(20, dtype=torch.float64)), torch.zeros(4, 20, dtype=torch.float64)
    optimizer, rates = mfac.MFAC([w], 0.3, 80, 1e-8, normalize="seen"), torch.tensor([[0.3], [0.1], [0.03], [0.01]])
    for a, target in zip(A, b, strict=True):
        w.grad = (a @ w.detach() - target) * a  # the gradient of ½ (aᵀw − b)²
        optimizer.step()
        sgd -= rates * (sgd @ a - target)[:, None] * a
    ours, theirs = ((each - best) @ A.T for each in (w.detach(), sgd))
    assert ours.square().mean() / 2 < 3 < 40 < theirs.square().mean(1).min() / 2


def test_gradients_in_between_are_multiplied_and_not_added():
    model = network()
    optimizer = mfac.MFAC(model.parameters(), 1e-3, M, 1e-3, update_every=3)
    train(model, optimizer, range(6))
    window = optimizer._window.operator
    assert window.num_seen == 2
    before, g = flat(model.parameters()), torch.ones(window.shape[0], dtype=torch.float64)
    optimizer._window.calls = 1  # not the turn of this one
    for tensor in model.parameters():
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    F = window.damping * torch.eye(len(g), dtype=g.dtype) + window.rows.T @ window.rows / M
    torch.testing.assert_close(before - flat(model.parameters()), 1e-3 * torch.linalg.solve(F, g))
    assert window.num_seen == 2
