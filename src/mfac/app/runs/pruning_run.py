"""Pruning of a task by several methods to several sparsities, each from the same dense weights."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mfac.app.runs.checkpoint import load_checkpoint
from mfac.app.runs.description import build_model, describe
from mfac.app.runs.device import choose_device
from mfac.app.runs.environment import process_peak_bytes
from mfac.app.runs.gradual_pruning import GradualPruning
from mfac.app.runs.measures import finite, measure
from mfac.app.runs.one_shot_pruning import OneShotPruning
from mfac.app.runs.optimizers import OptimizerSettings, make_optimizer
from mfac.app.runs.pruning_settings import PruningSettings
from mfac.app.runs.random_state import seeded
from mfac.app.runs.run_folder import DENSE, STATE, Record, RunFolder, open_run
from mfac.app.runs.task_batches import CountedStream, TaskBatches
from mfac.app.runs.tensor_files import load_state, save_state, save_weights
from mfac.app.runs.watcher import Silent, Watcher
from mfac.app.runs.writing import writing
from mfac.app.tasks import Task
from mfac.pruning.compact_file import CompactSize, save_compact
from mfac.pruning.masks import save_masks
from mfac.pruning.patterns import NOfM, parse_pattern
from mfac.pruning.result import StepRecord

FINE_TUNING_LR = 0.01
Work = OneShotPruning | GradualPruning


def run_pruning(
    task: Task,
    settings: PruningSettings,
    path: Path,
    *,
    command: str = "",
    fresh: bool = False,
    watcher: Watcher | None = None,
) -> Record:
    """Prunes, or goes on with what an interrupted run in the same folder has left; the record of run.json.

    Raises:
        ValueError: settings that do not fit, a checkpoint of another model, or a folder of another run.
        OSError: something could not be written; what was there before still is.
    """
    device = choose_device(settings.device)
    model = build_model(task, device, settings.seed, settings.checkpoint)
    settings.check(model)
    description = describe("prune", f"Pruning of {task.name}", command, task, model, device, settings.flat())
    with open_run(path, description, fresh=fresh) as folder:
        if not folder.is_finished:
            _Run(task, settings, folder, model, device, watcher or Silent()).run()
        return folder.record


class _Run:
    """One model, which goes back to its dense weights for each cell."""

    def __init__(
        self,
        task: Task,
        settings: PruningSettings,
        folder: RunFolder,
        model: nn.Module,
        device: torch.device,
        watcher: Watcher,
    ):
        self.task, self.settings, self.folder = task, settings, folder
        self.model, self.device, self.watcher = model, device, watcher
        self.saved = time.monotonic()

    def run(self) -> None:
        """Everything that is left to do."""
        self._train_first()
        if "dense" not in self.folder.record:
            self.folder.put("dense", asdict(measure(self.task, self.model, self.device)))
        dense = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for method, sparsity in self.settings.cells():
            name = f"{method}-{sparsity:g}"
            state_path = self.folder.cell_folder(name) / STATE
            if not self.folder.has(method=method, asked=sparsity):
                self.model.load_state_dict(dense)
                self.model.zero_grad()
                with seeded(self.settings.seed):
                    self.folder.add(self._cell(name, method, sparsity, state_path))
            state_path.unlink(missing_ok=True)
        self.folder.finish()

    def _train_first(self) -> None:
        """Trains the model once where the task says how, so that all cells start from the same weights."""
        if self.task.pretrain is None or self.settings.checkpoint is not None:
            return
        path = self.folder.path / DENSE
        if not path.exists():
            self.watcher.say(f"training {self.task.name} first, since no checkpoint is given")
            with seeded(self.settings.seed):
                self.task.pretrain(self.model)
            save_weights(self.model, path)
        load_checkpoint(path, self.model)

    def _cell(self, name: str, method: str, sparsity: float, state_path: Path) -> Record:
        work = self._work(method, sparsity)
        saved = load_state(state_path)
        if saved is not None and saved["run"] == self.folder.identity:
            work.load_state_dict(saved["work"])
            self.watcher.say(f"{name}: going on after {work.steps_done:.3g} of {work.total} steps")

        def save() -> None:
            save_state({"run": self.folder.identity, "work": work.state_dict()}, state_path)
            self.saved = time.monotonic()

        self.watcher.begin(name, work.total, "steps")
        self.watcher.at(work.steps_done)
        self._listen(work, save)
        while work.advance():
            save()
            self.watcher.at(work.steps_done, f"loss {work.history[-1].loss_after:.4g}" if work.history else "")
        self.watcher.end()
        return self._record(name, method, sparsity, work)

    def _work(self, method: str, sparsity: float) -> Work:
        settings = self.settings
        batches = TaskBatches(self.task, self.device)
        stream = CountedStream(batches, settings.seed)
        options = settings.prune_options(method)
        if not settings.gradual:
            wanted = None if isinstance(parse_pattern(settings.pattern), NOfM) else sparsity
            return OneShotPruning(
                self.model,
                self.task.loss,
                stream,
                wanted,
                recomputations=settings.recomputations,
                seed=settings.seed,
                options=options,
            )
        return GradualPruning(
            self.model,
            self.task.loss,
            stream,
            batches,
            self._optimizer(),
            settings.sparsities_to(sparsity),
            tuning_steps=settings.epochs * batches.count(),
            seed=settings.seed,
            options={**options, "recomputations": settings.recomputations},
        )

    def _optimizer(self) -> Optimizer:
        """The task's own, unless a learning rate is given or it has none: then SGD with momentum."""
        settings = self.settings
        if settings.lr is None and self.task.optimizer is not None:
            return make_optimizer(OptimizerSettings("task"), self.task, self.model)
        lr = FINE_TUNING_LR if settings.lr is None else settings.lr
        return make_optimizer(OptimizerSettings("sgd", lr=lr, momentum=settings.momentum), self.task, self.model)

    def _listen(self, work: Work, save: Callable[[], None]) -> None:
        """Tells the watcher about gradients and training steps, and saves in training from time to time."""
        if isinstance(work, OneShotPruning):
            drawn = work.stream.drawn

            def on_batch() -> None:
                # One gradient a batch, as a rule; what is shown is no more than that.
                done = (work.stream.drawn - drawn - 1) % self.settings.num_grads
                self.watcher.at(work.steps_done + done / self.settings.num_grads)

            work.stream.on_batch = on_batch
            return

        def on_tuning() -> None:
            self.watcher.at(work.steps_done, "training")
            if time.monotonic() - self.saved >= self.settings.save_every:
                save()

        work.on_tuning = on_tuning

    def _record(self, name: str, method: str, sparsity: float, work: Work) -> Record:
        masks, training = work.masks, work.training
        training_seconds = training[-1]["second"] if training else 0.0
        found = measure(self.task, self.model, self.device)
        size = self._write(name, masks)
        kept, weights = sum(int(mask.sum()) for mask in masks.values()), sum(mask.numel() for mask in masks.values())
        return {
            "label": method,
            "method": method,
            "asked": sparsity,
            "sparsity": 1 - kept / weights,
            **asdict(found),
            "seconds": round(sum(record.seconds for record in work.history) + training_seconds, 4),
            "gradient_seconds": round(sum(record.gradient_seconds for record in work.history), 4),
            "peak_bytes": process_peak_bytes(),
            "layers": [
                {"name": layer, "weights": mask.numel(), "kept": int(mask.sum())} for layer, mask in masks.items()
            ],
            "steps": [_step(record) for record in work.history],
            "training": training,
            "files": {what: f"{name}/{what}.safetensors" for what in ("weights", "masks", "compact")},
            "bytes": {"dense": size.dense, "compact": size.compact},
        }

    def _write(self, name: str, masks: Mapping[str, Tensor]) -> CompactSize:
        folder = self.folder.cell_folder(name)
        save_weights(self.model, folder / "weights.safetensors")
        with writing(folder / "masks.safetensors"):
            save_masks(masks, folder / "masks.safetensors")
        with writing(folder / "compact.safetensors"):
            return save_compact(self.model, folder / "compact.safetensors", masks)


def _step(record: StepRecord) -> Record:
    return {
        "sparsity": record.sparsity,
        "predicted_increase": finite(record.predicted_increase),
        "loss_before": finite(record.loss_before),
        "loss_after": finite(record.loss_after),
        "seconds": round(record.seconds, 4),
    }
