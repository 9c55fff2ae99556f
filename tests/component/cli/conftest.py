"""Tests of command lines have these from ``support.cli_fixtures``."""

from support.cli_fixtures import fasttrain_main, receipt

__all__ = ["fasttrain_main", "receipt"]
