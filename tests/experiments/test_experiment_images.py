"""Folders of images and CIFAR-100, on files that the tests make."""

import numpy as np
import pytest
import torch

from experiments.datasets.image_folder import FolderBatches, ImageFolder, centre_crop, random_crop
from experiments.datasets.images import load_cifar100
from experiments.recipe import Request

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def folder(tmp_path):
    """Two classes of three images each: red ones and blue ones, of different forms."""
    for name, colour in (("cats", (250, 0, 0)), ("dogs", (0, 0, 250))):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("RGB", (40 + 10 * i, 50), colour).save(tmp_path / name / f"{i}.png")
    (tmp_path / "cats" / "notes.txt").write_text("no image")
    return tmp_path


def test_classes_are_folders_in_the_order_of_their_names(folder):
    images = ImageFolder(folder, 16)
    assert images.classes == ["cats", "dogs"]
    assert [images[i][1] for i in range(len(images))] == [0, 0, 0, 1, 1, 1]
    pixels, _ = images[4]
    assert pixels.shape == (3, 16, 16)
    assert pixels.dtype == torch.uint8
    assert pixels.float().mean((1, 2)).tolist() == [0, 0, 250]


def test_the_middle_is_cut_out_for_testing():
    """A frame of 1/16 on each side is lost: 0.875 of the shorter side is kept."""
    pixels = np.zeros((64, 128, 3), np.uint8)
    pixels[:, 32:96] = 255
    cut = np.array(centre_crop(Image.fromarray(pixels), 56))
    assert cut.shape == (56, 56, 3)
    assert cut.min() == 255


def test_random_crops_are_parts_of_the_image():
    pixels = np.arange(64 * 48, dtype=np.uint32).reshape(64, 48)
    image = Image.fromarray(np.stack([pixels % 256, pixels // 256, pixels * 0], 2).astype(np.uint8))
    crops = [np.array(random_crop(image, 24, np.random.default_rng(seed))) for seed in range(8)]
    assert all(crop.shape == (24, 24, 3) for crop in crops)
    assert len({crop.tobytes() for crop in crops}) == 8
    again = np.array(random_crop(image, 24, np.random.default_rng(3)))
    assert np.array_equal(again, crops[3])


def test_an_image_of_a_strange_form_is_taken_whole():
    image = Image.new("RGB", (400, 2), (9, 9, 9))
    assert np.array(random_crop(image, 8, np.random.default_rng(0))).shape == (8, 8, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_shuffled_by_a_seed_whoever_decodes(folder, workers):
    one, two = (FolderBatches(folder, 4, size=16, seed=1, workers=w) for w in (0, workers))
    (images, labels), (others, other_labels) = next(iter(one)), next(iter(two))
    assert torch.equal(labels, other_labels)
    assert torch.equal(images, others)
    assert images.shape == (4, 3, 16, 16)
    assert len(one) == 1  # six images: the smaller second batch is left out


def test_batches_go_on_from_the_state_of_their_generator(folder):
    batches = FolderBatches(folder, 3, size=16, seed=1, workers=0)
    list(batches)
    state = batches.generator.get_state()
    second = [images for images, _ in batches]
    batches.generator.set_state(state)
    assert all(torch.equal(a, b) for a, b in zip(second, (images for images, _ in batches), strict=True))


def test_without_a_seed_all_images_come_in_order(folder):
    labels = [label for _, batch in FolderBatches(folder, 4, size=16, workers=0) for label in batch.tolist()]
    assert labels == [0, 0, 0, 1, 1, 1]


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is no folder"):
        ImageFolder(tmp_path / "nothing")
    (tmp_path / "class").mkdir()
    with pytest.raises(ValueError, match="1 sub-folders and no image"):
        ImageFolder(tmp_path)
    with pytest.raises(ValueError, match="--images FOLDER"):
        Request("full").image_folder("train")


def test_missing_pillow_says_what_to_install(monkeypatch):
    import sys

    from experiments.datasets.image_folder import require_pillow

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="pip install pillow"):
        require_pillow()


def test_cifar100_is_read_from_its_binary_format(monkeypatch, tmp_path):
    monkeypatch.setenv("MFAC_DATA", str(tmp_path))
    (tmp_path / "cifar-100-binary").mkdir()
    pixels = bytes(i % 251 for i in range(3072))
    (tmp_path / "cifar-100-binary" / "train.bin").write_bytes(bytes([3, 77]) + pixels + bytes([4, 12]) + pixels)
    images, labels = load_cifar100("train")
    assert labels.tolist() == [77, 12]
    assert bytes(images[1].flatten().tolist()) == pixels
    (tmp_path / "cifar-100-binary" / "test.bin").write_bytes(bytes(3073))
    with pytest.raises(ValueError, match="is damaged"):
        load_cifar100("test")
    monkeypatch.setenv("MFAC_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match="MFAC_DATA"):
        load_cifar100("train")
