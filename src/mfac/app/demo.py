"""What `mfac demo` runs: a small network on handwritten digits, pruned and trained, compared with baselines."""

from pathlib import Path
from typing import Any

from mfac.app.runs.folder import RUN, read_run
from mfac.app.runs.pruning import PruningSettings
from mfac.app.runs.run import Watcher, run_task
from mfac.app.runs.training import OptimizerSettings, TrainingSettings
from mfac.app.tasks import load_task
from mfac.pruning.options import PruningOptions

# Of the optimizers only the learning rates are tuned: the best of four or five for each, by the training loss.
PRUNING = PruningSettings(
    PruningOptions(recomputations=8), methods=("magnitude", "mfac"), sparsities=(0.5, 0.7, 0.8, 0.9, 0.95)
)
TRAINING = TrainingSettings(
    optimizers=(
        OptimizerSettings("full-matrix-adam", lr=3e-2),
        OptimizerSettings("sgd", lr=0.1, momentum=0.9),
        OptimizerSettings("adam", lr=3e-2),
    ),
    seeds=(1, 2, 3),
    epochs=10,
)
COMMAND = "mfac demo"
OTHER = {"color": "tab:orange", "marker": "s", "linestyle": "--"}
LOOKS: dict[str, dict[str, Any]] = {
    "mfac": {"label": "M-FAC", "color": "tab:blue", "marker": "o"},
    "full-matrix-adam": {"label": "FullMatrixAdam", "color": "tab:blue", "marker": "o"},
    "magnitude": {"label": "magnitude", **OTHER},
    "sgd": {"label": "SGD, momentum", **OTHER},
    "adam": {"label": "Adam", "color": "tab:green", "marker": "^", "linestyle": ":"},
}


def run(folder: Path, watcher: Watcher | None = None) -> list[dict[str, Any]]:
    """Prunes and trains, always from the start; the records of the runs in `prune` and `train` of the folder."""
    task, settings = load_task("digits"), (PRUNING, TRAINING)
    earlier = [path for path in (folder / one.kind for one in settings) if (path / RUN).exists()]
    is_ours = earlier and all(read_run(path)["command"] == COMMAND for path in earlier)
    if folder.exists() and any(folder.iterdir()) and not is_ours:
        raise ValueError(f"{folder} is not empty and not the folder of a demo; choose another (--out)")
    return [run_task(task, one, folder / one.kind, COMMAND, fresh=True, watcher=watcher) for one in settings]


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """One picture of both: accuracy against sparsity, and the loss during training."""
    from matplotlib.figure import Figure

    pruned, trained = records
    figure = Figure(figsize=(11.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method in PRUNING.methods:
        cells = [cell for cell in pruned["cells"] if cell["method"] == method]
        x, y = ([100 * cell[key] for cell in cells] for key in ("sparsity", "measure"))
        left.plot(x, y, **LOOKS[method])
    left.axhline(100 * pruned["dense"]["measure"], color="gray", linewidth=0.8, label="dense")
    left.set(xlabel="weights removed, %", ylabel="accuracy, %", title="Pruned in one shot, without training on labels")
    for name in (optimizer.name for optimizer in TRAINING.optimizers):
        runs = [cell["losses"] for cell in trained["cells"] if cell["optimizer"] == name]
        mean = [sum(losses) / len(losses) for losses in zip(*runs, strict=True)]
        smooth = [sum(mean[max(0, t - 10) : t + 1]) / min(t + 1, 11) for t in range(len(mean))]
        right.plot(range(1, len(smooth) + 1), smooth, markevery=40, **LOOKS[name])
    title = f"Trained, mean of {len(TRAINING.seeds)} seeds"
    right.set(xlabel="step", ylabel="training loss", yscale="log", title=title)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=140)
