"""Which weights are pruned: chosen by name or pattern, or every matrix and kernel of the model except embeddings."""

from collections.abc import Iterable

from torch import Tensor, nn

from mfac.layout import matching, parameters_by_name, some

Names = str | Iterable[str] | None


def choose_targets(model: nn.Module, targets: Names = None, ignore: Names = None) -> dict[str, Tensor]:
    """{name: parameter}, in the model's order; tied weights once, by their first name.

    Args:
        model: where the parameters are.
        targets: names or `"re:..."` patterns (by `re.search`); None: every trainable parameter of two or more
            dimensions that is not an embedding.
        ignore: names or patterns to leave out, whatever `targets` says.

    Raises:
        ValueError: a name or pattern matches nothing, or there is nothing left to prune.
    """
    every = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    if targets is None:
        kinds = nn.Embedding | nn.EmbeddingBag
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
        wanted = {id(tensor) for tensor in every.values() if tensor.ndim >= 2 and id(tensor) not in embeddings}
    else:
        wanted = matching_ids(model, targets, "targets")
    left_out = set() if ignore is None else matching_ids(model, ignore, "ignore")
    chosen: dict[str, Tensor] = {
        name: t for name, t in every.items() if id(t) in wanted - left_out and t.is_floating_point()
    }
    if not chosen:
        raise ValueError(
            "there is nothing to prune: targets and ignore leave no trainable parameter (by default those of two or "
            f"more dimensions that are not embeddings); the model has {some(dict(model.named_parameters()))}"
        )
    return chosen


def matching_ids(model: nn.Module, items: str | Iterable[str], argument: str) -> set[int]:
    """The ids of the parameters that names and patterns stand for; a tied weight answers to each of its names."""
    known = parameters_by_name(model)
    each = [items] if isinstance(items, str) else items
    return {id(tensor) for item in each for tensor in matching(item, known, argument, "the model").values()}
