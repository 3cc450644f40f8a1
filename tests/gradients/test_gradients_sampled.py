"""Labels drawn from the model's own output: the true Fisher by Monte Carlo; and the ready loss functions."""

import pytest
import torch
from models import CASES, cross_entropy, mlp
from torch import nn
from torch.nn import functional as F

from mfac.gradients import collect_gradients
from mfac.gradients.losses import criterion_loss, draw_targets, drawn_by_seed, model_loss


def true_fisher(model, x):
    """E[g gᵀ] over the classes that the model gives x."""
    total = 0.0
    for label, p in enumerate(model(x).softmax(1)[0].tolist()):
        grads = torch.autograd.grad(cross_entropy(model, (x, torch.tensor([label]))), list(model.parameters()))
        g = torch.cat([grad.flatten() for grad in grads])
        total += p * torch.outer(g, g)
    return total


def last_layer(n):
    """One sample, n times over, and a linear model."""
    torch.manual_seed(0)
    return nn.Linear(3, 4), (torch.randn(1, 3).repeat(n, 1), torch.zeros(n, dtype=torch.long))


@pytest.mark.parametrize("how", ["criterion", "output_fn", "sample_fn"])
def test_the_mean_of_outer_products_is_the_true_fisher(how):
    model, batch = last_layer(6000)
    options = {
        "criterion": {},
        "output_fn": {"output_fn": lambda m, b: m(b[0])},
        "sample_fn": {"sample_fn": lambda m, b: (b[0], torch.multinomial(m(b[0]).softmax(1), 1)[:, 0])},
    }[how]
    loss_fn = criterion_loss(F.cross_entropy) if how == "criterion" else cross_entropy
    rows = collect_gradients(model, loss_fn, [batch], 6000, per_sample=True, fisher="sampled", **options)
    expected = true_fisher(model, batch[0][:1])
    torch.testing.assert_close(rows.T @ rows / 6000, expected, rtol=0.1, atol=0.03 * expected.max().item())
    assert rows.mean(0).norm() < 0.05 * rows.norm(dim=1).mean()


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("other", [{"method": "loop"}, {"chunk_size": 7, "cut": 6}])
def test_labels_of_a_sample_do_not_depend_on_how_samples_are_taken(criterion, other):
    inputs, targets = mlp(40).batch
    targets = targets if isinstance(criterion, nn.CrossEntropyLoss) else torch.randn(40, 3)
    other = dict(other)
    length = other.pop("cut", 40)
    batches = list(zip(inputs.split(length), targets.split(length), strict=True))
    options = {"per_sample": True, "fisher": "sampled"}
    loss_fn, model = criterion_loss(criterion), mlp().model
    rows = collect_gradients(model, loss_fn, [(inputs, targets)], 40, **options)
    torch.testing.assert_close(collect_gradients(model, loss_fn, batches, 40, **options, **other), rows)


def test_a_sample_fn_is_given_chunks():
    def sample_fn(model, batch):
        return batch[0], torch.multinomial(model(batch[0]).softmax(1), 1)[:, 0]

    case = CASES["embedding"](20)
    options = {"per_sample": True, "fisher": "sampled", "sample_fn": sample_fn, "chunk_size": 10}
    rows = [
        collect_gradients(case.model, case.loss_fn, [case.batch], 20, method=m, **options) for m in ("vmap", "loop")
    ]
    torch.testing.assert_close(*rows)


def test_numbers_from_one_seed_after_the_other_are_independent():
    """The first of each generator: uniform, and none tells anything about the next."""
    u = drawn_by_seed(torch.rand, torch.zeros(100_000, dtype=torch.float64), range(100_000))
    counts = torch.histc(u, 50, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 86  # chi squared of 49 degrees: 0.1 % are above
    assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]) < 0.012


@pytest.mark.parametrize("is_flat", [False, True])
def test_several_labels_a_sample(is_flat):
    """Of sequences: what is drawn for a sample is the same alone and with others."""
    logits, targets = torch.randn(4, 3, 5), torch.zeros(4, 5, dtype=torch.long)
    if is_flat:
        logits, targets = logits.transpose(1, 2).flatten(0, 1), targets.flatten()
    third = slice(10, 15) if is_flat else slice(2, 3)
    together = draw_targets(nn.CrossEntropyLoss(), logits, targets, [3, 4, 5, 6])
    alone = draw_targets(nn.CrossEntropyLoss(), logits[third], targets[third], [5])
    assert torch.equal(alone, together[third])


def test_the_seed_decides_what_is_drawn():
    case = mlp(40)
    loss_fn = criterion_loss(nn.CrossEntropyLoss())
    first, again, other = (
        collect_gradients(case.model, loss_fn, [case.batch], 1, fisher="sampled", seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("criterion", [nn.MSELoss(), F.mse_loss, nn.BCEWithLogitsLoss(), nn.NLLLoss()])
def test_criteria_that_tell_how_labels_are_distributed(criterion):
    model = nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1) if isinstance(criterion, nn.NLLLoss) else nn.Identity())
    inputs = torch.randn(1, 3).repeat(4000, 1)
    targets = torch.zeros(4000, dtype=torch.long) if isinstance(criterion, nn.NLLLoss) else torch.zeros(4000, 2)
    rows = collect_gradients(
        model, criterion_loss(criterion), [(inputs, targets)], 4000, per_sample=True, fisher="sampled"
    )
    assert rows.mean(0).norm() < 0.06 * rows.norm(dim=1).mean()  # the score has mean zero under its own distribution


def test_ignored_targets_stay_ignored():
    logits, targets = torch.randn(5, 3, 4), torch.randint(3, (5, 4))
    targets[:, 0] = -100
    _, drawn = criterion_loss(nn.CrossEntropyLoss()).draw_labels(nn.Identity(), (logits, targets), [0])
    assert (drawn[:, 0] == -100).all()
    assert (drawn[:, 1:] >= 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, 'fisher="sampled" cannot tell the model.s outputs from this loss_fn; pass output_fn'),
        ({"sample_fn": print, "output_fn": print}, "sample_fn and output_fn do the same in two ways; pass one"),
        (
            {"output_fn": lambda m, b: torch.zeros(6)},
            r"must return logits \[samples, ..., classes\], it returned shape \(6,\)",
        ),
        ({"loss_fn": criterion_loss(nn.L1Loss())}, "and squared error, not L1Loss; pass sample_fn"),
        ({"loss_fn": model_loss, "batches": [{"input": torch.zeros(2, 5)}]}, "model_loss needs logits of shape"),
    ],
)
def test_losses_that_cannot_tell(options, message):
    case = mlp()
    given = {"model": case.model, "loss_fn": case.loss_fn, "batches": [case.batch], "num_grads": 1, "fisher": "sampled"}
    with pytest.raises(ValueError, match=message):
        collect_gradients(**(given | options))


def test_inputs_as_arguments():
    model, batch = nn.Bilinear(2, 3, 2), (torch.randn(4, 2), torch.randn(4, 3))
    targets, loss_fn = torch.zeros(4, 2), criterion_loss(nn.MSELoss())
    named = dict(zip(("input1", "input2"), batch, strict=True))
    assert loss_fn(model, (batch, targets)) == loss_fn(model, (named, targets)) == F.mse_loss(model(*batch), targets)
    assert repr(loss_fn) == "criterion_loss(MSELoss())"


def test_ready_losses_refuse_other_batches():
    with pytest.raises(ValueError, match=r"criterion_loss needs batches \(inputs, targets\), this one is a tuple of 3"):
        criterion_loss(nn.MSELoss())(nn.Identity(), (1, 2, 3))
    message = r"a model whose output has .loss; are the labels in the batch\? Or use criterion_loss"
    with pytest.raises(ValueError, match=message):
        model_loss(nn.Identity(), torch.zeros(2))


@pytest.mark.parametrize(("per_sample", "fisher"), [(False, "sampled"), (True, "empirical")])
def test_model_loss_says_what_to_do_with_pairs(per_sample, fisher):
    case = mlp()
    message = r"Sequential does not take a tuple of 2: too many .*; use criterion_loss\(criterion\) for batches"
    with pytest.raises(ValueError, match=message):
        collect_gradients(case.model, model_loss, [case.batch], 1, per_sample=per_sample, fisher=fisher)


def test_model_loss_names_arguments_that_the_model_does_not_take_and_hides_no_error_of_its_own():
    message = r"Linear does not take a batch of inputs, labels: .*; use criterion_loss\(criterion\)"
    with pytest.raises(ValueError, match=message):
        model_loss(nn.Linear(2, 2), {"inputs": torch.zeros(1, 2), "labels": torch.zeros(1)})

    class Broken(nn.Module):
        def forward(self, x):
            return x + None

    with pytest.raises(TypeError, match="unsupported operand"):
        model_loss(Broken(), {"x": torch.zeros(1)})
