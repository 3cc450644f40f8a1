"""The table of sparsities: counts, and how it looks."""

import pytest
import torch
from models import mlp
from torch.nn.utils import prune

from mfac.pruning.masks import apply_masks, to_torch_ao
from mfac.pruning.sparsity_report import sparsity_report


def half(shape):
    mask = torch.ones(shape, dtype=torch.bool)
    mask.view(-1)[::2] = False
    return mask


def test_the_table():
    model = mlp().model
    apply_masks(model, {"0.weight": half((7, 5))})
    report = sparsity_report(model)
    assert (report.weights, report.removed, report.others, report.sparsity) == (56, 18, 10, 18 / 56)
    assert [(row.name, row.sparsity) for row in report.rows] == [("0.weight", 18 / 35), ("2.weight", 0)]
    assert str(report).splitlines() == [
        "layer             shape  weights  removed  sparsity",
        "0.weight          7 x 5       35       18   51.43 %",
        "2.weight          3 x 7       21        0    0.00 %",
        "total                         56       18   32.14 %",
        "other parameters              10",
    ]


def test_masks_count_and_what_went_astray_shows():
    model = mlp().model
    masks = {"0.weight": half((7, 5)), "2.bias": torch.tensor([True, False, True])}
    apply_masks(model, masks)
    model[0].weight.data[0, 0] = 1.0
    model[0].weight.data[0, 1] = 0.0  # kept, though it is zero
    report = sparsity_report(model, masks)
    assert [(row.name, row.removed, row.astray) for row in report.rows] == [
        ("0.weight", 18, 1), ("2.bias", 1, 0),
    ]  # fmt: skip
    assert report.others == 7 + 21
    assert "1 not zero" in str(report)


@pytest.mark.parametrize("tool", ["prune", "ao"])
def test_models_prepared_by_torch_s_tools(tool):
    model = mlp().model
    if tool == "prune":
        prune.custom_from_mask(model[0], "weight", half((7, 5)))
    else:
        to_torch_ao(model, {"0.weight": half((7, 5))})
    counts = {row.name: (row.removed, row.astray) for row in sparsity_report(model).rows}
    assert counts == {"0.weight": (18, 0), "2.weight": (0, 0)}


def test_masks_that_do_not_fit():
    with pytest.raises(ValueError, match=r"'2.weight' needs a bool tensor of shape \(3, 7\)"):
        sparsity_report(mlp().model, {"2.weight": half((7, 5))})
