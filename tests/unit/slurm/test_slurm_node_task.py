"""Which ends of a run keep its job from being queued again."""

from __future__ import annotations

import pytest

from fasttrain.slurm.node_task import is_hopeless


@pytest.mark.parametrize(
    ("cause", "hopeless"),
    [
        ("disk-full", True),
        ("syntax", True),
        ("refused", True),
        ("stopped", False),  # by the signal that warned it
        ("signal", False),
        ("interrupted", False),  # --signal INT
        ("exit", False),
        ("exception", False),
        ("hang", False),
    ],
)
def test_what_would_end_so_again(cause: str, hopeless: bool) -> None:
    assert is_hopeless(cause) is hopeless
