from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fasttrain.cli.runs import NO_RUN, chosen, run_table
from fasttrain.model.errors import FasttrainError
from fasttrain.model.job import LocalRun
from fasttrain.model.machine import DeviceProcess

PROCESSES = (DeviceProcess(7, 2 << 30, "python"), DeviceProcess(8, 1 << 30, "python"))
FIRST = LocalRun("2026-11-21_14-30-05_train_1f9c", "running", 0.0, PROCESSES, "/data/[one]")
SECOND = LocalRun("2026-11-22_09-00-00_train_77aa", "orphaned", 60.0, PROCESSES[1:])


def test_a_run_is_meant_by_its_name_or_all_are() -> None:
    assert chosen((FIRST, SECOND), SECOND.run_id, all_runs=False) == (SECOND,)
    assert chosen((FIRST, SECOND), None, all_runs=True) == (FIRST, SECOND)
    assert chosen((), None, all_runs=True) == ()


@pytest.mark.parametrize("part", ["77aa", "2026-11-22", "09-00-00_train"])
def test_any_part_that_only_one_name_has_is_enough(part: str) -> None:
    assert chosen((FIRST, SECOND), part, all_runs=False) == (SECOND,)


def test_a_run_is_meant_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "fasttrain_runs" / FIRST.run_id
    folder.mkdir(parents=True)
    here = replace(FIRST, run_dir=str(folder))
    for named in (
        str(folder),
        f"fasttrain_runs/{FIRST.run_id}",
        f"./fasttrain_runs/{here.run_id}/",
    ):
        assert chosen((here, SECOND), named, all_runs=False) == (here,)
    with pytest.raises(FasttrainError):
        chosen((here, SECOND), "fasttrain_runs/", all_runs=False)


def test_a_name_that_is_part_of_another_is_meant_itself() -> None:
    short = LocalRun("train", "running", 0.0, PROCESSES)
    assert chosen((FIRST, short), "train", all_runs=False) == (short,)


@pytest.mark.parametrize(("part", "listed"), [("train", True), ("1f9d", False)])
def test_no_run_is_suggested_for_one_that_is_not_clear(part: str, *, listed: bool) -> None:
    with pytest.raises(FasttrainError) as caught:
        chosen((FIRST, SECOND), part, all_runs=False)
    assert (caught.value.slug, caught.value.exit_code) == ("run-unknown", 69)
    assert f"{FIRST.run_id}, {SECOND.run_id}" in caught.value.why
    assert ("fasttrain ps" in caught.value.fix) is not listed


def test_the_table_tells_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    run_table((FIRST, SECOND))
    _, first, directory, second = capsys.readouterr().out.splitlines()
    assert first.split() == [FIRST.run_id, "running", "2", "3", "GiB"]
    assert directory == "  /data/[one]"
    assert second.split()[:2] == [SECOND.run_id, "orphaned"]
    run_table(())
    assert capsys.readouterr().out == f"{NO_RUN}\n"


def test_a_long_name_stays_whole_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    long = f"2026-11-22_09-00-00_{'n' * 40}_77aa77aa"
    run_table((LocalRun(long, "orphaned", 60.0, PROCESSES, f"/data/{'d' * 90}/{long}"),))
    said = capsys.readouterr().out
    assert said.count(long) == 2
    assert said.count("\n") == 3
