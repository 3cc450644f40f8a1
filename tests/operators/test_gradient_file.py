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
    with pytest.raises(ValueError, match="has no complete row 0; it has 0"):
        file.read_rows(0, 1)


@pytest.mark.parametrize("kind", [torch.int8, mfac.Int8(), mfac.TopK(0.1), "float32"], ids=str)
def test_only_plain_dtypes_and_short_fingerprints_are_stored(path, kind):
    with pytest.raises(ValueError, match=r"stores float32, .*, not .*; choose one of these dtypes"):
        GradientFile.create(path, 1, 1, kind)
    with pytest.raises(ValueError, match="fingerprint is too long: the header has 4096 bytes"):
        GradientFile.create(path, 1, 1, fingerprint="x" * 5000)
    assert not path.exists()


HEADER = b"MFACROWS" + json.dumps({"num_grads": 1, "dim": 1, "dtype": "int8", "fingerprint": ""}).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a gradient file"),
        (b"something else entirely" * 300, "is not a gradient file"),
        (HEADER.ljust(HEADER_BYTES), r"stores rows as 'int8', and this version reads float32, .*; collect"),
    ],
)
def test_other_files_are_refused(path, content, message):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        GradientFile(path)
