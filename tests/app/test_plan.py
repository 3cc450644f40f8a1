"""Plans: the figures are those of the library, nothing large is allocated, and what is proposed fits."""

import json

import pytest
import torch
from torch import nn

import mfac
import mfac.app.plan.plan as plan_module
from mfac.app.plan import make_plan, timing
from mfac.app.plan.memory import PruningMemory, WindowMemory
from mfac.app.plan.plan import duration
from mfac.app.tasks import Task, load_task

LOSS = mfac.criterion_loss(nn.CrossEntropyLoss())


def network():
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))


def batches(count=4):
    return [(torch.randn(8, 20), torch.randint(5, (8,))) for _ in range(count)]


def test_a_pruning_plan_has_the_weights_and_the_bytes():
    plan = make_plan(network(), LOSS, batches(), num_grads=16, block_size=32, recomputations=4)
    assert plan.weights == {"all": 785, "trained": 785, "prunable": 750}
    assert plan.memory["gradients G"] == 16 * 750 * 4
    # 18 blocks of 32 and one of 24, then 4 of 32 and one of 22: in each a 16 x 16 factor in float64.
    assert plan.memory["factors of the blocks"] == (18 + 1 + 4 + 1) * 16**2 * 8
    assert plan.on_disk == {"bytes": 16 * 750 * 4, "pages": 1}
    assert plan.fits
    assert plan.remedies == []
    assert plan.seconds["gradients"] == pytest.approx(4 * 16 * plan.gradient_seconds)
    assert all(value > 0 for value in plan.seconds.values())
    frozen = network()
    frozen[0].requires_grad_(False)
    plan = make_plan(frozen, LOSS, batches(), num_grads=4, recomputations=1)
    assert plan.weights == {"all": 785, "trained": 155, "prunable": 150}


@pytest.mark.parametrize(("window", "momentum"), [(None, 0.9), (torch.bfloat16, 0.0), (mfac.TopK(0.1), 0.0)], ids=str)
def test_a_training_plan_has_what_the_optimizer_says(window, momentum):
    model = network()
    plan = make_plan(model, LOSS, batches(), kind="train", num_grads=32, window=window, momentum=momentum, steps=10)
    held = plan.memory["window G"] + plan.memory["m x m matrices"] + plan.memory.get("momentum", 0)
    assert held == mfac.MFAC.memory_needed(model.parameters(), 32, window=window, momentum=momentum)
    assert plan.seconds["gradients"] == pytest.approx(10 * plan.gradient_seconds)
    assert set(plan.seconds) == {"gradients", "algebra"}


def test_sums_of_blocks_and_pages_are_counted_as_they_are_held():
    """Beyond twice the block size `prune` sums gradients up; each sum is float64."""
    memory = PruningMemory([600, 150], 65, 32, torch.float32)
    held = 8 * (18 * 32**2 + 24**2 + 4 * 32**2 + 22**2)
    assert memory.is_summed
    assert memory.items()["factors of the blocks"] == held
    assert memory.items()["sums of the blocks, two copies"] == 3 * held
    assert not PruningMemory([600, 150], 64, 32, torch.float32).is_summed
    memory = PruningMemory([25_000_000], 1024, None, torch.float32, on_disk=True)
    assert memory.pages == 382  # 65,536 columns of 1,024 numbers: 2**26 numbers a page
    assert memory.items()["pages of G"] == 2 * 4 * 2**26


class Largest(torch.overrides.TorchFunctionMode):
    """The bytes of the largest tensor that any function of torch has returned."""

    seen = 0

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            self.seen = max(self.seen, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize("options", [{"kind": "train"}, {"block_size": None}, {"block_size": 128}], ids=str)
def test_nothing_of_the_size_of_the_window_is_allocated(monkeypatch, options):
    """2.5 million weights and 4,096 gradients are 41 GB; only a few rows and small samples are timed."""
    monkeypatch.setattr(plan_module, "available_memory", lambda device: 12 * 2**30)
    monkeypatch.setattr(timing, "WINDOW_ROWS", 16)
    model = nn.Sequential(nn.Linear(500, 5000, bias=False), nn.Linear(5000, 2, bias=False))
    data = [(torch.randn(1, 500), torch.zeros(1, dtype=torch.int64))]
    with Largest() as largest:
        plan = make_plan(model, LOSS, data, num_grads=4096, recomputations=2, steps=2, **options)
    assert largest.seen <= 2**26  # 64 MiB, the sample of a window
    assert plan.fits == (options == {"block_size": 128})
    if not plan.fits:
        assert plan.memory.get("window G", plan.memory.get("gradients G")) == 4096 * 2_510_000 * 4


def total(memory):
    return sum(memory.items().values())


def test_what_is_proposed_fits():
    available = 8 * 2**30
    memory = WindowMemory(10_000_000, 1024, torch.float32, torch.float32)
    found = list(memory.remedies(available))
    assert found[-1] == "window=mfac.TopK(0.01)"
    for text, window in zip(found[:3], (torch.float32, torch.bfloat16, torch.int8), strict=True):
        most = int(text.split()[0].removeprefix("num_grads="))
        fits, not_any_more = (
            total(WindowMemory(10_000_000, count, window, torch.float32)) for count in (most, most + 1)
        )
        assert fits <= available < not_any_more
    assert list(memory.remedies(25 * 2**30))[1] == "window=torch.bfloat16"
    assert list(memory.remedies(1000)) == []
    found = list(PruningMemory([50_000_000], 128, None, torch.float32).remedies(available))
    assert found[0].startswith("rows on disk (--rows-dir, 23.8 GiB")
    most = int(found[1].removeprefix("num_grads="))
    fits, not_any_more = (total(PruningMemory([50_000_000], n, None, torch.float32)) for n in (most, most + 1))
    assert fits <= available < not_any_more


def test_a_plan_that_does_not_fit_says_what_would(monkeypatch):
    def plan_with(available, **options):
        monkeypatch.setattr(plan_module, "available_memory", lambda device: available)
        return make_plan(network(), LOSS, batches(), num_grads=64, recomputations=2, **options)

    plan = plan_with(300_000, block_size=None)
    assert not plan.fits
    assert "num_grads=" in plan.remedies[0] or "rows on disk" in plan.remedies[0]
    assert plan.text().endswith(f"It does not fit. What would: {'; '.join(plan.remedies)}.")
    assert "a larger machine" in plan_with(10).text()
    assert plan_with(None).fits
    assert "unknown" in plan_with(None).text()


def test_as_text_and_as_json():
    plan = make_plan(load_task("digits"), num_grads=8, recomputations=2)
    text = plan.text()
    assert text.startswith("Pruning digits: num_grads 8, block_size 128")
    assert all(part in text for part in ("17,024", "2 x 8 gradients"))
    assert text.endswith("It fits.")
    record = json.loads(json.dumps(plan.as_dict()))
    assert record["memory"]["total"] == plan.needed
    assert record["seconds"]["total"] == pytest.approx(sum(plan.seconds.values()))
    for seconds, shown in [(0.001234, "0.0012 s"), (9.4, "9.4 s"), (42.2, "42 s"), (600, "10 min"), (7200, "2.0 h")]:
        assert duration(seconds) == shown


def test_the_model_is_left_alone():
    model, given = network().train(), batches()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    make_plan(model, LOSS, given, num_grads=4, recomputations=1, per_sample=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_more_gradients_than_are_sampled_are_scaled(monkeypatch):
    monkeypatch.setattr(timing, "MOST_ROWS", 8)
    monkeypatch.setattr(timing, "SAMPLE", 8 * 200)
    monkeypatch.setattr(timing, "_prune_sample", lambda memory, m, width, *others: 0.01 * width)
    # 0.01 s per column with 8 gradients: four times four as much with 32.
    memory = PruningMemory([1000], 32, None, torch.float32)
    seconds = timing.pruning_algebra(memory, 1e-5, 1.0, torch.device("cpu"))
    assert seconds(1000) == pytest.approx(0.01 * 1000 * 16)
    assert seconds(500) == pytest.approx(0.01 * 500 * 16)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((network(), LOSS, batches()), {"kind": "report"}, 'kind must be "prune" or "train"'),
        ((network(), LOSS, batches()), {"num_grads": 0}, "num_grads must be a positive int, not 0"),
        ((network(), LOSS, batches()), {"steps": 0}, "steps must be a positive int, not 0"),
        ((network(), LOSS, batches()), {"sparsity": 1.0}, "sparsity must be between 0 and 1, not 1.0"),
        ((network(), LOSS, batches()), {"targets": "3.weight"}, "matches no parameter"),
        ((network(),), {}, r"pass loss_fn\(model, batch\) and batches, or a Task"),
        ((Task("toy", network, batches, LOSS), LOSS), {}, "a task has its own loss and batches"),
        (("digits",), {}, r"takes a Task or a torch.nn.Module, not a str"),
    ],
)
def test_invalid_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        make_plan(*arguments, **options)
