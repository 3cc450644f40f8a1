"""F⁻¹ in front of any optimizer: gradients are replaced by preconditioned ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import ParamsT

from mfac.dynamic import Normalize
from mfac.parameter_groups import gradients_of, group_parameters
from mfac.parameter_window import Damping, NonFinite, ParameterWindow, Windowed
from mfac.precision import Precision
from mfac.saved import reading
from mfac.windows.storage import Window


class MFACPreconditioner(Windowed):
    """Replaces each `.grad` by its part of F⁻¹g; the step of any optimizer can follow.

        loss.backward()
        preconditioner.step()
        optimizer.step()

    Parameters that are frozen at this time are left out for good. Arguments and errors are those of `MFAC`.
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
        self._window = ParameterWindow(
            group_parameters(params), num_grads, damping, normalize, window, masks, update_every, nonfinite, precision,
            device, process_group, devices,
        )  # fmt: skip

    @torch.no_grad()
    def step(self) -> bool:
        """Replaces every `.grad` by its part of F⁻¹g, in place; those that are None stay None.

        Returns False if there is no gradient, or one that is not finite was skipped: gradients are unchanged, and the
        optimizer's step should be skipped too. Raises as `MFAC.step` does.
        """
        named = self._window.columns.named
        gradients = gradients_of([{"params": list(named.values()), "param_names": list(named)}])
        steps = self._window.precondition(gradients) if gradients else None
        if steps is None:
            return False
        for tensor, part in steps.items():
            gradients[tensor].copy_(part)
        return True

    def diagnostics(self) -> dict[str, float]:
        """As `MFAC.diagnostics`, without the time."""
        return self._window.diagnostics()

    def state_dict(self) -> dict[str, Any]:
        """As `MFAC.state_dict`: save or deep-copy it before the next step."""
        shared, states = self._window.state()
        return {"window": shared, "state": dict(enumerate(states.values()))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `MFAC.load_state_dict`."""
        if not state_dict.keys() >= {"window", "state"}:
            raise ValueError("this is not a state of MFACPreconditioner: it has no window; did an optimizer save it?")
        tensors, states = self._window.columns.tensors, state_dict["state"]
        if len(tensors) != len(states):
            raise ValueError(f"the state is of {len(states)} parameters, and there are {len(tensors)} here")
        with reading("the state of the preconditioner"):
            saved = {tensors[int(i)]: state for i, state in states.items()}
        self._window.load_state(state_dict["window"], saved, self._window.columns.named)
