"""MiniLM on GLUE's STS-B: how similar two sentences are, by the cosine of their embeddings; it comes trained."""

from experiments.tasks.glue import glue_task

globals().update(vars(glue_task("stsb")))
