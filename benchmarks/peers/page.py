"""The part of the page that is about peers: every picture with its table."""

from page_text import measured_on
from peers import pictures, tables


def section(record, folder):
    """Draws the pictures into a folder, and returns the text that shows them."""
    rows = record["rows"]
    drawn = pictures.draw(record, folder)
    limits = tables.limits_of(rows)
    rates = {name: limits[f"{name}_a_second"] / 1e9 for name in ("bytes", "flops", "float64_flops")}
    parts = [
        "Measured in the same run: memory is read at {bytes:.1f} GB/s, and matrices are multiplied at {flops:.0f} "
        "Gflop/s (float64: {float64_flops:.0f}).".format(**rates),
        "### A step of the window", _picture("peers_step"), tables.step_table(rows),
        "### A product with F⁻¹", _picture("peers_product"), tables.inverse_table(rows, "product"),
        "### The diagonal", _picture("peers_diagonal"), tables.inverse_table(rows, "diagonal"),
        "### Errors", _picture("peers_error"), tables.error_table(rows),
        "### Memory", _picture("peers_memory"),
        "### Optimizers", _picture("peers_training"), tables.training_table(rows),
    ]  # fmt: skip
    if "peers_pruning" in drawn:
        parts += ["### Pruning", _picture("peers_pruning"), tables.pruning_table(rows)]
    return "\n\n".join([*parts, measured_on(record)])


def _picture(name):
    return f"![{name.replace('_', ': ')}](images/{name}.png)"
