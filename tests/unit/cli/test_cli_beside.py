"""What is said of runs beside each other whose losses can't be compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.cli.beside import judged
from fasttrain.launch.alternation import Followed


@pytest.mark.parametrize("side", ["plain", "chosen"])
def test_steps_of_several_threads_have_no_order_to_compare(side: str) -> None:
    runs = {"plain": Followed(losses=[1.0, 2.0]), "chosen": Followed(losses=[2.0, 1.0])}
    runs[side].threads_train = True
    sides: Any = SimpleNamespace(signum=0, exit_code=lambda _: 0)
    turns: Any = SimpleNamespace(runs=runs)
    found = judged(sides, turns)
    assert found.finding == "can't tell"
    assert "threads" in found.reason
    runs["chosen"].losses = [1.0, 2.0]
    assert judged(sides, turns).finding == "same bits"
