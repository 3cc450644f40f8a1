"""Where a run computes."""

import torch


def choose_device(name: str) -> torch.device:
    """The device of a name such as "cpu", "cuda" or "cuda:1", if there is one.

    Raises:
        ValueError: torch does not know the name, or the machine has no such device.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"device {name!r} cannot be used here ({reason}); there is {', '.join(_present())}") from None
    return device


def _present() -> list[str]:
    found = ["cpu"]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        found += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    return found
