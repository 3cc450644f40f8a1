"""Storages of the window in the optimizer: states between storages, and in another order of columns."""

import copy

import oracle
import pytest
import torch
from optimizers import mfac, network, train

from mfac import Int8, TopK

COMPRESSED = {"int8": Int8(block=16), "top-k": TopK(0.4, block=8)}
KINDS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, **COMPRESSED}


def operator_of(optimizer):
    return optimizer._window.operator


@pytest.mark.parametrize(
    ("there", "here"),
    [("float64", "bfloat16"), ("int8", "float32"), ("top-k", "int8"), ("bfloat16", "top-k"), ("top-k", "top-k")],
)
def test_a_window_stored_otherwise_is_converted(there, here):
    model, twin = network(), network()
    optimizer = mfac(model.parameters(), window=KINDS[there])
    train(model, optimizer, range(8))
    fresh = mfac(twin.parameters(), window=KINDS[here])
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rows, source = operator_of(fresh).rows, operator_of(optimizer).rows
    if here in (there, "float32", "bfloat16"):
        assert torch.equal(rows, source.to(rows.dtype))
    elif here == "int8":
        assert torch.allclose(rows, source.to(rows.dtype), rtol=0, atol=float(source.abs().max()) / 127)
    else:
        kept = rows != 0
        assert torch.equal(rows[kept], source[kept].bfloat16().float())
        assert kept.sum(1).max() <= 36
    torch.testing.assert_close(operator_of(fresh).gram, rows.double() @ rows.double().T, rtol=1e-5, atol=1e-8)
    train(twin, fresh, range(8, 10))


@pytest.mark.parametrize("kind", COMPRESSED.values(), ids=COMPRESSED)
def test_a_state_in_another_order_of_columns_is_put_in_order(kind):
    """Parameters that get their first gradient late are at the end of the window; built with them, they are not."""
    model, twin = network(), network()
    model[0].weight.requires_grad_(False)
    optimizer = mfac(model.parameters(), window=kind)
    train(model, optimizer, range(4))
    model[0].weight.requires_grad_(True)
    train(model, optimizer, range(4, 9))
    fresh = mfac(twin.parameters(), window=kind)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    rows, saved = operator_of(fresh).rows, operator_of(optimizer).rows
    expected = torch.cat((saved[:, 31:], saved[:, :31]), dim=1)
    kept = rows != 0  # other blocks: one may have more entries than top-k keeps
    assert torch.allclose(rows[kept], expected[kept], rtol=0, atol=2 * float(saved.abs().max()) / 127)
    assert kept.sum() > 0.8 * (expected != 0).sum()
    dense, _ = oracle.inverse(oracle.fisher(rows, 0.1))
    x = torch.randn(rows.shape[1])
    assert oracle.error(operator_of(fresh) @ x, dense @ oracle.wide(x)) < 1e-4
