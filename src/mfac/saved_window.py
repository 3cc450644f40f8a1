"""What a saved window is asked before it is taken over."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mfac.columns import Ranks
from mfac.windows import SavedRows


def check_products(ranks: Ranks, saved: SavedRows, squares: Float[Tensor, " n"]) -> None:
    """Refuses rows whose squared norms are not those on the saved Gram matrix's diagonal."""
    norms = torch.zeros_like(squares)  # not a list: small tensors between large ones that are freed break up the heap
    for k in range(len(squares)):
        norms[k] = torch.linalg.vector_norm(saved.row(k), dtype=torch.float64)
    if len(norms) and not torch.allclose(ranks.sum_(norms.square()), squares, rtol=1e-3, atol=0):
        piece = "" if ranks.size == 1 else ", or the state of one rank was loaded on another"
        raise ValueError(
            "the saved rows are not those that the saved products were made from: the window went on after "
            f"state_dict(), whose rows are its own memory{piece}; save the state, or deep-copy it, before going on"
        )


def check_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuses the state of another window."""
    for name, value in expected.items():
        if state.get(name) != value:
            raise ValueError(
                f"the state was saved with {name}={state.get(name)!r}, this window has {name}={value!r}; build the "
                "operator with the saved value"
            )
