"""The sliding window: its order, its drift, its state, and what it refuses."""

import re
import threading

import oracle
import pytest
import torch
from cases import fill, mixed
from states import unchanged

import mfac
from mfac import sliding
from mfac.sliding import SlidingInverse


def window(m=8, d=30, damping=1e-2, **options):
    return mfac.DynamicInverseFisher(m, d, damping, **options)


def test_empty_is_x_over_damping():
    op, x = window(), torch.randn(30)
    assert torch.allclose(op @ x, x / 1e-2)
    assert torch.allclose(op.diagonal(), torch.full((30,), 100.0))
    assert float(op.logdet()) == pytest.approx(-30 * torch.tensor(1e-2).log().item())
    assert float(op[1, 1]) == pytest.approx(100)
    assert float(op[1, 2]) == 0
    assert torch.allclose(op.quadratic_form(x), x @ x * 100)
    assert (op.num_seen, op.num_grads) == (0, 8)


def test_the_oldest_row_leaves_first_also_after_another_was_replaced():
    rows, x = mixed(13, 30), torch.randn(30)
    op = fill(window(), rows[:12])
    op.replace(4, rows[12])  # the oldest
    op.update(rows[12])
    assert op.num_seen == 8
    assert torch.allclose(op @ x, mfac.StaticInverseFisher(rows[5:], 1e-2) @ x, rtol=1e-4, atol=1e-4)


def test_as_good_as_a_fresh_cholesky_after_many_updates():
    """Rows of changing scale and direction; the m x m part alone, where all the drift is."""
    m, shift = 8, 1e-3
    G = torch.randn(m, 20, dtype=torch.float64)
    inverse = SlidingInverse(m, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    refreshes = 0
    for t in range(4_000):
        k = t % m
        if t % 800 < m:  # now and then a lap of rows that are far larger or smaller, or nearly repeat one another
            G[k] = G[(k + 1) % m] * 10.0 ** ((t // 800) % 5 - 2)
        G[k] += 0.3 * torch.randn(20, dtype=torch.float64, generator=generator)
        G[k] *= 1 / max(1.0, float(G[k].norm()) / 100)
        inverse.replace(k, G[: max(inverse.size, k + 1)] @ G[k], shift)
        if inverse.inverse is None:
            refreshes += 1
            inverse.settle()
        if (t % 1_333 == 0 and t >= m) or t == 3_999:
            S = shift * torch.eye(m, dtype=torch.float64) + G @ G.T
            exact, _ = oracle.inverse(oracle.wide(S))
            fresh = torch.cholesky_inverse(torch.linalg.cholesky(S))[:, k]
            limit = max(10 * oracle.error(fresh, exact[:, k]), 1e-11)
            assert oracle.error(inverse.column(k), exact[:, k]) < limit
            b = torch.randn(m, dtype=torch.float64, generator=generator)
            assert oracle.error(inverse.solve(b), exact @ oracle.wide(b)) < max(limit, 1e-9)
    assert refreshes < 0.05 * 4_000  # so the updates were updates


def test_drift_is_noticed_and_repaired():
    rows = mixed(20, 30, dtype=torch.float64)
    op = fill(window(dtype=torch.float64), rows[:8])
    op.update_and_apply(rows[8])
    op._inverse.inverse += 1e-3 * torch.randn(8, 8, dtype=torch.float64)  # as if rounding had piled up
    op.update(rows[9])
    assert op._inverse.inverse is None
    step = op.update_and_apply(rows[10])
    assert torch.allclose(step, mfac.StaticInverseFisher(rows[3:11], 1e-2) @ rows[10], rtol=1e-9)


DAMAGE = [
    (None, {"num_seen": 99}, "the saved num_seen must be an int from 0 to 8, not 99"),
    (None, {"num_seen": True}, "the saved num_seen must be an int"),
    (None, {"updates": 3}, "the saved updates must be an int of 8 or more, not 3"),
    (None, {"age": -1}, "the saved age must be an int of 0 or more"),
    (None, {"gram": torch.full((8, 8), float("nan"))}, r"the saved gram must be a tensor \[8, 8\] of finite numbers"),
    (None, {"gram": -torch.eye(8)}, "do not match|not positive definite"),
    (None, {"inverse": None}, "the saved inverse must be a tensor"),
    (None, {"rough": torch.zeros(3)}, r"the saved rough must be a tensor \[8\]"),
    (None, {"damping": 0.0}, "damping must be positive"),
    (None, {"rows": torch.zeros(8, 5)}, r"a saved row has \[5\] numbers for 30 weights"),
    (None, {"rows": None}, "the state of the window is damaged"),
    (None, {"num_grads": 9}, "saved with num_grads=9, this window has num_grads=8"),
    (None, {"dim": 31}, "saved with dim=31"),
    (None, {"normalize": "full"}, "saved with normalize='full'"),
    (torch.int8, {"kind": "int3"}, "stored as 'int3', and int8, topk can be read"),
    (torch.int8, {"codes": torch.zeros(240, dtype=torch.int8)}, r"damaged, .*\(codes are torch.int8 \[240\]\)"),
    (torch.int8, {"codes": None}, "the state of the window is damaged"),
    (torch.int8, {"scales": torch.zeros(2, 2)}, "the saved scales must be a tensor"),
    (mfac.TopK(0.2), {"indices": torch.full((8, 6), 40, dtype=torch.int16)}, "outside of 30 columns"),
    (mfac.TopK(0.2), {"values": torch.zeros(8, 7)}, r"the saved values must be a tensor \[8, 6\]"),
]


@pytest.mark.parametrize(("kind", "damage", "message"), DAMAGE)
def test_a_damaged_state_is_refused_and_changes_nothing(kind, damage, message):
    state = fill(window(window=kind), mixed(8, 30, seed=1)).state_dict()
    state = {**state, "rows": {**state["rows"], **damage}} if kind else {**state, **damage}
    op = fill(window(window=kind), mixed(9, 30))
    with unchanged(op), pytest.raises(ValueError, match=message):
        op.load_state_dict(state)
    with pytest.raises(ValueError, match="is damaged, or of another kind: 'dim' is missing"):
        op.load_state_dict({name: value for name, value in op.state_dict().items() if name != "dim"})


@pytest.mark.parametrize(
    ("g", "message"),
    [
        (torch.ones(29), r"must be \[30\], not \[29\]"),
        (torch.ones(30, dtype=torch.int64), "floating-point tensor, not torch.int64"),
        (torch.ones(30, device="meta"), "a gradient must be a dense floating-point tensor, not one on the meta device"),
    ],
)
def test_gradients_of_the_wrong_kind_and_rows_that_are_not_there_are_refused(g, message):
    op = fill(window(), mixed(3, 30))
    with pytest.raises(ValueError, match=message):
        op.update(g)
    for k in (-1, 3, 8):
        with pytest.raises(IndexError, match=f"no row {k} to be replaced: the window holds 3"):
            op.replace(k, torch.ones(30))
    with unchanged(op), pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        op.replace(1.0, torch.ones(30))
    for average in (-0.5, 1.5, float("nan")):
        with unchanged(op), pytest.raises(ValueError, match=r"average must be a weight from 0 .* to 1, not"):
            op.update_and_apply(torch.ones(30), average)
    with pytest.raises(ValueError, match=r"coefficients must be \[3\], one a row, not \[4\]"):
        op.combine(torch.ones(4))


# The algebra of small windows is in numpy, that of large ones in torch.

each_way = pytest.mark.parametrize("in_numpy", [False, True], ids=["torch", "numpy"])


@each_way
@pytest.mark.parametrize("filled", [0, 3, 6, 9])
@pytest.mark.parametrize("kind", [None, torch.bfloat16, torch.int8, mfac.TopK(0.2)], ids=str)
def test_a_gradient_that_is_not_finite_leaves_no_trace(in_numpy, filled, kind, monkeypatch):
    monkeypatch.setattr(sliding, "SMALL", 96 if in_numpy else 0)
    op, other = (fill(window(6, window=kind), mixed(filled, 30)) for _ in range(2))
    for bad in (float("nan"), float("inf"), 1e200):
        for call in (op.update, op.update_and_apply):
            with pytest.raises(RuntimeError, match=r"not finite.*the window is unchanged"):
                call(torch.full((30,), bad, dtype=torch.float64))
    for g in mixed(20, 30, seed=4):
        assert torch.equal(op.update_and_apply(g), other.update_and_apply(g))


@each_way
@pytest.mark.parametrize("filled", [1, 6, 9])
def test_a_damping_too_small_for_float64_changes_nothing_and_the_advice_works(in_numpy, filled, monkeypatch):
    monkeypatch.setattr(sliding, "SMALL", 96 if in_numpy else 0)
    g = 1e9 * torch.randn(30, generator=torch.Generator().manual_seed(0))
    op = fill(window(6), torch.cat((1e-9 * mixed(filled - 1, 30), g[None])))
    with unchanged(op), pytest.raises(torch.linalg.LinAlgError, match="float64 has too few digits") as error:
        op.update_and_apply(g)
    op.damping *= float(re.search(r"raise the damping (\S+) times", str(error.value))[1])
    assert op.update_and_apply(g).isfinite().all()


def test_a_second_thread_is_refused():
    op, entered, leave = fill(window(), mixed(8, 30)), threading.Event(), threading.Event()
    op._rows.project = lambda *arguments: (entered.set(), leave.wait(), type(op._rows).project(op._rows, *arguments))[2]
    x, found = torch.randn(30), []
    first = threading.Thread(target=lambda: found.append(op @ x))
    first.start()
    entered.wait()
    try:
        for call in (op.update, op.update_and_apply, op.quadratic_form, lambda x: op @ x, lambda _: op.diagonal()):
            with pytest.raises(RuntimeError, match="another thread is using this DynamicInverseFisher; let it finish"):
                call(x)
    finally:
        leave.set()
        first.join()
    assert torch.equal(found[0], op @ x)
