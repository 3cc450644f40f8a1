"""Damage in what was saved, noticed while it is read."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raises ValueError, naming what is read, where an entry is missing or has another type or shape.

    A ValueError of the block itself passes as it is.
    """
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{what} is damaged, or something else: {error} is missing; load another") from error
    except (json.JSONDecodeError, TypeError, AttributeError, LookupError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{what} is damaged, or something else ({error}); load another") from error


def count_of(state: Mapping[str, Any], name: str, least: int = 0, most: float = float("inf")) -> int:
    """An entry that must be a whole number in a range."""
    value = state[name].item() if isinstance(state[name], Tensor) else state[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        allowed = f"an int from {least} to {most}" if most < float("inf") else f"an int of {least} or more"
        raise ValueError(f"the saved {name} must be {allowed}, not {value!r}; the state is damaged: load another")
    return value


def tensor_of(state: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Tensor:
    """An entry that must be a tensor of a shape, of finite numbers."""
    value = state[name]
    if not isinstance(value, Tensor) or value.shape != shape or not bool(value.isfinite().all()):
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"the saved {name} must be a tensor {list(shape)} of finite numbers, not {found} or with others; "
            "the state is damaged: load another"
        )
    return value
