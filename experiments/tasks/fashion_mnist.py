"""LeNet-300-100, 266,610 weights, on Fashion-MNIST."""

from experiments.tasks.lenet import lenet_task

globals().update(vars(lenet_task("fashion-mnist")))
