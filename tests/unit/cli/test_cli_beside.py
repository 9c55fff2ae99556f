"""What is said of runs beside each other whose losses can't be compared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fasttrain.cli.beside import judged
from fasttrain.cli.proving import _with_failures
from fasttrain.launch.alternation import Followed
from fasttrain.model.proof import Curves


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


@pytest.mark.parametrize(
    ("causes", "finding", "reason"),
    [
        ({"plain": "port-in-use"}, "can't tell", "a port that the other run has"),
        ({"chosen": "port-in-use", "plain": ""}, "can't tell", "a port that the other run has"),
        ({"chosen": "host-memory"}, "can't tell", "no memory for it beside"),
        ({"chosen": "nan"}, "differs", "with the levers only"),
        ({"plain": "nan", "chosen": "nan"}, "can't tell", "without levers, too"),
    ],
)
def test_a_run_that_lacks_what_the_other_has_says_nothing_of_the_levers(
    causes: dict[str, str], finding: str, reason: str
) -> None:
    receipts: Any = {
        side: SimpleNamespace(crash=SimpleNamespace(cause=causes.get(side, "")), ranks=())
        for side in ("plain", "chosen")
    }
    turns: Any = SimpleNamespace(runs={"plain": Followed(), "chosen": Followed()}, steps=5)
    found = _with_failures(Curves("same bits", ""), turns, causes, receipts)
    assert found.finding == finding
    assert reason in found.reason
