"""Every table and figure of the paper, in the order in which `python -m experiments run all` runs them."""

from experiments import gradual_pruning, one_shot_pruning
from experiments.recipe import Recipe
from experiments.recipes import (
    bert,
    cosine_similarity,
    figure1a,
    mnist_pruning,
    normalizer_free,
    sparse_tuning,
    table1,
    table2,
    table4_left,
    table4_right,
    wall_clock,
)  # fmt: skip

MODULES = (
    table2, mnist_pruning, sparse_tuning, cosine_similarity, figure1a, table1, gradual_pruning, one_shot_pruning,
    table4_left, table4_right, bert, normalizer_free, wall_clock,
)  # fmt: skip
RECIPES: dict[str, Recipe] = {module.RECIPE.name: module.RECIPE for module in MODULES}
