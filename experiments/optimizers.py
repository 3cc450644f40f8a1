"""FullMatrixAdam and M-FAC against their rivals at length: loss and accuracy by step and by second.

    python -m experiments.optimizers cifar10 --only Muon  # ResNet20, ten epochs: a quarter of an hour for each run
    python -m experiments.optimizers cifar10-decay        # the same with ten times the weight decay
    python -m experiments.optimizers sparse               # ResNet20 with 90 % of its weights zero, tuned for an epoch
    python -m experiments.optimizers stories              # stories260K's architecture from scratch on TinyStories
    python -m experiments.optimizers stories-2m           # the same at 2 million weights
    python -m experiments.optimizers shakespeare          # a character model
    python -m experiments.optimizers digits               # an MLP on scikit-learn's digits, five seeds: minutes
    python -m experiments.optimizers windows              # M-FAC: one learning rate, windows from 16 to 1024
    python -m experiments.optimizers plot                 # the pictures and tables of the results

Each optimizer gets the same search: three settings, and the next one as long as the best is at an end, a short run each
on a part of the training data; the best on the held-out part is trained on all of it. All runs lower the learning rate
to zero by a cosine. Decoupled decay takes 1e-4 of a weight a step at the start ("cifar10-decay": 1e-3), the same for
all. Runs are resumed at their last epoch. Seconds are processor time, without evaluation.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mfac
from experiments import drawing
from experiments.baselines.ggt import GGT
from experiments.ledger import IMAGES, Ledger
from experiments.training import Training, cosine, file_of, last_loss
from experiments.training_tasks import Task, cifar10, digits, shakespeare, sparse, stories

Named = list[tuple[str, Tensor]]
Make = Callable[[Named], torch.optim.Optimizer]
TITLES = {
    "digits": "An MLP on scikit-learn's digits, mean of five seeds",
    "cifar10": "ResNet20 on CIFAR-10, ten epochs of batches of 128",
    "cifar10-decay": "ResNet20 on CIFAR-10, ten epochs of batches of 128, ten times the weight decay",
    "sparse": "ResNet20 at 90 % sparsity, one epoch of tuning under its masks",
    "stories": "stories260K's architecture on TinyStories",
    "stories-2m": "A Llama of 2 million weights on TinyStories",
    "shakespeare": "A character model on tinyshakespeare",
}
LEADING = ("FullMatrixAdam, orthogonalized", "Muon", "SOAP", "FullMatrixAdam")  # of which all seeds are run
LOST = 1e-4  # of a weight by decoupled decay in a step at the full learning rate


def muon(named: Named, lr: float, lost: float) -> torch.optim.Optimizer:
    """Matrices but for embeddings and heads by Muon; the others by AdamW at a fifth of its learning rate."""
    from pytorch_optimizer import Muon

    def hidden(name: str, tensor: Tensor) -> bool:
        return tensor.ndim > 1 and not any(part in name for part in ("embed", "head", "linear", "fc"))

    split = {flag: [tensor for name, tensor in named if hidden(name, tensor) is flag] for flag in (True, False)}
    return Muon([
        {"params": split[True], "use_muon": True, "lr": lr, "weight_decay": lost / lr},
        {"params": split[False], "use_muon": False, "lr": lr / 5, "weight_decay": 5 * lost / lr},
    ])  # fmt: skip


def rival(name: str) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of pytorch-optimizer, which is imported when it is made."""

    def make(named: Named, lr: float, **options: Any) -> torch.optim.Optimizer:
        import pytorch_optimizer

        return getattr(pytorch_optimizer, name)([tensor for _, tensor in named], lr=lr, **options)

    return make


def contenders(
    num_grads: int, damping: float, decay: float, times: float = 1.0, lost: float = LOST
) -> dict[str, dict[str, Make]]:
    """{optimizer: {setting: how to make it}}, at `times` the learning rates from scratch; the middle three come first.

    M-FAC's decay is that of the paper's ResNet20 table.
    """

    def decayed(make: Callable[..., Any], rates: tuple[float, ...], **options: Any) -> dict[str, Make]:
        return {f"lr {lr:g}": partial(make, lr=lr, weight_decay=lost / lr, **options) for lr in rates}

    def rates(*from_scratch: float) -> tuple[float, ...]:
        return tuple(times * lr for lr in from_scratch)

    orthogonalized = partial(mfac.FullMatrixAdam, orthogonalize=True)
    sgd = partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=5e-4)
    paper = partial(mfac.MFAC, num_grads=num_grads, weight_decay=decay, normalize="sum")
    pairs = ((0.5 * times, damping), (times, damping), (times, 10 * damping))
    shampoo = partial(rival("ScalableShampoo"), preconditioning_compute_steps=10, decoupled_weight_decay=True)
    return {
        "FullMatrixAdam, orthogonalized": decayed(orthogonalized, rates(2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2)),
        "Muon": {f"lr {lr:g}": partial(muon, lr=lr, lost=lost) for lr in rates(5e-3, 1e-2, 2e-2, 4e-2, 8e-2)},
        "FullMatrixAdam": decayed(mfac.FullMatrixAdam, rates(1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)),
        "SOAP": decayed(rival("SOAP"), rates(3e-4, 1e-3, 3e-3, 1e-2, 3e-2)),
        "AdamW": decayed(torch.optim.AdamW, rates(3e-4, 1e-3, 3e-3, 1e-2, 3e-2)),
        "SGD, Nesterov": {f"lr {lr:g}": partial(sgd, lr=lr) for lr in rates(0.01, 0.03, 0.1, 0.3, 1.0)},
        "Shampoo": decayed(shampoo, rates(0.01, 0.03, 0.1, 0.3, 1.0)),
        "GGT": {f"lr {lr:g}": partial(GGT, lr=lr, weight_decay=1e-4) for lr in rates(3e-3, 0.01, 0.03, 0.1, 0.3)},
        "M-FAC": {f"lr {lr:g}, damping {d:g}": partial(paper, lr=lr, damping=d) for lr, d in pairs},
    }


larger = {"hidden_size": 160, "intermediate_size": 432, "num_hidden_layers": 6}
TASKS: dict[str, tuple[Callable[[], Task], dict[str, dict[str, Make]]]] = {
    "digits": (digits, contenders(num_grads=256, damping=1e-2, decay=0.0)),
    "cifar10": (cifar10, contenders(num_grads=256, damping=512e-5, decay=3e-3)),
    "cifar10-decay": (cifar10, contenders(num_grads=256, damping=512e-5, decay=3e-3, lost=10 * LOST)),
    "sparse": (sparse, contenders(num_grads=256, damping=512e-5, decay=0.0, times=0.3)),
    "stories": (stories, contenders(num_grads=256, damping=1e-2, decay=0.0)),
    "stories-2m": (partial(stories, **larger), contenders(num_grads=64, damping=1e-2, decay=0.0)),
    "shakespeare": (shakespeare, contenders(num_grads=256, damping=1e-2, decay=0.0)),
}


def train(task: Task, make: Make, steps: int, seed: int, key: str = "", ledger: Ledger | None = None) -> dict[str, Any]:
    """A run. With a ledger, it is saved after every pass, with its figures so far in the cell `key`."""
    model = task.model(seed)
    optimizer = make(list(model.named_parameters()))
    if task.masks is not None:
        mfac.attach_masks(optimizer, task.masks(model), model)
    run = Training(model, optimizer, task.batches(seed), steps, cosine, loss_fn=task.loss_fn,
                   test=task.test, test_every=task.test_every,
                   keep=None if ledger is None else file_of(f"{ledger.path.stem}, {key}"))  # fmt: skip
    if ledger is not None:
        run.note = lambda record: ledger.note(key, {"seed": seed} | thinned(record, task.test_every))
    record = run.run()
    return {"seed": seed} | (record if ledger is None else thinned(record, task.test_every))


def thinned(record: dict[str, Any], every: int) -> dict[str, Any]:
    """A record with the mean loss of each `every` steps, and the seconds at their end."""
    losses = [record["losses"][i : i + every] for i in range(0, len(record["losses"]), every)]
    means = [round(sum(part) / len(part), 5) for part in losses]
    return record | {"losses": means, "seconds": record["seconds"][every - 1 :: every], "every": every}


def score(run: dict[str, Any]) -> float:
    """Of a search: lower is better; infinite if it diverged."""
    last = run["tests"][-1] if run["finished"] else {"loss": math.inf}
    return last.get("loss", -last.get("accuracy", 0.0))


def tried(task: Task, ledger: Ledger, label: str, settings: dict[str, Make], setting: str) -> float:
    """The score of a short run on a part of the training data."""
    assert task.search is not None
    search = replace(task.search, test_every=task.search_steps)
    run = partial(train, search, settings[setting], task.search_steps, 0)
    return score(ledger.cell(f"search, {label}, {setting}", lambda: thinned(run(), task.search_steps // 10)))


def best_of(settings: list[str], tried: Callable[[str], float]) -> str:
    """Of the middle three, and then of the next one as long as the best is at an end."""
    first = (len(settings) - 3) // 2
    last = first + 3
    while True:
        best = min(settings[first:last], key=tried)
        if first > 0 and best == settings[first]:
            first -= 1
        elif last < len(settings) and best == settings[last - 1]:
            last += 1
        else:
            return best


def compare(name: str, only: str = "", seeds: int | None = None, setting: str = "") -> None:
    build, entrants = TASKS[name]
    task = build()
    ledger = Ledger(f"optimizers_{name}", f"python -m experiments.optimizers {name}")
    for label, settings in entrants.items():
        if only not in ("", label):
            continue
        if setting not in ("", *settings):
            raise SystemExit(f"{label} has no setting {setting!r}; it has {', '.join(settings)}")
        best = setting or best_of(list(settings), partial(tried, task, ledger, label, settings))
        count = (task.seeds if label in LEADING or name == "digits" else 1) if seeds is None else seeds
        for seed in range(1, count + 1):
            key = f"run, {label}, {best}, seed {seed}"
            run = ledger.cell(key, partial(train, task, settings[best], task.steps, seed, key=key, ledger=ledger))
            print(f"{label}: {best}, loss {last_loss(run):.4f}, {run['tests'][-1:]}, {run['seconds'][-1]:.0f} s")


def windows() -> None:
    """The same learning rate and damping for every m, for both normalizations."""
    task = digits()
    ledger = Ledger("optimizers_windows", "python -m experiments.optimizers windows")
    for m in (16, 64, 256, 1024):
        for normalize, lr, damping in (("full", 1e-3, 1e-5), ("sum", 0.5, 1e-1)):
            make = partial(mfac.MFAC, lr=lr, num_grads=m, damping=damping, normalize=normalize)
            for seed in range(1, 4):
                run = ledger.cell(f"{normalize}, m {m}, seed {seed}", partial(train, task, make, task.steps, seed))
                print(f"{normalize}, m = {m}: loss {last_loss(run):.4f}, accuracy {run['tests'][-1:]}")


def accuracies(run: dict[str, Any], what: str = "accuracy") -> drawing.Curve:
    """(steps, accuracies) of a run's tests; older results have pairs in place of dictionaries."""
    pairs = ((t["step"], t[what]) if isinstance(t, dict) else tuple(t) for t in run["tests"])
    return drawing.curve(pairs)


def mean(columns: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*columns, strict=False)]


def steps_to(run: dict[str, Any], mark: float) -> float:
    """The number of steps until the tests reach an accuracy, interpolated; NaN if they never do."""
    before = (0, 10.0)
    for step, value in zip(*accuracies(run), strict=True):
        if value >= mark:
            return before[0] + (step - before[0]) * (mark - before[1]) / (value - before[1])
        before = (step, value)
    return math.nan


def plot_task(name: str) -> None:
    """Three panels: loss by step, loss by second, tests by step; and a table of the runs."""
    cells = Ledger(f"optimizers_{name}", "").cells
    figure, ((by_step, by_second, tested),) = drawing.panels(1, 3, (13, 3.9))
    entrants = enumerate(TASKS[name][1].items())
    for number, label, setting in ((number, label, setting) for number, (label, all_) in entrants for setting in all_):
        key = f"run, {label}, {setting}, seed"
        runs = [run for at, run in cells.items() if at.startswith(key) and run["finished"]]
        if not runs:
            continue
        again = any(str(line.get_label()).startswith(f"{label} (") for line in by_step.lines)
        look = drawing.style(number) | {"alpha": 0.4 if again else 1}
        what = "accuracy" if "accuracy" in runs[0]["tests"][-1] else "loss"
        losses, every = mean([run["losses"] for run in runs]), runs[0]["every"]
        places = [every * (i + 1) for i in range(len(losses))]
        by_step.plot(places, losses, label=f"{label} ({setting})", **look)
        # Marked by hand in the results: processor seconds of another machine say nothing beside these.
        if timed := [run["seconds"] for run in runs if not run.get("slower machine")]:
            by_second.plot(mean(timed), losses, **look)
        tested.plot(accuracies(runs[0], what)[0], mean([accuracies(run, what)[1] for run in runs]), **look)
        ends = [run["tests"][-1][what] for run in runs]
        asked = (80, 85) if name.startswith("cifar10") else ()
        marks = [sum(steps_to(run, mark) for run in runs) / len(runs) for mark in asked]
        shown = "".join(f" {mark:.0f} |" for mark in marks)
        print(f"| {label} ({setting}) | {sum(ends) / len(ends):.4g} of {len(runs)} | {losses[-1]:.4f} |{shown}")
    by_step.set(xlabel="step", ylabel="training loss", yscale="log")
    by_second.set(xlabel="seconds of one core", ylabel="training loss", yscale="log")
    tested.set(xlabel="step", ylabel=f"test {what}")
    figure.suptitle(TITLES[name])
    figure.legend(*by_step.get_legend_handles_labels(), loc="outside lower center", ncol=3, fontsize=9, frameon=False)
    drawing.save(figure, IMAGES / f"optimizers_{name}.png")


def plot_windows() -> None:
    """The last loss against m, with one learning rate and one damping."""
    points: dict[str, list[tuple[int, float]]] = {"full": [], "sum": []}
    for key, run in Ledger("optimizers_windows", "").cells.items():
        if run["finished"]:
            normalize, m, _ = key.split(", ")
            points[normalize].append((int(m.removeprefix("m ")), sum(run["losses"][-44:]) / 44))
    figure, ((axis,),) = drawing.panels(size=(6, 4))
    for normalize, mark, told in (("full", "o", "lr 1e-3, damping 1e-5"), ("sum", "s", "lr 0.5, damping 0.1")):
        axis.plot(*drawing.curve(points[normalize]), mark, label=f'normalize="{normalize}", {told}')
    axis.set(xscale="log", yscale="log", xlabel="m, gradients in the window", ylabel="loss of the last 44 steps",
             title="One learning rate for every window: digits, three seeds")  # fmt: skip
    ticks = sorted({m for found in points.values() for m, _ in found})
    axis.set_xticks(ticks, map(str, ticks))
    axis.legend()
    drawing.save(figure, IMAGES / "optimizers_windows.png")


def plot() -> None:
    for name in TASKS:
        if Ledger(f"optimizers_{name}", "").cells:
            print(f"\n{TITLES[name]}")
            plot_task(name)
    plot_windows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*TASKS, "windows", "plot"])
    parser.add_argument("--only", default="", help="one optimizer, by its name here")
    parser.add_argument("--seeds", type=int, help="runs of each; 0 for the search alone")
    parser.add_argument("--setting", default="", help="of --only, in place of the best of the search")
    given = parser.parse_args()
    run = partial(compare, given.what, given.only, given.seeds, given.setting)
    {"windows": windows, "plot": plot}.get(given.what, run)()


if __name__ == "__main__":
    main()
