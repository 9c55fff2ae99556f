"""The mark of a run."""

from __future__ import annotations

RUN_MARK = "FASTTRAIN_RUN_ID"
"""Variable that every process of a run has in its environment; its value is the run's name."""
