import json

import pytest
import torch

import mfac
from mfac.gradient_file import HEADER_BYTES, GradientFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gradients.rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_and_columns_come_back(path, dtype):
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    file = GradientFile.create(path, 5, 7, dtype, "made of this")
    file.append(rows[0])
    file.append(rows[1:])
    again = GradientFile(path)
    assert again.shape == (5, 7)
    assert (again.num_grads, again.dtype, again.fingerprint) == (5, dtype, "made of this")
    assert torch.equal(again.read_rows(0, 5), rows)
    assert torch.equal(again.read_rows(2, 4), rows[2:4])
    assert torch.equal(again.read_columns(3, 6), rows[:, 3:6])


@pytest.mark.parametrize("torn", [1, 27, 28, 29])
def test_a_torn_tail_is_not_a_row_and_is_cut_off(path, torn):
    rows = torch.arange(21.0).reshape(3, 7)
    file = GradientFile.create(path, 3, 7)
    file.append(rows[:2])
    with open(path, "r+b") as raw:
        raw.truncate(HEADER_BYTES + 2 * 28 - torn)
    whole = 1 if torn <= 28 else 0
    assert GradientFile(path).rows == whole
    file.append(rows[whole:])
    assert torch.equal(file.read_rows(0, 3), rows)


def test_what_does_not_fit_is_refused(path):
    file = GradientFile.create(path, 2, 3)
    assert "rows=0 of 2, dim=3, torch.float32" in repr(file)
    with pytest.raises(FileExistsError, match="exists already; delete it or choose another"):
        GradientFile.create(path, 1, 1)
    with pytest.raises(ValueError, match="holds 0 of 2 rows; 3 more do not fit"):
        file.append(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="there are 0 complete rows, and 0 to 1 are not among them"):
        file.read_rows(0, 1)
    assert file.gather_columns(torch.tensor([2, 0])).shape == (0, 2)


G = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda file: file.append(G.T), r"rows must be \[3\] or \[k, 3\], not \[3, 2\]"),
        (lambda file: file.append(G.long()), "rows must be a dense floating-point tensor, not torch.int64"),
        (lambda file: file.append(G.to_sparse()), "rows must be a dense"),
        (lambda file: file.append(G.to("meta")), "meta device"),
        (lambda file: file.append(G.double() * 1e200), "not finite in torch.float32"),
        (lambda file: file.read_columns(-2, 1), "there are 3 complete columns, and -2 to 1 are not among them"),
        (lambda file: file.read_rows(2, 1), "2 to 1 are not"),
        (lambda file: file.gather_columns(torch.tensor([0, -1])), "numbered from 0 to 2"),
    ],
)
def test_shapes_and_ranges_are_strict(path, call, message):
    file = GradientFile.create(path, 4, 3)
    file.append(G)
    with pytest.raises(ValueError, match=message):
        call(file)
    assert torch.equal(file.read_rows(0, file.rows), G)


SIZES, DTYPES = "must be a positive int, not", r"stores float32, .*, not .*; choose one of these dtypes"
REFUSED = {(-4, 3): SIZES, (2, 0): SIZES, (2.0, 3): SIZES, (True, 3): SIZES, (1, 1, torch.int8): DTYPES}
REFUSED |= {(1, 1, mfac.TopK(0.1)): DTYPES, (1, 1, "float32"): DTYPES}
REFUSED |= {(1, 1, torch.float32, "x" * 5000): "fingerprint is too long: the header has 4096 bytes"}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.items(), ids=range(len(REFUSED)))
def test_arguments_that_make_no_file(path, arguments, message):
    with pytest.raises(ValueError, match=message):
        GradientFile.create(path, *arguments)
    assert not path.exists()


def header(**changes):
    fields = {"num_grads": 1, "dim": 1, "dtype": "float32", "fingerprint": ""} | changes
    return (b"MFACROWS" + json.dumps(fields).encode()).ljust(HEADER_BYTES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a gradient file"),
        (b"something else entirely" * 300, "is not a gradient file"),
        (b"MFACROWS{".ljust(HEADER_BYTES), "the header of .*gradients.rows is damaged"),
        (b"MFACROWS[]".ljust(HEADER_BYTES), "the header of .*gradients.rows is damaged"),
        (b"MFACROWS{}".ljust(HEADER_BYTES), "the header of .*gradients.rows is damaged.*'dtype' is missing"),
        (header(dim=-3), "the saved dim must be an int of 1 or more, not -3"),
        (header(dtype="int8"), r"stores rows as 'int8', and this version reads float32, .*; collect"),
    ],
)
def test_other_files_are_refused(path, content, message):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        GradientFile(path)
