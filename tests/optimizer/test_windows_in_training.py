"""Storages of the window in the optimizer: exact steps for the rows as stored, and states between storages."""

import copy

import oracle
import pytest
import torch
from optimizers import mfac, network, train
from states import weights

from mfac import Int8, TopK

KINDS = {"float16": torch.float16, "int8": Int8(block=16), "top-k": TopK(0.4, block=8)}
COMPRESSED = ("int8", "top-k")
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
compressed = pytest.mark.parametrize("kind", [KINDS[name] for name in COMPRESSED], ids=COMPRESSED)


def operator_of(optimizer):
    return optimizer._window.operator


@every_kind
@pytest.mark.parametrize("update_every", [1, 2])
def test_the_step_is_exact_for_the_rows_as_stored(kind, update_every):
    """Gradients that enter the window are multiplied as stored, those between updates as they are."""
    model = network()
    optimizer = mfac(model.parameters(), window=kind, lr=1.0, normalize="sum", update_every=update_every)
    train(model, optimizer, range(5))
    before = torch.cat([p.flatten() for p in weights(model)])
    train(model, optimizer, [5])
    moved = before - torch.cat([p.flatten() for p in weights(model)])
    g = torch.cat([p.grad.flatten() for p in model.parameters()])
    rows = operator_of(optimizer).rows[: 5 if update_every == 1 else 3]
    dense, _ = oracle.inverse(oracle.fisher(rows, 0.1, torch.ones(len(rows))))
    assert oracle.error(moved, dense @ oracle.wide(rows[0] if update_every == 1 else g)) < 1e-4


@pytest.mark.parametrize(
    ("there", "here"),
    [("float64", "bfloat16"), ("int8", "float32"), ("top-k", "int8"), ("bfloat16", "top-k"), ("top-k", "top-k")],
)
def test_a_window_stored_otherwise_is_converted(there, here):
    kinds = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, **KINDS}
    model, twin = network(), network()
    optimizer = mfac(model.parameters(), window=kinds[there])
    train(model, optimizer, range(8))
    fresh = mfac(twin.parameters(), window=kinds[here])
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


@compressed
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
