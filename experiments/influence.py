"""Influence against true retraining: leave-one-out, the linear datamodeling score and flipped labels.

    python -m experiments.influence run       # every task and method: half an hour on one core; needs dattri
    python -m experiments.influence table     # the table of docs/influence.md
    python -m experiments.influence picture   # docs/images/influence.png, from scikit-learn's digits

Networks minimize the mean cross-entropy plus ½λ‖θ‖² by L-BFGS in float64, and every method gets λ as its damping. Truth
is retraining: without a sample, from the trained weights on, for leave-one-out (Pearson's correlation over samples,
averaged over test images); on random halves, from the start, for the linear datamodeling score (Spearman's over halves,
likewise). With a tenth of the labels flipped, a sample is suspected by its influence on all test losses.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mfac
from experiments import drawing
from experiments.correlations import pearson, spearman
from experiments.datasets.images import load_mnist
from experiments.ledger import IMAGES, Ledger

COMMAND = "python -m experiments.influence run"
TESTS, LEFT_OUT, SUBSETS, FLIPPED, CLASSES = 50, 40, 50, 0.1, 10
FIGURES = ("leave-one-out", "LDS", "AUC", "seconds")
DAMPINGS = [1e-8, 1e-6, 1e-4, 1e-2, 1.0, 1e2]
LOSS = mfac.criterion_loss(nn.CrossEntropyLoss())


@dataclass(eq=False)  # by identity, for caches
class Task:
    """Training and test images [n, pixels] with labels, a network, and λ."""

    inputs: Tensor
    labels: Tensor
    tests: tuple[Tensor, Tensor]
    hidden: int
    damping: float

    def network(self) -> nn.Module:
        torch.manual_seed(0)
        pixels = self.inputs.shape[1]
        if not self.hidden:
            return nn.Sequential(nn.Linear(pixels, CLASSES)).double()
        layers = nn.Linear(pixels, self.hidden), nn.Tanh(), nn.Linear(self.hidden, CLASSES)
        return nn.Sequential(*layers).double()

    def fit(self, kept: Tensor | None = None, start: nn.Module | None = None, steps: int = 1500) -> nn.Module:
        """The minimum of (1/N) Σ loss over the kept samples + ½λ‖θ‖²; N is always the number of all samples."""
        model = self.network() if start is None else copy.deepcopy(start)
        chosen = slice(None) if kept is None else kept
        inputs, labels = self.inputs[chosen].double(), self.labels[chosen]
        params = list(model.parameters())
        optimizer = torch.optim.LBFGS(
            params, max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_grad=1e-9,
            tolerance_change=1e-13,
        )  # fmt: skip

        def objective() -> Tensor:
            optimizer.zero_grad()
            penalty = self.damping / 2 * sum((p.square().sum() for p in params), torch.zeros(()))
            loss = F.cross_entropy(model(inputs), labels, reduction="sum") / len(self.inputs) + penalty
            loss.backward()
            return loss

        optimizer.step(objective)
        return model

    @torch.no_grad()
    def test_losses(self, model: nn.Module) -> Tensor:
        return F.cross_entropy(model(self.tests[0].double()), self.tests[1], reduction="none")

    def flipped(self) -> tuple["Task", Tensor]:
        """The task with a tenth of its labels wrong, and which these are."""
        generator = torch.Generator().manual_seed(1)
        wrong = torch.rand(len(self.labels), generator=generator) < FLIPPED
        shift = torch.randint(1, CLASSES, (len(self.labels),), generator=generator)
        labels = torch.where(wrong, (self.labels + shift) % CLASSES, self.labels)
        return Task(self.inputs, labels, self.tests, self.hidden, self.damping), wrong


def digits(hidden: int, damping: float) -> Task:
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images, held_out = images.float() / 16, torch.arange(len(labels)) % 5 == 0
    return Task(
        images[~held_out], labels[~held_out], (images[held_out][:TESTS], labels[held_out][:TESTS]), hidden, damping
    )


def mnist(hidden: int, damping: float) -> Task:
    """5,000 + 50 images, averaged down to 7 x 7 pixels."""
    (inputs, labels), tests = (
        (F.avg_pool2d(x.float() / 255, 4).flatten(1), y.long()) for x, y in map(load_mnist, ("train", "test"))
    )
    return Task(inputs[:5000], labels[:5000], (tests[0][:TESTS], tests[1][:TESTS]), hidden, damping)


TASKS: dict[str, Callable[[], Task]] = {
    "digits, logistic regression": lambda: digits(0, 1e-3),
    "digits, MLP": lambda: digits(16, 1e-2),
    "MNIST 5,000, logistic regression": lambda: mnist(0, 1e-3),
}
Scores = Callable[[Task, nn.Module], Tensor]  # -> [tests, train], positive: the sample helps


def gradients(model: nn.Module, data: tuple[Tensor, Tensor], loss: Any = LOSS, **options: Any) -> Any:
    batches, count = list(zip(*(x.split(500) for x in data), strict=True)), options.pop("num_grads", len(data[0]))
    return mfac.collect_gradients(model, loss, batches, count, per_sample=True, progress=False, **options)


def class_loss(number: int) -> Callable[[nn.Module, Any], Tensor]:
    """v·z with v = √p_c (e_c − p): over all classes c, the sum of v vᵀ is the Hessian of the cross-entropy in z."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        z = model(batch[0])
        p = z.detach().softmax(-1)
        return (p[:, number, None].sqrt() * (F.one_hot(torch.tensor(number), CLASSES) - p) * z).sum()

    return loss


def operator(task: Task, model: nn.Module, rows: str | int, damping: float | None) -> mfac.StaticInverseFisher:
    """F⁻¹ of empirical rows, of so many random Gauss-Newton rows per sample, or of one for each class."""
    train, N, options = (task.inputs, task.labels), len(task.inputs), {}
    if rows == "classes":
        found = torch.cat([gradients(model, train, class_loss(number)) for number in range(CLASSES)])
        options = {"row_weights": torch.full((len(found),), 1 / N)}
    elif rows == "empirical":
        found = gradients(model, train)
    else:
        found = gradients(model, train, fisher="gauss-newton", num_grads=int(rows) * N, cycle=True)
    return mfac.StaticInverseFisher(found, task.damping if damping is None else damping, **options)


def by_mfac(
    task: Task, model: nn.Module, rows: str | int, leverage: bool = False, damping: float | None = None
) -> Tensor:
    op = operator(task, model, rows, damping)
    return mfac.influence(
        op, gradients(model, task.tests), gradients(model, (task.inputs, task.labels)), leverage=leverage
    )


def by_refinement(task: Task, model: nn.Module, steps: int = 8, damping: float | None = None) -> Tensor:
    """Conjugate gradients on the Hessian of the loss itself, preconditioned by F⁻¹."""
    damping = task.damping if damping is None else damping
    op, model = operator(task, model, 4, damping), copy.deepcopy(model).double()
    names, params = zip(*((name, p.detach()) for name, p in model.named_parameters()), strict=True)
    sizes, inputs = [p.numel() for p in params], task.inputs.double()

    def loss(flat: Tensor) -> Tensor:
        parts = [part.view_as(p) for part, p in zip(flat.split(sizes), params, strict=True)]
        return F.cross_entropy(functional_call(model, dict(zip(names, parts, strict=True)), inputs), task.labels)

    theta = torch.cat([p.flatten() for p in params])
    hessian = torch.func.vmap(lambda v: torch.func.jvp(torch.func.grad(loss), (theta,), (v,))[1], 1, 1, chunk_size=10)
    b = gradients(model, (task.tests[0].double(), task.tests[1])).T
    x, r = torch.zeros_like(b), b.clone()
    p = z = op @ r
    for _ in range(steps):
        Hp, old = hessian(p) + damping * p, (r * z).sum(0)
        x, r = x + p * (old / (p * Hp).sum(0)), r - Hp * (old / (p * Hp).sum(0))
        z = op @ r
        p = z + p * ((r * z).sum(0) / old)
    return x.T @ gradients(model, (inputs, task.labels)).T / len(inputs)


def by_dot_product(task: Task, model: nn.Module) -> Tensor:
    return gradients(model, task.tests) @ gradients(model, (task.inputs, task.labels)).T


@cache
def checkpoints(task: Task) -> list[nn.Module]:
    return [task.fit(steps=steps).float() for steps in (5, 10, 20, 40, 80)]


def by_tracin(task: Task, model: nn.Module) -> Tensor:
    """Dot products, summed over checkpoints of a training run."""
    return sum((by_dot_product(task, saved) for saved in checkpoints(task)), torch.zeros(()))


def by_dattri(task: Task, model: nn.Module, name: str, options: dict[str, Any], damping: float | None = None) -> Tensor:
    """An attributor of dattri, given the same network, damping and samples in one batch."""
    from dattri.algorithm import influence_function, trak
    from dattri.task import AttributionTask

    def loss(params: Any, data: Any) -> Tensor:
        inputs, labels = (
            part.unsqueeze(0) if part.ndim == rank else part for part, rank in zip(data, (1, 0), strict=True)
        )
        return F.cross_entropy(functional_call(model, params, inputs), labels.long())  # LiSSA makes floats of them

    work = AttributionTask(loss_func=loss, model=model, checkpoints=model.state_dict())
    strength, options = task.damping if damping is None else damping, dict(options)
    size = options.pop("loader", len(task.inputs))
    if name == "TRAK":
        attributor = trak.TRAKAttributor(
            work, lambda *given: torch.exp(-loss(*given)), regularization=strength, **options
        )
    else:
        key = "damping" if name in ("LiSSA", "EKFAC") else "regularization"
        attributor = getattr(influence_function, f"IFAttributor{name}")(work, **{key: strength}, **options)
    train = DataLoader(TensorDataset(task.inputs, task.labels), batch_size=size)
    tests = DataLoader(TensorDataset(*task.tests), batch_size=len(task.tests[0]))
    attributor.cache(train)
    return attributor.attribute(*([] if name == "TRAK" else [train]), test_dataloader=tests).T.detach()


METHODS: dict[str, Scores] = {
    "mfac, Gauss-Newton, a row for each class": partial(by_mfac, rows="classes"),
    "mfac, Gauss-Newton, 4 random rows": partial(by_mfac, rows=4),
    "mfac, Gauss-Newton, 1 random row, leverage": partial(by_mfac, rows=1, leverage=True),
    "mfac, empirical rows, leverage": partial(by_mfac, rows="empirical", leverage=True),
    "8 steps of CG on the Hessian, preconditioned by mfac": by_refinement,
    "gradient dot product": by_dot_product,
    "TracIn, five checkpoints": by_tracin,
    "dattri CG": partial(by_dattri, name="CG", options={"max_iter": 50}),
    "dattri LiSSA": partial(
        by_dattri, name="LiSSA", options={"batch_size": 64, "recursion_depth": 300, "scaling": 10.0}
    ),
    "dattri Arnoldi": partial(by_dattri, name="Arnoldi", options={"proj_dim": 100, "max_iter": 200}),
    "dattri EK-FAC": partial(by_dattri, name="EKFAC", options={"loader": 64}),
    "dattri TRAK": partial(by_dattri, name="TRAK", options={"projector_kwargs": {"proj_dim": 512}}),
}


def truth(task: Task) -> dict[str, Any]:
    """What retraining says: losses without single samples, and losses of models trained on halves."""
    model, generator = task.fit(), torch.Generator().manual_seed(2)
    before, N = task.test_losses(model), len(task.inputs)
    hardest = F.cross_entropy(model(task.inputs.double()), task.labels, reduction="none").topk(LEFT_OUT // 2).indices
    samples = torch.cat([hardest, torch.randperm(N, generator=generator)[: LEFT_OUT // 2]]).unique()
    others = [torch.arange(N)[torch.arange(N) != i] for i in samples]
    changes = torch.stack([task.test_losses(task.fit(kept, model)) - before for kept in others], 1)
    halves = [torch.randperm(N, generator=generator)[: N // 2] for _ in range(SUBSETS)]
    losses = torch.stack([task.test_losses(task.fit(half)) for half in halves], 1)
    flipped, wrong = task.flipped()
    return {"samples": samples, "changes": changes, "halves": halves, "losses": losses, "model": model,
            "flipped": flipped, "wrong": wrong, "wrong model": flipped.fit(),
            "accuracy": float((model(task.tests[0].double()).argmax(1) == task.tests[1]).double().mean())}  # fmt: skip


def measured(task: Task, known: dict[str, Any], scores: Scores) -> dict[str, Any]:
    checkpoints(task)  # a training run has them
    began = time.process_time()
    found = scores(task, known["model"].float()).double()
    seconds = time.process_time() - began
    alone = [pearson(row, true) for row, true in zip(found[:, known["samples"]], known["changes"], strict=True)]
    kept = torch.stack([found[:, half].sum(1) for half in known["halves"]], 1)  # a half that helps has lower losses
    subsets = [spearman(row, -true) for row, true in zip(kept, known["losses"], strict=True)]
    suspicion = -scores(known["flipped"], known["wrong model"].float()).double().sum(0)
    area = roc_auc_score(known["wrong"], suspicion) if suspicion.isfinite().all() else float("nan")
    figures = {"leave-one-out": sum(alone) / TESTS, "LDS": sum(subsets) / TESTS, "AUC": area, "seconds": seconds}
    return {name: round(float(value), 3) for name, value in figures.items()}


def finite(task: Task, model: nn.Module, scores: Any) -> list[bool]:
    """Whether every score is finite, at dampings from 1e-8 to 1e2."""
    return [bool(scores(task, model.float(), damping=damping).isfinite().all()) for damping in DAMPINGS]


def run(only: str) -> None:
    ledger = Ledger("influence", COMMAND)
    for name, build in TASKS.items():
        task = build()
        known = cache(partial(truth, task))  # trains many models, where a cell is missing
        for method, scores in METHODS.items():
            if only not in method or f"{name}: {method}" in ledger.cells:
                continue
            ledger.cell(f"{name}: accuracy", lambda known=known: known()["accuracy"])
            cell = ledger.cell(f"{name}: {method}", lambda t=task, k=known, s=scores: measured(t, k(), s))
            print(f"{name}: {method}: {cell}", flush=True)
    task = TASKS["digits, MLP"]()
    task.tests, model = (task.tests[0][:5], task.tests[1][:5]), task.fit()
    for method, scores in METHODS.items():
        if only in method and ("mfac" in method or "dattri" in method):
            ledger.cell(f"finite: {method}", lambda s=scores: finite(task, model, s))


def table() -> None:
    """Of each task: leave-one-out, LDS, AUC and seconds; a dash where nothing was measured."""
    cells = Ledger("influence", COMMAND).cells
    print(f"| | {' | '.join(TASKS)} | finite, of {len(DAMPINGS)} dampings |\n| --- |{' --- |' * (len(TASKS) + 1)}")
    for method in METHODS:
        found = [cells.get(f"{task}: {method}") for task in TASKS]
        columns = ["–" if c is None else ", ".join(f"{c[name]:.2f}" for name in FIGURES) for c in found]
        whole = cells.get(f"finite: {method}")
        print(f"| {method} | {' | '.join(columns)} | {'–' if whole is None else sum(whole)} |")


def picture() -> None:
    """Test digits, each with the training digits that help and harm it most."""
    task = TASKS["digits, MLP"]()
    model, shown = task.fit(), 4
    change = by_mfac(task, model.float(), "classes")
    hardest = task.test_losses(copy.deepcopy(model).double()).topk(3).indices
    figure, axes = drawing.panels(len(hardest), 1 + 2 * shown, (9, 3.6))
    for row, test in zip(axes, hardest, strict=True):
        order = change[test].argsort(descending=True)
        chosen = [(task.tests[0][test], f"test: {int(task.tests[1][test])}")]
        for sample in [*order[:shown], *order[-shown:]]:
            chosen.append((task.inputs[sample], f"{int(task.labels[sample])}, {1e3 * change[test, sample]:+.1f}"))
        for axis, (pixels, title) in zip(row, chosen, strict=True):
            axis.imshow(pixels.view(8, 8), cmap="gray_r")
            axis.set_title(title, fontsize=8)
            axis.set_axis_off()
    figure.suptitle("left: test images; then the training images that help most, and those that harm most\n"
                    "(label, and change of the test loss without the image, in thousandths)", fontsize=9)  # fmt: skip
    print(drawing.save(figure, IMAGES / "influence.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "picture"])
    parser.add_argument("--only", default="", help="methods whose name contains this")
    arguments = parser.parse_args()
    run(arguments.only) if arguments.what == "run" else table() if arguments.what == "table" else picture()


if __name__ == "__main__":
    main()
