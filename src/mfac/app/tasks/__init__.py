"""Tasks: what the commands prune and train. One is built in (`digits`); the others are users' files and modules."""

from mfac.app.tasks.loading import BUILT_IN, Task, TaskError, load_task, write_template

__all__ = ["BUILT_IN", "Task", "TaskError", "load_task", "write_template"]
