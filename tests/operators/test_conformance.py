"""One suite that every operator passes: exact against dense matrices in longdouble, whatever the rows."""

import copy
import itertools
import pickle
from contextlib import nullcontext

import numpy as np
import oracle
import pytest
import torch
from cases import DAMPINGS, MODES, OPERATORS, ROWS, mixed
from scipy.sparse.linalg import eigsh
from states import through_a_file

# All rows and dampings for operators that differ in their algebra, some for those that differ in how they read.
REPRESENTATIVE = ("full", "overwritten", "blocks in the primal", "blocks in the dual", "weighted", "dynamic")
SOME_ROWS = ("ordinary", "more rows than weights", "one of each", "huge and repeating", "scales mixed", "bfloat16")
GRID = [
    pytest.param(OPERATORS[name], ROWS[kind], damping, id=f"{name}-{kind}-{damping}")
    for name, kind, damping in itertools.product(OPERATORS, ROWS, DAMPINGS)
    if name in REPRESENTATIVE or (kind in SOME_ROWS and damping == 1e-5)
]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda op: pickle.loads(pickle.dumps(op)),
    "torch.save": lambda op: through_a_file(op, weights_only=False),
}


@pytest.fixture(params=OPERATORS.values(), ids=OPERATORS.keys())
def built(request, tmp_path):
    return request.param(mixed(12, 40), 1e-2, tmp_path)


def truth(built, damping=None):
    return oracle.inverse(oracle.fisher(built.rows, damping or built.op.damping, built.weights, built.blocks))


def keeps(built, call, truth, measure=oracle.error):
    """Whether an answer keeps the promise; an error only where float64 itself cannot be expected to."""
    weight = 1 if built.weights is None else max(1.0, float(built.weights.max()) * len(built.rows))
    beyond = 1e-14 * oracle.condition(built.rows * weight**0.5, built.op.damping)
    try:
        found = measure(call(), truth)
    except torch.linalg.LinAlgError:
        return beyond > 1e-4
    return found < (1e-4 if built.op.dtype == torch.float32 else min(1e-4, max(1e-10, beyond)))


@pytest.mark.parametrize(("build", "rows", "damping"), GRID)
def test_equals_dense(build, rows, damping, tmp_path):
    before = rows.clone()
    try:
        built = build(rows, damping, tmp_path)
    except torch.linalg.LinAlgError:
        assert oracle.condition(rows, damping) > 1e10
        return
    op, (dense, logdet) = built.op, truth(built, damping)
    x = torch.randn(rows.shape[1], 3, dtype=op.dtype)
    for y in (x, x[:, 0], rows.to(op.dtype).T @ torch.randn(len(rows), dtype=op.dtype)):
        assert not y.any() or keeps(built, lambda y=y: op @ y, dense @ oracle.wide(y))
    i, j = torch.meshgrid(torch.arange(rows.shape[1]), torch.arange(rows.shape[1]), indexing="ij")
    assert keeps(built, lambda: op[i, j], dense)
    assert keeps(built, lambda: op.quadratic_form(x), (oracle.wide(x) * (dense @ oracle.wide(x))).sum(0), oracle.worst)
    assert (op.quadratic_form(x) >= 0).all()
    assert keeps(built, op.diagonal, np.diag(dense), oracle.worst)
    fisher = np.diag(oracle.fisher(built.rows, damping, built.weights, built.blocks))
    assert (oracle.wide(op.diagonal()) >= 1 / fisher * (1 - 1e-6)).all()
    assert (op.diagonal() <= torch.tensor(1 / damping, dtype=op.dtype)).all()
    assert abs(float(op.logdet()) - logdet) <= 1e-9 * abs(logdet) + 1e-4
    assert torch.equal(rows, before)


def test_symmetric_and_positive(built):
    x, y = torch.randn(2, 40)
    assert torch.allclose(x @ (built.op @ y), y @ (built.op @ x), rtol=1e-4, atol=1e-3)
    assert torch.linalg.eigvalsh(built.op.to_dense().double()).min() > 0
    dense, x = truth(built)[0], torch.randn(40, dtype=torch.float64)
    assert oracle.error(built.op.to_dense(), dense) < 1e-5
    assert oracle.error(built.op @ x, dense @ oracle.wide(x)) < 1e-6  # float64 vectors get float64 answers


def test_manners_of_a_matrix(built, request):
    op, x, dense = built.op, torch.randn(3, 40, dtype=torch.float64), truth(built)[0]
    forward = oracle.fisher(built.rows, op.damping, built.weights, built.blocks)
    assert op.T is op
    assert oracle.error(x @ op, oracle.wide(x) @ dense) < 1e-6
    assert torch.equal(x[0] @ op, op @ x[0])
    assert oracle.error(op.solve(x.T), forward @ oracle.wide(x.T)) < 1e-6
    assert oracle.error(op.solve(x[0]), forward @ oracle.wide(x[0])) < 1e-6
    assert float(op.trace()) == pytest.approx(float(np.trace(dense)), rel=1e-5)
    assert oracle.error(torch.from_numpy(op.as_scipy() @ x[0].numpy()), dense @ oracle.wide(x[0])) < 1e-6
    if request.node.callspec.id in ("full", "blocks in the primal", "dynamic"):
        largest = eigsh(op.as_scipy(), k=2, which="LA", v0=np.ones(40), return_eigenvectors=False)
        assert largest == pytest.approx(np.linalg.eigvalsh(dense.astype(float))[-2:], rel=1e-5)


def test_moves_to_another_device_and_dtype(built):
    whitened = any(getattr(block, "_whitened", False) for block in getattr(built.op, "_blocks", ()))
    if whitened:
        with pytest.raises(ValueError, match="rows have changed since it was built"):
            built.op.to("cpu")
        return
    moved, x = built.op.to("cpu"), torch.randn(40)
    assert oracle.error(moved @ x, truth(built)[0] @ oracle.wide(x)) < 1e-4
    if not isinstance(getattr(built.op, "_grads", built.rows), torch.Tensor):
        with pytest.raises(ValueError, match="only rows in memory can change their dtype"):
            built.op.to(dtype=torch.float64)
        return
    moved = built.op.to(dtype=torch.float64)
    assert moved.diagonal().dtype == moved.dtype == torch.float64
    assert oracle.error(moved @ x.double(), truth(built)[0] @ oracle.wide(x)) < 1e-10


def test_elements_take_every_form_of_index(built):
    dense = built.op.to_dense()
    i, j = torch.randint(0, 40, (2, 3, 5))
    assert torch.allclose(built.op[i, j], dense[i, j], atol=1e-4)
    assert built.op[i, j].shape == (3, 5)
    assert built.op[2, 3].shape == ()
    assert torch.allclose(built.op[-1, -2], dense[-1, -2], atol=1e-4)
    assert built.op[torch.empty(0, dtype=torch.int64), []].shape == (0,)


def test_keeps_dtype_device_and_arguments(built):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(40, 2).to(dtype)
        before = x.clone()
        for answer in (built.op @ x, built.op @ x[:, 0], built.op.quadratic_form(x)):
            assert (answer.dtype, answer.device) == (dtype, x.device)
        assert torch.equal(x, before)
    assert built.op.shape == (40, 40)
    assert built.op.dtype == built.op.diagonal().dtype == built.op[0, 0].dtype == torch.float32
    assert built.op.device == torch.device("cpu")


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("build", OPERATORS.values(), ids=OPERATORS.keys())
def test_modes_of_torch_change_no_answer(build, mode, tmp_path):
    rows, x = mixed(12, 40, 3.0), torch.randn(40, 3)
    with mode():
        built = build(rows, 1e-2, tmp_path)
    for damping, inside in ((1e-2, nullcontext), (0.5, mode), (0.1, nullcontext)):
        with inside():
            built.op.damping = damping
            found = built.op @ x, built.op[3, 3], built.op.quadratic_form(x), built.op.diagonal(), built.op.solve(x)
        dense = truth(built)[0]
        product, solved = dense @ oracle.wide(x), np.linalg.inv(dense.astype(float)) @ x.double().numpy()
        exact = product, dense[3, 3], (oracle.wide(x) * product).sum(0), np.diag(dense), solved
        for answer, expected in zip(found, exact, strict=True):
            assert oracle.error(answer, expected) < 1e-4


@pytest.mark.parametrize("damping", [1e-6, 3.0])
def test_damping_can_be_changed(built, damping):
    if damping < 1e-4 and getattr(built.op, "_blocks", None) and getattr(built.op._blocks[0], "_whitened", False):
        with pytest.raises(ValueError, match=r"needs more digits .* with overwrite=False"):
            built.op.damping = damping
        damping = 1e-2
    x = torch.randn(40)
    built.op.damping = 1e8  # far away, where only x/λ is left, and back
    assert torch.allclose(built.op @ x, x / 1e8, rtol=1e-6, atol=0)
    built.op.damping = damping
    dense, logdet = truth(built, damping)
    assert built.op.damping == damping
    assert oracle.error(built.op @ x, dense @ oracle.wide(x)) < 1e-4
    assert oracle.worst(built.op.diagonal(), np.diag(dense)) < 1e-4
    assert float(built.op.logdet()) == pytest.approx(float(logdet))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_survives_being_copied(built, copied):
    other, x = copied(built.op), torch.randn(40)
    assert torch.equal(other @ x, built.op @ x)
    assert torch.equal(other.diagonal(), built.op.diagonal())
    other.damping = 0.5  # the copy has state of its own
    assert built.op.damping == 1e-2
    assert oracle.error(built.op @ x, truth(built)[0] @ oracle.wide(x)) < 1e-5
