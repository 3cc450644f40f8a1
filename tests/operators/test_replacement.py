"""One row of S replaced: the same formulas over tensors and over arrays, against inverting anew."""

import numpy as np
import pytest
import torch
from cases import mixed

import mfac
from mfac import sliding

SHIFT = 0.1


def case(as_array):
    """S⁻¹, then K with another row 4, both as tensors or as arrays of numpy."""
    G = mixed(12, 40, 1.0, torch.float64)
    P = torch.linalg.inv(SHIFT * torch.eye(12, dtype=torch.float64) + G @ G.T)
    G[4] = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    K = G @ G.T
    return (P.numpy(), K.numpy()) if as_array else (P, K)


@pytest.mark.parametrize("as_array", [False, True], ids=["torch", "numpy"])
def test_replace_equals_inverting_anew(as_array):
    P, K = case(as_array)
    before, out = P + 0, P * 0
    others = K[4] + 0
    others[4] = 0
    sliding.replace_row(P, 4, others, K[4, 4] + SHIFT, out=out)
    expected = np.linalg.inv(np.asarray(K) + SHIFT * np.eye(12))
    assert np.allclose(out, expected, rtol=1e-10, atol=1e-10)
    assert bool((before == P).all())


@pytest.mark.parametrize("as_array", [False, True], ids=["torch", "numpy"])
def test_examine_mends_what_is_wrong_and_says_how_much_it_was(as_array):
    _, K = case(as_array)
    S = np.asarray(K) + SHIFT * np.eye(12)
    exact = np.linalg.inv(S)
    wrong = exact * (1 + 1e-4)
    refined, figures = sliding.examine(K, torch.tensor(wrong) if not as_array else wrong, 4, SHIFT)
    square, drifted, whole, collinearity, terms, total = figures
    assert np.allclose(refined, exact[:, 4], rtol=1e-7, atol=1e-9)
    assert drifted / whole == pytest.approx(1e-8, rel=1e-2)
    c, weights = wrong[:, 4], np.diag(S)
    assert (square, collinearity) == pytest.approx((S[4, 4] - SHIFT, (weights * np.diag(wrong)).max()))
    assert (whole, terms, total) == pytest.approx((weights @ c**2, np.diag(K) @ c**2, c @ np.asarray(K) @ c))


def test_the_window_is_the_same_in_numpy_and_in_torch(monkeypatch):
    small = mfac.DynamicInverseFisher(6, 30, 1e-2)
    monkeypatch.setattr(sliding, "SMALL", 0)
    large = mfac.DynamicInverseFisher(6, 30, 1e-2)
    for g in mixed(80, 30):
        assert torch.allclose(small.update_and_apply(g), large.update_and_apply(g), rtol=1e-5, atol=1e-6)
    assert small._inverse.age == large._inverse.age > 0
    assert torch.allclose(small._inverse.inverse, large._inverse.inverse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("limit", [0, 96], ids=["torch", "numpy"])
def test_a_gradient_that_is_not_finite_leaves_no_trace(limit, monkeypatch):
    monkeypatch.setattr(sliding, "SMALL", limit)
    op = mfac.DynamicInverseFisher(6, 30, 1e-2)
    for g in mixed(9, 30):
        op.update_and_apply(g)
    before = op.gram.clone()
    for bad in (float("nan"), float("inf"), 1e200):
        with pytest.raises(RuntimeError, match="the window is unchanged"):
            op.update(torch.full((30,), bad, dtype=torch.float64))
    assert torch.equal(op.gram, before)
