"""Tasks: what the commands prune and train. One is built in (`digits`); the others are users' files and modules."""

from mfac.app.tasks.loading import BUILT_IN, load_task, write_template
from mfac.app.tasks.task import Task, TaskError

__all__ = ["BUILT_IN", "Task", "TaskError", "load_task", "write_template"]
