"""The digits that are promised: 1e-4 in float32, where the paper's formula has none left."""

import oracle
import pytest
import torch
from cases import fill, mixed, repeating

import mfac
from mfac import reference

M, D, DAMPING = 128, 600, 1e-5


def truth(rows, x, damping=DAMPING):
    """F⁻¹x through the dual in longdouble; None: of the first row, by the push-through form."""
    G, x, m = oracle.wide(rows), x if x is None else oracle.wide(x), len(rows)
    S = m * oracle.np.longdouble(damping) * oracle.np.eye(m) + G @ G.T
    dual, _ = oracle.inverse(S)
    return m * G.T @ dual[0] if x is None else (x - G.T @ (dual @ (G @ x))) / oracle.np.longdouble(damping)


def filled(rows, **options):
    return fill(mfac.DynamicInverseFisher(len(rows), rows.shape[1], DAMPING, **options), rows)


@pytest.mark.parametrize("norm", [0.01, 1, 100])
@pytest.mark.parametrize("noise", [0.01, 0.1, None], ids=lambda noise: f"noise {noise}")
def test_float32_keeps_four_digits(norm, noise):
    rows = mixed(M, D, norm) if noise is None else repeating(M, D, norm, noise)
    static, dynamic = mfac.StaticInverseFisher(rows, DAMPING), filled(rows)
    for x in (torch.randn(D), rows.T @ torch.randn(M), rows[5]):
        exact = truth(rows, x)
        assert oracle.error(static @ x, exact) < 1e-4
        assert oracle.error(dynamic @ x, exact) < 1e-4
    g = rows[0].clone()
    assert oracle.error(dynamic.update_and_apply(g), truth(rows, g)) < 1e-4


@pytest.mark.parametrize("noise", [0, 1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("norm", [1e2, 1e3, 1e4, 1e5, 1e6])
def test_a_step_among_repeated_rows_has_four_digits_or_is_refused(norm, noise):
    rows = repeating(12, 20, norm, noise)
    op = filled(rows)  # the next update replaces the first row by itself
    try:
        assert oracle.error(op.update_and_apply(rows[0]), truth(rows, None)) < 1e-4
    except torch.linalg.LinAlgError:
        assert norm > 1e3
        assert noise < 1e-5


def test_the_papers_formula_loses_all_digits_where_this_keeps_four():
    rows = mixed(M, D, 100)
    D_, B = reference.dynamic_setup(rows @ rows.T, DAMPING)
    exact = truth(rows, rows[0])
    assert oracle.error(reference.dynamic_multiply(rows, rows[0], D_, B, DAMPING), exact) > 1
    assert oracle.error(filled(rows).update_and_apply(rows[0]), exact) < 1e-4


def test_a_small_gradient_along_a_large_row_is_noticed():
    """Not collinear by the damping's measure, but the two terms of its step cancel."""
    rows = torch.tensor([[100.0], [0.3]])
    op = mfac.DynamicInverseFisher(2, 1, 1.0)
    op.update(rows[0])
    assert oracle.error(op.update_and_apply(rows[1]), truth(rows, rows[1], 1.0)) < 1e-5


def test_four_digits_also_when_repeating_rows_spread_again():
    op = filled(repeating(M, D, 1))
    op.update_and_apply(repeating(M, D, 1)[0])
    for row in mixed(2 * M, D, 1, seed=5):
        op.update_and_apply(row)
    rows = mixed(2 * M, D, 1, seed=5)[M:]
    x = rows.T @ torch.randn(M)
    assert oracle.error(op @ x, truth(rows, x)) < 1e-4


@pytest.mark.parametrize(("precision", "worst"), [("float32", float("inf")), ("float64", 1e-6)])
def test_precision_can_be_forced(precision, worst):
    rows = repeating(M, D, 10)
    static = mfac.StaticInverseFisher(rows, DAMPING, precision=precision)
    x = rows.T @ torch.randn(M)
    for answer in (static @ x, filled(rows, precision=precision) @ x):
        assert (oracle.error(answer, truth(rows, x)) > 1e-4) == (precision == "float32")
        assert oracle.error(answer, truth(rows, x)) < worst


def test_a_page_that_turns_out_large_switches_to_float64_in_mid_pass():
    rows = torch.cat((mixed(16, 100, 0.01), mixed(16, 100, 50)), dim=1)
    op = mfac.StaticInverseFisher(rows, DAMPING, page_size=20)
    x = rows.T @ torch.randn(16)
    assert oracle.error(op @ x, truth(rows, x)) < 1e-4
