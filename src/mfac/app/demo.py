"""What `mfac demo` does: a small network on handwritten digits, pruned and trained, beside the usual ways."""

from pathlib import Path
from typing import Any

from mfac.app.runs.optimizers import OptimizerSettings
from mfac.app.runs.pruning_run import run_pruning
from mfac.app.runs.pruning_settings import PruningSettings
from mfac.app.runs.training_run import TrainingSettings, run_training
from mfac.app.runs.watcher import Watcher
from mfac.app.tasks import load_task

# Nothing is tuned here but the learning rates of the three optimizers and the damping of M-FAC, by one search of four
# settings for each (python -m experiments.optimizers digits).
PRUNING = PruningSettings(methods=("magnitude", "mfac"), sparsities=(0.5, 0.7, 0.8, 0.9, 0.95), recomputations=8)
TRAINING = TrainingSettings(
    optimizers=(
        OptimizerSettings("mfac", lr=1.0, num_grads=256, damping=0.1),
        OptimizerSettings("sgd", lr=0.1, momentum=0.9),
        OptimizerSettings("adam", lr=1e-2),
    ),
    seeds=(1, 2, 3),
    epochs=10,
)
NAMES = {"mfac": "M-FAC", "magnitude": "magnitude", "sgd": "SGD, momentum", "adam": "Adam"}
LOOKS = {"mfac": ("tab:blue", "o", "-"), "magnitude": ("tab:orange", "s", "--"), "sgd": ("tab:orange", "s", "--"),
         "adam": ("tab:green", "^", ":")}  # fmt: skip


def run(folder: Path, watcher: Watcher | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prunes and trains, anew each time; the records of the two runs, in `prune` and `train` of the folder."""
    task = load_task("digits")
    pruned = run_pruning(task, PRUNING, folder / "prune", command="mfac demo", fresh=True, watcher=watcher)
    trained = run_training(task, TRAINING, folder / "train", command="mfac demo", fresh=True, watcher=watcher)
    return pruned, trained


def plot(pruned: dict[str, Any], trained: dict[str, Any], path: Path) -> None:
    """One picture of both: accuracy against sparsity, and the loss while training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method in PRUNING.methods:
        points = [
            (100 * cell["sparsity"], 100 * cell["measure"]) for cell in pruned["cells"] if cell["method"] == method
        ]
        _line(left, method, *zip(*points, strict=True), markersize=6)
    left.axhline(100 * pruned["dense"]["measure"], color="gray", linewidth=0.8, label="dense")
    left.set(xlabel="weights removed, %", ylabel="accuracy, %", title="Pruned in one shot, no training afterwards")
    for optimizer in (settings.name for settings in TRAINING.optimizers):
        runs = [cell["losses"] for cell in trained["cells"] if cell["optimizer"] == optimizer]
        mean = [sum(losses) / len(losses) for losses in zip(*runs, strict=True)]
        smooth = [sum(mean[max(0, t - 10) : t + 1]) / len(mean[max(0, t - 10) : t + 1]) for t in range(len(mean))]
        _line(right, optimizer, range(1, len(smooth) + 1), smooth, markevery=40, markersize=5)
    right.set(
        xlabel="step", ylabel="training loss", yscale="log", title=f"Trained, mean of {len(TRAINING.seeds)} seeds"
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=140)


def _line(axes: Any, name: str, x: Any, y: Any, **options: Any) -> None:
    colour, marker, style = LOOKS[name]
    axes.plot(x, y, linestyle=style, marker=marker, color=colour, label=NAMES[name], **options)
