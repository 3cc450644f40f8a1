"""Files of the public formats become tensors and examples; damaged ones, and other ones, are refused."""

import struct

import pytest
import torch

from experiments.datasets.folder import MissingData, data_folder
from experiments.datasets.images import HALVES, crop_and_flip, load_cifar10, load_mnist, read_idx
from experiments.datasets.sentences import load_glue, read_tsv
from experiments.datasets.tensor_batches import TensorBatches


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MFAC_DATA", str(tmp_path))
    return tmp_path


def idx(shape, data):
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(data)


def test_the_folder_is_of_the_variable_or_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MFAC_DATA", str(tmp_path / "mine"))
    assert data_folder() == tmp_path / "mine"
    monkeypatch.delenv("MFAC_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "mfac" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert data_folder() == tmp_path / "home" / ".cache" / "mfac" / "data"


def test_idx_files_have_their_own_shape(tmp_path):
    (tmp_path / "x").write_bytes(idx((2, 3, 2), range(12)))
    assert torch.equal(read_idx(tmp_path / "x"), torch.arange(12, dtype=torch.uint8).view(2, 3, 2))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x1f\x8b\x08\x00", "is it still compressed"),
        (idx((2, 3), range(5)), r"header says \[2, 3\], and 5 bytes follow"),
        (idx((2, 3), range(6))[:8], "damaged"),
        (b"", "not an idx file"),
    ],
)
def test_other_files_are_refused(tmp_path, data, message):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / "x")


def test_mnist_is_read_from_its_four_files(folder):
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


def test_a_cifar_file_of_half_a_record_is_refused(folder):
    (folder / "cifar-10-batches-bin").mkdir()
    (folder / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(bytes(3073 + 5))
    with pytest.raises(ValueError, match="3078 bytes are no whole number of records of 3073"):
        load_cifar10("test")


@pytest.mark.parametrize(
    ("load", "name", "path"),
    [
        (lambda: load_mnist("train"), "mnist", "mnist/train-images-idx3-ubyte"),
        (lambda: load_mnist("test", "fashion-mnist"), "fashion-mnist", "fashion-mnist/t10k-images-idx3-ubyte"),
        (lambda: load_cifar10("train"), "cifar10", "cifar-10-batches-bin/data_batch_1.bin"),
        (lambda: load_glue("rte", "dev"), "glue-rte", "glue/RTE/dev.tsv"),
    ],
)
def test_what_is_missing_and_how_to_get_it(folder, load, name, path):
    with pytest.raises(
        MissingData, match=f"{path} is not there; `python -m experiments.datasets {name}` fetches it, or put it there"
    ):
        load()


@pytest.mark.parametrize("load", [load_mnist, load_cifar10])
def test_an_unknown_split(load):
    with pytest.raises(ValueError, match='split must be "train" or "test", not \'dev\''):
        load("dev")


def test_glue_is_read_with_quotes_as_letters(folder):
    (folder / "glue" / "MRPC").mkdir(parents=True)
    header = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    (folder / "glue" / "MRPC" / "dev.tsv").write_text(header + '1\t2\t3\tSay " it .\tHe said " it .\n', "utf-8")
    (example,) = load_glue("mrpc", "dev")
    assert (example.first, example.second, example.label) == ('Say " it .', 'He said " it .', 1)


def test_glue_labels_are_numbered_or_numbers(folder):
    for task, text in (
        ("RTE", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tnot_entailment\n1\ta\tb\tentailment\n"),
        ("STS-B", "sentence1\tsentence2\tscore\na\tb\t3.25\n"),
        ("SST-2", "sentence\tlabel\nfine \t1\n"),
    ):
        (folder / "glue" / task).mkdir(parents=True)
        (folder / "glue" / task / "train.tsv").write_text(text)
    assert [example.label for example in load_glue("rte", "train")] == [1, 0]
    assert load_glue("stsb", "train")[0].label == 3.25
    assert load_glue("sst2", "train")[0].second is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n",
            r"dev.tsv:2: the label must be entailment or not_entail",
        ),
        ("index\tsentence1\tsentence2\n0\ta\tb\n", "columns sentence1, sentence2, label"),
        ("index\tsentence1\tsentence2\tlabel\n", "must have lines"),
        ("index\tsentence1\tsentence2\tlabel\n0\ta\n", r"dev.tsv:2: another number of fields"),
    ],
)
def test_a_glue_file_that_is_something_else(folder, text, message):
    (folder / "glue" / "RTE").mkdir(parents=True)
    (folder / "glue" / "RTE" / "dev.tsv").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_glue("rte", "dev")


def test_unknown_tasks_and_splits_of_glue():
    with pytest.raises(ValueError, match="task must be one of mrpc, stsb, rte, sst2, not 'cola'"):
        load_glue("cola", "dev")
    with pytest.raises(ValueError, match="test labels are not public"):
        load_glue("rte", "test")


@pytest.mark.parametrize(
    ("task", "train", "dev"), [("mrpc", 3668, 408), ("stsb", 5749, 1500), ("rte", 2490, 277), ("sst2", 67349, 872)]
)
def test_glue_at_hand_has_the_published_number_of_examples(task, train, dev):
    if not (data_folder() / "glue").exists():
        pytest.skip("no GLUE in the data folder")
    assert (len(load_glue(task, "train")), len(load_glue(task, "dev"))) == (train, dev)


def test_a_tsv_keeps_its_lines(tmp_path):
    (tmp_path / "x.tsv").write_text("a\tb\n1\t2\n3\t4\n")
    assert read_tsv(tmp_path / "x.tsv") == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]


def test_batches_in_order_have_all_samples():
    batches = TensorBatches(torch.arange(10.0), torch.arange(10), 4)
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(batches) == 3


def test_shuffled_batches_are_of_the_global_seed_and_new_in_every_pass():
    batches = TensorBatches(torch.arange(10.0), torch.arange(10), 4, shuffle=True, prepare=lambda x: -x)
    torch.manual_seed(5)
    first, second = ([y.tolist() for _, y in batches] for _ in range(2))
    torch.manual_seed(5)
    assert [y.tolist() for _, y in batches] == first != second
    assert len(first) == len(batches) == 2
    assert all(torch.equal(x, -y.float()) for x, y in batches)


def test_batches_that_cannot_be():
    with pytest.raises(ValueError, match="10 inputs and 9 targets"):
        TensorBatches(torch.arange(10), torch.arange(9), 4)
    with pytest.raises(ValueError, match="batch_size must be from 1 to 10, the number of samples, not 11"):
        TensorBatches(torch.arange(10), torch.arange(10), 11)


def test_pixels_are_normalised_channel_by_channel():
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    assert torch.allclose(HALVES(images).flatten(), torch.tensor([-1.0, 1.0, -0.6]))


def test_crops_draw_from_the_global_seed_where_no_generator_is_given():
    images = torch.randint(0, 256, (8, 3, 32, 32)).to(torch.uint8)
    torch.manual_seed(1)
    first = crop_and_flip(images)
    assert not torch.equal(first, crop_and_flip(images))
    torch.manual_seed(1)
    assert torch.equal(first, crop_and_flip(images))
