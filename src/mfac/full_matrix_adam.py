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
from mfac.optimizer import WindowOptimizer, memory_of, update
from mfac.parameter_groups import group_parameters
from mfac.parameter_window import Damping, NonFinite, ParameterWindow
from mfac.precision import Precision
from mfac.windows.storage import Window

ADAM_LR, ORTHOGONAL_LR = 3e-3, 2e-2  # unless lr is given
TALLEST = 8  # taller matrices are embeddings or their transposes, and are not orthogonalized
ORTHOGONAL_RMS = 0.23  # of the entries of an orthogonalized step, as of a typical step of Adam


class FullMatrixAdam(WindowOptimizer):
    """Adam whose diagonal is followed by the full matrix of the last m gradients.

        v ← β2 v + (1−β2) g²                          u = g / (√(v / (1−β2^t)) + ε)      u is the newest row of U
        F = λ I + (1/n) Σ ū ūᵀ                        ū: the average of row u and older ones, weights β1^age / Σ
        λ = damping · trace of (1/n) Σ ū ūᵀ / n       z = F^-p ū of the newest row, scaled to length · ‖ū‖
        Z ← 0.23 √max(out, rest) · orthogonal(Z)      with `orthogonalize`, each matrix Z [out, rest] of z
        w ← (1 − lr · decay) w − lr z

    β1 and β2 are `betas`, p `power`, ε `eps` times the mean of √v; m is `num_grads`, n the number of rows so far. The
    loss times a constant gives the same steps, so lr has Adam's units. The matrix is never formed: z is a combination
    of the rows of U, with coefficients from the m x m matrix U Uᵀ (`full_matrix_coefficients`): two passes over U.

    Args:
        params: parameters, named parameters or groups, as for any torch optimizer.
        lr: None: 3e-3, three times AdamW's default; with `orthogonalize` 2e-2, as for Muon.
        num_grads: m; the window takes m times the memory of the trained weights (`memory_needed`).
        betas: (β1, β2).
        damping: a fraction of the mean eigenvalue of the window, or a function of the number of steps so far.
        power: p. 0 is Adam, but for `length`; 1/2 its full-matrix form; 1 is M-FAC in Adam's coordinates.
        length: of the step, over that of Adam's.
        eps: ε, relative to the mean of √v over all weights.
        weight_decay: decoupled, as in AdamW.
        orthogonalize: matrices take Muon's step: the nearest orthogonal matrix to that of z. Vectors, matrices of one
            row or column, and those over eight times as tall as wide (embeddings) keep theirs.
        maximize: ascend instead of descend.

    `lr`, `weight_decay`, `eps`, `orthogonalize` and `maximize` can differ between groups. `window`, `masks`,
    `nonfinite`, `precision`, `device`, `process_group`, `devices` and errors are those of `MFAC`.
    """

    buffer = "root_mean_square"  # √v: squares of small gradients would underflow, those of large ones overflow
    shared = ("betas", "power", "length")

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
        if isinstance(damping, str):
            raise ValueError(
                f"damping must be a number or a function of the steps, not {damping!r}: it is relative here"
            )
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
        """The bytes that the optimizer will hold (on this rank) for its window, the m x m algebra and √v."""
        groups = group_parameters(params)
        buffered = (tensor for group in groups for tensor in group["params"])
        return memory_of(groups, num_grads, window, masks, process_group, buffered)

    def _take(self, gradients: dict[Tensor, Tensor]) -> None:
        groups = {tensor: group for group in self.param_groups for tensor in group["params"] if tensor in gradients}
        roots = {tensor: self._root(tensor, gradients[tensor], group) for tensor, group in groups.items()}
        first = self.param_groups[0]
        options = {"beta": first["betas"][0], "power": first["power"], "length": first["length"]}
        combination = partial(full_matrix_coefficients, **options)
        steps = self._window.precondition(self._rows(gradients, roots, groups), combination)
        if steps is None:
            return
        for group in self.param_groups:
            params = [tensor for tensor in dict.fromkeys(group["params"]) if tensor in steps]
            if group["orthogonalize"]:
                steps |= {tensor: self._orthogonal(tensor, steps[tensor]) for tensor in params if is_matrix(tensor)}
            for tensor in params:
                local(self.state[tensor][self.buffer]).copy_(roots[tensor])
                self.state[tensor]["step"] += 1
            if params:
                update([local(tensor) for tensor in params], [steps[tensor] for tensor in params], [], group)

    def _root(self, tensor: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> Tensor:
        """√v of a parameter after this step."""
        root, beta = local(self._begin(tensor, group)[self.buffer]), group["betas"][1]
        return torch.hypot(root * math.sqrt(beta), gradient.to(root.dtype) * math.sqrt(1 - beta))

    def _rows(
        self,
        gradients: Mapping[Tensor, Tensor],
        roots: Mapping[Tensor, Tensor],
        groups: Mapping[Tensor, Mapping[str, Any]],
    ) -> dict[Tensor, Tensor]:
        """u of every parameter. The mean of √v stays on the device: no sync."""
        started = {tensor: 1 - groups[tensor]["betas"][1] ** (int(self.state[tensor]["step"]) + 1) for tensor in roots}
        scales = {tensor: root / math.sqrt(started[tensor]) for tensor, root in roots.items()}
        norms = [norm.to(self._window.operator.device) for norm in torch._foreach_norm(list(scales.values()), 1)]
        mean = self._window.columns.total(torch.stack(norms).sum()) / sum(tensor.numel() for tensor in roots)
        for tensor, scale in scales.items():
            scale.add_(mean.to(scale.device) * groups[tensor]["eps"]).clamp_min_(torch.finfo(scale.dtype).tiny)
        return {tensor: gradients[tensor] / scale for tensor, scale in scales.items()}

    def _orthogonal(self, tensor: Tensor, step: Tensor) -> Tensor:
        """The step of a matrix, orthogonalized; ranks that have shards of it gather it, and each does all of it."""
        if is_placed(tensor):
            whole = torch.zeros_like(tensor, dtype=step.dtype)
            local(whole).copy_(step)
            step = local(like("a step", orthogonalized(whole.full_tensor()), tensor, step.dtype))  # type: ignore[attr-defined]
        else:
            step = orthogonalized(step)
        columns = self._window.columns
        for name, mask in columns.masks.items():
            if columns.named[name] is tensor:
                step = step * local(mask)
        return step


def full_matrix_coefficients(
    K: Float[Tensor, "n n"], ages: Float[Tensor, " n"], damping: float, *, beta: float, power: float, length: float
) -> Float[Tensor, " n"]:
    """c with Uᵀc = F^-p Uᵀa, scaled to `length` times the length of Uᵀa, for rows U with UUᵀ = K; in O(n³).

        a_i = beta^age_i / Σ        B_ij = beta^(age_j − age_i) / Σ_j / √n where row j is not newer than row i, else 0
        F = λ I + UᵀBᵀB U           B K Bᵀ = V diag(s) Vᵀ        λ = damping · mean(s)
        c ∝ a + Bᵀ V diag(((1 + s_i/λ)^-p − 1)/s_i) Vᵀ B K a        p = power

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
    Ka = K @ a
    c = a + B.T @ (V @ (changed * (V.T @ (B @ Ka))))
    return c * (length * ((a @ Ka).clamp_min(0) / (c @ K @ c).clamp_min(least)).sqrt())


def is_matrix(tensor: Tensor) -> bool:
    """Whether it is one to be orthogonalized: two sides above 1 once flattened to [out, rest], and no embedding."""
    out, rest = (tensor.shape[0], tensor.shape[1:].numel()) if tensor.ndim > 1 else (1, 1)
    return min(out, rest) > 1 and out <= TALLEST * rest


def orthogonalized(Z: Float[Tensor, "out *rest"], iterations: int = 5) -> Float[Tensor, "out *rest"]:
    """0.23 √max(out, rest) times the nearest orthogonal matrix, whose entries have a root mean square of 0.23.

    Five iterations X ← aX + (bXXᵀ + cXXᵀXXᵀ)X, from X = Z/‖Z‖, bring every singular value that is not tiny between 0.7
    and 1.2: the coefficients are those of Muon (Jordan, 2024).
    """
    X = Z.flatten(1)
    size, wide = max(X.shape), X.shape[0] <= X.shape[1]
    X = X if wide else X.T
    X = X / torch.linalg.matrix_norm(X).clamp_min(torch.finfo(X.dtype).tiny)
    for _ in range(iterations):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return (X if wide else X.T).mul(ORTHOGONAL_RMS * math.sqrt(size)).view(Z.shape)
