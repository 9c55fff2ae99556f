"""What ranks leave on disk, and what becomes of ranks that go different ways."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from support.script_runs import LEVERS_OFF, Alone, assert_same_prints, differences, with_ranks
from support.thinned import thinned
from support.zygote import Zygote

HERE = Path(__file__).parent
PROGRAMS = HERE / "data_parallel"
OWN = {"run"}  # what fasttrain itself leaves
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(zygote: Zygote) -> Any:
    return Alone(zygote)


def files(cwd: Path) -> dict[str, Path]:
    """Return the files that a run left behind, but for those of fasttrain."""
    found = (path for path in sorted(cwd.rglob("*")) if path.is_file())
    named = {str(path.relative_to(cwd)): path for path in found}
    return {name: path for name, path in named.items() if name.split("/")[0] not in OWN}


def assert_same_files(found: dict[str, Path], expected: dict[str, Path]) -> None:
    assert list(found) == list(expected)
    for name, path in expected.items():
        if path.suffix == ".pt":
            loaded = (torch.load(each, weights_only=False) for each in (found[name], path))
            assert differences(*loaded) == [], name
        else:
            lines = (each.read_text().splitlines() for each in (found[name], path))
            assert_same_prints(*lines, lambda _: {"abs": 2e-5})


WAYS = ["checkpoints", "logs", "rotation", "temporary", "late_directory"]


@pytest.mark.parametrize("way", thinned(WAYS, 0, left=3))
def test_files_are_those_of_one_process(
    alone: Any, fasttrain: Any, tmp_path: Path, way: str
) -> None:
    program = PROGRAMS / "files.py"
    one = alone(tmp_path / "alone", program, way).good
    options = (*LEVERS_OFF, "--show-ranks", "all")
    run = with_ranks(fasttrain, tmp_path / "ranks", program, way, options=options)
    for rank in (0, 1):
        assert_same_prints(run.lines(rank), one.stdout.splitlines(), lambda _: {"abs": 2e-6})
    assert_same_files(files(run.cwd), files(one.cwd))


def without_times(found: dict[str, Path]) -> list[str]:
    """Return the names of files without the times, hosts and processes in them."""
    names = [re.sub(r"^runs/(?!named).*?-by-time", "runs/by-time", name) for name in found]
    return sorted(re.sub(r"tfevents[\d.]+$", "tfevents", name) for name in names)


def test_all_ranks_name_their_files_by_the_folder_of_a_summary_writer(
    alone: Any, fasttrain: Any, tmp_path: Path
) -> None:
    """With torch's own writer, on a stand-in for tensorboard."""
    program, standin = PROGRAMS / "logged_by_writer.py", str(PROGRAMS / "site-packages")
    one = alone(tmp_path / "alone", program, standin).good
    options = (*LEVERS_OFF, "--show-ranks", "all")
    run = with_ranks(fasttrain, tmp_path / "ranks", program, standin, options=options)
    for rank in (0, 1):
        assert_same_prints(run.lines(rank), one.stdout.splitlines(), lambda _: {"abs": 2e-6})
    found, expected = files(run.cwd), files(one.cwd)
    assert without_times(found) == without_times(expected)
    logs = [cwd / "runs/named/training.log" for cwd in (run.cwd, one.cwd)]
    assert logs[0].read_text() == logs[1].read_text()
    assert differences(run.saved(), one.saved()) == []


def run_until_wrong(fasttrain: Any, tmp_path: Path, rank: int, how: str) -> Any:
    """Have one rank go wrong, and see that all have ended."""
    program = PROGRAMS / "out_of_step.py"
    run = with_ranks(fasttrain, tmp_path / "ranks", program, str(rank), how)
    left = [p for p in psutil.process_iter(["cmdline"]) if of_run(p, run.cwd)]
    assert not left, f"processes were left running: {left}"
    return run


def of_run(process: psutil.Process, cwd: Path) -> bool:
    """Whether a process belongs to a run, by the plan on its command line or by its directory."""
    try:
        return str(cwd) in " ".join(process.info["cmdline"] or ()) or process.cwd() == str(cwd)
    except psutil.Error:
        return False


def said(run: Any) -> str:
    """Return what all ranks and fasttrain said on stderr."""
    logs = sorted((run.cwd / "run").glob("rank-*.log"))
    return "\n".join([run.stderr, *(log.read_text() for log in logs)])


# What the wrong rank is about to do in the script, and what the other one is.
CALLS = [("call Sequential", 28), ("call Sequential", 30)]
PARTED = {
    "elsewhere": CALLS,
    "elsewhere, normed": CALLS,
    "penalized": [("call backward", 26), CALLS[1]],
}


@pytest.mark.parametrize("rank", thinned([0, 1], 2, 1))
@pytest.mark.parametrize(
    ("how", "slug"),
    [
        ("ends", "ranks-steps"),
        pytest.param("wider", "ranks-models", marks=pytest.mark.full),
        pytest.param("changed", "ranks-data", marks=pytest.mark.matrix),
        ("elsewhere", "ranks-parted"),
        pytest.param("elsewhere, normed", "ranks-parted", marks=pytest.mark.matrix),
        pytest.param("penalized", "ranks-parted", marks=pytest.mark.matrix),
    ],
)
def test_ranks_that_go_different_ways_are_an_error(
    fasttrain: Any, tmp_path: Path, rank: int, how: str, slug: str
) -> None:
    run = run_until_wrong(fasttrain, tmp_path, rank, how)
    assert run.returncode == 78, said(run)
    lines = said(run).splitlines()
    fixes = (i for i, line in enumerate(lines) if line.strip().startswith("fix: "))
    last = next(i for i in fixes if lines[i].endswith(f"[{slug}]"))
    starts = [line.strip().split(": ")[0] for line in lines[last - 2 : last + 1]]
    assert starts == ["error", "why", "fix"]
    assert "Traceback" not in said(run)
    crash = json.loads((run.cwd / "run" / "crash.json").read_text())
    assert (crash["cause"], crash["exit_code"]) == ("refused", 78)
    assert crash["why"] in lines[last - 1]
    if slug == "ranks-parted":
        told = re.search(r"is to (.*), rank 1 to (.*)", lines[last - 2])
        assert told is not None
        places = told.groups() if rank == 0 else told.groups()[::-1]
        script = PROGRAMS / "out_of_step.py"
        assert list(places) == [f"{doing} at {script}:{at}" for doing, at in PARTED[how]]


@pytest.mark.parametrize("rank", thinned([0, 1], 0))
def test_a_killed_rank_ends_the_run(fasttrain: Any, tmp_path: Path, rank: int) -> None:
    run = run_until_wrong(fasttrain, tmp_path, rank, "killed")
    assert run.returncode == 128 + signal.SIGKILL
    assert re.search(rf"^fasttrain: rank {rank} .*\bSIGKILL\b", run.stderr, re.MULTILINE)
    assert "ended" not in run.stdout


@pytest.mark.parametrize("rank", thinned([1, 0], 0))
def test_a_rank_that_raises_ends_the_run(fasttrain: Any, tmp_path: Path, rank: int) -> None:
    run = run_until_wrong(fasttrain, tmp_path, rank, "raises")
    assert run.returncode == 1
    assert re.search(rf"^fasttrain: rank {rank} .*\bexit code 1\b", run.stderr, re.MULTILINE)
    assert "ValueError: no more of this" in said(run)
    assert "ended" not in run.stdout


STRICT = ("--preset", "exact", "--strict")


@pytest.mark.full
def test_a_model_without_room_for_a_second_graph_is_split_all_the_same(
    alone: Any, fasttrain: Any, tmp_path: Path
) -> None:
    program = PROGRAMS / "no_room.py"
    one = alone(tmp_path / "alone", program).good
    run = with_ranks(fasttrain, tmp_path / "ranks", program, options=STRICT)
    assert_same_prints(run.lines(0), one.stdout.splitlines(), lambda _: {"abs": 2e-6})
    counts = run.outcome("strategy")["counts"]
    assert counts["split calls"] + counts["verified"] == 6
    assert run.returncode == 0, run.stderr


@pytest.mark.matrix
def test_what_the_second_attempt_changes_is_undone(
    alone: Any, fasttrain: Any, tmp_path: Path
) -> None:
    program = PROGRAMS / "no_room.py"
    one = alone(tmp_path / "alone", program, "counts").good
    run = with_ranks(fasttrain, tmp_path / "ranks", program, "counts")
    assert_same_prints(run.lines(0), one.stdout.splitlines(), lambda _: {"abs": 2e-6})
    assert "changes something outside its modules" in json.dumps(run.outcome("strategy"))


@pytest.mark.matrix
def test_a_model_that_is_not_split_is_an_error_with_strict(fasttrain: Any, tmp_path: Path) -> None:
    program = HERE.parent / "scripts/ranks/nosplit_infonce_inside.py"
    run = with_ranks(fasttrain, tmp_path / "ranks", program, options=STRICT)
    assert run.returncode != 0
    assert "[strict]" in run.stderr
