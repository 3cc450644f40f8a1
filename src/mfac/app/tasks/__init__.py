"""What the commands work on: tasks that are built in, and those that users write."""

from mfac.app.tasks.loading import BUILT_IN, load_task
from mfac.app.tasks.task import Task, TaskError
from mfac.app.tasks.template import write_template

__all__ = ["BUILT_IN", "Task", "TaskError", "load_task", "write_template"]
