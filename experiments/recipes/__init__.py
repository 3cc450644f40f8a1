"""Every table and figure of the paper, in the order in which `python -m experiments run all` runs them."""

from importlib import import_module

from experiments.recipe import Recipe

MODULES = (
    "recipes.table2", "recipes.mnist_pruning", "recipes.cosine_similarity", "recipes.figure1a", "recipes.table1",
    "gradual_pruning", "one_shot_pruning", "recipes.table4_left", "recipes.table4_right", "recipes.bert",
    "recipes.normalizer_free",
)  # fmt: skip
FOUND: list[Recipe] = [import_module(f"experiments.{name}").RECIPE for name in MODULES]
RECIPES = {recipe.name: recipe for recipe in FOUND}
