"""GGT (Agarwal et al., 2019): the inverse root of the second moment of the last m gradients, on their span."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


def ggt_step(rows: Tensor, newest: int, count: int, eps: float) -> Tensor:
    """[(M Mᵀ)^½ + ε I]⁻¹ v for M = rowsᵀ/√count [d, m] and v = rows[newest], by an eigendecomposition of MᵀM.

    With MᵀM = V Σ² Vᵀ and v = √count M e, in the span of M, this is √count M V (Σ + ε)⁻¹ Vᵀ e. The whole Gram matrix
    is computed anew, as in the authors' code: O(d m²).
    """
    gram = (rows @ rows.T).double() / count
    squares, V = torch.linalg.eigh(gram)
    scaled = V[newest] / (squares.clamp_min(0).sqrt() + eps)
    return (V @ scaled).to(rows.dtype) @ rows


class GGT(Optimizer):
    """v ← β v + (1−β) g enters a window of m; w ← w − lr [(M Mᵀ)^½ + ε I]⁻¹ v, M the window over √m.

    All parameters share one window; m is 10 by default in the authors' code, and 100 in the paper.
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.05, window: int = 100, *, beta: float = 0.9, eps: float = 1e-2,
        weight_decay: float = 0.0,
    ):  # fmt: skip
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps, "weight_decay": weight_decay})
        self.window = window
        tensors = self.param_groups[0]["params"]
        dim = sum(p.numel() for p in tensors)
        # With the first parameter, so that state_dict saves them.
        rows, average = tensors[0].new_zeros(window, dim), tensors[0].new_zeros(dim)
        self.state[tensors[0]] = {"count": 0, "rows": rows, "average": average}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        state = self.state[group["params"][0]]
        state["average"].lerp_(_flat_gradient(group), 1 - group["beta"])
        newest = state["count"] % self.window
        state["rows"][newest] = state["average"]
        state["count"] += 1
        step = ggt_step(state["rows"], newest, min(state["count"], self.window), group["eps"])
        for p, part in zip(group["params"], step.split([p.numel() for p in group["params"]]), strict=True):
            p.sub_(part.view_as(p), alpha=group["lr"])


def _flat_gradient(group: dict) -> Tensor:
    parts = []
    for p in group["params"]:
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        parts.append((gradient + group["weight_decay"] * p).flatten())
    return torch.cat(parts)
