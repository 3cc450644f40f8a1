"""Storages of the window: what a row reads back as, products with it, conversion, and what is refused."""

import copy
from contextlib import nullcontext

import numpy as np
import oracle
import pytest
import torch
from cases import MODES, fill, mixed, repeating, stored
from states import through_a_file, unchanged
from torch import nn

import mfac
from mfac import sliding
from mfac.windows import native
from mfac.windows.storage import as_kind, saved_rows, window_bytes

D, M = 45, 6
KINDS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int8 in blocks": mfac.Int8(block=16),
    "int8, three numbers a block": mfac.Int8(block=3),
    "int8, stochastic": mfac.Int8(block=16, stochastic=True),
    "top-k": mfac.TopK(0.2, block=16),
    "top-k in float32": mfac.TopK(0.2, block=7, dtype=torch.float32),
    "all entries": mfac.TopK(1.0, block=16, dtype=torch.float32),
    "one percent": mfac.TopK(),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def window(kind, m=M, d=D, damping=1e-2, **options):
    return mfac.DynamicInverseFisher(m, d, damping, window=kind, **options)


def filled(kind, count=M + 3, **options):
    return fill(window(kind, **options), mixed(count, D))


def built(kind, m=M, d=D):
    return as_kind(kind).build(m, d, torch.device("cpu"))


def write(rows, k, g):
    stored = rows.encode(g)
    rows.write(k, stored)
    return stored.dense


@every_kind
def test_every_way_to_read_rows_gives_what_was_written(kind):
    rows, G = stored(mixed(M, D, 3.0), kind)
    assert torch.equal(torch.stack([rows.row(k) for k in range(M)]), G)
    assert torch.equal(rows.columns(M, 0, D), G)
    pages = rows.pages(4)
    assert torch.equal(pages.load(slice(3, 33)), G[:4, 3:33])
    indices = torch.tensor([44, 0, 17, 16, 17, 31])
    assert torch.equal(pages.gather(indices), G[:4, indices])
    assert torch.equal(saved_rows(copy.deepcopy(rows.state())).row(2), G[2])


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [(), (3,)], ids=["vector", "matrix"])
def test_products_are_those_of_the_rows_as_stored(kind, dtype, columns):
    rows, G = stored(mixed(M, D, 3.0), kind)
    G = G.double()
    x, a = torch.randn(D, *columns, dtype=torch.float64), torch.randn(5, *columns, dtype=torch.float64)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    assert torch.allclose(rows.project(5, x, dtype), G[:5] @ x, **near)
    assert torch.allclose(rows.combine(a, dtype).double(), G[:5].T @ a, **near)
    assert torch.allclose(rows.gram(5, dtype), G[:5] @ G[:5].T, **near)


@every_kind
@pytest.mark.parametrize("extra", [1, 3, 40])
def test_wider_rows_are_the_same_with_zeros_behind(kind, extra):
    rows, G = stored(mixed(M, D), kind)
    rows = rows.widened(extra)
    assert rows.shape == (M, D + extra)
    assert torch.equal(rows.columns(M, 0, D + extra), torch.nn.functional.pad(G, (0, extra)))
    assert torch.equal(write(rows, 2, torch.randn(D + extra)), rows.row(2))
    assert torch.equal(rows.row(3)[:D], G[3])


@every_kind
def test_the_bytes_that_were_said_are_the_bytes_that_are_held(kind):
    state = built(kind).state()
    tensors = [state] if isinstance(state, torch.Tensor) else [v for v in state.values() if isinstance(v, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) == as_kind(kind).bytes(M, D)
    needed = mfac.MFAC.memory_needed([nn.Parameter(torch.zeros(D))], M, window=kind)
    assert needed == window_bytes(M, D, kind) == as_kind(kind).bytes(M, D) + 4 * 8 * M**2


def test_int8_is_the_nearest_multiple_of_the_scale():
    g = torch.randn(D) * torch.logspace(-4, 2, D)
    rows = built(mfac.Int8(block=16))
    row = write(rows, 1, g)
    state = rows.state()
    scales = state["scales"][:, 1].repeat_interleave(16)[:D]
    for block, scale in zip(g.split(16), state["scales"][:, 1], strict=True):
        assert 1 <= 127 * scale / block.abs().max() < 1 + 2**-14
    assert torch.equal(row, torch.round(g / scales) * scales)
    assert torch.equal(row.double(), torch.round(g / scales).double() * scales.double())  # exact, not only rounded
    for extreme in (torch.zeros(D), torch.full((D,), 1e-45), torch.full((D,), 1e30)):
        assert torch.allclose(rows.encode(extreme).dense, extreme, rtol=0.01, atol=1e-44)


def test_stochastic_rounding_is_right_on_average_and_draws_from_itself():
    rows, g = built(mfac.Int8(stochastic=True), m=1), torch.randn(D)
    before = torch.get_rng_state()
    mean = sum(write(rows, 0, g) for _ in range(1000)) / 1000
    assert torch.equal(torch.get_rng_state(), before)
    scale = g.abs().max() / 127
    assert (mean - g).abs().max() < 0.1 * scale  # a standard error is at most scale / 2 / √1000, a sixth of this
    assert (built(torch.int8).encode(g).dense - g).abs().max() > 0.3 * scale
    one, other = (built(mfac.Int8(stochastic=True, seed=seed)).encode(g).dense for seed in (0, 1))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_keeps_the_largest_and_gives_the_rest_to_the_next_row(dtype):
    rows, error = built(mfac.TopK(0.2, block=16, dtype=dtype)), torch.zeros(D)
    for k, g in enumerate(mixed(M, D)):
        a = error + g
        expected = torch.zeros(D)
        for start in range(0, D, 16):
            part = a[start : start + 16]
            kept = part.abs().topk(-(-len(part) // 5)).indices + start  # a fifth, rounded up
            expected[kept] = a[kept].to(dtype).float()
        assert torch.equal(write(rows, k, g), expected)
        error = a - expected
        assert torch.equal(rows.state()["error"], error)


@every_kind
@pytest.mark.parametrize("mode", [nullcontext, *MODES.values()], ids=["no mode", *MODES])
def test_a_step_is_the_inverse_times_the_row_as_stored(kind, mode, monkeypatch):
    if mode is not nullcontext:
        monkeypatch.setattr(native, "LEAST_NUMBERS", 0)
        monkeypatch.setattr(sliding, "SMALL", 0)
    with mode():
        op = window(kind, device="cpu")
    for i, g in enumerate(mixed(3 * M, D)):
        with mode() if i % 3 else nullcontext():
            step = op.update_and_apply(g)
        stored = op.rows[: i + 1]
        dense, _ = oracle.inverse(oracle.fisher(stored, 1e-2))
        assert oracle.error(step, dense @ oracle.wide(stored[i % M])) < 1e-4


@every_kind
@pytest.mark.parametrize("devices", [None, ["cpu"] * 5], ids=["one device", "five devices"])
def test_replaced_and_widened_it_is_still_exact(kind, devices):
    op = filled(kind, devices=devices)
    K = op._rows.gram(M, torch.float64)
    assert torch.equal(K, K.T)  # bit for bit, as a refused gradient leaves it
    op.replace(2, torch.randn(D))
    rows = op.rows
    op.widen(9)
    assert torch.equal(op.rows, torch.nn.functional.pad(rows, (0, 9)))
    op.update(torch.randn(D + 9))
    dense, logdet = oracle.inverse(oracle.fisher(op.rows, 1e-2))
    x = torch.randn(D + 9)
    assert oracle.error(op @ x, dense @ oracle.wide(x)) < 1e-4
    assert oracle.worst(op.diagonal(), np.diag(dense)) < 1e-4
    assert float(op.logdet()) == pytest.approx(float(logdet))


@every_kind
@pytest.mark.parametrize("after", [2, M, 2 * M + 1])
def test_saved_and_loaded_goes_on_bit_for_bit(kind, after):
    for rows in (mixed(4 * M, D), repeating(4 * M, D)):
        op, other = window(kind), window(kind, damping=9.0)
        for row in rows[:after]:
            op.update_and_apply(row)
        other.load_state_dict(through_a_file(op.state_dict()))
        for row in rows[after:]:
            assert torch.equal(op.update_and_apply(row), other.update_and_apply(row))
        assert torch.equal(op @ rows[0], other @ rows[0])
        assert other.damping == op.damping


@pytest.mark.parametrize(("kind", "name"), [(torch.float16, "torch.float16"), (mfac.TopK(0.2), r"mfac.TopK\(0.2\)")])
def test_a_gradient_beyond_the_range_of_its_storage_is_refused(kind, name):
    op = filled(kind)
    with pytest.raises(RuntimeError, match=rf"squared norm in {name} is"):
        op.update(torch.full((D,), 1e6 if kind == torch.float16 else 3.4e38))
    assert op.num_seen == M


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("float32", "bfloat16"), ("float32", "int8 in blocks"), ("float32", "top-k"), ("bfloat16", "top-k in float32"),
        ("int8 in blocks", "float32"), ("int8 in blocks", "int8"), ("int8", "top-k"), ("top-k", "float32"),
        ("top-k", "int8 in blocks"), ("top-k", "all entries"), ("top-k in float32", "float16"),
    ],
)  # fmt: skip
def test_rows_of_one_storage_become_rows_of_another(there, here):
    saved, op = filled(KINDS[there]), filled(KINDS[here], 4)
    op.load_state_dict(through_a_file(saved.state_dict()))
    alone = [built(KINDS[here]).encode(row).dense for row in saved.rows]  # nothing is left over from one to the next
    assert torch.equal(op.rows, torch.stack(alone).to(op.rows.dtype))
    dense, _ = oracle.inverse(oracle.fisher(op.rows, 1e-2))
    x = torch.randn(D)
    assert oracle.error(op @ x, dense @ oracle.wide(x)) < 1e-4
    step = op.update_and_apply(torch.randn(D))
    dense, _ = oracle.inverse(oracle.fisher(op.rows, 1e-2))
    assert oracle.error(step, dense @ oracle.wide(op.rows[(M + 3) % M])) < 1e-4


def test_an_error_is_kept_by_another_top_k_and_by_nothing_else():
    saved = filled(mfac.TopK(0.2, block=16))
    error = saved.state_dict()["rows"]["error"]
    op = filled(mfac.TopK(0.5, block=7), 4)
    op.load_state_dict(through_a_file(saved.state_dict()))
    assert torch.equal(op.state_dict()["rows"]["error"], error)
    op.load_state_dict(through_a_file(filled(torch.float32).state_dict()))
    assert not op.state_dict()["rows"]["error"].any()


@pytest.mark.parametrize(
    ("there", "here"), [(torch.float32, torch.float16), (torch.bfloat16, torch.float16), (torch.float64, mfac.TopK())]
)
def test_rows_beyond_the_range_of_a_storage_are_refused_when_they_are_loaded(there, here):
    op, fresh = fill(window(there), mixed(3, D)), filled(here)
    op.update(mixed(1, D, dtype=torch.float64)[0] * (1e6 if there != torch.float64 else 1e39))
    message = r"row 3 of the saved window, stored in torch.*, has numbers that .* cannot"
    with unchanged(fresh), pytest.raises(ValueError, match=message):
        fresh.load_state_dict(op.state_dict())


@every_kind
def test_a_state_whose_rows_went_on_is_refused(kind):
    op = filled(kind)
    state = op.state_dict()
    fill(op, 2 * mixed(M, D, seed=3))
    with pytest.raises(ValueError, match="deep-copy it before the next update"):
        window(kind).load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mfac.Int8(block=0), "block of Int8 must be a positive int, not 0"),
        (lambda: mfac.TopK(1.5), "density of TopK must be above 0 and at most 1, not 1.5"),
        (lambda: mfac.TopK(block=40_000), "block of TopK must be an int from 1 to 32768 .*, not 40000"),
        (lambda: mfac.TopK(dtype=torch.float16), "TopK keeps its numbers in .*, not torch.float16"),
        (lambda: window("int8"), r"rows can be stored in .*, torch.int8, mfac.Int8\(...\) or mfac.TopK.*, not 'int8'"),
        (lambda: window(None, dtype=torch.int8), "dtype must be one of .*, not torch.int8"),
        (lambda: window(None, m=0), "num_grads must be a positive int, not 0"),
        (lambda: mfac.MFAC.memory_needed(nn.Linear(3, 1).parameters(), -1), "num_grads must be a positive int, not -1"),
        (lambda: window(None, d=-1), "dim must be a positive int, not -1"),
        (lambda: window(None, normalize="no"), "normalize must be 'seen', 'full' or 'sum', not 'no'"),
        (lambda: window(None, precision="half"), "precision must be one of 'auto', 'float32', 'float64', not 'half'"),
        (lambda: window(None, damping=0), "damping must be positive and finite, not 0;"),
        (lambda: window(None, device="cpu", devices=["cpu"]), r"give device='cpu' or devices=\[\.\.\.\], not both"),
        (lambda: window(None, devices=[]), r"devices must be a list of at least one device, not \[\]"),
        (lambda: window(None, devices="cpu"), "devices must be a list of at least one device, not 'cpu'"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.float32, r"in torch.float32 needs .* would fit, or \d+ of them with window=torch.bfloat16, "
                        r"or \d+ of them with window=torch.int8, or \d+ of them with window=mfac.TopK\(0.01\)"),
        (torch.int8, r"in torch.int8 needs .* would fit, or \d+ of them with window=mfac.TopK\(0.01\)$"),
        (mfac.TopK(0.01), r"in mfac.TopK\(0.01\) needs .*num_grads=\d+ would fit$"),
    ],
)  # fmt: skip
def test_a_window_larger_than_the_memory_is_refused_with_what_would_fit_and_that_does(kind, message, monkeypatch):
    monkeypatch.setattr("mfac.windows.storage.available_memory", lambda device: 2 * 10**5)
    with pytest.raises(MemoryError, match=message) as refused:
        window(kind, m=4000, d=2000)
    fits = int(str(refused.value).split("num_grads=")[1].split()[0])
    assert 0 < window_bytes(fits, 2000, kind) <= 2 * 10**5
    window(kind, m=fits, d=2000)
    with pytest.raises(MemoryError, match=r"available; not one would fit: mask weights, or use several devices$"):
        window(kind, m=1000, d=10**8)
