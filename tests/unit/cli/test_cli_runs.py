from __future__ import annotations

import pytest

from fasttrain.cli.runs import chosen, run_table
from fasttrain.spec.errors import FasttrainError
from fasttrain.spec.examination import DeviceProcess
from fasttrain.spec.local_run import LocalRun

PROCESSES = (DeviceProcess(7, 2 << 30, "python"), DeviceProcess(8, 1 << 30, "python"))
FIRST = LocalRun("2026-11-21_14-30-05_train_1f9c", "running", 0.0, PROCESSES, "/data/[one]")
SECOND = LocalRun("2026-11-22_09-00-00_train_77aa", "orphaned", 60.0, PROCESSES[1:])


def test_a_run_is_meant_by_its_name_or_all_are() -> None:
    assert chosen((FIRST, SECOND), SECOND.run_id, all_runs=False) == (SECOND,)
    assert chosen((FIRST, SECOND), None, all_runs=True) == (FIRST, SECOND)
    assert chosen((), None, all_runs=True) == ()


def test_the_nearest_name_is_named() -> None:
    with pytest.raises(FasttrainError) as caught:
        chosen((FIRST, SECOND), SECOND.run_id[:-1], all_runs=False)
    assert (caught.value.slug, caught.value.exit_code) == ("run-unknown", 69)
    assert SECOND.run_id in caught.value.fix


def test_the_table_tells_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    run_table((FIRST, SECOND))
    _, first, second = capsys.readouterr().out.splitlines()
    assert FIRST.run_id in first
    assert first.split()[-4:] == ["2", "3", "GiB", "/data/[one]"]
    assert second.split()[1] == "orphaned"
    run_table(())
    assert capsys.readouterr().out == "no run of yours is on this machine\n"
