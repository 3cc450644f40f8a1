"""Products with the m x d matrix G: the only place where time and memory grow with d.

G stays as it is stored. Where the arithmetic is in another dtype, tiles of G are converted one at a time, small enough
to stay in cache, so that a pass still reads G from memory once and allocates nothing of its size. Every sum that ends
in an m-vector or an m x m matrix leaves in float64.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

TILE = 1 << 20  # numbers in a converted tile: 8 MiB in float64
TILE_COLUMNS = 1 << 16  # long enough to read memory in order, short enough for many rows
GRAM_COLUMNS = 1 << 14  # a Gram matrix sums over its columns, and likes them long
WHITEN_COLUMNS = 1 << 12  # whitened columns go out again
LEAST_COLUMNS = 1 << 9  # of a tile that is whitened, and should not leave the cache before it is squared
# Row blocks of symmetric and triangular products, whose upper halves are never computed.
ROW_BLOCKS, LEAST_ROWS, WHITEN_ROWS = 4, 128, 256


def project(G: Float[Tensor, "*blocks m d"], x: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """G x, computed in `dtype` from G as stored, returned in float64."""
    x = x if x.dtype == dtype else x.to(dtype)  # asking `to` for nothing takes time too
    if G.ndim == 3:
        if len(G) == 1:
            return project(G[0], x[0], dtype)[None]
        return _batched(G.to(dtype), x).double()
    if G.dtype == dtype:
        return (G @ x).double()
    out = torch.zeros(G.shape[0], *x.shape[1:], dtype=torch.float64, device=G.device)
    for rows, columns, tile in _tiles(G, dtype):
        out[rows] += tile @ x[columns]
    return out


def combine(G: Float[Tensor, "*blocks m d"], a: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Gᵀ a, computed and returned in `dtype`, from G as stored."""
    a = a.to(dtype)
    if G.ndim == 3:
        if len(G) == 1:
            return combine(G[0], a[0], dtype)[None]
        return _batched(G.to(dtype).transpose(1, 2), a)
    if G.dtype == dtype:
        return G.T @ a
    out = torch.zeros(G.shape[1], *a.shape[1:], dtype=dtype, device=G.device)
    into = torch.addmv if a.ndim == 1 else torch.addmm
    for rows, columns, tile in _tiles(G, dtype):
        into(out[columns], tile.T, a[rows], out=out[columns])
    return out


def gram(G: Float[Tensor, "*blocks m d"], dtype: torch.dtype) -> Float[Tensor, "*blocks m m"]:
    """G Gᵀ, computed in `dtype`, summed and returned in float64; half of it, mirrored, where m is large."""
    if G.ndim == 3 and len(G) > 1:
        G = G.to(dtype)
        return torch.bmm(G, G.transpose(1, 2)).double()
    if G.ndim == 3:
        return gram(G[0], dtype)[None]
    m = G.shape[0]
    K = torch.zeros(m, m, dtype=torch.float64, device=G.device)
    part = torch.zeros(m, m, dtype=dtype, device=G.device)
    for columns in G.split(GRAM_COLUMNS, dim=1):
        piece = columns.to(dtype)
        for rows in _row_blocks(m, max(LEAST_ROWS, m // ROW_BLOCKS)):
            torch.mm(piece[rows], piece[: rows.stop].T, out=part[rows, : rows.stop])
        K += part
    return K.tril() + K.tril(-1).T


def whitened_squares(
    Linv: Float[Tensor, "*blocks m m"], G: Float[Tensor, "*blocks m d"], dtype: torch.dtype
) -> Float[Tensor, "*blocks d"]:
    """Column sums of W², W = L⁻¹ G: W is made a tile at a time and not kept."""
    if G.ndim == 3 and len(G) > 1:
        return torch.bmm(Linv.to(dtype), G.to(dtype)).square_().sum(-2).double()
    if G.ndim == 3:
        return whitened_squares(Linv[0], G[0], dtype)[None]
    Linv, (m, d) = Linv.to(dtype), G.shape
    total = torch.zeros(d, dtype=torch.float64, device=G.device)
    width = min(d, max(LEAST_COLUMNS, TILE // m))
    W = torch.empty(m * width, dtype=dtype, device=G.device)
    for columns, sums in zip(G.split(width, dim=1), total.split(width), strict=True):
        part = W[: columns.numel()].view_as(columns)
        _multiply_lower(Linv, columns.to(dtype), out=part)
        for rows in part.split(WHITEN_ROWS):
            sums += rows.square_().sum(0)
    return total


def whiten_(
    Linv: Float[Tensor, "*blocks m m"], G: Float[Tensor, "*blocks m d"], dtype: torch.dtype
) -> Float[Tensor, "*blocks m d"]:
    """G ← L⁻¹ G, in G's own memory."""
    if G.ndim == 3 and len(G) > 1:
        return G.copy_(torch.bmm(Linv.to(dtype), G.to(dtype)))
    if G.ndim == 3:
        return whiten_(Linv[0], G[0], dtype)[None]
    Linv = Linv.to(dtype)
    for columns in G.split(WHITEN_COLUMNS, dim=1):
        # From the last rows up: row block i needs only the rows before it, which are still those of G.
        for rows in reversed(list(_row_blocks(len(G), WHITEN_ROWS))):
            columns[rows] = Linv[rows, : rows.stop] @ columns[: rows.stop].to(dtype)
    return G


def column_squares(
    G: Float[Tensor, "*blocks m d"], weights: Float[Tensor, " m"] | None, dtype: torch.dtype
) -> Float[Tensor, "*blocks d"]:
    """Column sums of G², each row weighted; the diagonal of Gᵀ diag(weights) G, in float64."""
    total = torch.zeros(*G.shape[:-2], G.shape[-1], dtype=torch.float64, device=G.device)
    buffer = torch.empty(G[..., :WHITEN_COLUMNS].numel(), dtype=dtype, device=G.device)
    for columns, sums in zip(G.split(WHITEN_COLUMNS, dim=-1), total.split(WHITEN_COLUMNS, dim=-1), strict=True):
        squares = buffer[: columns.numel()].view(columns.shape).copy_(columns).square_()
        sums += squares.sum(-2) if weights is None else torch.einsum("...md,m->...d", squares, weights.to(dtype))
    return total


def _batched(A: Tensor, x: Tensor) -> Tensor:
    """A x for many matrices at once; x holds a vector or a matrix for each."""
    return torch.bmm(A, x[..., None])[..., 0] if x.ndim == 2 else torch.bmm(A, x)


def _tiles(G: Float[Tensor, "m d"], dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of G converted to `dtype`, one after the other in the same memory."""
    m, d = G.shape
    width = min(d, TILE_COLUMNS)
    height = max(1, min(m, TILE // max(width, 1)))
    buffer = torch.empty(height * width, dtype=dtype, device=G.device)
    for left in range(0, d, width):
        columns = slice(left, min(left + width, d))
        for top in range(0, m, height):
            rows = slice(top, min(top + height, m))
            source = G[rows, columns]
            yield rows, columns, buffer[: source.numel()].view_as(source).copy_(source)


def _multiply_lower(L: Float[Tensor, "m m"], X: Float[Tensor, "m d"], out: Float[Tensor, "m d"]) -> None:
    """L X for a lower triangular L, by halves: the upper right quarter is never touched."""
    m = len(L)
    if m <= LEAST_ROWS:
        torch.mm(L, X, out=out)
        return
    top, bottom = slice(0, m // 2), slice(m // 2, m)
    _multiply_lower(L[bottom, bottom], X[bottom], out[bottom])
    out[bottom].addmm_(L[bottom, top], X[top])
    _multiply_lower(L[top, top], X[top], out[top])


def _row_blocks(m: int, height: int) -> Iterator[slice]:
    return (slice(top, min(top + height, m)) for top in range(0, m, height))
