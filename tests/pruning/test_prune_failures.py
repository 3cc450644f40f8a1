"""Bad arguments say what to do; whatever fails or is interrupted leaves the last complete step."""

from tempfile import TemporaryDirectory

import pytest
import torch
from models import cnn, failing_loss, mlp
from pruning_cases import PAPER, quick, zeros
from states import same, state_of, unchanged
from torch import nn

from mfac import criterion_loss
from mfac.pruning import Pruner, PruningOptions, prune
from mfac.pruning.weights import MaskedWeights

BAD = [
    ({"sparsity": -0.1}, "number from 0 to 1, not -0.1"),
    ({"sparsity": 90}, r"not 90; did you mean 0\.9\?"),
    ({"sparsity": 1.0}, "the floor keeps 2 of them; request a sparsity of at most 0.964"),
    ({"sparsity": None}, 'sparsity=None requires an "N:M" pattern'),
    ({"sparsity": {"0.weight": 2.0}}, "number from 0 to 1, not 2.0"),
    ({"sparsity": {"0.wieght": 0.5}}, "targets: '0.wieght' matches no parameter of the model; did you mean '0.weight'"),
    ({"sparsity": {"0.weight": 0.5}, "targets": "2.weight"}, "omit targets"),
    ({"targets": [3]}, "takes names, 're:...' patterns and tensors, not int"),
    ({"targets": 3}, "takes names, 're:...' patterns and tensors, not int"),
    ({"ignore": "re:."}, "there is nothing to prune"),
    ({"update": "exact"}, "update must be one of 'auto', 'joint', 'obs', 'none', not 'exact'"),
    ({"scope": "row"}, "scope must be one of 'global', 'layer', not 'row'"),
    ({"order": "random"}, "order must be one of 'scores', 'greedy'"),
    ({"recomputations": 0}, "recomputations must be a positive int, not 0"),
    ({"block_size": 0}, 'block_size must be a positive int, "row"'),
    ({"memory": "4 apples"}, 'memory must be a number of bytes or a text such as "4GB"'),
    ({"fisher": "true"}, "fisher must be one of 'auto', 'empirical'"),
    ({"damping": "automatic"}, 'damping must be a positive number or "auto", not \'automatic\''),
    ({"floor": 1.5}, "floor must be a number of weights or, below 1, a fraction"),
    ({"pattern": "4:2"}, 'pattern must be "N:M" with 0 < N < M'),
    ({"pattern": "2:4", "sparsity": None}, r"0.weight has shape \(7, 5\), and 4 must divide its dimension 1"),
    ({"pattern": "1:7", "sparsity": 0.5, "targets": "2.weight"}, "implies a sparsity of 0.857143; pass sparsity=None"),
    ({"pattern": "channel", "targets": ["0.bias"]}, r"0.bias has shape \(7,\), so no channels"),
    ({"order": "greedy", "method": "magnitude"}, 'order="greedy" requires method="mfac" without a pattern'),
    ({"method": "kfac"}, "not 'kfac'; other methods are baselines under experiments/"),
    ({"damping": "auto", "rows_dir": "."}, 'needs a block_size .* and a number as damping; .* memory="4GB"'),
    ({"bn_batches": []}, "the model has no batch norm"),
    ({"recalibrate": True}, "no batch norm with running statistics; drop recalibrate and bn_"),
    ({"recalibrate": None}, 'recalibrate must be "auto", True, False or batches, not None'),
    ({"damping": None}, "damping must be a positive number, not None"),
    ({"damping": float("inf")}, "damping must be positive and finite, not inf"),
    ({"seed": 1.5}, "seed must be an int or None, not 1.5"),
    ({"masks": {"0.weight": torch.rand(7, 5)}}, "has other values than True or 1"),
    ({"masks": {"0.weight": torch.ones(3)}}, "needs a bool tensor of shape"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(options) for options, _ in BAD])
def test_bad_arguments(options, message):
    case = mlp()
    with unchanged(case.model), pytest.raises(ValueError, match=message):
        quick(case, **({"sparsity": 0.5} | options))


def test_a_sparsity_below_the_present_one():
    case = mlp()
    masks = quick(case, 0.5).masks
    for sparsity, message in (
        (0.3, r"the requested sparsity, 0.3036, is below the present one, 0.5 \(28 of 56 weights"),
        ({"0.weight": 0.0, "2.weight": 0.9}, r"0.weight: the requested sparsity, 0, is below"),
    ):
        with unchanged(case.model), pytest.raises(ValueError, match=message):
            quick(case, sparsity, masks=masks)


def test_batches_that_run_out_for_good():
    case = mlp()
    batches = iter([case.batch] * 9)
    with pytest.raises(ValueError, match=r"gave 9 and then ended.*3 recomputations need 12 batches"):
        prune(case.model, case.loss_fn, batches, 0.5, num_grads=4, recomputations=3)
    assert zeros(case.model) == 56 - round(56 * 0.5 ** (2 / 3))
    nothing = [[part[:0] for part in case.batch]]
    for given, message in (([], "batches is empty"), (nothing, "the model is nan before"), ({}, "one dict, not an")):
        with pytest.raises(ValueError, match=message):
            prune(case.model, case.loss_fn, given, 0.5)
    with pytest.raises(ValueError, match="the loss does not depend on any trainable parameter; loss_fn"):
        prune(case.model, lambda *batch: case.loss_fn(*batch).detach(), [case.batch], 0.5)


@pytest.fixture(scope="module")
def complete():
    """The states before the first step, and after each of the steps."""
    case = mlp()
    found = [state_of(case.model)]
    quick(case, 0.5, on_step=lambda result: found.append(state_of(case.model)), loss_batches=1)
    return found


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a broken batch")], ids=["Ctrl-C", "error"])
@pytest.mark.parametrize("call", [1, 5, 6, 7, 16])
def test_whatever_happens_the_model_holds_the_last_complete_step(complete, call, error):
    """One loss at the start; each step has four gradients and a loss."""
    case = mlp()
    with pytest.raises(type(error)):
        quick(case._replace(loss_fn=failing_loss(call, error)), 0.5, loss_batches=1)
    assert same(state_of(case.model), complete[max(0, call - 2) // 5])
    assert all(parameter.grad is None for parameter in case.model.parameters())


def test_interrupted_in_the_middle_of_writing_the_weights(complete, monkeypatch):
    case = mlp()
    options = PruningOptions(**PAPER, num_grads=4, block_size=8, recomputations=3, loss_batches=1, progress=False)
    pruner = Pruner(case.model, case.loss_fn, [case.batch], 0.5, options)
    pruner.step()
    masks, write = dict(pruner.weights.masks), MaskedWeights.write

    def write_half(self, *arguments):
        whole, self.targets = self.targets, {"0.weight": self.targets["0.weight"]}
        write(self, *arguments)
        self.targets = whole
        assert not same(state_of(case.model), complete[1])
        raise KeyboardInterrupt

    monkeypatch.setattr(MaskedWeights, "write", write_half)
    with pytest.raises(KeyboardInterrupt):
        pruner.step()
    assert same(state_of(case.model), complete[1])
    assert same(pruner.weights.masks, masks)
    assert same(pruner.result.masks, masks)


def test_a_step_counts_even_if_its_folder_cannot_be_removed(tmp_path, monkeypatch):
    case, cleanup = mlp(), TemporaryDirectory.cleanup
    options = PruningOptions(**PAPER, num_grads=4, block_size=8, rows_dir=tmp_path)
    pruner = Pruner(case.model, case.loss_fn, [case.batch], 0.5, options)
    monkeypatch.setattr(TemporaryDirectory, "cleanup", lambda folder: cleanup(folder) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pruner.step()
    assert pruner.steps_done == 1
    assert same(pruner.result.masks, pruner.weights.masks)


def test_a_step_that_breaks_the_model_is_undone():
    case = mlp()

    def loss_fn(model, batch):
        loss = case.loss_fn(model, batch)
        return loss if torch.is_grad_enabled() or (model[0].weight != 0).all() else loss * torch.nan

    message = "the loss became nan in this step, which is undone"
    with unchanged(case.model), pytest.raises(RuntimeError, match=message):
        prune(case.model, loss_fn, [case.batch], 0.9, num_grads=4, recomputations=2)


def test_batch_norm_that_fails_is_put_back():
    case = cnn()
    flags = [module.training for module in case.model.modules()]
    with unchanged(case.model), pytest.raises(RuntimeError):
        quick(case, 0.5, bn_batches=[torch.randn(2, 3, 8, 8), torch.randn(2, 4, 8, 8)])
    assert [module.training for module in case.model.modules()] == flags
    assert case.model[1].momentum == 0.1
    with unchanged(case.model), pytest.raises(ValueError, match="no batch for batch norm has more than one sample"):
        quick(case, 0.5, bn_batches=[])


@pytest.mark.parametrize("fisher", ["empirical", "gauss-newton"])
def test_losses_that_are_no_scalar(fisher):
    case, options = mlp(), {"output_fn": lambda model, batch: model(batch[0])} if fisher == "gauss-newton" else {}
    for loss_fn, message in (
        (lambda model, batch: model(batch[0]).logsumexp(1), r"must return a scalar tensor, .* shape \(6,\); reduce it"),
        (lambda model, batch: (case.loss_fn(model, batch), 0), "must return a scalar tensor, it returned tuple"),
        (lambda model, batch: case.loss_fn(model, batch).item(), "must return a scalar tensor, it returned float"),
    ):
        with unchanged(case.model), pytest.raises(ValueError, match=message):
            prune(case.model, loss_fn, [case.batch], 0.5, fisher=fisher, **options)


class LastOutputs(nn.Sequential):
    """Of sequences that lie along the first dimension of the inputs."""

    def forward(self, x):
        return self[1](self[0](x)[0][-1])


def test_samples_that_cannot_be_told_apart():
    model, loss = LastOutputs(nn.GRU(5, 4), nn.Linear(4, 3)), criterion_loss(nn.CrossEntropyLoss())
    batches = [(torch.randn(7, 6, 5), torch.randint(3, (6,)))]
    with pytest.raises(ValueError, match=r"share their first dimension, .* \[6, 7\]; .* an int as block_size"):
        prune(model, loss, batches, 0.5)
    assert prune(model, loss, batches, 0.5, block_size=16, num_grads=4).sparsity == 0.5


def test_losses_and_models_that_cannot_be_pruned(monkeypatch):
    case = mlp()
    with pytest.raises(ValueError, match=r"pass mfac.criterion_loss\(CrossEntropyLoss\(\)\)"):
        prune(case.model, nn.CrossEntropyLoss(), [case.batch], 0.5)
    with pytest.raises(ValueError, match=r"nothing to prune.*or frozen ones, which .* has 0.weight, 0.bias"):
        prune(nn.Sequential(nn.LayerNorm(3)), lambda m, b: m(b).sum(), [torch.ones(2, 3)], 0.5)
    for name, message in (("0.bias", "the loss of the model is nan before"), ("0.weight", "0.weight has weights that")):
        case.model.get_parameter(name).data[0] = torch.nan
        with pytest.raises(ValueError, match=message):
            quick(case, 0.5)
    assert torch.isnan(case.model[0].weight).sum() == 5
    case.model[2].to("meta")
    with pytest.raises(ValueError, match="the targets are on cpu, meta; prune needs them on one device"):
        quick(case, 0.5)
    monkeypatch.setattr("mfac.gradients.collect.available_memory", lambda device: 100)
    with pytest.raises(MemoryError, match="to keep them on disk, pass rows_dir"):
        quick(mlp(), 0.5)
