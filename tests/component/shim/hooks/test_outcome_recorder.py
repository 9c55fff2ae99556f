"""What a receipt says of objects that a lever isn't applied to, or not at first."""

from __future__ import annotations

from fasttrain.model.outcome import State
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder


def passed_over() -> OutcomeRecorder:
    recorder = OutcomeRecorder("strategy", "ddp", explicit=True)
    recorder.settle(State.ARMED)
    for what in ("Net (train.py:9)", "Head (train.py:3)"):
        recorder.pass_over(what, "it changes something", missed=True)
    return recorder


def test_what_is_passed_over_is_told() -> None:
    outcome = passed_over().outcome()
    assert (outcome.state, outcome.reason) == (
        State.SKIPPED,
        "Head (train.py:3): it changes something",
    )
    assert [note.split(" (")[0] for note in outcome.missed] == ["Net", "Head"]


def test_what_the_lever_is_applied_to_after_all_is_not() -> None:
    recorder = passed_over()
    recorder.take_up("Head (train.py:3)")
    recorder.apply("Head", "train.py:3")
    outcome = recorder.outcome()
    assert [note.split(" (")[0] for note in outcome.notes] == ["Net"]
    assert [note.split(" (")[0] for note in outcome.missed] == ["Net"]
    recorder.take_up("Net (train.py:9)")
    assert (recorder.outcome().notes, recorder.outcome().missed) == ((), ())
