"""Equal to the paper's literal algorithms, to rounding."""

import numpy as np
import oracle
import pytest
import torch
from cases import fill, mixed, repeating

import mfac
from mfac import reference

DAMPING = 1e-3
matrices = pytest.mark.parametrize(
    "G",
    [mixed(20, 50, 0.3, torch.float64), repeating(20, 50, 0.3, 0.1, torch.float64), mixed(50, 20, 1.0, torch.float64)],
    ids=["mixed", "repeating", "more rows than weights"],
)


@matrices
def test_the_references_agree_with_the_dense_inverse_and_static_with_algorithm_3(G):
    dense, _ = oracle.inverse(oracle.fisher(G, DAMPING))
    op, x = mfac.StaticInverseFisher(G, DAMPING), torch.randn(G.shape[1], dtype=torch.float64)
    D, B = reference.dynamic_setup(G @ G.T, DAMPING)
    V, q = reference.static_setup(G, DAMPING)
    assert oracle.error(reference.dynamic_multiply(G, x, D, B, DAMPING), dense @ oracle.wide(x)) < 1e-10
    assert oracle.error(reference.static_multiply(V, q, x, DAMPING), dense @ oracle.wide(x)) < 1e-10
    assert oracle.worst(reference.static_diagonal(V, q, DAMPING), np.diag(dense)) < 1e-10
    assert float(reference.static_element(V, q, 3, 5, DAMPING)) == pytest.approx(float(dense[3, 5]))
    assert oracle.error(reference.woodbury_recursion(G, DAMPING), dense) < 1e-10
    assert torch.allclose(op @ x, reference.static_multiply(V, q, x, DAMPING), rtol=1e-8, atol=1e-8)
    assert torch.allclose(op.diagonal(), reference.static_diagonal(V, q, DAMPING), rtol=1e-8, atol=1e-8)
    assert torch.allclose(op[4, 7], reference.static_element(V, q, 4, 7, DAMPING), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("block_size", [10, 25])
def test_blocks_equal_algorithm_3_and_woodfisher_on_each(block_size):
    G = mixed(20, 50, 0.3, torch.float64)
    op = mfac.StaticInverseFisher(G, DAMPING, block_size=block_size)
    blocks = G.unflatten(1, (-1, block_size)).transpose(0, 1)
    V, q = reference.static_setup(blocks, DAMPING)
    assert torch.allclose(op.diagonal(), reference.static_diagonal(V, q, DAMPING).flatten(), rtol=1e-9)
    assert torch.allclose(op.to_dense(), torch.block_diag(*reference.woodbury_recursion(blocks, DAMPING)), atol=1e-9)


def test_dynamic_equals_algorithms_1_and_2_after_hundreds_of_replacements_in_any_order():
    m, d = 16, 60
    G = mixed(m, d, 0.5, torch.float64)
    op = fill(mfac.DynamicInverseFisher(m, d, DAMPING, dtype=torch.float64), G)
    for k in torch.randint(0, m, (400,)).tolist():
        G[k] = torch.randn(d, dtype=torch.float64) * 10 ** (2 * torch.rand(()) - 1.5)
        op.replace(k, G[k])
    D, B = reference.dynamic_setup(G @ G.T, DAMPING)
    for x in torch.randn(3, d, dtype=torch.float64):
        assert torch.allclose(op @ x, reference.dynamic_multiply(G, x, D, B, DAMPING), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("normalize", ["seen", "full"])
def test_update_and_apply_equals_algorithms_1_and_2_from_the_first_step_through_the_wrap(normalize):
    m, d = 8, 30
    op = mfac.DynamicInverseFisher(m, d, DAMPING, dtype=torch.float64, normalize=normalize)
    window = torch.zeros(m, d, dtype=torch.float64)
    for t in range(3 * m):
        g = torch.randn(d, dtype=torch.float64)
        window[t % m] = g
        rows = window[: t + 1] if normalize == "seen" else window
        D, B = reference.dynamic_setup(rows @ rows.T, DAMPING)
        expected = reference.dynamic_multiply(rows, g, D, B, DAMPING)
        assert torch.allclose(op.update_and_apply(g), expected, rtol=1e-8, atol=1e-8)
