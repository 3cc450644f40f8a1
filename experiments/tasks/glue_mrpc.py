"""MiniLM on GLUE's MRPC."""

from experiments.tasks.glue import glue_task

globals().update(vars(glue_task("mrpc")))
