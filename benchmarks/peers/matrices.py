"""The gradients that every contender is given, and the truth about them in float64."""

import sys
from pathlib import Path

import torch

import mfac

DAMPING = 1e-5
COMMON = 4  # directions that all gradients share, each half as strong as the one before
SHARE = 0.5  # of the square of a gradient's norm, in these directions
SAMPLED = 256  # entries of the diagonal that are compared
SHIFT = 17  # columns between the directions that two neighbours have for themselves
TILE = 1 << 23
GGT_EPS = 1e-2
LARGEST_EIGH = 1024  # beyond, a decomposition in float64 takes minutes


def fill_rows(G):
    """Gradients of norm 1 (within a hundredth) into [m, d]: half in common directions, half in one of its own each.

    Real gradients of one model share directions too: with independent ones every iteration would converge at once.
    The directions of their own are one random vector, shifted: as good as drawn anew, and made at the speed of memory.
    """
    m, d = G.shape
    base, common = _directions(d, SHIFT * m)
    own, amounts = base.as_strided((m, d), (SHIFT, 1)), _amounts(m, 0)
    for some in torch.arange(m).split(max(1, TILE // d)):  # addmm makes copies, and there is no room for all of them
        few = slice(int(some[0]), int(some[-1]) + 1)
        G[few] = torch.addmm(own[few], amounts[few], common, beta=(1 - SHARE) ** 0.5)


def _directions(d, more=0):
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(COMMON, d, generator=generator) / d**0.5
    return torch.randn(d + more, generator=generator) / d**0.5, common


def _amounts(m, seed):
    amounts = torch.randn(m, COMMON, generator=torch.Generator().manual_seed(seed)) * 0.5 ** torch.arange(COMMON)
    return amounts / amounts.norm(dim=1, keepdim=True) * SHARE**0.5


def rows(m, d):
    G = torch.empty(m, d)
    fill_rows(G)
    return G


def real_rows(m):
    """What they are of, and gradients of batches: ResNet20 on CIFAR-10 where the data is at hand, else digits."""
    sys.path.insert(0, str(Path(__file__).parents[2]))  # of a script, the folder of experiments is not on the path
    torch.manual_seed(0)
    try:
        from experiments.data import HALVES, cifar_batches
        from experiments.models.resnet import mfac_resnet20

        name, model, batches = "ResNet20", mfac_resnet20(), cifar_batches(16, HALVES, seed=0)
    except (ImportError, FileNotFoundError):
        from mfac.app.tasks import digits

        name, model, batches = "digits", digits.model(), digits.train_batches()
    return name, mfac.collect_gradients(model, mfac.criterion_loss(torch.nn.CrossEntropyLoss()), batches, m, cycle=True)


def vector(d):
    """What F⁻¹ is applied to: one more such gradient, which is not among the rows."""
    own = torch.randn(d, generator=torch.Generator().manual_seed(1))
    return (1 - SHARE) ** 0.5 * own / own.norm() + (_amounts(1, 1) @ _directions(d)[1])[0]


def sampled_columns(d):
    return torch.randperm(d, generator=torch.Generator().manual_seed(2))[:SAMPLED]


def tiles64(G):
    """G in float64, some columns at a time."""
    return (tile.double() for tile in G.split(max(1, TILE // len(G)), dim=-1))


def gram64(G):
    return sum(tile @ tile.T for tile in tiles64(G))


def combine64(G, a):
    return torch.cat([a @ tile for tile in tiles64(G)])


def project64(G, x):
    parts = x.double().split(max(1, TILE // len(G)))
    return sum(tile @ part for tile, part in zip(tiles64(G), parts, strict=True))


def truth(m, d):
    """By the dual in float64: K, F⁻¹x, F⁻¹g of the first row, some of the diagonal, and GGT's own step."""
    G, x, columns = rows(m, d), vector(d), sampled_columns(d)
    K = gram64(G)
    L = torch.linalg.cholesky(K + m * DAMPING * torch.eye(m, dtype=torch.float64))
    unit = torch.eye(m, 1, dtype=torch.float64)
    solved = torch.cholesky_solve(torch.stack((project64(G, x), unit[:, 0]), 1), L)
    whitened = torch.linalg.solve_triangular(L, G[:, columns].double(), upper=False)
    return {
        "K": K,
        "product": (x.double() - combine64(G, solved[:, 0])) / DAMPING,
        "step": m * combine64(G, solved[:, 1]),
        "diagonal": (1 - whitened.square().sum(0)) / DAMPING,
        **({"ggt": combine64(G, _ggt_coefficients(K / m))} if m <= LARGEST_EIGH else {}),
    }


def _ggt_coefficients(K):
    squares, V = torch.linalg.eigh(K)
    return V @ (V[0] / (squares.clamp_min(0).sqrt() + GGT_EPS))


def save_truth(folder, m, d):
    torch.save(truth(m, d), _path(folder, m, d))


def load_truth(folder, m, d):
    """None where it was too much to compute."""
    path = _path(folder, m, d)
    return torch.load(path, weights_only=True, mmap=True) if path.exists() else None


def _path(folder, m, d):
    return Path(folder) / f"truth_{d}_{m}.pt"


def error(answer, true):
    """‖answer − truth‖ / ‖truth‖."""
    return float((answer.double() - true).norm() / true.norm())


def worst(answer, true):
    """The largest relative error of an entry."""
    return float(((answer.double() - true) / true).abs().max())
