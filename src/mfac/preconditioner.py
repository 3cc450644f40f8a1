"""F⁻¹ by itself, in front of any optimizer: gradients are replaced by preconditioned ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from mfac.columns import local_gradients
from mfac.dynamic import Normalize
from mfac.parameter_groups import group_parameters, name_masks, name_parameters
from mfac.parameter_window import Damping, NonFinite, ParameterWindow
from mfac.precision import Precision
from mfac.windows import Window


class MFACPreconditioner:
    """Replaces each `.grad` by its part of F⁻¹g; any optimizer's step can follow.

        loss.backward()
        preconditioner.step()
        optimizer.step()

    Args:
        params: parameters, named parameters or groups of them; those without `requires_grad` are left out.

    All other arguments are those of `MFAC`.

    Raises:
        ValueError: an argument out of its range, or a mask that does not fit.
        MemoryError: the window does not fit; the message has the figures.
    """

    def __init__(
        self,
        params: ParamsT,
        num_grads: int = 1024,
        damping: Damping = 1e-5,
        *,
        normalize: Normalize = "full",
        window: Window | None = None,
        masks: Mapping[Any, Tensor] | None = None,
        update_every: int = 1,
        nonfinite: NonFinite = "raise",
        precision: Precision = "auto",
        device: torch.device | str | None = None,
        process_group: ProcessGroup | None = None,
        devices: Sequence[torch.device | str] | None = None,
    ):
        named = name_parameters(group_parameters(params))
        trained = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        if not trained:
            raise ValueError("there is no trainable parameter to precondition; pass model.parameters()")
        self._window = ParameterWindow(
            trained,
            name_masks(masks, named),
            num_grads,
            damping,
            normalize=normalize,
            window=window,
            precision=precision,
            device=device,
            update_every=update_every,
            nonfinite=nonfinite,
            process_group=process_group,
            devices=devices,
        )

    @property
    def damping(self) -> float:
        """λ; assign a number, which costs a Cholesky factorisation of the m x m matrix, or a function of the steps."""
        return self._window.operator.damping

    @damping.setter
    def damping(self, damping: Damping) -> None:
        self._window.assign_damping(damping)

    @property
    def skipped(self) -> int:
        """How many gradients were not finite, and skipped."""
        return self._window.skipped

    @torch.no_grad()
    def step(self) -> bool:
        """Replaces every `.grad` by its part of F⁻¹g, in place; those that are None stay None.

        Returns:
            Whether it was done: False where there is no gradient, or one that is not finite was skipped. Gradients are
            then as they were, so the optimizer's step should be left out too.

        Raises:
            RuntimeError: a gradient is not finite (with `nonfinite="raise"`) or sparse. Nothing has changed.
        """
        tensors = self._window.named
        given = [tensor for tensor in tensors.values() if tensor.grad is not None]
        gradients = dict(zip(given, local_gradients(given), strict=True))
        sparse = [name for name, tensor in tensors.items() if tensor in gradients and gradients[tensor].is_sparse]
        if sparse:
            raise RuntimeError(f"sparse gradients cannot be preconditioned, and {', '.join(sparse)} has one")
        steps = self._window.precondition(gradients) if gradients else None
        if steps is None:
            return False
        for tensor, part in steps.items():
            gradients[tensor].copy_(part)
        return True

    def diagnostics(self) -> dict[str, float]:
        """Figures to plot, of the last step and the window: as `MFAC.diagnostics`, without the time."""
        return self._window.diagnostics()

    def state_dict(self) -> dict[str, Any]:
        """All of the state. Gradients of the window are its own memory: save it (or deep-copy it) before going on."""
        states = self._window.parameter_states().values()
        return {"window": self._window.shared_state(), "state": dict(enumerate(states))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a saved state; a window stored in another dtype or on another device is converted.

        Raises:
            ValueError: it is the state of another window.
        """
        if not state_dict.keys() >= {"window", "state"}:
            raise ValueError(
                "this is not a state of MFACPreconditioner: it has no window; was it saved by an optimizer?"
            )
        tensors, states = self._window.columns.tensors, state_dict["state"]
        if len(tensors) != len(states):
            raise ValueError(f"the state is of {len(states)} parameters, and there are {len(tensors)} here")
        saved = {tensors[int(i)]: state for i, state in states.items()}
        self._window.load_state(state_dict["window"], saved, self._window.named)
