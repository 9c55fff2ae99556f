"""Ends ``fasttrain run --prove`` of a script that trains in processes that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttrain.cli import beside, proving
from fasttrain.model.proof import Curves


class Now:
    """A clock that goes when it is told to."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def test_children_are_given_up_on_once_they_alone_have_trained_for_a_while(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, alone = Now(), [False]
    monkeypatch.setattr(beside, "time", clock)
    monkeypatch.setattr(beside, "trains_in_children", lambda _: alone[0])
    children = beside.Children(tmp_path)

    def seen(trains: bool, after_s: float) -> bool:
        alone[0] = trains
        clock.now_s += after_s
        return children.train_alone()

    assert not seen(False, 100.0)
    assert not seen(True, 100.0)
    assert not seen(True, beside.CHILDREN_S / 2)
    assert not seen(False, beside.CHILDREN_S), "its own process has made a step"
    assert not seen(True, beside.CHILDREN_S)
    assert seen(True, beside.CHILDREN_S)


@pytest.mark.parametrize(("in_children", "word"), [(True, "it starts"), (False, "no optimizer")])
def test_the_reason_says_who_trains(in_children: bool, word: str) -> None:
    found = proving._with_failures(
        Curves("can't tell", "no losses"),
        proving.Alternation(None, 1),  # type: ignore[arg-type]
        {},
        {"plain": None, "chosen": None},
        in_children=in_children,
    )
    assert found.finding == "can't tell"
    assert word in found.reason
