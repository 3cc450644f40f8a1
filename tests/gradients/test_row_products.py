"""Products for rows of G: whatever is formed at a time, they are those of a loop in float64."""

import pytest
import torch
from torch import Tensor

from mfac.gradients.row_products import RowProducts, _add_together, _tiles

SHAPES = [(1, 7, 5, 6), (4, 7, 5, 6), (4, 7, 1, 6), (3, 1, 4, 1), (9, 2, 3, 2)]  # samples, o, t, i


@pytest.fixture(params=[(1 << 20, 1 << 18), (12, 8), (100, 90)], ids=["one tile", "many tiles", "some tiles"])
def tiles(request, monkeypatch):
    """How many numbers are formed at a time."""
    staged, together = request.param
    monkeypatch.setattr("mfac.gradients.row_products.STAGED", staged)
    monkeypatch.setattr("mfac.gradients.row_products.TOGETHER", together)


def expected_rows(A: Tensor, B: Tensor, region: Tensor, rows: list[int], is_first: bool) -> Tensor:
    result = region.double()
    for row, a, b in zip(rows, A.double(), B.double(), strict=True):
        result[row] = a @ b + (0 if is_first else result[row])
    return result


def rows_of(samples: int, kind: str) -> list[int]:
    return {
        "all": list(range(samples)),
        "runs": [row + (row > samples // 2) for row in range(samples)],
        "backwards": list(range(samples))[::-1],
    }[kind]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["all", "runs", "backwards"])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_added_to_their_rows(shape, kind, is_first, dtype, tiles):
    samples, o, t, i = shape
    A, B = torch.randn(samples, t, o, dtype=dtype).transpose(1, 2), torch.randn(samples, t, i, dtype=dtype)
    matrix = torch.randn(samples + 1, o * i + 3, dtype=dtype)  # what lies beside the region is not touched
    region = matrix[:, 2 : 2 + o * i].view(samples + 1, o, i)
    rows = rows_of(samples, kind)
    index = None if kind == "all" else torch.tensor(rows)
    whole = matrix.clone()
    expected = expected_rows(A, B, region, rows, is_first)
    RowProducts().add(A, B, region[:samples] if index is None else region, index, is_first)
    torch.testing.assert_close(region.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(matrix[:, :2], whole[:, :2])
    assert torch.equal(matrix[:, -1], whole[:, -1])


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("kind", ["all", "backwards"])
def test_the_way_of_accelerators_gives_the_same(kind, is_first):
    A, B, region = torch.randn(4, 7, 5), torch.randn(4, 5, 6), torch.randn(4, 7, 6)
    rows = rows_of(4, kind)
    expected = expected_rows(A, B, region, rows, is_first)
    _add_together(A, B, region, None if kind == "all" else torch.tensor(rows), is_first)
    torch.testing.assert_close(region.double(), expected, rtol=1e-5, atol=1e-5)


def test_memory_is_kept_and_follows_the_dtype():
    products = RowProducts()
    for dtype in (torch.float32, torch.float64, torch.float32):
        A, B, region = (
            torch.randn(2, 3, 4, dtype=dtype),
            torch.randn(2, 4, 5, dtype=dtype),
            torch.empty(2, 3, 5).to(dtype),
        )
        products.add(A, B, region, None, True)
        torch.testing.assert_close(region, A @ B)
        kept = products._memory.data_ptr()
        products.add(A, B, region, None, True)
        assert products._memory.data_ptr() == kept


@pytest.mark.parametrize(("c", "o", "i"), [(1, 5000, 5000), (7, 300, 784), (200, 10, 10), (3, 2, 1 << 21)])
def test_tiles_cover_everything_once_and_fit(c, o, i):
    covered = torch.zeros(c, o, dtype=torch.int64)
    for samples, lines in _tiles(c, o, i):
        covered[samples, lines] += 1
        assert covered[samples, lines].numel() * i <= max(1 << 20, i)
    assert torch.equal(covered, torch.ones_like(covered))
