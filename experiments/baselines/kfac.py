"""K-FAC as an optimizer (Martens and Grosse, 2015; convolutions: Grosse and Martens, 2016).

The Fisher matrix of a layer is S ⊗ A: A of the layer's inputs (a one appended where there is a bias), S of the
gradients at its outputs. Other parameters (batch norm, embeddings) take plain gradient steps.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from experiments.baselines.layer_moments import Layer, is_plain, output_rows, patches


def input_factor(layer: Layer, x: Tensor) -> Tensor:
    """A = (1/n) Σ a aᵀ over n samples and all positions; a is what a row of the weight is multiplied with."""
    rows = patches(layer, x)[0]
    if layer.bias is not None:
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    return rows.T @ rows / len(x)


def output_factor(layer: Layer, gradient: Tensor) -> Tensor:
    """S: the mean over samples and positions of g gᵀ; `gradient` is of a loss averaged over the samples."""
    rows = output_rows(layer, gradient)
    return rows.T @ rows / len(rows)


def damped_factors(S: Tensor, A: Tensor, damping: float, balance: bool = True) -> tuple[Tensor, Tensor]:
    """S + √λ/π I and A + π√λ I; π² is the ratio of the mean diagonals, or 1 without `balance`."""
    pi = torch.ones((), dtype=A.dtype, device=A.device)
    if balance:
        tiny = torch.finfo(A.dtype).tiny  # a layer that no gradient reaches has S = 0
        pi = ((A.diagonal().mean() + tiny) / (S.diagonal().mean() + tiny)).sqrt().clamp(1e-6, 1e6)
    root = damping**0.5
    return S + torch.eye(len(S)).to(S) * (root / pi), A + torch.eye(len(A)).to(A) * (root * pi)


def cholesky_factors(S: Tensor, A: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    S, A = damped_factors(S.double(), A.double(), damping)
    return torch.linalg.cholesky(S), torch.linalg.cholesky(A)


def solve_factors(left: Tensor, right: Tensor, gradient: Tensor) -> Tensor:
    """S⁻¹ G A⁻¹ from the Cholesky factors of S and A."""
    halfway = torch.cholesky_solve(gradient.double(), left)
    return torch.cholesky_solve(halfway.T, right).T.to(gradient.dtype)


class KFAC(Optimizer):
    """w ← w − lr v, v ← μ v + (S ⊗ A)⁻¹ g, layer by layer, for linear layers and convolutions without groups.

    Factors are of the empirical Fisher: exponential averages over training batches with `decay`, inverted `every` so
    many steps. `clip` bounds lr² Σ v·g of a step, over all layers.
    """

    def __init__(
        self, model: nn.Module, lr: float = 0.1, damping: float = 0.2, *, momentum: float = 0.9, decay: float = 0.95,
        weight_decay: float = 0.0, clip: float | None = 1e-3, every: int = 1,
    ):  # fmt: skip
        defaults = {"lr": lr, "damping": damping, "momentum": momentum, "decay": decay, "weight_decay": weight_decay,
                    "clip": clip, "every": every, "steps": 0}  # fmt: skip
        super().__init__(list(model.parameters()), defaults)
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear) or (is_plain(m) and m.groups == 1)]
        for layer in self.layers:
            layer.register_forward_hook(self._watch)

    @property
    def _looks(self) -> bool:
        group = self.param_groups[0]
        return group["steps"] % group["every"] == 0

    def _watch(self, layer: Layer, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        if not (layer.training and output.requires_grad and self._looks):
            return
        inputs = arguments[0].detach()
        output.register_hook(lambda gradient: self._take(layer, inputs, gradient.detach()))

    @torch.no_grad()
    def _take(self, layer: Layer, inputs: Tensor, gradient: Tensor) -> None:
        for name, factor in (("A", input_factor(layer, inputs)), ("S", output_factor(layer, gradient))):
            state = self.state[layer.weight]
            if name in state:
                state[name].lerp_(factor, 1 - self.param_groups[0]["decay"])
            else:
                state[name] = factor

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        gradients = {p: p.grad + group["weight_decay"] * p for p in group["params"] if p.grad is not None}
        steps = dict(gradients)
        for layer in self.layers:
            if layer.weight in gradients and "S" in self.state[layer.weight]:
                steps.update(self._precondition(layer, gradients, group["damping"]))
        size = sum(float((steps[p] * gradients[p]).sum()) for p in steps)
        scale = 1.0 if group["clip"] is None else min(1.0, (group["clip"] / max(group["lr"] ** 2 * size, 1e-30)) ** 0.5)
        for p, step in steps.items():
            buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            buffer.mul_(group["momentum"]).add_(step, alpha=scale)
            p.sub_(buffer, alpha=group["lr"])
        group["steps"] += 1

    def _precondition(self, layer: Layer, gradients: dict[Tensor, Tensor], damping: float) -> dict[Tensor, Tensor]:
        state: dict[str, Any] = self.state[layer.weight]
        if self._looks or "left" not in state:
            state["left"], state["right"] = cholesky_factors(state["S"], state["A"], damping)
        matrix = gradients[layer.weight].flatten(1)
        if layer.bias is None:
            return {layer.weight: solve_factors(state["left"], state["right"], matrix).view_as(layer.weight)}
        matrix = torch.cat([matrix, gradients[layer.bias][:, None]], 1)
        step = solve_factors(state["left"], state["right"], matrix)
        return {layer.weight: step[:, :-1].reshape(layer.weight.shape), layer.bias: step[:, -1].clone()}
