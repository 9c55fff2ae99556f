"""What dynamo and inductor say of their graphs, as the receipt has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from torch._dynamo import utils

from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.compile import slots
from fasttrain.shim.levers.compile.account import UNKNOWN_SKIP, Account


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    counters = {
        "stats": {"unique_graphs": 0},
        "inductor": {"cudagraph_skips": 3},
        "aot_autograd": {"autograd_cache_hit": 0},
    }
    monkeypatch.setattr(utils, "counters", counters)
    with ExitStack() as undo:
        yield Account(undo)


def read(account: Account, monkeypatch: pytest.MonkeyPatch, *metrics: Any) -> OutcomeRecorder:
    monkeypatch.setattr(utils, "get_compilation_metrics", lambda: list(metrics))
    recorder = OutcomeRecorder("compile", "reduce-overhead", explicit=True)
    account.read_skips(recorder)
    return recorder


def test_nothing_is_said_if_none_was_skipped(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = read(account, monkeypatch)
    assert not recorder.counts
    assert not recorder.outcome().notes


def test_reasons_come_from_the_metrics(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    utils.counters["inductor"]["cudagraph_skips"] += 2
    reason = "skipping cudagraphs due to cpu device (arg0_1). Found from :\n  File train.py"
    older = SimpleNamespace()  # of a torch that has no such field
    recorder = read(account, monkeypatch, older, SimpleNamespace(cudagraph_skip_reason=reason))
    assert recorder.counts["CUDA graph skips"] == 2
    (note,) = recorder.outcome().notes
    assert ": cpu device (arg0_1). Found from" in note


def test_skips_without_a_reason_say_where_it_can_be_had(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils.counters["inductor"]["cudagraph_skips"] += 1
    recorder = read(account, monkeypatch)
    assert any(note.endswith(UNKNOWN_SKIP) for note in recorder.outcome().notes)


def test_a_place_of_fasttrains_own_is_no_place_of_the_script(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(path: str) -> Any:
        metrics = dict.fromkeys(("recompile_reason", "cudagraph_skip_reason"))
        where = {"fail_user_frame_filename": path, "fail_user_frame_lineno": 7}
        return SimpleNamespace(**metrics, **where, fail_type="Unsupported", fail_reason="LSTM")

    both = [failed(slots.__file__), failed("train.py")]
    monkeypatch.setattr(utils, "get_compilation_metrics", lambda: both)
    recorder = OutcomeRecorder("compile", "default", explicit=True)
    account.read(recorder)
    notes = ["ran eagerly: Unsupported: LSTM", "ran eagerly at train.py:7: Unsupported: LSTM"]
    assert list(recorder.outcome().notes) == notes
