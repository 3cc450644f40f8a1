"""The parts that recipes are made of: readers, augmentation, models, checkpoints."""

import pytest
import torch

from experiments import data
from experiments.datasets.images import crop_and_flip
from experiments.models import resnet

needs_data = pytest.mark.skipif(not data.data_folder().exists(), reason="no data under MFAC_DATA")


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("depth", "projection", "weights"), [(20, False, 269_722), (20, True, 272_474), (32, False, 464_154)]
)
def test_resnets_have_the_published_number_of_weights(depth, projection, weights):
    assert count(resnet.ResNet(depth, projection=projection)) == weights


def test_an_impossible_depth_is_refused():
    with pytest.raises(ValueError, match="6 n \\+ 2"):
        resnet.ResNet(21)


def test_a_missing_file_says_where_it_belongs(monkeypatch, tmp_path):
    monkeypatch.setenv("MFAC_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="MFAC_DATA"):
        data.load_cifar10("test")


def test_cifar10_is_read_from_its_binary_format(monkeypatch, tmp_path):
    monkeypatch.setenv("MFAC_DATA", str(tmp_path))
    (tmp_path / "cifar-10-batches-bin").mkdir()
    pixels = torch.arange(3072).remainder(251).to(torch.uint8)
    records = bytes([7]) + bytes(pixels.tolist()) + bytes([2]) + bytes(pixels.flip(0).tolist())
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(records)
    images, labels = data.load_cifar10("test")
    assert labels.tolist() == [7, 2]
    assert torch.equal(images[0].flatten(), pixels)
    assert images.shape == (2, 3, 32, 32)


def test_crops_are_shifts_with_black_beyond_the_border():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (64, 3, 32, 32), generator=generator).to(torch.uint8)
    out = crop_and_flip(images, generator)
    padded = torch.nn.functional.pad(images, (4,) * 4)
    for image, result in zip(padded, out, strict=True):
        windows = [image[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
        assert any(torch.equal(result, w) or torch.equal(result, w.flip(2)) for w in windows)
    assert len({bytes(result.flatten().tolist()) for result in out - images}) > 32  # they differ from each other


def test_shuffled_batches_are_seeded_and_go_on_in_the_next_pass():
    images, labels = torch.zeros(10, 3, 4, 4, dtype=torch.uint8), torch.arange(10)
    one, two = (data.ImageBatches(images, labels, 3, data.HALVES, seed=1) for _ in range(2))
    first, second = ([y.tolist() for _, y in one] for _ in range(2))
    assert first == [y.tolist() for _, y in two]
    assert first != second
    assert len(first) == len(one) == 3


@needs_data
@pytest.mark.parametrize(("load", "normalisation"), [(resnet.mfac_resnet20, data.HALVES)])
def test_checkpoints_are_as_accurate_as_published(load, normalisation):
    images, labels = (part[:1000] for part in data.load_cifar10("test"))
    assert data.accuracy(load(), data.ImageBatches(images, labels, 250, normalisation)) > 90
