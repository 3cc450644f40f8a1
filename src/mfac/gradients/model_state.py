"""The model and the random state, left exactly as they were found."""

import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mfac.gradients.batches import Batch

RandomState = dict[str, Any]
_users: list[tuple[int, set[int]]] = []  # (a thread, the ids of the modules that it has in eval mode)
_lock = threading.Lock()


@contextmanager
def reserved(model: nn.Module) -> Iterator[None]:
    """Refuses a second thread while the block runs: it would see, and restore, flags that the first has changed."""
    me, modules = threading.get_ident(), set(map(id, model.modules()))
    with _lock:
        if any(thread != me and not modules.isdisjoint(theirs) for thread, theirs in _users):
            way = "let one thread finish first, or give each a copy.deepcopy of the model"
            raise RuntimeError(f"another thread is computing gradients of this {type(model).__name__}; {way}")
        _users.append((me, modules))
    try:
        yield
    finally:
        _users.remove((me, modules))


@contextmanager
def evaluation(model: nn.Module, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """The model in eval mode, gradients on, also those of frozen `tensors`; one thread at a time.

    Training flags, `requires_grad`, `.grad`, buffers and random states are restored afterwards.
    """
    accelerators = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    with reserved(model), kept_random_state(sorted(accelerators, key=str)):
        frozen = [tensor for tensor in tensors if not tensor.requires_grad]
        flags = [(module, module.training) for module in model.modules()]
        grads = [(parameter, parameter.grad) for parameter in model.parameters()]
        buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        try:
            model.eval()
            for parameter, _ in grads:
                parameter.grad = None
            for tensor in frozen:
                tensor.requires_grad_()
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            for tensor in frozen:
                tensor.requires_grad_(False)
            for module, flag in flags:
                module.training = flag
            for parameter, grad in grads:
                parameter.grad = grad
            for module, name, buffer, value in buffers:
                if getattr(module, name, None) is not buffer:
                    setattr(module, name, buffer)
                if not torch.equal(buffer, value):
                    with torch.no_grad():
                        buffer.copy_(value)


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Restores modules that hold other tensors as plain attributes at the end: those of a `vmap` are of no use then."""
    before = [(module, vars(module).copy()) for module in model.modules()]
    try:
        yield
    finally:
        for module, held in before:
            now = vars(module)
            if any(isinstance(value, Tensor) and value is not held.get(name) for name, value in now.items()):
                now.clear()
                now.update(held)


def random_state(devices: Iterable[torch.device] | None = None) -> RandomState:
    """The states of Python, numpy, and torch on the CPU and these devices (None: every initialized accelerator)."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    there = _accelerators() if devices is None else devices
    return {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
        "devices": {str(device): torch.get_device_module(device).get_rng_state(device) for device in there},
    }


def set_random_state(state: RandomState) -> None:
    """Restores what `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"])
    for device, its_state in state["devices"].items():
        torch.get_device_module(device).set_rng_state(its_state, device)


@contextmanager
def kept_random_state(devices: Iterable[torch.device] | None = None) -> Iterator[None]:
    """Restores the random states at the end of the block."""
    before = random_state(devices)
    try:
        yield
    finally:
        set_random_state(before)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers inside are those of the seed; the states outside are restored."""
    with kept_random_state():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for device in (torch.device("cpu"), *_accelerators()):
            set_seed(seed, device)
        yield


def _accelerators() -> list[torch.device]:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def set_seed(seed: int, device: torch.device) -> None:
    """Sets torch's random state on the CPU and on `device`."""
    torch.default_generator.manual_seed(seed)
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        with module.device(device):
            module.manual_seed(seed)


def with_own_random_state(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches; what is drawn at random for them continues as if no seed had been set in between."""
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    for batch in batches:
        here = torch.get_rng_state()
        there = None if module is None else module.get_rng_state(device)
        yield batch
        torch.set_rng_state(here)
        if module is not None:
            module.set_rng_state(there, device)
