"""Tests of the worker's side have their levers from ``support.shim_fixtures``."""

from support.shim_fixtures import amp, backend, machine, plan, preempted, rig

__all__ = ["amp", "backend", "machine", "plan", "preempted", "rig"]
