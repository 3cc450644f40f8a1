"""Every table and figure of the paper, in the order in which `python -m experiments run all` runs them."""

from importlib import import_module

from experiments.recipe import Recipe

NAMES = (
    "table2", "mnist_pruning", "sparse_tuning", "cosine_similarity", "figure1a", "table1", "table3", "updates",
    "table4_left", "table4_right", "bert", "normalizer_free", "wall_clock",
)  # fmt: skip
RECIPES: dict[str, Recipe] = {name: import_module(f"experiments.recipes.{name}").RECIPE for name in NAMES}
