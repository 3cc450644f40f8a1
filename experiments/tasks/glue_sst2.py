"""MiniLM on GLUE's SST-2."""

from experiments.tasks.glue import glue_task

globals().update(vars(glue_task("sst2")))
