"""The memory and time of a run, estimated before anything large is allocated."""

from mfac.app.plan.plan import Plan, make_plan

__all__ = ["Plan", "make_plan"]
