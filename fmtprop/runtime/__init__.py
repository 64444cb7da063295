"""Execution of a formatted graph: the frozen plan, its memory, and the loop that runs it."""

from fmtprop.runtime.build import build_plan
from fmtprop.runtime.executor import Executor
from fmtprop.runtime.plan import Plan

__all__ = ["Executor", "Plan", "build_plan"]
