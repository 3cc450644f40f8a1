"""mfac.prune from outside: counts, masks, scopes, histories, errors, and models that are left as they should be."""

import itertools

import pytest
import torch
from models import CASES, cnn, mlp, tied
from pruning_cases import dense_scores, dense_update, quadratic, quick, solve, zeros
from states import same, state_of, weights
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from mfac.pruning import apply_masks, prune
from mfac.pruning.selection import Pool, step_pools

MLP_WEIGHTS = 5 * 7 + 7 * 3
COUNTED = sorted(set(CASES) - {"unused_parameter", "normalised"})


@pytest.mark.parametrize("block_size", [None, 7])
@pytest.mark.parametrize("update", ["joint", "obs", "none"])
def test_on_a_quadratic_it_is_the_dense_answer_and_the_prediction_is_true(update, block_size):
    problem = quadratic(8, block_size)
    result = solve(problem, 0.5, block_size, update=update)
    scores = dense_scores(problem.F, problem.theta)
    removed = torch.zeros(32, dtype=torch.bool)
    removed[scores.topk(16, largest=False).indices] = True
    assert torch.equal(torch.cat([mask.flatten() for mask in result.masks.values()]), ~removed)
    delta = dense_update(problem.F, problem.theta, removed, update)
    assert torch.allclose(problem.model.vector(), problem.theta + delta, atol=1e-9)
    (record,) = result.history
    assert record.loss_before == pytest.approx(3.0)
    assert record.true_increase == pytest.approx(record.predicted_increase, rel=1e-8)
    assert result.predicted_increase == pytest.approx(0.5 * float(delta @ problem.F @ delta), rel=1e-8)


@pytest.mark.filterwarnings("ignore:per-sample gradients are taken one by one")
@pytest.mark.parametrize(("name", "block_size"), [*((name, "row") for name in COUNTED), ("tied", 8), ("cnn", 8)])
def test_the_count_of_zeros_is_exact_for_every_kind_of_model(name, block_size):
    case = CASES[name]()
    case.model.train()
    before = state_of(case.model)
    result = quick(case, 0.37, num_grads=3, recomputations=2, block_size=block_size, damping="auto")
    parameters = dict(case.model.named_parameters())
    assert result.num_removed == round(0.37 * result.num_weights)
    assert result.sparsity == result.num_removed / result.num_weights
    assert all(module.training for module in case.model.modules())
    assert all(parameter.grad is None for parameter in case.model.parameters())
    for key, value in case.model.state_dict().items():
        assert key in result.masks or torch.equal(value, before[key])
    assert all(torch.equal(parameters[key] != 0, result.masks[key]) for key in result.targets)


@pytest.mark.parametrize("sparsity", [0.0, 0.013, 0.96])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_counts_are_exact_at_every_sparsity(sparsity, scope):
    result = quick(mlp(), sparsity, scope=scope)
    assert result.num_removed == round(sparsity * MLP_WEIGHTS)
    assert min(int(mask.sum()) for mask in result.masks.values()) >= 1
    if scope == "layer":
        for name, fraction in result.layer_sparsity.items():
            assert abs(fraction - sparsity) * result.masks[name].numel() <= 1


def test_each_step_keeps_the_same_fraction_of_what_is_left():
    steps = step_pools([Pool(("w",), 100_000)], [1_000_000], 16)
    kept = [1_000_000] + [pools[0].keep for pools in steps]
    assert kept[-1] == 100_000
    for now, then in itertools.pairwise(kept):
        assert then / now == pytest.approx(0.1 ** (1 / 16), rel=1e-5)
    assert [pools[0].keep for pools in step_pools([Pool(("w",), 0)], [4], 4)] == [3, 2, 1, 0]


def test_history_has_a_record_for_each_recomputation():
    seen = []
    result = quick(mlp(), 0.6, recomputations=4, on_step=lambda so_far: seen.append(so_far.sparsity))
    assert seen == pytest.approx([record.sparsity for record in result.history])
    assert [record.step for record in result.history] == [1, 2, 3, 4]
    assert sum(record.removed for record in result.history) == result.num_removed
    assert result.history[-1].sparsity == pytest.approx(result.sparsity)
    for one, next_one in itertools.pairwise(result.history):
        assert one.loss_after == next_one.loss_before
        assert one.predicted_increase > 0
        assert 0 < one.gradient_seconds < one.seconds
    assert result.damping == 1e-5
    assert "34 of 56 weights removed (60.71%) in 4 steps" in repr(result)


def test_targets_are_matrices_and_kernels_but_no_embeddings_or_those_of_names_patterns_and_parameters():
    result = quick(CASES["transformer"](), 0.1)
    assert "embed.weight" not in result.masks
    assert "encoder.layers.0.self_attn.in_proj_weight" in result.masks
    assert not any(name.endswith("bias") or "norm" in name for name in result.masks)
    assert quick(tied(), 0.1).targets == ("mix.weight",)  # the head is the embedding
    assert quick(mlp(), 0.5, targets="re:weight$", ignore=["2.weight"]).targets == ("0.weight",)
    assert quick(mlp(), 0.5, targets=["0.weight", "0.bias"]).num_removed == 21
    assert quick(tied(), 0.5, targets=["head.weight"]).targets == ("embed.weight",)
    case = mlp()
    case.model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0, 5)))  # without entries
    assert quick(case, 0.2).targets == ("0.weight", "2.weight")
    assert quick(case, 0.3, targets=case.model[2].weight).targets == ("2.weight",)
    result = quick(mlp(), {"0.weight": 0.2, "re:^2": 0.8}, ignore="2.bias")
    assert result.layer_sparsity == {"0.weight": pytest.approx(7 / 35), "2.weight": pytest.approx(17 / 21)}


def test_masks_are_taken_over_count_and_stay_zero():
    case = mlp()
    first = quick(case, 0.3)
    again = quick(case, 0.6, masks=first.masks)
    assert again.num_removed == round(0.6 * MLP_WEIGHTS)
    for name, mask in first.masks.items():
        assert not (again.masks[name] & ~mask).any()
        assert not dict(case.model.named_parameters())[name][~mask].any()
    same = quick(case, 0.6, masks={dict(case.model.named_parameters())[n]: m for n, m in again.masks.items()})
    assert same.history == []
    other = torch.tensor([True, False, True])
    for given in (lambda model: "2.bias", lambda model: model[2].bias):
        case = mlp()
        result = quick(case, 0.3, masks={given(case.model): other})
        assert result.masks["2.bias"] is other
        assert "2.bias" not in result.targets
        assert case.model[2].bias[1] == 0
    mask = torch.arange(54).view(9, 6) % 3 > 0  # by the second name of a tied weight
    result = quick(tied(), 0.6, targets="head.weight", masks={"head.weight": mask})
    assert result.masks.keys() == {"embed.weight"}
    assert not (result.masks["embed.weight"] & ~mask).any()


def test_weights_that_masks_remove_are_zero_from_the_start():
    masks = {"0.weight": torch.arange(35).view(7, 5) % 2 == 0, "2.weight": torch.ones(3, 7)}
    zeroed, given = mlp(), mlp()
    apply_masks(zeroed.model, masks)
    results = [quick(case, 0.6, masks=masks) for case in (zeroed, given)]
    assert results[0].history[0].loss_before == results[1].history[0].loss_before
    assert same(state_of(zeroed.model), state_of(given.model))
    case = mlp()
    assert quick(case, 17 / 56, masks=masks).history == []
    assert not case.model[0].weight[~masks["0.weight"]].any()


def test_a_loader_over_an_iterable_has_no_length():
    class Samples(IterableDataset):
        def __iter__(self):
            return iter(case.batch[0].unbind())

    case = mlp()
    loader = DataLoader(Samples(), batch_size=2)
    result = prune(case.model, lambda model, x: model(x).square().mean(), loader, 0.5, recomputations=2)
    assert result.num_removed == MLP_WEIGHTS // 2


def test_zeros_without_a_mask_are_only_weights_that_cost_nothing():
    case = mlp()
    with torch.no_grad():
        case.model[0].weight[:2] = 0
    result = quick(case, 0.1, recomputations=1)
    assert result.num_removed == 6
    assert not result.masks["0.weight"][:2].all(1).any()


@pytest.mark.parametrize(("sparsity", "floor", "kept"), [(0.6, 5, 5), (0.4, 0.5, 11)])
def test_the_floor_keeps_a_layer_alive(sparsity, floor, kept):
    case = mlp()
    with torch.no_grad():
        case.model[2].weight.mul_(1e-6)
    assert int(quick(case, sparsity, floor=floor).masks["2.weight"].sum()) == kept


def test_channels_last_and_half_precision_weights():
    case = cnn()
    case.model.to(memory_format=torch.channels_last)
    result = quick(case, 0.5)
    assert zeros(case.model) == result.num_removed
    half = mlp()
    half.model.to(torch.bfloat16)
    result = quick(half, 0.5, [(half.batch[0].to(torch.bfloat16), half.batch[1])], damping=1e-2)
    assert result.num_removed == zeros(half.model) == 28


@pytest.mark.parametrize(("kept", "block_size"), [("on disk", None), ("on disk", 5), ("summed", 5)])
def test_gradients_on_disk_or_summed_give_the_same_and_leave_nothing_behind(tmp_path, monkeypatch, kept, block_size):
    usual, other = mlp(), mlp()
    batches = [(torch.randn(4, 5), torch.randint(3, (4,))) for _ in range(9)]
    options = {"num_grads": 9, "recomputations": 2, "block_size": block_size}
    expected = quick(usual, 0.5, batches, **options)
    if kept == "summed":
        monkeypatch.setattr("mfac.pruning.step.ROWS_PER_BLOCK_SIZE", 1)
    found = quick(other, 0.5, batches, rows_dir=tmp_path if kept == "on disk" else None, **options)
    assert list(tmp_path.iterdir()) == []
    assert same(found.masks, expected.masks)
    near = {"rtol": 1e-5, "atol": 1e-6 if kept == "on disk" else 1e-5}
    torch.testing.assert_close(weights(usual.model), weights(other.model), **near)


def test_each_recomputation_sees_other_batches_and_the_global_random_state_is_untouched():
    seen = []
    case = mlp()
    data = TensorDataset(torch.arange(40.0)[:, None].expand(40, 5), torch.zeros(40, dtype=torch.long))

    def loss_fn(model, batch):
        if torch.is_grad_enabled():
            seen.append(tuple(batch[0][:, 0].int().tolist()))
        return case.loss_fn(model, (batch[0] / 40, batch[1]))

    state = torch.get_rng_state()
    loader = DataLoader(data, batch_size=4, shuffle=True)
    prune(case.model, loss_fn, loader, 0.5, num_grads=5, block_size=8, recomputations=4, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(seen)) == 20  # two passes in two different orders
    assert sorted(sum(seen[:10], ())) == list(range(40))
