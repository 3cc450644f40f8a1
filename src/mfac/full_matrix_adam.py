"""Adam with the full second-moment matrix of a window of gradients in the place of its diagonal."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from mfac.columns import is_placed, like, local
from mfac.optimizer import WindowOptimizer, memory_of
from mfac.parameter_groups import group_parameters
from mfac.parameter_window import Damping, NonFinite, ParameterWindow
from mfac.precision import Precision
from mfac.products import without_autocast
from mfac.windows.storage import Window

ADAM_LR, ORTHOGONAL_LR = 3e-3, 1e-2  # unless lr is given
TALLEST = 8  # taller matrices are embeddings or their transposes, and are not orthogonalized


class FullMatrixAdam(WindowOptimizer):
    """Adam whose diagonal is followed by the full matrix of the last m gradients.

        v ← β2 v + (1−β2) g²                          u = g / (√(v / (1−β2^t)) + ε)      u is the newest row of U
        F = λ I + (1/n) Σ ū ūᵀ                        ū: the average of row u and older ones, weights β1^age / Σ
        λ = damping · trace of (1/n) Σ ū ūᵀ / n       z = F^-p ū of the newest row
        Z ← orthogonal(Z)                             with `orthogonalize`, each matrix Z [out, rest] of z
        Z ← Z · length · ‖Ū‖ / ‖Z‖                    each tensor Z of z, which Adam would move by Ū, its part of ū
        w ← (1 − lr · decay) w − lr z

    β1 and β2 are `betas`, p `power`, ε `eps` times the mean of √v; m is `num_grads`, n the number of rows so far. The
    loss times a constant gives the same steps, so lr has Adam's units. The matrix is never formed: z is a combination
    of the rows of U, with coefficients from the m x m matrix U Uᵀ (`full_matrix_coefficients`): two passes over U.

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer.
        lr: None: 3e-3, three times AdamW's default; with `orthogonalize` 1e-2.
        num_grads: m; the window takes m times the memory of the trained weights (`memory_needed`).
        betas: (β1, β2).
        damping: a fraction of the mean eigenvalue of the window, or a function of the number of steps so far.
        power: p. 0 is Adam, but for `length`; 1/2 its full-matrix form; 1 is M-FAC in Adam's coordinates.
        length: of the step of each tensor, over that of Adam's.
        eps: ε, relative to the mean of √v over all weights.
        weight_decay: decoupled, as in AdamW.
        orthogonalize: matrices take Muon's direction: the nearest orthogonal matrix to that of z. Vectors, matrices of
            one row or column, and those over eight times as tall as wide (embeddings) keep theirs.
        maximize: ascend instead of descend.

    `lr`, `weight_decay`, `eps`, `orthogonalize` and `maximize` can differ between groups. `window`, `masks`,
    `nonfinite`, `precision`, `device`, `process_group`, `devices` and errors are those of `MFAC`.
    """

    # √v, since squares of small gradients would underflow, and those of large ones overflow; and the average of u.
    buffers = ("root_mean_square", "average")
    shared = ("betas", "power", "length")
    _relative = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        num_grads: int = 64,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        damping: Damping = 0.1,
        power: float = 0.5,
        length: float = 1.5,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        orthogonalize: bool = False,
        maximize: bool = False,
        window: Window | None = None,
        masks: Mapping[Any, Tensor] | None = None,
        nonfinite: NonFinite = "raise",
        precision: Precision = "auto",
        device: torch.device | str | None = None,
        process_group: ProcessGroup | None = None,
        devices: Sequence[torch.device | str] | None = None,
    ):
        self._check_relative(damping)
        self.seconds = 0.0
        lr = (ORTHOGONAL_LR if orthogonalize else ADAM_LR) if lr is None else lr
        defaults = {"lr": lr, "betas": betas, "power": power, "length": length, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "orthogonalize": orthogonalize, "maximize": maximize}
        super().__init__(params, defaults)
        self._window = ParameterWindow(
            self.param_groups, num_grads, damping, "full", window, masks, 1, nonfinite, precision,
            device, process_group, devices, {"groups": self._options()},
        )  # fmt: skip
        self._begin_all()

    @staticmethod
    def memory_needed(
        params: ParamsT,
        num_grads: int = 64,
        *,
        window: Window | None = None,
        masks: Mapping[Any, Tensor] | None = None,
        process_group: ProcessGroup | None = None,
    ) -> int:
        """The bytes that the optimizer will hold (on this rank) for its window, the m x m algebra, √v and averages."""
        groups = group_parameters(params)
        trained = {tensor for group in groups for tensor in group["params"]}
        return memory_of(groups, num_grads, window, masks, process_group, [*trained, *trained])

    def _take(self, gradients: dict[Tensor, Tensor]) -> None:
        groups = {tensor: group for group in self.param_groups for tensor in group["params"] if tensor in gradients}
        columns, first = self._window.columns, self.param_groups[0]
        masks = {columns.named[name]: local(mask) for name, mask in columns.masks.items()}
        beta, decay = first["betas"]
        roots = {}  # √v after this step
        for tensor, group in groups.items():
            root = local(self._begin(tensor, group)["root_mean_square"])
            gradient = gradients[tensor].to(root.dtype)
            gradients[tensor] = torch.where(masks[tensor], gradient, 0.0) if tensor in masks else gradient
            roots[tensor] = torch.hypot(root * math.sqrt(decay), gradients[tensor] * math.sqrt(1 - decay))
        rows = {tensor: gradients[tensor] / scale for tensor, scale in self._scales(roots, groups, decay).items()}
        averages = {tensor: torch.lerp(local(self.state[tensor]["average"]), row, 1 - beta)
                    for tensor, row in rows.items()}  # fmt: skip
        steps = self._window.precondition(rows, partial(full_matrix_coefficients, beta=beta, power=first["power"]))
        if steps is None:
            return
        for tensor in [tensor for tensor in steps if groups[tensor]["orthogonalize"] and is_matrix(tensor)]:
            steps[tensor] = self._orthogonal(tensor, steps[tensor]) * masks.get(tensor, 1)
        self._set_lengths(steps, averages, first["length"], beta)
        for tensor in steps:
            local(self.state[tensor]["root_mean_square"]).copy_(roots[tensor])
            local(self.state[tensor]["average"]).copy_(averages[tensor])
        self._move(steps)

    def _started(self, tensor: Tensor, beta: float) -> float:
        """1 − β^t: how much of an average the gradients so far make up."""
        return 1 - beta ** (int(self.state[tensor]["step"]) + 1)

    def _scales(self, roots: dict[Tensor, Tensor], groups: dict[Tensor, Any], decay: float) -> dict[Tensor, Tensor]:
        """What u is the gradient divided by. The mean of √v stays on the device: no sync."""
        scales = {tensor: root / math.sqrt(self._started(tensor, decay)) for tensor, root in roots.items()}
        norms = [norm.to(self._window.operator.device) for norm in torch._foreach_norm(list(scales.values()), 1)]
        total, limits = self._window.columns.total(torch.stack(norms).sum()), torch.finfo(norms[0].dtype)
        mean = total.clamp_max(limits.max) / sum(tensor.numel() for tensor in roots)
        for tensor, scale in scales.items():
            scale.add_(mean.to(scale.device) * groups[tensor]["eps"]).clamp_min_(limits.tiny)
        return scales

    def _set_lengths(
        self, steps: dict[Tensor, Tensor], averages: Mapping[Tensor, Tensor], length: float, beta: float
    ) -> None:
        """Scales every step to the length of Adam's, its average, times `length`; no sync."""
        device = self._window.operator.device
        norms = torch._foreach_norm([*steps.values(), *(averages[tensor] for tensor in steps)])
        squares = torch.stack([norm.to(device, torch.float64) for norm in norms]).square()
        own, adams = self._window.columns.total(squares).sqrt().view(2, -1)
        longer = [length / self._started(tensor, beta) for tensor in steps]
        wanted = torch.tensor(longer, dtype=torch.float64, device=device) * adams
        scales = torch.where(own > 0, wanted / own, 0.0)
        for part, scale in zip(steps.values(), scales, strict=True):
            part.mul_(scale.to(part.device, part.dtype))

    def _orthogonal(self, tensor: Tensor, step: Tensor) -> Tensor:
        """The step of a matrix, orthogonalized; ranks that have shards of it gather it, and each does all of it."""
        if is_placed(tensor):
            whole = torch.zeros_like(tensor, dtype=step.dtype)
            local(whole).copy_(step)
            return local(like("a step", orthogonalized(whole.full_tensor()), tensor, step.dtype))  # type: ignore[attr-defined]
        return orthogonalized(step)


def full_matrix_coefficients(
    K: Float[Tensor, "n n"], ages: Float[Tensor, " n"], damping: float, *, beta: float, power: float
) -> Float[Tensor, " n"]:
    """c with Uᵀc = λ^p F^-p Uᵀa for rows U with UUᵀ = K; in O(n³).

        a_i = beta^age_i / Σ        B_ij = beta^(age_j − age_i) / Σ_j / √n where row j is not newer than row i, else 0
        F = λ I + UᵀBᵀB U           B K Bᵀ = V diag(s) Vᵀ        λ = damping · mean(s)
        c = a + Bᵀ V diag(((1 + s_i/λ)^-p − 1)/s_i) Vᵀ B K a        p = power

    Rows that are all zero give zeros.
    """
    older = ages[None, :] - ages[:, None]
    B = torch.where(older >= 0, beta ** older.clamp_min(0), 0.0)
    B = B / B.sum(1, keepdim=True)
    a = B[ages.argmin()]  # the average that the newest row stands for
    B = B / math.sqrt(len(B))
    s, V = torch.linalg.eigh(B @ K @ B.T)
    s = s.clamp_min(0)
    least = torch.finfo(K.dtype).tiny
    shift = (damping * s.mean()).clamp_min(least)
    changed = torch.expm1(-power * torch.log1p(s / shift)) / s.clamp_min(least)  # zero where s is: so is Vᵀ B K a
    return a + B.T @ (V @ (changed * (V.T @ (B @ (K @ a)))))


def is_matrix(tensor: Tensor) -> bool:
    """Whether it is one to be orthogonalized: two sides above 1 once flattened to [out, rest], and no embedding."""
    out, rest = (tensor.shape[0], tensor.shape[1:].numel()) if tensor.ndim > 1 else (1, 1)
    return min(out, rest) > 1 and out <= TALLEST * rest


@without_autocast
def orthogonalized(Z: Float[Tensor, "out *rest"], iterations: int = 5) -> Float[Tensor, "out *rest"]:
    """About the nearest orthogonal matrix to Z [out, rest]; zeros of zeros.

    Five iterations X ← aX + (bXXᵀ + cXXᵀXXᵀ)X, from X = Z/‖Z‖, bring every singular value that is not tiny between 0.7
    and 1.2: the coefficients are those of Muon (Jordan, 2024).
    """
    X = Z.flatten(1)
    wide = X.shape[0] <= X.shape[1]
    X = X if wide else X.T
    X = X / torch.linalg.matrix_norm(X).clamp_min(torch.finfo(X.dtype).tiny)
    for _ in range(iterations):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return (X if wide else X.T).reshape(Z.shape)
