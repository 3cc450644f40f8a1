"""Public functions other than the static operator, under anything: a right answer, or a clear error and no change."""

import copy
import os

import mpmath
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from states import same
from torch import nn

import mfac

REFUSED = (ValueError, TypeError, RuntimeError, IndexError, MemoryError)
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
KINDS = [*FLOATS, torch.int8, mfac.Int8(block=2), mfac.TopK(0.5), mfac.TopK(1.0, dtype=torch.float32)]
fuzz = settings(deadline=None, max_examples=int(os.environ.get("MFAC_CASES", "40")), derandomize=True)
seeds = st.integers(0, 2**20)
scales = st.integers(-30, 30).map(lambda exponent: 10.0**exponent)


@st.composite
def tensors(draw, *shape, odd=True):
    """Of a shape, mostly: of any scale and dtype, with repeats, zeros and what is not finite; and oddities."""
    generator = torch.Generator().manual_seed(draw(seeds))
    rows = draw(scales) * torch.randn(shape, generator=generator, dtype=torch.float64)
    change = draw(st.sampled_from(["none"] * 6 + ["repeat", "zeros", "spread"] + ["nan", "inf"] * odd))
    if change == "repeat":
        rows[:] = rows.flatten()[: shape[-1]]
    elif change == "zeros":
        rows.zero_()
    elif change == "spread":
        rows *= 10.0 ** torch.randint(-9, 9, shape, generator=generator)
    elif change != "none":
        rows.view(-1)[-1] = float(change)
    rows = rows.to(draw(st.sampled_from(FLOATS)))
    refused = ["long", "sparse", "meta", "short", "list"] * odd
    form = draw(st.sampled_from(["plain"] * 6 + ["strided", "graph"] + refused))
    forms = {
        "strided": lambda: rows.repeat_interleave(2, -1)[..., ::2],
        "graph": lambda: rows.requires_grad_(),
        "long": rows.long,
        "sparse": rows.to_sparse,
        "meta": lambda: rows.to("meta"),
        "short": lambda: rows[..., 1:],
        "list": rows.tolist,
    }
    return forms.get(form, lambda: rows)()


def dense_inverse(rows, damping, divisor):
    """F⁻¹ with 150 digits."""
    mpmath.mp.dps = 150
    G = mpmath.matrix(rows.double().tolist())
    F = G.T * G / divisor
    for i in range(rows.shape[1]):
        F[i, i] += mpmath.mpf(damping)
    return F**-1


def close(answer, truth, tolerance=1e-3):
    """In norm, for what the dtype can hold; beyond it, infinite."""
    found, limits = answer.double().flatten().tolist(), torch.finfo(answer.dtype)
    size, tolerance = mpmath.norm(truth), max(tolerance, 4 * limits.eps)
    if size > limits.max / 2:
        return True
    return mpmath.norm(mpmath.matrix(found) - truth) <= tolerance * size + len(found) * limits.smallest_normal


@fuzz
@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.integers(-12, 12), st.sampled_from(KINDS))
def test_windows(data, m, d, exponent, kind):
    dtype, normalize = data.draw(st.sampled_from(FLOATS[:2])), data.draw(st.sampled_from(["seen", "full"]))
    op = mfac.DynamicInverseFisher(m, d, 10.0**exponent, dtype=dtype, window=kind, normalize=normalize)
    for _ in range(data.draw(st.integers(1, 6))):
        g, before = data.draw(tensors(d)), copy.deepcopy(op.state_dict())
        replaced = data.draw(st.integers(-2, op.num_seen - 1))
        try:
            step = op.replace(replaced, g) if replaced >= 0 else op.update_and_apply(g)
        except REFUSED:
            assert same(copy.deepcopy(op.state_dict()), before)
            continue
        if replaced >= 0:
            continue
        n = op.num_seen
        inverse = dense_inverse(op.rows[:n], op.damping, n if normalize == "seen" else m)
        assert close(step, inverse * mpmath.matrix(op.rows[(op._updates - 1) % m].double().tolist()))
    n = op.num_seen
    assume(n)
    x, inverse = data.draw(tensors(d)), dense_inverse(op.rows[:n], op.damping, n if normalize == "seen" else m)
    before = copy.deepcopy(op.state_dict())
    try:
        product = op @ x  # diagonals and elements are those of a static operator
    except REFUSED:
        assert same(copy.deepcopy(op.state_dict())["rows"], before["rows"])
        return
    assert close(product, inverse * mpmath.matrix(x.double().tolist())) or not x.isfinite().all()


@fuzz
@given(st.data(), st.integers(-1, 4), st.floats(-0.1, 1.1), st.booleans())
def test_collecting_and_pruning(data, num_grads, sparsity, per_sample):
    torch.manual_seed(data.draw(seeds))
    model, x = nn.Linear(3, 2), data.draw(tensors(4, 3))
    x = x.float() if isinstance(x, torch.Tensor) else x
    before, was = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]

    def loss_fn(model, batch):
        return model(batch).square().mean()

    try:
        rows = mfac.collect_gradients(model, loss_fn, [x], num_grads, per_sample=per_sample, cycle=True)
    except REFUSED:
        rows = None
    assert same(dict(model.state_dict()), dict(before))
    assert [p.requires_grad for p in model.parameters()] == was
    assert all(p.grad is None for p in model.parameters())
    if rows is not None:
        loss_fn(model, x[:1] if per_sample else x).backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters()])
        assert rows.isfinite().all()
        torch.testing.assert_close(rows[0], expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
        model.zero_grad()
    try:
        options = {"fisher": "empirical", "damping": 10.0 ** data.draw(st.integers(-12, 3)), "block_size": 3}
        result = mfac.prune(model, loss_fn, [x], sparsity, num_grads=1, recomputations=1, **options)
    except REFUSED:
        assert same(dict(model.state_dict()), dict(before))
        return
    assert int((~result.masks["weight"]).sum()) == round(6 * sparsity)
    assert model.weight.isfinite().all()
    assert not model.weight[~result.masks["weight"]].any()
