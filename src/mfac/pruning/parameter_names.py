"""Parameters found by the names that people have for them: plain, wrapped, or reparametrised by a pruning tool."""

import difflib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mfac.layout import some

# Parts of a name that torch.compile and FSDP put in; DataParallel and many checkpoints put `module.` before it.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module")


def plain_name(name: str) -> str:
    """The name of a parameter in the bare model: without wrappers and without a pruning tool's reparametrisation.

    `module.fc.weight_orig` (torch.nn.utils.prune) and `fc.parametrizations.weight.original` are both `fc.weight`.
    """
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    if parts[0] == "module" and len(parts) > 1:
        parts = parts[1:]
    if "parametrizations" in parts and parts[-1] == "original":
        parts = [part for part in parts[:-1] if part != "parametrizations"]
    return ".".join(parts).removesuffix("_orig")


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter by its own name and by its plain one; a tied weight by each of its names."""
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    plain = {plain_name(name): tensor for name, tensor in named.items()}
    return plain | named


def find(name: str, known: Mapping[str, Tensor], where: str) -> Tensor:
    """The parameter called `name`.

    Raises:
        ValueError: there is none; the message has the nearest name.
    """
    for candidate in (name, plain_name(name)):
        if candidate in known:
            return known[candidate]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"it has {some(known)}"
    raise ValueError(f"masks: {name!r} is not a parameter of {where}; {hint}")


def as_mask(label: str, mask: Tensor, shape: torch.Size) -> Tensor:
    """The mask as a bool tensor: itself where it is one, converted where it holds zeros and ones.

    Raises:
        ValueError: it has another shape, or other values.
    """
    if not isinstance(mask, Tensor) or mask.shape != shape:
        found = f"has shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"is a {type(mask).__name__}"
        raise ValueError(f"masks: {label} needs a bool tensor of shape {tuple(shape)} (True = kept), this one {found}")
    if mask.dtype == torch.bool:
        return mask
    kept = mask != 0
    if not torch.equal(mask, kept.to(mask.dtype)):
        raise ValueError(
            f"masks: {label} needs True or 1 for kept and False or 0 for removed; this one has other values"
        )
    return kept
