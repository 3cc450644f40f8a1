"""States of something else: refused in words, and nothing changes."""

import copy

import pytest
import torch
from optimizers import (
    mask_of,
    masked,
    mfac,
    network,
    same,
    train,
    trained_by_name,
    weights,
)
from torch import nn

# States of something else.


def groups_of(*sizes):
    params = [nn.Parameter(torch.ones(3)) for _ in range(sum(sizes))]
    return [{"params": [params.pop() for _ in range(size)]} for size in sizes]


OTHERS = {
    "m": (lambda model: mfac(model.parameters(), num_grads=7), "saved with num_grads=7, this window has num_grads=5"),
    "normalize": (
        lambda model: mfac(model.parameters(), normalize="seen"),
        "saved with normalize='seen', this window has normalize='full'",
    ),
    "d": (
        lambda model: mfac(nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).parameters()),
        r"gradients of shape \[9, 5\] for parameter 0, which is \[7, 5\] here; was it saved with another model",
    ),
    "order": (
        lambda model: mfac(list(model.parameters())[::-1]),
        r"gradients of shape \[3\] for parameter 0, which is \[7, 5\] here; .*parameters in another order",
    ),
    "transposed": (
        lambda model: mfac([nn.Parameter(torch.zeros(tensor.shape[::-1])) for tensor in model.parameters()]),
        r"gradients of shape \[5, 7\] for parameter 0, which is \[7, 5\] here",
    ),
    "mask": (
        lambda model: masked(model.parameters(), masks={model[0].weight: mask_of(model[0].weight) | True}),
        "saved with another mask of parameter 0; build the optimizer with the same masks",
    ),
    "groups": (lambda model: mfac(groups_of(1, 1)), r"groups of \[1, 1\] parameters, .* has groups of \[4\]; build it"),
    "fewer": (lambda model: mfac(groups_of(3)), r"groups of \[3\] parameters, and this optimizer has groups of \[4\]"),
    "SGD": (lambda model: torch.optim.SGD(model.parameters(), momentum=0.9), "this state has no window"),
    "Adam": (
        lambda model: torch.optim.Adam(model.parameters()),
        "this state has no window.*another optimizer saved it",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("steps", [0, 6])
def test_the_state_of_something_else_is_refused_and_nothing_changes(other, steps):
    build, words = OTHERS[other]
    theirs = network()
    stranger = build(theirs)
    for tensor in stranger.param_groups[0]["params"]:
        tensor.grad = torch.ones_like(tensor)
    stranger.step()
    model = network()
    optimizer = mfac(model.parameters(), momentum=0.9)
    train(model, optimizer, range(steps))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(copy.deepcopy(stranger.state_dict()))
    assert same(optimizer.state_dict(), before)
    train(model, optimizer, range(steps, 9))
    assert same(weights(model), weights(trained_by_name(mfac, 9, momentum=0.9)[0]))


def test_names_in_another_order_are_refused():
    square = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    state = mfac([("a", square[0]), ("b", square[1])]).state_dict()
    with pytest.raises(
        ValueError, match="saved with 'a' where this optimizer has 'b'; pass the parameters in the order"
    ):
        mfac([("b", square[1]), ("a", square[0])]).load_state_dict(state)
    mfac(square).load_state_dict(state)  # without names there is nothing to compare


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        (True, False, "saved with another mask of 0.weight; build the optimizer with the same masks"),
        (False, True, "saved with no mask of 0.weight; build the optimizer with the same masks"),
        (True, None, "saved with another mask of 0.weight; build the optimizer with the same masks"),
    ],
)
def test_masks_that_differ_are_refused(there, here, words):
    def build(kind):
        model = network()
        mask = mask_of(model[0].weight)
        masks = {True: {"0.weight": mask}, False: None, None: {"0.weight": mask.flip(1)}}[kind]
        if masks:
            model[0].weight.data.mul_(masks["0.weight"])
        return model, mfac(model.named_parameters(), masks=masks)

    state = build(there)[1].state_dict()
    optimizer = build(here)[1]
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(state)
    assert same(optimizer.state_dict(), before)


@pytest.mark.parametrize("state", [{}, {"state": {}, "param_groups": []}, {"state": {0: {"rows": torch.ones(2, 2)}}}])
def test_what_is_no_state_at_all_is_refused(state):
    with pytest.raises(ValueError, match="this state has no window of gradients"):
        trained_by_name(mfac, 1)[1].load_state_dict(state)
