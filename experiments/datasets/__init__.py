"""Public data sets: where they come from, where they are kept, and how their files become tensors."""
