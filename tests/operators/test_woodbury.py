"""The pure functions, against dense linear algebra."""

import pytest
import torch
from cases import mixed

from mfac import products, woodbury


def test_a_matrix_beyond_float64_is_an_error_that_names_damping_scale_and_remedy():
    G = torch.full((3, 5), 1e12, dtype=torch.float64)
    with pytest.raises(torch.linalg.LinAlgError, match=r"adds 3e-08 .* up to 5e\+24.*raise the damping"):
        woodbury.factor(G @ G.T, 3e-8)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("computed", [torch.float32, torch.float64])
def test_products_do_not_depend_on_how_they_are_cut(stored, computed, monkeypatch):
    sizes = {"TILE": 64, "TILE_COLUMNS": 16, "GRAM_COLUMNS": 16, "WHITEN_COLUMNS": 16, "LEAST_ROWS": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(products, name, size)
    G = mixed(10, 50, 1.0, stored)
    exact, x, a = G.double(), torch.randn(50, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    lower = torch.randn(10, 10, dtype=torch.float64).tril()
    close = {"rtol": 1e-5, "atol": 1e-5} if computed == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    batch = G.unflatten(1, (5, 10)).transpose(0, 1)
    assert torch.allclose(products.project(G, x, computed), exact @ x, **close)
    assert torch.allclose(products.combine(G, a, computed).double(), a @ exact, **close)
    assert torch.allclose(products.gram(G, computed), exact @ exact.T, **close)
    assert torch.equal(products.gram(G, computed), products.gram(G, computed).T)
    assert torch.allclose(products.gram(batch, computed), batch.double() @ batch.double().mT, **close)
    of_product, plain = products.squares(lower, G, a[None], computed)
    assert torch.allclose(of_product, (lower @ exact).square().sum(0), **close)
    assert torch.allclose(plain[0], a @ exact.square(), **close)
    if stored == computed:
        assert torch.allclose(products.whiten_(lower, G.clone(), computed).double(), lower @ exact, **close)
