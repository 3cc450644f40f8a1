"""Labels drawn from the model's own output: the true Fisher by Monte Carlo; and the ready loss functions."""

import pytest
import torch
from models import CASES, mlp
from torch import nn
from torch.nn import functional as F

from mfac.gradients import collect_gradients
from mfac.gradients.losses import criterion_loss, draw_targets, drawn_by_seed, model_loss


def test_a_sample_fn_is_given_chunks():
    def sample_fn(model, batch):
        return batch[0], torch.multinomial(model(batch[0]).softmax(1), 1)[:, 0]

    case = CASES["embedding"](20)
    options = {"per_sample": True, "fisher": "sampled", "sample_fn": sample_fn, "chunk_size": 10}
    given = case.model, case.loss_fn, [case.batch], 20
    torch.testing.assert_close(*(collect_gradients(*given, method=method, **options) for method in ("vmap", "loop")))


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
    assert torch.equal(draw_targets(nn.CrossEntropyLoss(), logits[third], targets[third], [5]), together[third])


@pytest.mark.parametrize("criterion", [nn.MSELoss(), F.mse_loss, nn.BCEWithLogitsLoss(), nn.NLLLoss()])
def test_criteria_that_tell_how_labels_are_distributed(criterion):
    model = nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1) if isinstance(criterion, nn.NLLLoss) else nn.Identity())
    inputs = torch.randn(1, 3).repeat(4000, 1)
    targets = torch.zeros(4000, dtype=torch.long) if isinstance(criterion, nn.NLLLoss) else torch.zeros(4000, 2)
    options = {"per_sample": True, "fisher": "sampled"}
    rows = collect_gradients(model, criterion_loss(criterion), [(inputs, targets)], 4000, **options)
    assert rows.mean(0).norm() < 0.06 * rows.norm(dim=1).mean()  # the score has mean zero under its own distribution


NO_LOGITS = r"must return logits \[samples, ..., classes\], it returned"
CANNOT_TELL = [
    *[(fisher, {}, f'fisher="{fisher}" cannot tell the model.s outputs from this loss_fn; pass output_fn')
      for fisher in ("sampled", "gauss-newton")],
    ("sampled", {"sample_fn": print, "output_fn": print}, "sample_fn and output_fn are alternatives; pass one"),
    ("sampled", {"output_fn": lambda m, b: torch.zeros(6)}, rf"{NO_LOGITS} shape \(6,\)"),
    ("sampled", {"loss_fn": criterion_loss(nn.L1Loss())}, "and squared error, not L1Loss; pass sample_fn"),
    ("sampled", {"loss_fn": model_loss, "batches": [{"input": torch.zeros(2, 5)}]}, "model_loss needs logits of shape"),
    ("gauss-newton", {"loss_fn": criterion_loss(nn.L1Loss())}, "and squared error, not L1Loss; pass output_fn"),
    ("gauss-newton", {"loss_fn": criterion_loss(nn.MSELoss(reduction="none"))},
     'reduction="mean" or "sum", not "none"'),
    ("gauss-newton", {"sample_fn": print}, 'sample_fn needs fisher="sampled", output_fn that or "gauss-newton"'),
    ("gauss-newton", {"output_fn": lambda m, b: 1}, f"{NO_LOGITS} int"),
    ("gauss-newton", {"output_fn": lambda m, b: torch.zeros(6, 1)}, rf"{NO_LOGITS} shape \(6, 1\); a softmax needs"),
]  # fmt: skip


@pytest.mark.parametrize(("fisher", "options", "message"), CANNOT_TELL)
def test_losses_that_cannot_tell(fisher, options, message):
    case = mlp()
    given = {"model": case.model, "loss_fn": case.loss_fn, "batches": [case.batch], "num_grads": 1, "fisher": fisher}
    with pytest.raises(ValueError, match=message):
        collect_gradients(**(given | options))


def test_inputs_as_arguments():
    model, batch = nn.Bilinear(2, 3, 2), (torch.randn(4, 2), torch.randn(4, 3))
    targets, loss_fn = torch.zeros(4, 2), criterion_loss(nn.MSELoss())
    named = dict(zip(("input1", "input2"), batch, strict=True))
    assert loss_fn(model, (batch, targets)) == loss_fn(model, (named, targets)) == F.mse_loss(model(*batch), targets)
    assert repr(loss_fn) == "criterion_loss(MSELoss())"


OTHER_BATCHES = [
    (model_loss, mlp().model, mlp().batch,
     r"Sequential does not take a tuple of 2: too many .*; use criterion_loss\(criterion\) for batches"),
    (criterion_loss(nn.MSELoss()), nn.Identity(), (1, 2, 3), r"needs batches \(inputs, targets\), .* a tuple of 3"),
    (model_loss, nn.Identity(), torch.ones(2), r"output has .loss; are the labels in the batch\? Or use criterion"),
    (model_loss, nn.Linear(2, 2), {"inputs": torch.zeros(1, 2), "labels": torch.zeros(1)},
     r"Linear does not take a batch of inputs, labels: .*; use criterion_loss\(criterion\)"),
]  # fmt: skip


@pytest.mark.parametrize(("loss_fn", "model", "batch", "message"), OTHER_BATCHES, ids=range(4))
def test_ready_losses_refuse_other_batches_and_hide_no_error_of_the_model(loss_fn, model, batch, message):
    with pytest.raises(ValueError, match=message):
        loss_fn(model, batch)
    with pytest.raises(TypeError, match="must be Tensor, not NoneType"):
        model_loss(nn.Linear(2, 2), {"input": None})
