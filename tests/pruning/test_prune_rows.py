"""Blocks of the inputs of one output: equal to dense matrices of explicit per-sample gradients."""

import copy

import pytest
import torch
from layer_cases import LOSS, MODELS, dense_rows, images, problem
from pruning_cases import PAPER, dense_joint
from states import same, state_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune as torch_prune
from transformers.pytorch_utils import Conv1D

import mfac
from mfac.pruning import layer_sums
from mfac.pruning.row_fisher import DAMPING, RowFisher
from mfac.pruning.weights import Weight


@pytest.mark.parametrize("count", [8, 41])  # fewer rows than weights in a block, and more; a last batch of one
@pytest.mark.parametrize("name", MODELS)
def test_one_step_is_joint_removal_by_dense_matrices_of_each_output(name, count):
    model, batches = problem(name, count)
    dense = copy.deepcopy(model)
    result = mfac.prune(model, LOSS, batches, 0.5, **PAPER | {"damping": 1e-3}, recomputations=1, progress=False)
    scores, predicted = [], 0.0
    for key in result.targets:
        theta = dense.get_parameter(key).detach().flatten(1)
        rows = dense_rows(dense, batches, key)
        H = torch.einsum("noi,noj->oij", rows, rows) / len(rows) + 1e-3 * torch.eye(theta.shape[1]).double()
        scores.append((theta.square() / (2 * torch.linalg.inv(H).diagonal(dim1=1, dim2=2))).flatten())
        gone = ~result.masks[key].flatten(1)
        for o, (new, old) in enumerate(zip(model.get_parameter(key).flatten(1), theta, strict=True)):
            delta, cost = dense_joint(H[o], old, gone[o])
            assert torch.allclose(new, old + delta, atol=1e-9)
            predicted += cost
    removed = ~torch.cat([result.masks[key].flatten() for key in result.targets])
    each = torch.cat(scores)
    assert each[removed].max() <= each[~removed].min()
    assert result.predicted_increase == pytest.approx(predicted, rel=1e-6)


@pytest.mark.parametrize("fisher", ["empirical", "gauss-newton"])
def test_samples_count_alike_in_batches_of_any_size(fisher):
    """With one output of a squared error, signs do not matter."""
    data, found = (torch.randn(40, 6).double(), torch.randn(40, 1).double()), []
    dense = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).double()
    for sizes in ([40], [1, 31, 8]):
        model, batches = copy.deepcopy(dense), list(zip(*(part.split(sizes) for part in data), strict=True))
        options = {"fisher": fisher, "update": "joint", "num_grads": len(sizes), "recomputations": 1}
        mfac.prune(model, mfac.criterion_loss(nn.MSELoss()), batches, 0.5, refit=False, **options)
        found.append(list(model.parameters()))
    torch.testing.assert_close(*found)


class Bypassed(nn.Sequential):
    """Does not call its first layer, whose weight has gradients of single samples."""

    def forward(self, x):
        return self[1](torch.tanh(F.linear(x, self[0].weight, self[0].bias)))


@pytest.mark.parametrize("fisher", ["empirical", "gauss-newton"])
@pytest.mark.parametrize("make", [nn.Sequential, Bypassed])
def test_a_summed_loss_has_the_fisher_matrix_of_a_batch(fisher, make):
    layers = [nn.Linear(6, 5).double(), *([nn.Tanh()] if make is nn.Sequential else []), nn.Linear(5, 1).double()]
    x, y = torch.randn(24, 6).double(), torch.randn(24, 1).double()
    found = []
    for reduction, size in (("mean", 24), ("sum", 8)):
        model = make(*copy.deepcopy(layers))
        batches = list(zip(x.split(size), y.split(size), strict=True))
        options = {"fisher": fisher, "update": "joint", "targets": "0.weight", "num_grads": len(batches)}
        loss = mfac.criterion_loss(nn.MSELoss(reduction=reduction))
        found.append(mfac.prune(model, loss, batches, 0.5, recomputations=1, refit=False, **options))
    assert found[1].damping == pytest.approx(8 * found[0].damping)
    assert found[1].predicted_increase == pytest.approx(8 * found[0].predicted_increase)


@pytest.mark.parametrize(("fisher", "make"), [("sampled", nn.Sequential), ("gauss-newton", Bypassed)])
def test_the_loss_of_an_output_fn_is_a_mean_whatever_the_reduction_of_another(fisher, make):
    layers, batches = problem("linear")
    options = {"fisher": fisher, "output_fn": lambda m, b: m(b[0]), "recomputations": 1, "refit": False, "seed": 0}
    losses = [mfac.criterion_loss(nn.CrossEntropyLoss(reduction=reduction)) for reduction in ("mean", "sum")]
    found = [mfac.prune(make(*copy.deepcopy([layers[0], layers[2]])), loss, batches, 0.5, **options) for loss in losses]
    assert found[0].predicted_increase == pytest.approx(found[1].predicted_increase)


def test_tokens_are_rows_of_their_own_and_damping_is_relative():
    model, batches = problem("tokens")
    dense = copy.deepcopy(model)
    options = {"fisher": "empirical", "recomputations": 1, "update": "joint", "targets": "0.weight"}
    result = mfac.prune(model, LOSS, batches, 0.4, **options)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    hidden = dense[0](x)
    hidden.retain_grad()
    F.cross_entropy(dense[1](torch.tanh(hidden).mean(1)), y, reduction="sum").backward()
    H = torch.einsum("nto,nti,ntj->oij", hidden.grad.square(), x, x) / len(x)
    damping = DAMPING * float(H.diagonal(dim1=1, dim2=2).mean())
    assert result.damping == pytest.approx(damping, rel=1e-6)
    for o, old in enumerate(dense[0].weight.detach()):
        full = H[o] + damping * torch.eye(5).double()
        delta, _ = dense_joint(full, old, ~result.masks["0.weight"][o])
        assert torch.allclose(model[0].weight[o], old + delta, atol=1e-6)


def test_clusters_of_tokens_are_exact_where_output_gradients_are_alike(monkeypatch):
    """And their sum over the outputs always is."""
    monkeypatch.setattr(layer_sums, "CLUSTERS", 3)
    kinds, a = torch.rand(3, 4).double(), torch.randn(40, 5).double()
    alike, others = kinds[torch.arange(40) % 3] * torch.randn(40, 1), torch.randn(40, 4).double()
    part = layer_sums.Part(Weight("w", torch.empty(4, 5)), torch.arange(20).view(4, 5), 20, slice(0, 4), joined=False)
    for dy, summed in ((alike, False), (others, True)):
        sums = layer_sums.TokenSums(torch.Size((4, 5)), torch.float64, a.device)
        for first in range(0, 40, 8):
            sums.add(a[first : first + 8], dy[first : first + 8])
        H, true = sums.blocks(part), torch.einsum("to,ti,tj->oij", dy.square(), a, a)
        assert torch.allclose(H.sum(0), true.sum(0))
        assert torch.allclose(H, true) is not summed


@pytest.mark.parametrize("pattern", [None, "2:4", "row", "channel"])
def test_conv1d_of_hugging_face_is_a_transposed_linear_layer(pattern):
    hugging = nn.Sequential(Conv1D(8, 12), nn.Tanh(), Conv1D(4, 8)).double()
    plain = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    plain.load_state_dict({key: value.t() for key, value in hugging.state_dict().items()})
    batches = [(torch.randn(16, 12).double(), torch.randint(4, (16,))) for _ in range(3)]
    options = {"recomputations": 2, "progress": False, "pattern": pattern, "seed": 0}
    sparsity = None if pattern == "2:4" else 0.5
    left, right = (mfac.prune(model, LOSS, batches, sparsity, **options) for model in (hugging, plain))
    assert same({key: mask.T for key, mask in left.masks.items()}, right.masks)
    assert all(torch.allclose(value.t(), plain.state_dict()[key]) for key, value in hugging.state_dict().items())
    with pytest.raises(ValueError, match="5 must divide its dimension 0"):
        mfac.prune(hugging, LOSS, batches, None, pattern="2:5")


LIMITS = [({"update": "joint"}, (20_000, "1kB")), ({"update": "obs"}, (20_000, "1kB")), ({}, (100_000,))]


@pytest.mark.parametrize(("options", "limits"), LIMITS, ids=str)
def test_a_memory_limit_takes_more_passes_and_gives_the_same_masks(options, limits):
    results = []
    for memory in (None, *limits):
        model, batches = problem("convolution", 40)
        masks = mfac.prune(model, LOSS, batches, 0.6, memory=memory, recomputations=3, seed=1, **options).masks
        results.append((masks, state_of(model)))
    for masks, state in results[1:]:
        assert same(masks, results[0][0])
        assert all(torch.allclose(value, results[0][1][key]) for key, value in state.items())


@pytest.mark.parametrize(("prior", "count", "memory", "groups"), [("kron", 40, 40_000, 6), (None, 8, 20_000, 2)])
def test_layers_that_do_not_fit_are_taken_in_groups_that_make_room(prior, count, memory, groups, monkeypatch):
    """With a prior, and as rows."""
    model, batches = problem("convolution", count)
    taken, measured = [], RowFisher._measured

    def recorded(self, parts):
        assert not sum(part._rows.numel() for group in self.groups for part in group)
        taken.append(sum(len(part.inside) * self._bytes_of_output(part.weight.name) for part in parts))
        return measured(self, parts)

    monkeypatch.setattr(RowFisher, "_measured", recorded)
    mfac.prune(model, LOSS, batches, 0.6, memory=memory, recomputations=1, prior=prior, update="joint")
    assert len(taken) == 2 * groups  # for the scores, and again for the removal
    assert max(taken) <= memory


@pytest.mark.parametrize(("memory", "passes"), [(None, 1), (8000, 1), (1000, 4)])
def test_sums_over_tokens_serve_all_groups_that_they_fit_beside(memory, passes, monkeypatch):
    """Two layers over tokens, whose sums take 576 and 1,296 bytes and whose blocks 6,400 and 6,144."""
    monkeypatch.setattr(layer_sums, "CLUSTERS", 4)
    model, taken, measure = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), [], RowFisher._pass

    def recorded(self, parts):
        taken.append(self.passes)
        measure(self, parts)

    monkeypatch.setattr(RowFisher, "_pass", recorded)
    batches = [(torch.randn(8, 4, 5), torch.randint(3, (8,))) for _ in range(3)]
    options = {"memory": memory, "recomputations": 1}
    mfac.prune(model, lambda m, b: F.cross_entropy(m(b[0]).mean(1), b[1]), batches, 0.5, **options)
    assert len(taken) == taken[0] == passes


@pytest.mark.parametrize("order", ["scores", "greedy"])
def test_every_fisher_reaches_the_sparsity_and_drawn_labels_and_signs_give_matrices_of_one_scale(order):
    dampings = {}
    for fisher in ("gauss-newton", "sampled", "empirical"):
        model, batches = problem("linear", 80)
        result = mfac.prune(model, LOSS, batches, 0.5, fisher=fisher, order=order, recomputations=2)
        assert result.num_removed == round(0.5 * result.num_weights)
        dampings[fisher] = result.damping
    assert dampings["sampled"] == pytest.approx(dampings["gauss-newton"], rel=0.5)


def test_frozen_weights_that_are_named_are_pruned_and_stay_frozen():
    model, batches = problem("linear")
    model.requires_grad_(False)
    assert mfac.prune(model, LOSS, batches, 0.5, targets=["0.weight"], recomputations=2).sparsity == 0.5
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="nothing to prune"):
        mfac.prune(model, LOSS, batches, 0.5)


REPARAMETRIZED = {
    "parametrizations": (nn.utils.parametrizations.weight_norm, "parametrize.remove_parametrizations"),
    "prune": (lambda layer: torch_prune.l1_unstructured(layer, "weight", 3), "prune.remove, and pass its masks"),
    "weight norm": (nn.utils.weight_norm, "remove_weight_norm"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("kind", REPARAMETRIZED)
def test_weights_that_are_computed_from_other_parameters_are_refused(kind):
    change, remedy = REPARAMETRIZED[kind]
    model, batches = problem("linear")
    change(model[0])
    with pytest.raises(ValueError, match=f"0.weight is computed from it; make .* again by torch.nn.utils.{remedy}"):
        mfac.prune(model, LOSS, batches, 0.5)


class Around(nn.Sequential):
    """Calls its layers in a way of its own."""

    def __init__(self, layers, way):
        super().__init__(layers)
        self.way = way

    def forward(self, x):
        return self.way(self[0], x)


def by_token(layers, x):
    return layers[1](torch.tanh(layers[0](x.flatten(0, 1))).unflatten(0, x.shape[:2]).mean(1))


# On samples without a dimension for them, on some of the samples at a time, on two for each and then on one, and on
# tokens that are samples.
WAYS = [
    ("linear", lambda layers, x: torch.cat([layers(some) for some in x.split(4)]), nn.Module.__call__),
    ("linear", lambda layers, x: torch.stack([layers(one) for one in x]), nn.Module.__call__),
    ("convolution", lambda layers, x: torch.stack([layers(one) for one in x]), nn.Module.__call__),
    ("linear", lambda layers, x: torch.sub(*layers(torch.cat((x, -x))).chunk(2)) + layers(x),
     lambda layers, x: layers(x) - layers(-x) + layers(x)),
    ("tokens", by_token, nn.Module.__call__),
]  # fmt: skip


@pytest.mark.parametrize(("name", "odd", "plain"), WAYS)
def test_layers_that_see_other_batches_than_the_model_are_measured_alike(name, odd, plain):
    layers, batches = problem(name, 22)
    found = []
    for way in (odd, plain):
        model = Around(copy.deepcopy(layers), way)
        options = {"fisher": "empirical", "update": "joint", "recomputations": 2, "refit": False}
        mfac.prune(model, LOSS, batches, 0.5, **options)
        found.append(list(model.parameters()))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("options", [{}, {"fisher": "empirical"}, {"update": "obs"}, {"prior": "kron"}])
def test_weights_without_a_gradient_are_removed_first(options):
    model, batches = problem("linear")
    model.register_module("spare", nn.Linear(4, 4))
    forward = model.__class__.forward
    model.forward = lambda x: forward(nn.Sequential(*list(model)[:3]), x)
    result = mfac.prune(model, LOSS, batches, 16 / 97, recomputations=2, refit=False, **options)
    assert result.masks["spare.weight"].sum() == 1  # the floor
    assert result.num_removed == 16
    assert result.predicted_increase < 0.1


def test_batches_whose_labels_are_all_ignored_add_nothing():
    found = []
    for ignored in (False, True):
        model, batches = problem("linear", 48)
        if ignored:
            batches.append((batches[0][0], torch.full((8,), -100)))
        options = {"update": "joint", "recomputations": 1, "damping": 1e-3 * 6 / len(batches)}
        found.append(mfac.prune(model, LOSS, batches, 0.5, **options).masks)
    assert same(*found)


@pytest.mark.parametrize("how", ["auto", True, False, "by other batches"])
def test_batch_norm_is_recalibrated_once_at_the_end(how):
    model = images(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8)).eval()
    batches, others = ([(torch.randn(8, 2, 6, 6), torch.randint(3, (8,))) for _ in range(3)] for _ in range(2))
    options = {"recalibrate": False, "bn_batches": others} if how == "by other batches" else {"recalibrate": how}
    before = model[1].running_mean.clone()
    mfac.prune(model, LOSS, iter(batches * 2), 0.5, recomputations=2, num_grads=3, **options)  # ends with the last step
    seen = torch.cat([x for x, _ in (others if how == "by other batches" else batches)])
    assert torch.allclose(model[1].running_mean, model[0](seen).mean((0, 2, 3)), atol=1e-5) == bool(how)
    assert torch.equal(model[1].running_mean, before) == (not how)
    assert model[1].momentum == 0.1
    assert not model.training


@pytest.mark.parametrize("refit", [False, True])
def test_a_single_sample_without_a_variance_is_left_out_and_unused_statistics_stay(refit):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    model[1].spare = nn.BatchNorm1d(5)
    model[1].spare(torch.randn(9, 5))
    spare = state_of(model[1].spare)
    batches = [(torch.randn(count, 6).double(), torch.randint(3, (count,))) for count in (1, 8, 8, 1, 8)]
    mfac.prune(model, LOSS, batches, 0.5, recomputations=1, num_grads=5, refit=refit)
    means = [model[0](x).mean(0) for x, _ in batches if len(x) > 1]
    torch.testing.assert_close(model[1].running_mean, sum(means) / 3)
    model[0].spare, head = model[1].spare, model[0]  # in a model that uses no other
    mfac.prune(head, LOSS, batches, 0.5, recomputations=1, num_grads=5, refit=refit)
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(model[1].spare, name), spare[name])
    with pytest.raises(ValueError, match="no batch for batch norm has more than one sample"):
        mfac.prune(model, LOSS, batches[:1], 0.6, recomputations=2, refit=refit, on_step=pytest.fail)
    with pytest.raises(ValueError, match="no batch has more than one sample, which batch norm needs"):
        mfac.refit(model, copy.deepcopy(model), LOSS, batches[:1], {})
