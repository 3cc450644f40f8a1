"""Everything that knows of process groups: their ranks, and how parameters, windows and rows are divided among them."""
