"""LeNet-300-100, 266,610 weights, on MNIST."""

from experiments.tasks.lenet import lenet_task

_TASK = lenet_task("mnist")
model, train_batches, loss, evaluate = _TASK.model, _TASK.train_batches, _TASK.loss, _TASK.evaluate
eval_batches, optimizer, pretrain = _TASK.eval_batches, _TASK.optimizer, _TASK.pretrain
