"""MiniLM on GLUE's RTE."""

from experiments.tasks.glue import glue_task

globals().update(vars(glue_task("rte")))
