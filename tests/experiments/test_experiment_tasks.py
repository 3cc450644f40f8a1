"""Tasks on public data, and their errors where the data is missing."""

import itertools

import pytest
import torch
from public_data import needs_data

import mfac
from experiments.correlations import pearson, spearman
from experiments.datasets.folder import MissingData
from experiments.datasets.sentences import SentenceBatches, Tokens
from experiments.tasks.glue import correlation
from mfac.app.runs.task_batches import measure
from mfac.app.tasks import Task, load_task

TASKS = ("mnist", "fashion_mnist", "resnet20_cifar10", "glue_mrpc", "glue_rte", "glue_sst2", "glue_stsb")


def test_digits_is_trained_quickly_and_seeded():
    task, found = load_task("digits"), []
    for _ in range(2):
        torch.manual_seed(3)
        model = task.model()
        task.pretrain(model)
        found.append(measure(task, model, torch.device("cpu"))["measure"])
    assert found[0] == found[1] > 0.93


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_complete_and_says_what_data_it_lacks(name, monkeypatch, tmp_path):
    monkeypatch.setenv("MFAC_DATA", str(tmp_path))
    task = load_task(f"experiments.tasks.{name}")
    assert isinstance(task, Task)
    assert task.evaluate is not None
    assert task.eval_batches is not None
    assert task.optimizer is not None
    with pytest.raises(MissingData, match=r"`python -m experiments.datasets [a-z0-9-]+` fetches it"):
        next(iter(task.train_batches()))


@needs_data
def test_lenet_on_the_images_at_hand():
    task = load_task("experiments.tasks.mnist")
    model = task.model()
    G = mfac.collect_gradients(model, task.loss, task.train_batches(), 2, progress=False)
    assert bool(G.isfinite().all())
    assert G.shape == (2, 266_610)
    images, _ = next(iter(task.eval_batches()))
    assert abs(float(images.mean())) < 0.05
    assert abs(float(images.std()) - 1) < 0.05
    assert 0 <= task.evaluate(model) < 0.3


@needs_data
def test_resnet20_comes_trained():
    task = load_task("experiments.tasks.resnet20_cifar10")
    model = task.model()
    images, labels = next(iter(task.eval_batches()))
    assert task.pretrain is None
    assert float((model(images).argmax(1) == labels).float().mean()) > 0.88
    assert sum(p.numel() for p in model.parameters()) == 272_474
    assert float(task.loss(model, next(iter(task.train_batches()))).detach()) < 0.3


@needs_data
def test_minilm_agrees_with_people_about_sentences():
    task = load_task("experiments.tasks.glue_stsb")
    model = task.model()
    assert correlation(model, itertools.islice(task.eval_batches(), 10)) > 0.85
    assert (task.measure, task.pretrain) == ("spearman", None)
    batch = next(iter(task.train_batches()))
    G = mfac.collect_gradients(model, task.loss, [batch], 1, params=["re:layer.2.output.dense"], progress=False)
    assert bool(G.any())


def test_sentences_are_padded_to_the_longest_of_the_batch():
    examples = [Tokens([101, *range(5, 5 + n), 102], [0] * (n + 2), float(n % 2)) for n in range(1, 20)]
    batches = list(SentenceBatches(examples, 16, shuffle=False))
    assert [len(batch["labels"]) for batch in batches] == [16, 3]
    first = batches[0]
    assert first["input_ids"].shape == (16, 18)
    assert first["attention_mask"].sum(1).tolist() == list(range(3, 19))
    assert first["input_ids"][0].tolist() == [101, 5, 102] + [0] * 15
    assert first["labels"].dtype == torch.int64
    shuffled = SentenceBatches(examples, 16, shuffle=True)
    assert len(list(shuffled)) == len(shuffled) == 1


def test_measures_of_sentences():
    assert spearman(torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([1.0, 2.0, 3.0])) == pytest.approx(1)
    ties = spearman(torch.tensor([[1.0], [1.0], [2.0]]), torch.tensor([1.0, 2.0, 3.0]))
    assert ties == pytest.approx(3**0.5 / 2)  # Pearson's of (1.5, 1.5, 3) and (1, 2, 3)
    assert spearman(torch.zeros(3, 1), torch.tensor([1.0, 2.0, 3.0])) == 0
    squares = pearson(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 4.0, 9.0]))
    assert squares == pytest.approx(0.98974, abs=1e-5)
