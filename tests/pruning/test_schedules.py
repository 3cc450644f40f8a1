"""Schedules: the formulas literally, exact ends, the paper's two, and lists that make no sense."""

import itertools
import math

import pytest
import torch

from mfac.pruning import mobilenet_schedule, polynomial_schedule, resnet50_schedule
from mfac.pruning.schedules import checked_schedule, geometric_schedule, learning_rate_cycle


def test_polynomial_is_the_formula_of_zhu_and_gupta():
    found = polynomial_schedule(0.05, 0.89, 6)
    assert found == pytest.approx([0.89 + (0.05 - 0.89) * (1 - t / 6) ** 3 for t in range(1, 7)])
    assert len(found) == 6
    assert found[-1] == 0.89


@pytest.mark.parametrize(("initial", "final", "steps"), [(0.0, 0.9, 1), (0.5, 0.98, 15), (0.3, 0.31, 7)])
def test_geometric_keeps_equal_fractions_of_what_remains(initial, final, steps):
    found = geometric_schedule(initial, final, steps)
    densities = [1 - initial, *(1 - sparsity for sparsity in found)]
    fractions = [after / before for before, after in itertools.pairwise(densities)]
    assert fractions == pytest.approx([((1 - final) / (1 - initial)) ** (1 / steps)] * steps)
    assert found[-1] == final


def test_mobilenet_halves_and_takes_15_equal_fractions_and_resnet50_replaces_the_last_5_by_10():
    assert mobilenet_schedule(0.9) == [0.5, *geometric_schedule(0.5, 0.9, 15)]
    found = resnet50_schedule(0.98)
    assert len(found) == 1 + 10 + 10
    kept = [1 - sparsity for sparsity in found]
    first = (0.02 / 0.5) ** (1 / 15)
    assert [kept[i + 1] / kept[i] for i in range(10)] == pytest.approx([first] * 10)
    assert [kept[i + 1] / kept[i] for i in range(10, 20)] == pytest.approx([math.sqrt(first)] * 10)
    assert found[-1] == 0.98


def test_a_list_is_a_schedule():
    assert checked_schedule([0.5, 0.75, 1]) == (0.5, 0.75, 1.0)
    assert checked_schedule(s / 10 for s in (1, 2)) == (0.1, 0.2)


def rates(epochs, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.005)
    scheduler = learning_rate_cycle(optimizer, **options)
    found = []
    for _ in range(epochs):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_the_paper_s_rates_for_mobilenet():
    found = rates(100, period=3, cycles=15, drops=(75, 90))
    assert found == pytest.approx([0.005, 0.005, 0.0005] * 15 + [0.005] * 30 + [0.0005] * 15 + [0.00005] * 10)


def test_the_cycle_s_state_is_saved():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = learning_rate_cycle(optimizer, 3, 2)
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    other = learning_rate_cycle(optimizer, 5, 7)
    other.load_state_dict(scheduler.state_dict())
    assert other.last_epoch == 2
    assert [other.lr_lambdas[0](epoch) for epoch in range(7)] == [1, 1, 0.1, 1, 1, 0.1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: polynomial_schedule(0.5, 0.5, 3), "0 <= initial < final <= 1; these are"),
        (lambda: geometric_schedule(0.0, math.nan, 3), "0 <= initial < final <= 1; these are"),
        (lambda: geometric_schedule(0, 0.5, 0), "steps must be a positive int"),
        (lambda: geometric_schedule(0, 1, 3), "never reach a sparsity of 1"),
        (lambda: polynomial_schedule(0, 0.5, 3, 0), "power must be a positive number"),
        (lambda: checked_schedule([]), "schedule is empty"),
        (lambda: checked_schedule(0.9), r"must be a list of sparsities, not 0.9; \[0.9\] is one step"),
        (lambda: checked_schedule([0.5, 90]), r"schedule\[1\] is 90; each entry is a sparsity"),
        (lambda: checked_schedule([0.5, math.nan]), r"schedule\[1\] is nan"),
        (lambda: checked_schedule([0.5, 0.5]), r"schedule\[1\] is 0.5, not above the 0.5 before it"),
        (lambda: checked_schedule([0.8, 0.5]), "sparsities must rise"),
        (lambda: rates(1, period=0, cycles=1), "period must be at least 1"),
        (lambda: rates(1, period=3, cycles=1, low=4), "low must be between 0 and the period of 3, not 4"),
        (lambda: rates(1, period=3, cycles=1, factor=0), "factor must be above 0"),
        (lambda: rates(1, period=3, cycles=2, drops=(5,)), "after the cycles, which end at epoch 6"),
        (lambda: rates(1, period=3, cycles=2, drops=(9, 8)), "drops must be rising epochs after the cycles"),
    ],
)
def test_arguments_that_make_no_schedule(make, message):
    with pytest.raises(ValueError, match=message):
        make()
