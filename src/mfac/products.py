"""Products with the m x d matrix G: the only place where time and memory grow with d.

G stays as it is stored. Where the arithmetic is in another dtype, tiles of G are converted one at a time, small enough
to stay in cache, so that a pass still reads G from memory once and allocates nothing of its size. Every sum that ends
in an m-vector or an m x m matrix leaves in float64.
"""

import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

P = ParamSpec("P")
Value = TypeVar("Value")

AUTOCAST = ("cpu", "cuda", "xpu")
SHORT_ROW = 1 << 14  # up to here float32 is as good for a sum of squares as it is for products
TILE = 1 << 20  # numbers in a tile: 8 MiB in float64
TILE_COLUMNS = 1 << 16  # long enough to read memory in order, short enough for many rows
GRAM_COLUMNS = 1 << 11  # what is summed in one piece: long enough for speed, short enough for float32
GRAM_NUMBERS = 1 << 17  # of fewer rows in float64 more columns: a call takes as long as 16 rows of 1024
# A whitened tile should still be in cache when it is squared: of many rows fewer columns.
WHITEN_COLUMNS, WHITEN_NUMBERS = 1 << 9, 1 << 17
# Row blocks of symmetric and triangular products, whose upper halves are never computed.
ROW_BLOCKS, LEAST_ROWS = 4, 64

Whitened = Callable[[Int[Tensor, " k"], Int[Tensor, "k q"]], Float[Tensor, "k r q"]]


def without_autocast(function: Callable[P, Value]) -> Callable[P, Value]:
    """Products in the dtype that is asked for, where autocast would make them in a smaller one."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Value:
        for device in AUTOCAST:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    return called(*args, **kwargs)
        return function(*args, **kwargs)

    return called


@without_autocast
def project(G: Float[Tensor, "*blocks m d"], x: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """G x, computed in `dtype` from G as stored, returned in float64."""
    x = x if x.dtype == dtype else x.to(dtype)  # `to` takes time even when it has nothing to do
    if G.ndim == 3:
        if len(G) == 1:
            return project(G[0], x[0], dtype)[None]
        if x.ndim == 2:  # bmm with a vector each would take three times as long, and fifty times for Gᵀa
            return (G.to(dtype).transpose(0, 1) * x).sum(-1).T.double()
        return torch.bmm(G.to(dtype), x).double()
    if G.dtype == dtype:
        return (G @ x).double()
    out = torch.zeros(G.shape[0], *x.shape[1:], dtype=torch.float64, device=G.device)
    for rows, columns, tile in tiles(G, dtype):
        out[rows] += tile @ x[columns]
    return out


@without_autocast
def combine(G: Float[Tensor, "*blocks m d"], a: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """Gᵀ a, computed and returned in `dtype`, from G as stored."""
    a = a.to(dtype)
    if G.ndim == 3:
        if len(G) == 1:
            return combine(G[0], a[0], dtype)[None]
        if a.ndim == 2:
            return (G.to(dtype).transpose(0, 1) * a.T[..., None]).sum(0)
        return torch.bmm(G.to(dtype).transpose(1, 2), a)
    if G.dtype == dtype:
        return G.T @ a
    out = torch.zeros(G.shape[1], *a.shape[1:], dtype=dtype, device=G.device)
    into = torch.addmv if a.ndim == 1 else torch.addmm
    for rows, columns, tile in tiles(G, dtype):
        into(out[columns], tile.T, a[rows], out=out[columns])
    return out


@without_autocast
def gram(G: Float[Tensor, "*blocks m d"], dtype: torch.dtype) -> Float[Tensor, "*blocks m m"]:
    """G Gᵀ, computed in `dtype`, summed and returned in float64; for large m half of it, mirrored."""
    if G.ndim == 3 and len(G) > 1:
        G = G.to(dtype)
        return torch.bmm(G, G.transpose(1, 2)).double()
    if G.ndim == 3:
        return gram(G[0], dtype)[None]
    m = G.shape[0]
    K = torch.zeros(m, m, dtype=torch.float64, device=G.device)
    part = torch.zeros(m, m, dtype=dtype, device=G.device)
    for columns in G.split(GRAM_COLUMNS if dtype == torch.float32 else max(GRAM_COLUMNS, GRAM_NUMBERS // m), dim=1):
        piece = columns.to(dtype)
        for rows in _row_blocks(m):
            torch.mm(piece[rows], piece[: rows.stop].T, out=part[rows, : rows.stop])
        K += part.double()  # converted first: adding two dtypes takes several times as long
    return K.tril() + K.tril(-1).T


@without_autocast
def squares(
    L: Float[Tensor, "*blocks m m"], X: Float[Tensor, "*blocks m d"], weights: Float[Tensor, "*blocks r m"],
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "*blocks d"], Float[Tensor, "*blocks r d"]]:  # fmt: skip
    """Column sums of (L X)² for a lower triangular L, and of X² with r weights for each row; L X is never kept."""
    if X.ndim == 3 and len(X) > 1:
        X = X.to(dtype)
        of_product = torch.bmm(L.to(dtype), X).square_().sum(-2).double()
        return of_product, torch.bmm(weights.to(dtype), X.square()).double()
    if X.ndim == 3:
        product, plain = squares(L[0], X[0], weights[0], dtype)
        return product[None], plain[None]
    L, weights, (m, d) = L.to(dtype), weights.to(dtype), X.shape
    of_product, of_X = (torch.empty(*r, d, dtype=torch.float64, device=X.device) for r in ((), (len(weights),)))
    width = max(1, min(d, max(WHITEN_COLUMNS, WHITEN_NUMBERS // m), TILE // m))
    held, made = torch.empty(2, m * width, dtype=dtype, device=X.device)
    for columns in spans(d, width):
        tile = held[: X[:, columns].numel()].view(m, -1).copy_(X[:, columns])
        LX = made[: tile.numel()].view_as(tile)
        for rows in _row_blocks(m):
            torch.mm(L[rows, : rows.stop], tile[: rows.stop], out=LX[rows])
        of_product[columns] = LX.square_().sum(0)
        of_X[:, columns] = weights @ tile.square_()
    return of_product, of_X


@without_autocast
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
        for rows in reversed(_row_blocks(len(G))):
            columns[rows] = Linv[rows, : rows.stop] @ columns[: rows.stop].to(dtype)
    return G


def pair_products(
    rows: Int[Tensor, " n"], columns: Int[Tensor, " n"], length: int, step: int, whitened: Whitened
) -> Float[Tensor, " n"]:
    """W_i · W_j for i in `rows` and j in `columns`, with blocks of `length` columns; zero between blocks.

    `whitened` makes columns of W from (blocks, columns of each block), once for `step` pairs.
    """
    out = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    same = (rows // length == columns // length).nonzero()[:, 0]
    same = same[rows[same].argsort(stable=True)]
    for chosen in same.split(step) if len(same) else ():
        wanted, where = torch.stack((rows[chosen], columns[chosen])).unique(return_inverse=True)
        blocks, table, row, place = grouped(wanted // length, wanted % length)
        W = whitened(blocks, torch.where(table < 0, table[:, :1], table))[row, :, place]
        out[chosen] = (W[where[0]] * W[where[1]]).sum(-1)
    return out


def grouped(
    keys: Int[Tensor, " n"], values: Int[Tensor, " n"]
) -> tuple[Int[Tensor, " k"], Int[Tensor, "k q"], Int[Tensor, " n"], Int[Tensor, " n"]]:
    """The values of each distinct key: (keys, table padded with −1, row of each value in it, place in that row)."""
    distinct, row, lengths = torch.unique(keys, return_inverse=True, return_counts=True)
    order, place = row.argsort(stable=True), torch.empty_like(row)
    place[order] = torch.arange(len(row), device=row.device) - (lengths.cumsum(0) - lengths)[row[order]]
    table = values.new_full((len(distinct), int(lengths.max())), -1)
    table[row, place] = values
    return distinct, table, row, place


def in_groups(
    ids: Int[Tensor, " n"], length: int, count: int, rows: int, numbers: int
) -> Iterator[tuple[Int[Tensor, " k"], Int[Tensor, " k"], Int[Tensor, "k q"]]]:
    """(block, group, places) of what each of `count` groups has in each block of `length` places; padded with −1.

    As many at once as leave `numbers` in matrices of so many `rows` and at least as many columns as places.
    """
    if len(ids):
        places = torch.arange(len(ids), device=ids.device)
        keys, table, _, _ = grouped(places // length * count + ids, places)
        step = max(1, numbers // (rows * max(rows, table.shape[1])))
        for key, chosen in zip(keys.split(step), table.split(step), strict=True):
            yield key // count, key % count, chosen


def kept(G: Float[Tensor, "blocks m n"], removed: Bool[Tensor, "blocks n"]) -> Float[Tensor, "blocks m kept"]:
    """The columns that are not removed; of several blocks, zeros in the place of those that are."""
    return G[:, :, ~removed[0]] if len(G) == 1 else torch.where(removed[:, None], 0.0, G)


def tiles(G: Tensor, dtype: torch.dtype, widest: int = TILE_COLUMNS) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows, columns and numbers of tiles of G [m, d] in `dtype`, one after the other in the same memory."""
    (m, d), width = G.shape, min(G.shape[1], widest)
    height = max(1, min(m, TILE // max(width, 1)))
    buffer = torch.empty(height * width, dtype=dtype, device=G.device)
    for columns in spans(d, width):
        for rows in spans(m, height):
            source = G[rows, columns]
            yield rows, columns, buffer[: source.numel()].view_as(source).copy_(source)


def spans(stop: int, step: int) -> list[slice]:
    """0 to `stop` - 1 in slices of `step`; the last one may be shorter."""
    return [slice(start, min(start + step, stop)) for start in range(0, stop, step)]


def _row_blocks(m: int) -> list[slice]:
    return spans(m, max(LEAST_ROWS, m // ROW_BLOCKS))


def squared_norm(row: Float[Tensor, " d"], dtype: torch.dtype) -> Float[Tensor, ""]:
    """In float64; for a short row as the products with other rows, which loses no more."""
    if row.dtype == dtype == torch.float32 and len(row) <= SHORT_ROW:
        return torch.dot(row, row)
    return torch.linalg.vector_norm(row, dtype=torch.float64).square()
