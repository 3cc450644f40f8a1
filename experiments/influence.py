"""Influence against true retraining: leave-one-out, the linear datamodeling score and flipped labels.

    python -m experiments.influence run       # every task and method; needs dattri
    python -m experiments.influence choose    # every setting of SETTINGS, on other images; the first is the best
    python -m experiments.influence table     # the tables of docs/influence.md
    python -m experiments.influence picture   # docs/images/influence.png, from scikit-learn's digits

Truth is retraining: without a sample, from the trained weights on, for leave-one-out (Pearson's correlation, averaged
over test images); on random halves for the linear datamodeling score (Spearman's over halves, likewise). With
a tenth of the labels flipped, a sample is suspected by its influence on all test losses ("AUC, tests") or on its own
loss ("AUC, own", of 50 samples, half of them flipped).
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mfac
from experiments import drawing
from experiments.correlations import pearson, spearman
from experiments.ledger import IMAGES, Ledger
from experiments.retraining import CLASSES, TASKS, TESTS, Task, build, trained, truth

COMMAND = "python -m experiments.influence run"
FIGURES = ("leave-one-out", "LDS", "AUC, tests", "AUC, own", "seconds")
DAMPINGS = [1e-8, 1e-6, 1e-4, 1e-2, 1.0, 1e2]
LOSS = mfac.criterion_loss(nn.CrossEntropyLoss())


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


def operator(task: Task, model: nn.Module, rows: str | int, damping: float) -> mfac.StaticInverseFisher:
    """F⁻¹ of empirical rows, of so many random Gauss-Newton rows per sample, or of one for each class."""
    train, N, options = (task.inputs, task.labels), len(task.inputs), {}
    if rows == "classes":
        found = torch.cat([gradients(model, train, class_loss(number)) for number in range(CLASSES)])
        options = {"row_weights": torch.full((len(found),), 1 / N)}
    elif rows == "empirical":
        found = gradients(model, train)
    else:
        found = gradients(model, train, fisher="gauss-newton", num_grads=int(rows) * N, cycle=True)
    return mfac.StaticInverseFisher(found, damping, **options)


# Every method: (task, network, damping, settings) -> [tests, train], positive: the sample helps.


def by_mfac(task: Task, model: nn.Module, damping: float, rows: str | int, leverage=False, times=1.0) -> Tensor:
    op, train = operator(task, model, rows, times * damping), gradients(model, (task.inputs, task.labels))
    return mfac.influence(op, gradients(model, task.tests), train, leverage=leverage)


def by_refinement(
    task: Task, model: nn.Module, damping: float, rows: str | int, times: float = 1.0, without_prior: int = 0
) -> Tensor:
    """Conjugate gradients on the Hessian of the loss itself, preconditioned by F⁻¹.

    `without_prior` times, test gradients lose λF⁻¹g: the part of them that the prior decides and not the data.
    """
    op, train = operator(task, model, rows, times * damping), (task.inputs, task.labels)
    hessian, tests = mfac.hessian_product(model, LOSS, [train], times * damping), gradients(model, task.tests).double()
    for _ in range(without_prior):
        tests = tests - times * damping * (tests @ op)
    return mfac.influence(op, tests, gradients(model, train), hessian=hessian)


def by_dot_product(task: Task, model: nn.Module, damping: float) -> Tensor:
    return gradients(model, task.tests) @ gradients(model, (task.inputs, task.labels)).T


@cache
def checkpoints(task: Task) -> list[nn.Module]:
    return [task.fit(steps=steps).float() for steps in (5, 10, 20, 40, 80)]


def by_tracin(task: Task, model: nn.Module, damping: float) -> Tensor:
    """Dot products, summed over checkpoints of a training run."""
    return sum((by_dot_product(task, saved, damping) for saved in checkpoints(task)), torch.zeros(()))


def by_dattri(task: Task, model: nn.Module, damping: float, name: str, times: float = 1.0, **options: Any) -> Tensor:
    """An attributor of dattri, given the same network and samples in one batch, and so many times the damping."""
    from dattri.algorithm import influence_function, trak
    from dattri.task import AttributionTask

    def loss(params: Any, data: Any) -> Tensor:
        inputs, labels = (
            part.unsqueeze(0) if part.ndim == rank else part for part, rank in zip(data, (1, 0), strict=True)
        )
        return F.cross_entropy(functional_call(model, params, inputs), labels.long())  # LiSSA makes floats of them

    def margin(params: Any, data: Any) -> Tensor:
        """log((1 − p) / p), the output that TRAK is made for."""
        z, own = functional_call(model, params, data[0].unsqueeze(0)), torch.arange(CLASSES) == data[1]
        return (z.masked_fill(own, -torch.inf).logsumexp(-1) - (z * own).sum(-1)).sum()

    target = margin if name == "TRAK" else loss
    work = AttributionTask(loss_func=target, model=model, checkpoints=model.state_dict())
    size = options.pop("loader", len(task.inputs))
    if name == "TRAK":
        options["projector_kwargs"] = {"proj_dim": options.pop("proj_dim")}
        attributor = trak.TRAKAttributor(
            work, lambda *given: torch.exp(-loss(*given)), regularization=times * damping, **options
        )
    else:
        key = "damping" if name in ("LiSSA", "EKFAC") else "regularization"
        attributor = getattr(influence_function, f"IFAttributor{name}")(work, **{key: times * damping}, **options)
    train = DataLoader(TensorDataset(task.inputs, task.labels), batch_size=size)
    tests = DataLoader(TensorDataset(*task.tests), batch_size=len(task.tests[0]))
    attributor.cache(train)
    if name == "TRAK":
        return attributor.attribute(test_dataloader=tests).T.detach()
    return attributor.attribute(DataLoader(train.dataset, batch_size=len(task.inputs)), tests).T.detach()


# Of each method the settings that `choose` compares; the first is the best there, and `run` takes it.
SETTINGS: dict[str, tuple[Callable[..., Tensor], list[dict[str, Any]]]] = {
    "mfac, a row for each class": (by_mfac, [{"rows": "classes"}]),
    "mfac, 4 random rows": (by_mfac, [{"rows": 4}]),
    "mfac, empirical rows, leverage": (by_mfac, [{"rows": "empirical", "leverage": True}]),
    "mfac, refined": (by_refinement, [{"rows": rows} for rows in (1, 4)]),
    "mfac, refined, more damping": (by_refinement, [{"rows": 1, "times": t} for t in (10, 2, 3, 30, 100)]),
    "mfac, refined, by LDS": (by_refinement, [{"rows": 1, "times": 3}]),
    "mfac, refined, by AUC": (by_refinement, [{"rows": 1, "times": 30}]),
    "mfac, refined, by the data alone": (
        by_refinement, [{"rows": "classes", "without_prior": 2}, {"rows": 1, "without_prior": 2}]),
    "gradient dot product": (by_dot_product, [{}]),
    "TracIn, five checkpoints": (by_tracin, [{}]),
    "dattri CG": (partial(by_dattri, name="CG"), [{"max_iter": n} for n in (50, 20)]),
    "dattri LiSSA": (
        partial(by_dattri, name="LiSSA"),
        [{"batch_size": 64, "recursion_depth": 300, "scaling": scale} for scale in (3.0, 10.0)]),
    "dattri Arnoldi": (partial(by_dattri, name="Arnoldi"), [{"proj_dim": n, "max_iter": 200} for n in (100, 50, 200)]),
    "dattri Arnoldi, by AUC": (partial(by_dattri, name="Arnoldi"), [{"proj_dim": 50, "max_iter": 200}]),
    "dattri EK-FAC": (partial(by_dattri, name="EKFAC"), [{"loader": 64, "times": t} for t in (1e-3, 0.01, 0.1, 1, 10)]),
    "dattri TRAK": (
        partial(by_dattri, name="TRAK"), [{"proj_dim": 512, "times": t} for t in (100.0, 10.0, 1.0, 1e4, 1e6)]),
}  # fmt: skip


def measured(task: Task, known: dict[str, Any], scores: Callable[..., Tensor]) -> dict[str, float]:
    small = replace(task, inputs=task.inputs[:100], labels=task.labels[:100], tests=tuple(x[:2] for x in task.tests))
    model = trained(task, known["weights"])
    for work in (small, task):  # the first call imports and warms up
        checkpoints(work)  # a training run has them
        began = time.process_time()
        found = scores(work, model, task.damping).double()
        seconds = time.process_time() - began
    alone = [pearson(row, true) for row, true in zip(found[:, known["samples"]], known["changes"], strict=True)]
    kept = torch.stack([found[:, half].sum(1) for half in known["halves"]], 1)  # a half that helps has lower losses
    subsets = [spearman(row, -true) for row, true in zip(kept, known["losses"], strict=True)]
    figures = {"leave-one-out": sum(alone) / TESTS, "LDS": sum(subsets) / TESTS, "seconds": seconds}
    flipped, wrong = task.flipped()
    chosen = suspects(wrong)
    flipped = replace(flipped, tests=tuple(torch.cat(pair) for pair in zip(
        task.tests, (task.inputs[chosen], flipped.labels[chosen]), strict=True)))  # fmt: skip
    found = scores(flipped, trained(task, known["wrong weights"]), task.damping).double()
    if found.isfinite().all():
        figures["AUC, tests"] = roc_auc_score(wrong, -found[:TESTS].sum(0))
        figures["AUC, own"] = roc_auc_score(wrong[chosen], found[range(TESTS, len(found)), chosen])
    return {name: round(float(value), 3) for name, value in figures.items()}


def suspects(wrong: Tensor) -> Tensor:
    """25 samples whose label is wrong and 25 others."""
    order = torch.randperm(len(wrong), generator=torch.Generator().manual_seed(3))
    return torch.cat([order[wrong[order]][:25], order[~wrong[order]][:25]])


def by_loss(task: Task, known: dict[str, Any]) -> dict[str, float]:
    """Flipped labels by the plain loss of each sample."""
    (flipped, wrong), model = task.flipped(), trained(task, known["wrong weights"])
    losses, chosen = F.cross_entropy(model(flipped.inputs), flipped.labels, reduction="none").detach(), suspects(wrong)
    return {"AUC, own": round(float(roc_auc_score(wrong[chosen], losses[chosen])), 3)}


def finite(task: Task, known: dict[str, Any], scores: Callable[..., Tensor]) -> list[bool]:
    """Whether every score of five test images is finite, at dampings from 1e-8 to 1e2."""
    task, model = replace(task, tests=(task.tests[0][:5], task.tests[1][:5])), trained(task, known["weights"])
    return [bool(scores(task, model, damping).isfinite().all()) for damping in DAMPINGS]


def run(only: str, tasks: str, trial: bool) -> None:
    ledger = Ledger("influence", COMMAND)
    for name in [name for name in TASKS if tasks in name]:
        task, known = build(name, trial), cache(partial(truth, name, trial))

        def cell(key: str, compute: Callable[..., Any], *rest: Any, task: Task = task, known: Any = known) -> None:
            print(f"{key}: {ledger.cell(key, lambda: compute(task, known(), *rest))}", flush=True)

        for method, (scores, settings) in SETTINGS.items():
            if only not in method:
                continue
            for options in settings if trial else settings[:1]:
                cell(f"trial, {name}: {method}, {options}" if trial else f"{name}: {method}", measured,
                     partial(scores, **options))  # fmt: skip
            if name == "digits, MLP" and not trial:
                cell(f"finite: {method}", finite, partial(scores, **settings[0]))
        if not trial:
            cell(f"{name}: training loss", by_loss)
            cell(f"{name}: accuracy", accuracy)


def accuracy(task: Task, known: dict[str, Any]) -> float:
    return float((trained(task, known["weights"])(task.tests[0]).argmax(1) == task.tests[1]).double().mean())


def table() -> None:
    """A table for each task, best figures in bold, and at how many dampings every score was finite."""
    cells = Ledger("influence", COMMAND).cells
    places: dict[str, dict[str, dict[str, float]]] = {}
    for key, cell in cells.items():
        place, method = key.split(": ", 1)
        if isinstance(cell, dict):
            places.setdefault(place, {})[method] = cell
    for place, found in places.items():
        print(f"\n**{place}**\n\n| | {' | '.join(FIGURES)} | finite |\n| --- |{' --- |' * (len(FIGURES) + 1)}")
        best = {name: max(cell.get(name, 0) for cell in found.values()) for name in FIGURES[:-1]}
        for method, cell in found.items():
            shown = ["–" if name not in cell else f"**{cell[name]:.3f}**" if cell[name] == best.get(name)
                     else f"{cell[name]:.3f}" for name in FIGURES]  # fmt: skip
            whole = cells.get(f"finite: {method}")
            print(f"| {method} | {' | '.join(shown)} | {'–' if whole is None else f'{sum(whole)}/{len(whole)}'} |")


def picture() -> None:
    """Test digits, each with the training digits that help and harm it most."""
    task, shown = build("digits, MLP"), 4
    model = task.fit()
    hardest = task.test_losses(model).topk(3).indices
    change = by_mfac(task, model.float(), task.damping, "classes")
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
    parser.add_argument("what", choices=["run", "choose", "table", "picture"])
    parser.add_argument("--only", default="", help="methods whose name contains this")
    parser.add_argument("--tasks", default="", help="tasks whose name contains this")
    given = parser.parse_args()
    if given.what in ("run", "choose"):
        run(given.only, given.tasks, trial=given.what == "choose")
    else:
        table() if given.what == "table" else picture()


if __name__ == "__main__":
    main()
