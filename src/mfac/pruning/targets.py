"""Which weights are pruned: chosen by name or pattern, or every matrix and kernel of the model but its embeddings."""

import difflib
import re
from collections.abc import Iterable

from torch import Tensor, nn

from mfac.layout import some

Names = str | Iterable[str] | None


def choose_targets(model: nn.Module, targets: Names = None, ignore: Names = None) -> dict[str, Tensor]:
    """{name: parameter}, in the model's order; tied weights once, by their first name.

    Args:
        model: where the parameters are.
        targets: names or `"re:..."` patterns (by `re.search`); None: every trainable parameter of two or more
            dimensions that no embedding owns.
        ignore: names or patterns that are left out whatever `targets` says.

    Raises:
        ValueError: a name or pattern that matches nothing, or nothing that is left to prune.
    """
    every = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    if targets is None:
        embeddings = _embedding_ids(model)
        wanted = {id(tensor) for tensor in every.values() if tensor.ndim >= 2 and id(tensor) not in embeddings}
    else:
        wanted = matching_ids(model, targets, "targets")
    left_out = set() if ignore is None else matching_ids(model, ignore, "ignore")
    chosen: dict[str, Tensor] = {
        name: t for name, t in every.items() if id(t) in wanted - left_out and t.is_floating_point()
    }
    if not chosen:
        raise ValueError(
            "there is nothing to prune: no trainable parameter is left by targets and ignore (by default those of two "
            f"or more dimensions that are no embeddings); the model has {some(dict(model.named_parameters()))}"
        )
    return chosen


def matching_ids(model: nn.Module, items: str | Iterable[str], argument: str) -> set[int]:
    """The ids of the parameters that names and patterns stand for; a tied weight answers to each of its names.

    Raises:
        ValueError: one of them matches nothing; `argument` is what the message calls it.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    found: set[int] = set()
    for item in [items] if isinstance(items, str) else items:
        if not isinstance(item, str):
            raise ValueError(f"{argument} takes names and 're:...' patterns, not {type(item).__name__}")
        if item.startswith("re:"):
            matches = {id(tensor) for name, tensor in named.items() if re.search(item[3:], name)}
        else:
            matches = {id(named[item])} if item in named else set()
        if not matches:
            close = difflib.get_close_matches(item, named, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {some(named)}"
            raise ValueError(f"{argument}: {item!r} matches no parameter of the model; {hint}")
        found |= matches
    return found


def _embedding_ids(model: nn.Module) -> set[int]:
    kinds = nn.Embedding | nn.EmbeddingBag
    return {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
