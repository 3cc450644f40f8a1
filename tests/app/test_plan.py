"""Plans: the figures are those of the library, nothing large is allocated, and what is proposed fits."""

import json
from functools import partial

import pytest
import torch
from states import unchanged
from torch import nn

import mfac
from mfac.app import plan as planning
from mfac.app.plan import duration, plan_pruning, plan_training, pruning_memory, remedies
from mfac.app.tasks import Task

LOSS = mfac.criterion_loss(nn.CrossEntropyLoss())


def network():
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))


def batches(count=4):
    return [(torch.randn(8, 20), torch.randint(5, (8,))) for _ in range(count)]


TASK = Task("toy", network, batches, LOSS)


def task_of(model, data=None):
    return Task("toy", lambda: model, lambda: data or batches(), LOSS)


def test_a_pruning_plan_has_the_weights_and_the_bytes():
    plan = plan_pruning(TASK, num_grads=16, block_size=32, recomputations=4)
    assert plan.weights == {"all": 785, "trained": 785, "prunable": 750}
    assert plan.memory["gradients G"] == 16 * 750 * 4
    # 18 blocks of 32 and one of 24, then 4 of 32 and one of 22: in each a 16 x 16 factor in float64.
    assert plan.memory["factors of the blocks"] == (18 + 1 + 4 + 1) * 16**2 * 8
    assert plan.on_disk == {"bytes": 16 * 750 * 4, "pages": 1}
    assert (plan.fits, plan.remedies) == (True, [])
    assert plan.gradients == 4 * 16
    assert plan.as_dict()["seconds"] == 4 * 16 * plan.gradient_seconds > 0
    frozen = network()
    frozen[0].requires_grad_(False)
    plan = plan_pruning(task_of(frozen), num_grads=4, recomputations=1)
    assert plan.weights == {"all": 785, "trained": 155, "prunable": 150}


@pytest.mark.parametrize(("window", "momentum"), [(None, 0.9), (torch.bfloat16, 0.0), (mfac.TopK(0.1), None)], ids=str)
def test_a_training_plan_has_what_the_optimizer_says(window, momentum):
    options = {} if momentum is None else {"optimizer": "mfac", "momentum": momentum}
    plan = plan_training(TASK, num_grads=32, window=window, steps=10, **options)
    kind = mfac.FullMatrixAdam if momentum is None else mfac.MFAC
    options.pop("optimizer", None)
    held = plan.memory["window G"] + plan.memory["m x m matrices, state"]
    assert held == kind.memory_needed(network().parameters(), 32, window=window, **options)
    assert plan.gradients == 10


def test_sums_of_blocks_and_pages_are_counted_as_they_are_held():
    """Beyond twice the block size `prune` sums gradients up; each sum is float64."""
    memory = partial(pruning_memory, [600, 150], torch.float32)
    held = 8 * (18 * 32**2 + 24**2 + 4 * 32**2 + 22**2)
    assert memory(65, 32, False)["factors of the blocks"] == held
    assert memory(65, 32, False)["sums of the blocks, two copies"] == 3 * held
    assert "gradients G" in memory(64, 32, False)
    assert pruning_memory([25_000_000], torch.float32, 1024, None, True)["pages of G"] == 2 * 4 * 2**26


class Largest(torch.overrides.TorchFunctionMode):
    """The bytes of the largest tensor that any function of torch has returned."""

    seen = 0

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            self.seen = max(self.seen, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize(
    ("estimate", "options"),
    [(plan_training, {}), (plan_pruning, {"block_size": None}), (plan_pruning, {"block_size": 128})],
    ids=["training", "full", "blocks"],
)
def test_nothing_of_the_size_of_the_window_is_allocated(monkeypatch, estimate, options):
    """2.5 million weights and 4,096 gradients are 41 GB; only three rows are made."""
    monkeypatch.setattr(planning, "available_memory", lambda device: 12 * 2**30)
    model = nn.Sequential(nn.Linear(500, 5000, bias=False), nn.Linear(5000, 2, bias=False))
    task = task_of(model, [(torch.randn(1, 500), torch.zeros(1, dtype=torch.int64))])
    with Largest() as largest:
        plan = estimate(task, num_grads=4096, **options)
    assert largest.seen <= 3 * 4 * 2_510_000
    assert plan.fits == (options == {"block_size": 128})
    if not plan.fits:
        assert plan.memory.get("window G", plan.memory.get("gradients G")) == 4096 * 2_510_000 * 4


def test_what_is_proposed_fits():
    available = 8 * 2**30

    def memory(num_grads, window):
        return {"rows": num_grads * 10_000_000 * window.itemsize}

    ways = {"": (torch.float32,), "window=torch.bfloat16": (torch.bfloat16,)}
    plain, halved = remedies(memory, available, 1024, ways)
    assert halved.endswith(" with window=torch.bfloat16")
    for text, window in ((plain, torch.float32), (halved, torch.bfloat16)):
        most = int(text.split()[0].removeprefix("num_grads="))
        fits, not_any_more = (sum(memory(count, window).values()) for count in (most, most + 1))
        assert fits <= available < not_any_more
    assert remedies(memory, 25 * 2**30, 1024, ways)[1] == "window=torch.bfloat16"
    assert remedies(memory, 1000, 1024, ways) == []
    assert remedies(memory, None, 1024, ways) == remedies(memory, available, 100, ways) == []


def test_a_plan_that_does_not_fit_says_what_would(monkeypatch):
    def plan_with(available, estimate=plan_pruning, **options):
        monkeypatch.setattr(planning, "available_memory", lambda device: available)
        return estimate(TASK, num_grads=64, **options)

    plan = plan_with(300_000, block_size=None)
    assert not plan.fits
    assert plan.remedies[0].startswith("num_grads=")
    assert plan.text().endswith(f"It does not fit. What would: {'; '.join(plan.remedies)}.")
    disk, blocks = plan_with(200_000, block_size=64).remedies[1:3]
    assert "rows on disk (--rows-dir, 0.2 MiB)" in disk
    assert "block_size=32" in blocks
    windows = [text.split("window=")[1] for text in plan_with(100_000, plan_training).remedies[1:]]
    assert windows == ["torch.bfloat16", "torch.int8", "mfac.TopK(0.01)"]
    assert "a larger machine" in plan_with(10).text()
    assert plan_with(None).fits
    assert "unknown" in plan_with(None).text()


def test_as_text_and_as_json():
    by_output = plan_pruning(TASK, recomputations=2)
    assert by_output.settings["passes"] == 1
    passes = plan_pruning(TASK, recomputations=2, memory="200kB")
    assert passes.gradients == passes.settings["passes"] * by_output.gradients > by_output.gradients
    least = plan_pruning(TASK, memory=1)  # a group has at least one output
    assert least.settings["passes"] <= 2 * 35
    assert least.memory["sums and factors of the blocks"] == 4 * 8 * 30**2
    assert "sums and factors of the blocks" in by_output.text()
    plan = plan_pruning(TASK, num_grads=8, block_size=128, recomputations=2)
    text = plan.text()
    assert text.startswith("Pruning toy: num_grads 8, block_size 128")
    assert all(part in text for part in ("750", "gradients G", "gradients, of ", "ms each", "16"))
    assert text.endswith("It fits.")
    record = json.loads(json.dumps(plan.as_dict()))
    assert record["memory"]["total"] == sum(plan.memory.values())
    assert record["gradients"] == 16
    for seconds, shown in [(0.001234, "0.0012 s"), (9.4, "9.4 s"), (42.2, "42 s"), (600, "10 min"), (7200, "2.0 h")]:
        assert duration(seconds) == shown


def test_the_model_and_the_random_state_are_left_alone():
    model, data = network().train(), batches()
    state = torch.get_rng_state()
    with unchanged(model):
        plan_pruning(task_of(model, data), num_grads=4, recomputations=1, per_sample=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
