"""Files of the public formats become tensors and examples; damaged files are refused; batches of both."""

import struct

import pytest
import torch
from public_data import needs_data

from experiments import data
from experiments.datasets.folder import MissingData, data_folder, find
from experiments.datasets.images import HALVES, crop_and_flip, load_cifar10, load_mnist, read_idx
from experiments.datasets.sentences import load_glue


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MFAC_DATA", str(tmp_path))
    return tmp_path


def idx(shape, content):
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(content)


def test_the_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MFAC_DATA", str(tmp_path / "mine"))
    assert data_folder() == tmp_path / "mine"
    monkeypatch.delenv("MFAC_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "mfac" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_folder() == tmp_path / "home" / ".cache" / "mfac" / "data"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x1f\x8b\x08\x00", "is it still compressed"),
        (idx((2, 3), range(5)), r"header says \[2, 3\], and 5 bytes follow"),
        (idx((2, 3), range(6))[:8], "damaged"),
        (b"", "not an idx file"),
    ],
)
def test_other_files_than_idx_are_refused(tmp_path, content, message):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / "x")


def test_mnist_is_read_from_its_files(folder):
    (folder / "fashion-mnist").mkdir()
    pixels = torch.arange(2 * 784).remainder(251).to(torch.uint8)
    (folder / "fashion-mnist" / "t10k-images-idx3-ubyte").write_bytes(idx((2, 28, 28), pixels.tolist()))
    (folder / "fashion-mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx((2,), [7, 2]))
    images, labels = load_mnist("test", "fashion-mnist")
    assert torch.equal(images, pixels.view(2, 1, 28, 28))
    assert labels.tolist() == [7, 2]
    (folder / "fashion-mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx((3,), [7, 2, 1]))
    with pytest.raises(ValueError, match=r"do not belong together"):
        load_mnist("test", "fashion-mnist")


def test_cifar_is_read_from_its_binary_format(folder):
    path = folder / "cifar-10-batches-bin" / "test_batch.bin"
    path.parent.mkdir()
    pixels = bytes(i % 251 for i in range(3072))
    path.write_bytes(bytes([77]) + pixels + bytes([12]) + pixels)
    images, labels = load_cifar10("test")
    assert labels.tolist() == [77, 12]
    assert images.shape == (2, 3, 32, 32)
    assert bytes(images[1].flatten().tolist()) == pixels
    path.write_bytes(bytes(3070))
    with pytest.raises(ValueError, match="3070 bytes are no whole number of records"):
        load_cifar10("test")
    with pytest.raises(ValueError, match='split must be "train" or "test", not \'dev\''):
        load_cifar10("dev")


def test_the_error_for_a_missing_file_says_how_to_get_it(folder):
    missing = "glue/RTE/dev.tsv is not there; `python -m experiments.datasets glue-rte` fetches it"
    with pytest.raises(MissingData, match=missing):
        load_glue("rte", "dev")
    with pytest.raises(FileNotFoundError, match=r"config.json is not there; put it there by hand, or set MFAC_DATA"):
        find(None, "stories260K", "config.json")


def test_glue_labels_are_classes_or_numbers_and_quotes_are_kept(folder):
    for task, split, text in (
        ("MRPC", "dev", '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t2\t3\tSay " it .\tHe said " it .\n'),
        ("RTE", "train", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n1\ta\tb\tentailment\n"),
        ("STS-B", "train", "sentence1\tsentence2\tscore\na\tb\t3.25\n"),
        ("SST-2", "train", "sentence\tlabel\nfine \t1\n"),
    ):
        (folder / "glue" / task).mkdir(parents=True)
        (folder / "glue" / task / f"{split}.tsv").write_text(text, "utf-8")
    assert load_glue("mrpc", "dev") == [('Say " it .', 'He said " it .', 1)]
    assert [example.label for example in load_glue("rte", "train")] == [1, 0]
    assert load_glue("stsb", "train")[0].label == 3.25
    assert load_glue("sst2", "train")[0].second is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n", r"dev.tsv:2: the label must be entailment or not_ent"),
        ("index\tsentence1\tsentence2\n0\ta\tb\n", "columns sentence1, sentence2, label"),
        ("index\tsentence1\tsentence2\tlabel\n", "must have lines"),
        ("index\tsentence1\tsentence2\tlabel\n0\ta\n", r"dev.tsv:2: the number of fields differs"),
    ],
)
def test_other_files_than_glue_are_refused(folder, text, message):
    (folder / "glue" / "RTE").mkdir(parents=True)
    (folder / "glue" / "RTE" / "dev.tsv").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_glue("rte", "dev")
    with pytest.raises(ValueError, match="test labels are not public"):
        load_glue("rte", "test")


@needs_data
@pytest.mark.parametrize(("task", "train", "dev"), [("mrpc", 3668, 408), ("stsb", 5749, 1500), ("rte", 2490, 277)])
def test_glue_has_the_published_number_of_examples(task, train, dev):
    assert (len(load_glue(task, "train")), len(load_glue(task, "dev"))) == (train, dev)


def test_batches_of_images_are_seeded_and_new_in_every_pass():
    images, labels = torch.zeros(10, 3, 4, 4, dtype=torch.uint8), torch.arange(10)
    one, two = (data.ImageBatches(images, labels, 3, HALVES, seed=1) for _ in range(2))
    first, second = ([y.tolist() for _, y in one] for _ in range(2))
    assert first == [y.tolist() for _, y in two]
    assert first != second
    assert len(first) == len(one) == 3
    assert [y.tolist() for _, y in data.ImageBatches(images, labels, 6, HALVES)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    shuffled = data.ImageBatches(images, labels, 6, HALVES, shuffle=True, augment=True)
    torch.manual_seed(5)
    (first,) = [y.tolist() for _, y in shuffled]
    torch.manual_seed(5)
    assert [y.tolist() for _, y in shuffled] == [first]


def test_crops_are_shifts_with_black_beyond_the_border():
    images = torch.randint(1, 256, (32, 3, 32, 32)).to(torch.uint8)
    torch.manual_seed(1)
    out = crop_and_flip(images)
    torch.manual_seed(1)
    assert torch.equal(out, crop_and_flip(images))
    for image, result in zip(torch.nn.functional.pad(images, (4,) * 4), out, strict=True):
        windows = [image[:, i : i + 32, j : j + 32] for i in range(9) for j in range(9)]
        assert any(torch.equal(result, w) or torch.equal(result, w.flip(2)) for w in windows)
    assert len({bytes(result.flatten().tolist()) for result in out - images}) > 16
