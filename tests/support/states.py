"""States and weights: copied, sent through a file, compared bit for bit."""

import copy
import io
from contextlib import contextmanager

import torch
from torch import Tensor


def same(a, b):
    """Whether two states are equal, bit for bit, whatever they are made of."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def through_a_file(state, weights_only=True):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def weights(model):
    return [tensor.detach().clone() for tensor in model.parameters()]


def state_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@contextmanager
def unchanged(*holders):
    """For a block that must not change the states of models, optimizers or operators."""
    before = [copy.deepcopy(holder.state_dict()) for holder in holders]
    yield
    assert all(same(holder.state_dict(), state) for holder, state in zip(holders, before, strict=True))


def moved(before, model):
    """Which parameters have changed."""
    return [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
