"""The model and the random state, left exactly as they were found."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from mfac.gradients.batches import Batch


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, gradients on, every `.grad` set aside; restored afterwards, whatever happens.

    Restored are training flags, `.grad` and buffers (the same tensors with the same values), and the random state of
    torch, numpy and Python.
    """
    flags = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = {parameter.device for parameter in model.parameters()}
    python, numpy, states = random.getstate(), np.random.get_state(), _random_states(devices)
    try:
        model.eval()
        for parameter, _ in grads:
            parameter.grad = None
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        _set_random_states(states)
        for module, flag in flags:
            module.training = flag
        for parameter, grad in grads:
            parameter.grad = grad
        for module, name, buffer, value in buffers:
            if getattr(module, name, None) is not buffer:
                setattr(module, name, buffer)
            if not torch.equal(buffer, value):
                buffer.detach().copy_(value)


def set_seed(seed: int, device: torch.device) -> None:
    """Sets torch's random state on the CPU and on `device`."""
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        with module.device(device):
            module.manual_seed(seed)


def with_own_random_state(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches; what is drawn at random for them continues as if no seed had been set in between."""
    for batch in batches:
        states = _random_states([device])
        yield batch
        _set_random_states(states)


def _random_states(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    """Torch's random state on the CPU and on the accelerators among the devices."""
    accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
    states = {device: torch.get_device_module(device).get_rng_state(device) for device in accelerators}
    return {torch.device("cpu"): torch.get_rng_state()} | states


def _set_random_states(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
