"""What the operators do, shown on real gradients: a small network on scikit-learn's handwritten digits."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mfac import reference
from mfac.dynamic import DynamicInverseFisher
from mfac.gradients import collect_gradients
from mfac.static import StaticInverseFisher

DAMPING = 1e-5
NUM_GRADS = 256


@dataclass
class Line:
    """One line of the table: the relative errors of our answer and of the paper's, and the seconds of each."""

    name: str
    error: float
    paper_error: float
    ours: float
    paper: float
    dense: float


def run(folder: Path) -> Iterator[str]:
    """Trains, collects gradients, compares with the dense inverse and with the paper, plots; says what it finds."""
    torch.manual_seed(0)
    images, labels = _digits()
    model = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
    accuracy = _train(model, images, labels)
    weights = sum(p.numel() for p in model.parameters())
    yield f"A network of {weights:,} weights on {len(images):,} handwritten digits: {accuracy:.1%} right."

    loss = nn.CrossEntropyLoss()
    start = time.perf_counter()
    batches = zip(images.split(64), labels.split(64), strict=True)
    G = collect_gradients(
        model, lambda model, batch: loss(model(batch[0]), batch[1]), batches, NUM_GRADS, per_sample=True, progress=False
    )
    yield (
        f"Its gradients on {NUM_GRADS} of them: G is {list(G.shape)}, collected in {time.perf_counter() - start:.2f} s."
    )

    dense, dense_seconds = _timed(lambda: _dense_inverse(G, DAMPING), times=1)
    lines = [*_static_lines(G, dense, dense_seconds), *_dynamic_lines(G, dense, dense_seconds)]
    yield _table(lines)
    path = folder / "operators.png"
    _plot(lines, _errors_by_damping(G), path)
    yield f"\nThe plot: {path.resolve()}"


def _digits() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("mfac demo needs scikit-learn and matplotlib: pip install 'torch-mfac[demo]'")
    data: Any = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def _train(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """A few epochs on four fifths of the data; the accuracy on the rest."""
    order = torch.randperm(len(images))
    held, train = order[::5], order[torch.arange(len(order)) % 5 != 0]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(15):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(images[held]).argmax(1) == labels[held]).double().mean())


def _dense_inverse(G: Tensor, damping: float) -> Tensor:
    """F⁻¹ as a d x d matrix in float64: what everything is compared with, and what nobody can afford for long."""
    exact = G.double()
    F = exact.T @ exact / len(G)
    F.diagonal().add_(damping)
    return torch.cholesky_inverse(torch.linalg.cholesky(F))


def _errors_by_damping(G: Tensor) -> list[tuple[float, float, float]]:
    """(damping, our error, the paper's error) of F⁻¹x for a sum of gradients, where float32 is put to the test."""
    x, errors = G.T @ torch.randn(len(G)), []
    for damping in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7):
        truth = _dense_inverse(G, damping) @ x.double()
        literal = reference.static_multiply(*reference.static_setup(G, damping), x, damping)
        errors.append((damping, _error(StaticInverseFisher(G, damping) @ x, truth), _error(literal, truth)))
    return errors


def _static_lines(G: Tensor, dense: Tensor, dense_seconds: float) -> list[Line]:
    x, in_span = torch.randn(G.shape[1]), G.T @ torch.randn(len(G))
    op, ours = _timed(lambda: StaticInverseFisher(G, DAMPING))
    (V, q), paper = _timed(lambda: reference.static_setup(G, DAMPING))
    lines = []
    for name, vector in (("F⁻¹x, x random", x), ("F⁻¹x, x a sum of gradients", in_span)):
        truth, literal = dense @ vector.double(), reference.static_multiply(V, q, vector, DAMPING)
        lines.append(Line(name, _error(op @ vector, truth), _error(literal, truth), ours, paper, dense_seconds))
    diagonal, ours = _timed(lambda: StaticInverseFisher(G, DAMPING).diagonal())
    literal, more = _timed(lambda: reference.static_diagonal(V, q, DAMPING))
    truth = dense.diagonal()
    errors = _error(diagonal, truth), _error(literal, truth)
    return [*lines, Line("diagonal of F⁻¹", *errors, ours, paper + more, dense_seconds)]


def _dynamic_lines(G: Tensor, dense: Tensor, dense_seconds: float) -> list[Line]:
    """The optimizer's step: the window is full, a gradient comes, F⁻¹ times it is wanted."""
    op = DynamicInverseFisher(len(G), G.shape[1], DAMPING)
    for g in G:
        op.update(g)
    laps = iter(range(len(G)))
    op.update_and_apply(G[next(laps)])
    step, ours = _timed(lambda: op.update_and_apply(G[next(laps)]))
    g = G[next(laps) - 1]

    def literal() -> Tensor:
        D, B = reference.dynamic_setup(G @ G.T, DAMPING)
        return reference.dynamic_multiply(G, g, D, B, DAMPING)

    theirs, paper = _timed(literal)
    truth = dense @ g.double()
    return [
        Line("one step of a sliding window", _error(step, truth), _error(theirs, truth), ours, paper, dense_seconds)
    ]


def _timed(call: Callable[[], Any], times: int = 3) -> tuple[Any, float]:
    best = float("inf")
    for _ in range(times):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
    return result, best


def _error(answer: Tensor, truth: Tensor) -> float:
    return float((answer.double() - truth).norm() / truth.norm())


def _table(lines: list[Line]) -> str:
    rows = [f"\nIn float32, set-up included:{'error':>24}{'(paper)':>10}{'time':>12}{'(paper)':>12}{'(dense)':>12}"]
    for line in lines:
        errors = f"{line.error:>12.0e}{line.paper_error:>10.0e}"
        times = "".join(f"{1e3 * value:>9.1f} ms" for value in (line.ours, line.paper, line.dense))
        rows.append(f"{line.name:<40}{errors}{times}")
    rows.append("Errors are relative, against the dense inverse in float64; (paper) is its literal algorithm.")
    return "\n".join(rows)


def _plot(lines: list[Line], errors: list[tuple[float, float, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.2), layout="constrained")
    dampings, ours, paper = zip(*errors, strict=True)
    left.loglog(dampings, paper, "s--", color="tab:orange", label="the paper's algorithm")
    left.loglog(dampings, ours, "o-", color="tab:blue", label="mfac")
    left.axhline(1e-4, color="gray", linewidth=0.8, linestyle=":", label="what mfac promises")
    left.set(xlabel="damping λ", ylabel="relative error", title="Error of F⁻¹x in float32, x a sum of gradients")
    left.legend()
    places = torch.arange(len(lines)).double()
    for shift, hatch, name, label in (
        (-0.27, "", "ours", "mfac"),
        (0.0, "//", "paper", "the paper's algorithm"),
        (0.27, "..", "dense", "dense inverse"),
    ):
        values = [1e3 * getattr(line, name) for line in lines]
        right.barh(places + shift, values, 0.25, hatch=hatch, label=label, edgecolor="white")
    right.set_yticks(places, [line.name for line in lines])
    right.invert_yaxis()
    right.set(xscale="log", xlabel="milliseconds, set-up included", title="Time")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)
