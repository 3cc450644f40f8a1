"""Influence functions: by how much losses would change if training samples were left out, from F⁻¹ exactly."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mfac import products, woodbury
from mfac.dual import DualBlocks
from mfac.gradient_file import GradientFile
from mfac.inverse_fisher import InverseFisher, unrecorded
from mfac.precision import check_dense
from mfac.static import StaticInverseFisher

Rows = Tensor | GradientFile | Iterable[Tensor]
Product = Callable[[Tensor], Tensor]
BLOCK = 1 << 24  # numbers in the rows that are worked on at once
RESIDUAL = 1e-2  # beside a test gradient, at which conjugate gradients end


@unrecorded
def influence(
    op: InverseFisher, test_grads: Rows, train_grads: Rows | None = None, *, leverage: bool = False,
    num_samples: int | None = None, hessian: Product | None = None, steps: int = 32,
) -> Float[Tensor, "tests train"]:  # fmt: skip
    """The change of each test loss if a training sample were left out: g_testᵀ F⁻¹ g_train / N, to first order.

    The unit is that of the loss. Positive: without the sample the test loss is higher, so the sample helps; negative:
    it harms. The model is taken to minimize the mean loss of N samples plus ½λ‖θ‖², and F to be the Hessian of that.

    If F is only near the Hessian H, as for networks with hidden layers, give `hessian`: H⁻¹ then takes the place of
    F⁻¹, by conjugate gradients preconditioned by F⁻¹. Where H is not positive definite, a test gradient keeps what the
    steps of positive curvature made of it, in the worst case F⁻¹ g_test.

    With `leverage=True` sample i is divided by 1 − h_i, h = `leverages(op)`: F without row i then takes the place of F.
    If the losses are quadratic and the rows of `op` are their Gauss-Newton rows, this is the change of θ that training
    without the sample makes, exactly; see docs/influence.md.

    Args:
        op: F⁻¹; its rows need not be the gradients of the labels, nor cover all training samples.
        test_grads: gradients of test losses (or outputs) [tests, d]: a tensor, a `GradientFile`, or an iterable of
            tensors [d] or [k, d].
        train_grads: gradients of training losses [train, d], likewise; read in blocks of rows, so they may be larger
            than the memory. None: the rows of `op`.
        leverage: exact leave-one-out instead of the first order in 1/N; training row i must belong to row i of `op`.
        num_samples: N; None: the number of training rows given.
        hessian: X [d, k] -> H X, in float64; `hessian_product` makes it. None: F is the Hessian.
        steps: of conjugate gradients at most, each one call of `hessian`; they end where the residual is 1% of g_test.

    Returns:
        A matrix [tests, train] in float64.

    Raises:
        ValueError: rows that do not fit the operator, are not finite, or are none at all; or an argument that is not
            what it should be.
    """
    train = op._held_rows()[0] if train_grads is None else train_grads
    if num_samples is not None and not (isinstance(num_samples, int) and num_samples > 0):
        raise ValueError(f"num_samples must be the size of the training set, a positive int, not {num_samples!r}")
    if not (isinstance(steps, int) and steps >= 0):
        raise ValueError(f"steps must be how many steps of conjugate gradients to take, an int, not {steps!r}")
    rest = _leverages(op)[1] if leverage else None
    tests = _blocks(op, test_grads, "test_grads")
    if not isinstance(train, Tensor | GradientFile):  # can be read once only
        tests = iter([torch.cat(list(tests))])
    values = torch.cat([_products(op, _solved(op, block.T, hessian, steps), train) for block in tests])
    count = values.shape[1]
    if rest is not None and len(rest) != count:
        raise ValueError(
            f"leverage=True needs a row of the operator for each training sample; it has {len(rest)} rows, and "
            f"train_grads {count}"
        )
    return values.div_(num_samples or count) if rest is None else values.div_(rest * (num_samples or count))


@unrecorded
def leverages(op: InverseFisher) -> Float[Tensor, " m"]:
    """h_i = g_iᵀ F⁻¹ g_i / m of every row g_i of the operator, between 0 and 1, in float64.

    Equal to [K S⁻¹]_ii, with K = G Gᵀ and S = mλI + K; their sum is the effective number of parameters. A window's rows
    are in the order of its slots.

    Raises:
        ValueError: the operator keeps blocks only, or no rows.
    """
    return _leverages(op)[0]


@unrecorded
def leave_out(op: InverseFisher, rows: int | Sequence[int] | Int[Tensor, " n"]) -> StaticInverseFisher:
    """F⁻¹ without some rows, exactly: the inverse of F − (1/m) Σ g gᵀ over them.

    Damping and divisor stay the same, as in a sum of losses from which terms are taken while the penalty is kept. In a
    quadratic problem θ moves by `leave_out(op, rows) @ train_grads[rows].sum(0) / N`. One set-up of the operator.

    Raises:
        ValueError: the operator keeps no rows.
        IndexError: a row that it does not have.
    """
    held, weights = op._held_rows()
    chosen = torch.as_tensor(rows, device=weights.device).reshape(-1)
    if len(chosen) and (chosen.is_floating_point() or chosen.is_complex() or chosen.dtype == torch.bool):
        raise IndexError(f"rows must be ints, not {chosen.dtype}; of a mask take mask.nonzero()")
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(weights):
        raise IndexError(f"rows must lie in 0 .. {len(weights) - 1}, not {chosen.tolist()}")
    weights[chosen.long()] = 0
    if isinstance(op, StaticInverseFisher):
        return op._again(held, row_weights=weights)
    return StaticInverseFisher(held, op.damping, row_weights=weights, process_group=op._ranks.group)


def _leverages(op: InverseFisher) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """h and 1 − h; the second is positive, however close to 1 the first may be."""
    block = op._whole()
    if isinstance(block, DualBlocks):
        return block.leverages()
    rows, weights = op._held_rows()
    parts = [(op.quadratic_form(g.T), g.square().sum(1)) for g in _blocks(op, rows, "the operator's rows")]
    h, bound = (torch.cat(part) * weights for part in zip(*parts, strict=True))
    # F ⪰ λI + c g gᵀ bounds h: rounding must not carry it beyond.
    return h.minimum(bound / (op.damping + bound)), (1 - h).maximum(op.damping / (op.damping + bound))


def _solved(op: InverseFisher, right: Float[Tensor, "d t"], hessian: Product | None, steps: int) -> Tensor:
    """F⁻¹ right, or H⁻¹ right column by column."""
    if hessian is None:
        return op @ right

    def product(x: Tensor) -> Tensor:
        result = hessian(x)
        if not isinstance(result, Tensor) or result.shape != x.shape:
            kind = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"hessian must return H X for X of shape {list(x.shape)}, in that shape, not {kind}")
        return result.to(x)

    def dot(a: Tensor, b: Tensor) -> Float[Tensor, " t"]:
        return op._ranks.sum_((a * b).sum(0))

    return woodbury.conjugate_gradients(product, op.__matmul__, right, steps, RESIDUAL, dot)


def _products(op: InverseFisher, solved: Float[Tensor, "d t"], train: Rows) -> Float[Tensor, "t n"]:
    """`solved`ᵀ g_train, over all ranks, in float64: for rows in the span of G nearly all of F⁻¹x cancels."""
    found = [op._ranks.sum_(products.project(g, solved, torch.float64)) for g in _blocks(op, train, "train_grads")]
    values = torch.cat(found).T.contiguous()
    if not bool(values.isfinite().all()):
        bad = (~values.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"test gradient {bad[0]} or training gradient {bad[1]} is not finite; leave it out")
    return values


def _blocks(op: InverseFisher, rows: Rows, name: str) -> Iterator[Float[Tensor, "k d"]]:
    """The rows in float64, on the operator's device, some at a time; at least one block."""
    step, empty = max(1, BLOCK // op.shape[0]), True
    if isinstance(rows, GradientFile):
        parts: Iterable[Tensor] = (rows.read_rows(i, min(i + step, rows.rows)) for i in range(0, rows.rows, step))
    else:
        parts = [rows] if isinstance(rows, Tensor) else rows
    for part in parts:
        check_dense(name, part)
        if part.shape[-1:] != op.shape[:1]:
            raise ValueError(f"{name} must be rows [k, {op.shape[0]}], as the operator's are, not {list(part.shape)}")
        for piece in part.detach().reshape(-1, op.shape[0]).split(step):
            yield piece.to(op.device, torch.float64)
            empty &= not len(piece)
    if empty:
        raise ValueError(f"{name} holds no rows; give at least one")
