"""How sparse a model is, layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mfac.layout import match_masks, parameters_by_name, plain_name
from mfac.pruning.masks import masks_of_model

HEADER = ("layer", "shape", "weights", "removed", "sparsity", "")


@dataclass(frozen=True)
class LayerSparsity:
    """One row of the table; `astray` counts weights that a mask removes but that are not zero."""

    name: str
    shape: tuple[int, ...]
    weights: int
    removed: int
    astray: int = 0

    @property
    def sparsity(self) -> float:
        return self.removed / self.weights if self.weights else 0.0


@dataclass(frozen=True)
class SparsityReport:
    """The table: one row per parameter that could be pruned; `others` counts the weights of all others."""

    rows: tuple[LayerSparsity, ...]
    others: int

    @property
    def weights(self) -> int:
        return sum(row.weights for row in self.rows)

    @property
    def removed(self) -> int:
        return sum(row.removed for row in self.rows)

    @property
    def sparsity(self) -> float:
        return self.removed / self.weights if self.weights else 0.0

    def __str__(self) -> str:
        lines = [HEADER]
        for row in self.rows:
            note = f"{row.astray:,} not zero" if row.astray else ""
            lines.append((row.name, " x ".join(map(str, row.shape)), *_counts(row), note))
        lines += [("total", "", *_counts(self), ""), ("other parameters", "", f"{self.others:,}", "", "", "")]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
        aligned = "  ".join(f"{{:{side}{width}}}" for side, width in zip("<<>>><", widths, strict=True))
        return "\n".join(aligned.format(*line).rstrip() for line in lines)


@torch.no_grad()
def sparsity_report(model: nn.Module, masks: Mapping[str, Tensor] | None = None) -> SparsityReport:
    """Counts the removed weights of a model, layer by layer; `str()` of the report is a table.

    Args:
        model: any model, also one prepared by torch.nn.utils.prune or torch.ao.pruning.
        masks: the rows of the table, and what is removed. Without them, every parameter of two or more dimensions is a
            row, and the removed weights are those of the model's own masks, or its exact zeros.

    Raises:
        ValueError: a mask belongs to no parameter, or does not fit it.
    """
    given = masks if masks is not None else masks_of_model(model)
    found = {id(parameter): mask for _, parameter, mask in match_masks(given, parameters_by_name(model), "the model")}
    rows, others = [], 0
    for name, parameter in model.named_parameters():
        mask = found.get(id(parameter))
        if mask is None and (masks or parameter.ndim < 2):
            others += parameter.numel()
        else:
            removed = parameter == 0 if mask is None else ~mask.to(parameter.device)
            # Torch's tools keep the parameter's values and multiply them by the mask in the forward pass.
            astray = 0 if masks is None else int(torch.count_nonzero(parameter.masked_select(removed)))
            counts = parameter.numel(), int(removed.sum()), astray
            rows.append(LayerSparsity(plain_name(name), tuple(parameter.shape), *counts))
    return SparsityReport(tuple(rows), others)


def _counts(row: LayerSparsity | SparsityReport) -> tuple[str, str, str]:
    return f"{row.weights:,}", f"{row.removed:,}", f"{100 * row.sparsity:.2f} %"
