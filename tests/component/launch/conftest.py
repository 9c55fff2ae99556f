"""Tests of the launcher have their plans and reports from ``support.launch_fixtures``."""

from support.launch_fixtures import of_command, plan, report, slug

__all__ = ["of_command", "plan", "report", "slug"]
