"""A search for answers that are judged good and are not: rows made to deceive, many more rows than FEW_ROWS."""

import os

import oracle
import pytest
import torch
from cases import spans
from hypothesis import given, settings
from hypothesis import strategies as st

import mfac
from mfac import precision, products
from mfac.precision import FEW_ROWS

CASES = int(os.environ.get("MFAC_CASES", "25"))  # MFAC_CASES=10000 is the long search


def one_sign(draw, m, d):
    return draw(1, d).abs() + 1e-2 * draw(m, d).abs()  # sums of the same terms round the same way


# How each draws m rows of d numbers.
ADVERSARIES = {
    "collinear": lambda draw, m, d: draw(1, d) + 1e-3 * draw(m, d),
    "huge row": lambda draw, m, d: draw(m, d) * torch.where(torch.arange(m) == m // 2, 1e4, 1.0)[:, None],
    "huge column": lambda draw, m, d: draw(m, d).abs() * torch.where(torch.arange(d) == 3, 1e4, 1.0),
    "duplicated": lambda draw, m, d: draw(m // 3 + 1, d).repeat(3, 1)[:m],
    "twelve decades": lambda draw, m, d: draw(m, d) * torch.logspace(-8, 4, m, dtype=torch.float64)[:, None],
    "low rank": lambda draw, m, d: draw(m, 3) @ draw(3, d) + 1e-4 * draw(m, d),
    "one sign": one_sign,
    "two camps": lambda draw, m, d: one_sign(draw, m, d) * draw(m, 1).sign(),
    "mixed": lambda draw, m, d: draw(m, d),
}


def adversary(name, m, d, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return ADVERSARIES[name](lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator), m, d)


def check(G, damping, block_size):
    """Every answer keeps 1e-4, or is refused where float64 itself could not be expected to."""
    if oracle.condition(G, damping) > 1e15:  # where the oracle itself has no four digits
        return
    d = G.shape[1]
    blocks = None if block_size is None else spans([d], block_size)
    dense, _ = oracle.inverse(oracle.fisher(G, damping, blocks=blocks))
    x = torch.randn(d, 2)
    spanned = (G.double().T @ torch.randn(len(G), dtype=torch.float64)).float()
    try:
        op = mfac.StaticInverseFisher(G, damping, block_size=block_size)
        assert oracle.worst(op.diagonal(), dense.diagonal()) < 1e-4
        first = oracle.wide(op[torch.arange(d), torch.zeros(d, dtype=torch.int64)])
        assert abs(first - dense[:, 0]).max() < 1e-4 / damping
        for y in (x, x[:, 0], spanned, G[1]):
            assert oracle.error(op @ y, dense @ oracle.wide(y)) < 1e-4
            form = (oracle.wide(y) * (dense @ oracle.wide(y))).sum(0)
            assert oracle.worst(op.quadratic_form(y), form) < 1e-4
    except torch.linalg.LinAlgError:
        assert oracle.condition(G, damping) > 1e10


@pytest.mark.parametrize(("damping", "block_size"), [(1e-7, None), (1e-4, 40), (1e-2, 70), (1e-1, None)])
@pytest.mark.parametrize("rows", ADVERSARIES)
def test_rows_made_to_deceive(rows, damping, block_size):
    G = adversary(rows, 50, 100)
    assert len(G) > FEW_ROWS
    check(G.float(), damping, block_size)


@pytest.mark.parametrize(("m", "d"), [(40, 300), (100, 5000), (600, 2500)])
@pytest.mark.parametrize("rows", ADVERSARIES)
def test_the_error_of_the_gram_matrix_is_not_measured_too_small(rows, m, d):
    G = adversary(rows, m, d).float()
    K, exact, some = products.gram(G, torch.float32), G.double() @ G.double().T, precision.sample(m)
    scale = exact.diagonal().rsqrt()
    true = torch.linalg.matrix_norm((K - exact) * scale[:, None] * scale, 2)
    assert true <= precision.measured_error(K[None], exact[None, some, some], some)[0]


@settings(max_examples=CASES, deadline=None, derandomize=True)
@given(
    rows=st.sampled_from(list(ADVERSARIES)),
    m=st.integers(FEW_ROWS + 1, 60),
    more=st.integers(1, 60),
    scale=st.floats(-4, 4),
    damping=st.floats(-8, 1),
    block_size=st.sampled_from([None, 40, 70]),
    seed=st.integers(0, 10**6),
)
def test_no_answer_is_silently_wrong(rows, m, more, scale, damping, block_size, seed):
    torch.manual_seed(seed)
    check((10**scale * adversary(rows, m, m + more, seed)).float(), 10**damping, block_size)


def test_ordinary_rows_stay_in_float32_and_diagnostics_say_so():
    G = torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    op = mfac.StaticInverseFisher(G, 1e-6)
    op.diagonal()
    found = op.diagnostics()
    assert (found["blocks"], found["float64_blocks"], found["entries"], found["products"]) == (1, 0, 0, 0)
    assert 0 < found["gram_error"] < 5e-5
    op @ G[0]  # in the span: nearly all of it cancels
    assert op.diagnostics()["products"] + op.diagnostics()["float64_blocks"] >= 1


SCALES = [0.0, 1e-30, 1e-12, 1e-3, 1.0, 1e3, 1e12, 1e30, float("nan")]


@settings(max_examples=CASES, deadline=None, derandomize=True)
@given(
    m=st.integers(0, 12),
    d=st.integers(0, 16),
    scale=st.sampled_from(SCALES),
    of_x=st.sampled_from(SCALES[:-1]),
    damping=st.sampled_from([1e-30, 1e-8, 1e-3, 1.0, 1e8, 1e30]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    kind=st.sampled_from(["plain", "duplicates", "transposed", "strided", "requires_grad"]),
    sizes=st.sampled_from(
        [{}, {"block_size": 1}, {"block_size": 4}, {"page_size": 3}, {"block_size": 5, "page_size": 7}]
    ),
    seed=st.integers(0, 10**6),
)
def test_any_input_is_answered_right_or_refused(m, d, scale, of_x, damping, dtype, kind, sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(m, 2 * d, dtype=torch.float64, generator=generator)
    rows = (rows[:1].expand(m, -1) if kind == "duplicates" else rows).mul(scale).to(dtype)
    G = {"transposed": rows[:, :d].T.contiguous().T, "strided": rows[:, ::2]}.get(kind, rows[:, :d])
    G = G.clone().requires_grad_() if kind == "requires_grad" else G
    before = G.detach().clone()
    try:
        op = mfac.StaticInverseFisher(G, damping, **sizes)
        x = (of_x * torch.randn(d, dtype=torch.float64, generator=generator)).to(op.dtype)
        found = [(op @ x).double(), op.diagonal().double()]
    except (ValueError, torch.linalg.LinAlgError):
        found = []
    if found and oracle.condition(before, damping) < 1e14:
        blocks = spans([d], sizes.get("block_size", d))
        dense, _ = oracle.inverse(oracle.fisher(before, damping, blocks=blocks))
        limit = min(1e-4, oracle.tolerance(before, damping, op.dtype))
        largest = torch.finfo(op.dtype).max
        for answer, exact in zip(found, (dense @ oracle.wide(x), dense.diagonal()), strict=True):
            if 1e-30 < abs(exact).max() < largest:
                assert oracle.error(answer, exact) < limit
    assert torch.equal(G.detach().nan_to_num(), before.nan_to_num())
