"""Every table and figure of the paper, in the order in which `python -m experiments run all` takes them."""

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
    table3,
    table4_left,
    table4_right,
    updates,
    wall_clock,
)

RECIPES: dict[str, Recipe] = {
    module.RECIPE.name: module.RECIPE
    for module in (
        table2,
        mnist_pruning,
        sparse_tuning,
        cosine_similarity,
        figure1a,
        table1,
        table3,
        updates,
        table4_left,
        table4_right,
        bert,
        normalizer_free,
        wall_clock,
    )
}
