"""MiniLM on GLUE's RTE."""

from experiments.tasks.glue import glue_task

_TASK = glue_task("rte")
model, train_batches, loss, evaluate = _TASK.model, _TASK.train_batches, _TASK.loss, _TASK.evaluate
eval_batches, optimizer, pretrain = _TASK.eval_batches, _TASK.optimizer, _TASK.pretrain
