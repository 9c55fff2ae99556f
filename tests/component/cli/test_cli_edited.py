"""What is kept of a run belongs to the script that ran, though it was edited meanwhile."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from fasttrain.cli import history, running, tuned, tuning
from fasttrain.cli.requests import RunRequest, TuneRequest
from fasttrain.model.places import RUNS_FOLDER
from fasttrain.model.tuning import Compared, Ratio, TuningReport

BEFORE = "print(1)\n"
SOURCE = sha256(BEFORE.encode()).hexdigest()[:16]
REPORT = TuningReport(
    "decided", 9, 1.0, compared=(Compared(("optimizer",), "fused", "slower", Ratio(1.1, 1.2, 1.3)),)
)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path(RUNS_FOLDER).mkdir()
    path = tmp_path / "train.py"
    path.write_text(BEFORE)
    return path


def request(kind: Any) -> Any:
    words = ("train.py",)
    return kind(words=[*words], passed_on=(), typed=words, flags={"quiet": True})


def test_the_length_of_a_run(script: Path, receipt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = receipt().ranks[0]
    ran = replace(receipt(), ranks=(replace(rank, stats=replace(rank.stats, steps=7)),))

    def start(_plan: Any, _invocation: Any, _show: Any, remember: Any) -> int:
        script.write_text("print(2)\n")
        remember(ran)
        return 0

    monkeypatch.setattr(running, "_start", start)
    running.perform(request(RunRequest))
    (known,) = history.read(str(script.parent)).runs
    assert known.of.source == SOURCE


def test_a_result_of_tuning(script: Path, receipt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tune(*_: Any, **__: Any) -> Any:
        script.write_text("print(2)\n")
        return tuning._Ended(REPORT, receipt(), by_us=False, said=b"")

    monkeypatch.setattr(tuning, "_tune", tune)
    monkeypatch.setattr(tuning, "_has_settings", lambda *_: False)
    assert tuning.perform(request(TuneRequest)) == 0
    (result,) = tuned.read(str(script.parent))[0].results
    assert result.of.source == SOURCE
