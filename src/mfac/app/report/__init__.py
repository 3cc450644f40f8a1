"""One self-contained HTML page from what `mfac prune` and `mfac train` have recorded."""
