"""The way out of `vmap` and back: a call with plain tensors that hold all samples, the mapped dimension first.

The public way is a `Function` with a rule for `vmap`. What that comes down to is a few private calls of torch. Made
directly they take much less time than all that is around them, which shows in chunks of few samples; where they are not
to be had, or another transform has come on top, the public way is taken.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.function import Function

try:
    from torch._C._functorch import (
        _add_batch_dim,
        get_unwrapped,
        is_batchedtensor,
        maybe_get_bdim,
        maybe_get_level,
        peek_interpreter_stack,
    )
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    has_direct_way = True
except ImportError:  # another version of torch
    has_direct_way = False


def outside(function: Callable[..., Any], x: Tensor, each: Tensor, *rest: Any) -> Any:
    """function(x, *rest) outside of vmap; x that is the same for all samples is expanded.

    Args:
        function: gives a tensor or a tuple of them, with the samples first.
        x: what one sample sees.
        each: any tensor that is mapped, so that it is known what over.
        rest: further arguments; tensors among them are mapped or not.
    """
    if has_direct_way and peek_interpreter_stack().level() == maybe_get_level(each):
        return _directly(function, x, each, *rest)
    return Outside.apply(function, x, each, *rest)


def _directly(function: Callable[..., Any], x: Tensor, each: Tensor, *rest: Any) -> Any:
    level = maybe_get_level(each)
    whole, moved = _unwrapped(x, level), [_unwrapped(value, level) for value in rest]
    with temporarily_pop_interpreter_stack():
        if whole is x:
            whole = x.unsqueeze(0).expand(len(get_unwrapped(each)), *x.shape)
        result = function(whole, *moved)
    if isinstance(result, tuple):
        return tuple(_add_batch_dim(tensor, 0, level) for tensor in result)
    return _add_batch_dim(result, 0, level)


def _unwrapped(value: Any, level: int) -> Any:
    """The plain tensor, for one that is mapped at this level."""
    if not isinstance(value, Tensor) or not is_batchedtensor(value) or maybe_get_level(value) != level:
        return value
    return get_unwrapped(value).movedim(maybe_get_bdim(value), 0)


class Outside(Function):
    """Leaves `vmap`: calls `function` on the plain tensors that hold all samples, with the mapped dimension first."""

    @staticmethod
    def forward(function: Any, x: Tensor, each: Tensor, *rest: Any) -> Tensor:
        """Never runs: `each` is always mapped."""
        raise AssertionError("a layer was caught outside vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep: the functions called outside have their own backward."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Any, x: Tensor, each: Tensor, *rest: Any) -> Any:
        """Puts the mapped dimension of every tensor first, and expands x where it is the same for all samples."""
        moved = [_first(value, dim) for value, dim in zip(rest, in_dims[3:], strict=True)]
        whole = _first(x, in_dims[1]) if in_dims[1] is not None else x.unsqueeze(0).expand(info.batch_size, *x.shape)
        result = function(whole, *moved)
        return result, (0,) * len(result) if isinstance(result, tuple) else 0


def _first(value: Any, dim: Any) -> Any:
    return value.movedim(dim, 0) if isinstance(value, Tensor) and dim is not None else value
