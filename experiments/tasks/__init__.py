"""Tasks on public data for the command line: `mfac prune experiments.tasks.mnist`."""
