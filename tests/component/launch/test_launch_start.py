from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fasttrain.config.environ import read_environ
from fasttrain.launch.node_run import NodeRun, Observers
from fasttrain.launch.output import relay
from fasttrain.launch.output.display import PlainDisplay, write_all
from fasttrain.launch.run_node import attend, compose
from fasttrain.launch.start import active_elsewhere, read_invocation, start
from fasttrain.model.attempts import Preempt, Restarts
from fasttrain.model.decision import Decision, Setting, Source, SourceKind
from fasttrain.model.plan import EnvVar, LaunchPlan, ScriptFacts, Target
from fasttrain.model.settings import Settings

FLAG = Source(SourceKind.FLAG, "--env")


class Recorder(PlainDisplay):
    """Keeps what a script writes."""

    def __init__(self) -> None:
        self.written: list[tuple[int, bytes]] = []
        self.closed = False

    def write(self, descriptor: int, data: bytes) -> None:
        self.written.append((descriptor, data))

    def close(self) -> None:
        self.closed = True


def test_environment_of_the_processes() -> None:
    changes = (EnvVar("A", "2", "", FLAG), EnvVar("B", None, "", FLAG), EnvVar("C", "x", "", FLAG))
    before = {"A": "1", "B": "gone", "D": "stays"}
    assert compose(before, changes) == {"A": "2", "C": "x", "D": "stays"}
    assert compose({}, changes) == {"A": "2", "C": "x"}
    assert before["A"] == "1"


def test_a_command_from_start_to_receipt(of_command: Callable[..., LaunchPlan]) -> None:
    plan = of_command("sh", "sh", "-c", "echo said; echo told >&2; exit 7")
    display = Recorder()
    receipt = start(plan, plan, {"PATH": os.defpath}, Observers(display))
    assert sorted(display.written) == [(1, b"said\n"), (2, b"told\n")]
    assert display.closed
    assert (receipt.exit_code, receipt.ranks) == (7, ())
    log = Path(plan.run_dir, "rank-0.log").read_bytes()
    assert sorted(log.splitlines()) == [b"said", b"told"]


@pytest.mark.parametrize(("ends", "interrupted"), [("kill -INT $$", True), ("exit 130", False)])
def test_a_command_that_sigint_ends_is_told_from_one_that_handles_it(
    of_command: Callable[..., LaunchPlan], ends: str, interrupted: bool
) -> None:
    plan = of_command("sh", "sh", "-c", ends)
    receipt = start(plan, plan, {"PATH": os.defpath}, Observers(Recorder()))
    assert (receipt.exit_code, receipt.interrupted) == (130, interrupted)


LATER = "(echo begun; while [ -e going ]; do {}; done; echo later; : > flag) & echo now"


@pytest.mark.parametrize("does", ["sleep 0.05", "echo again; sleep 0.02"], ids=["waits", "prints"])
def test_what_is_left_running_goes_on_to_print(
    of_command: Callable[..., LaunchPlan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    does: str,
) -> None:
    before = psutil.Process().children()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(relay, "MOST_DRAIN_S", 0.5)
    going = tmp_path / "going"
    going.touch()
    plan = of_command("sh", "sh", "-c", LATER.format(does))
    began_s = time.monotonic()
    receipt = start(plan, plan, {"PATH": os.defpath}, Observers(Recorder()))
    assert (receipt.exit_code, going.exists()) == (0, True)
    assert time.monotonic() - began_s < 10, "it ends, whatever is printed"
    going.unlink()
    for child in psutil.Process().children():
        if child not in before:
            child.wait()
    assert (tmp_path / "flag").exists()
    assert capfd.readouterr().out.endswith("later\n")
    assert Path(plan.run_dir, "rank-0.log").read_bytes().endswith(b"later\n")


def test_a_file_that_is_no_program(
    of_command: Callable[..., LaunchPlan], tmp_path: Path, slug: Any
) -> None:
    program = tmp_path / "empty"
    program.write_text("")
    program.chmod(0o755)
    plan, display = of_command(str(program)), Recorder()
    assert slug(start, plan, plan, {}, Observers(display)) == ("cannot-start", 71)
    assert display.closed


def test_files_stay_open_to_nobody(of_command: Callable[..., LaunchPlan]) -> None:
    gc.collect()  # what other tests left is not to end in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    plan = of_command("true")
    assert start(plan, plan, {"PATH": os.defpath}, Observers(Recorder())).exit_code == 0
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("why", ["No space left on device", "Is a directory"])
def test_a_log_that_cannot_be_written_is_told(
    of_command: Callable[..., LaunchPlan], why: str
) -> None:
    plan, display = of_command("echo", "echo", "seen"), Recorder()
    log = Path(plan.run_dir, "rank-0.log")
    log.parent.mkdir(parents=True)
    # A link to the full device stands for a full disk, a folder for one that has no more files.
    log.symlink_to("/dev/full") if "space" in why else log.mkdir()
    environ = {"PATH": os.defpath}
    ended = attend(NodeRun(plan, plan, "/bin/echo", environ, environ), Observers(display))
    assert (ended.exit_code, display.written) == (0, [(1, b"seen\n")])
    (warning,) = ended.warnings
    assert f" {plan.run_dir} " in warning
    assert warning.endswith(f": {why}")


def test_all_is_written_however_little_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bytes] = []

    def write(_: int, data: memoryview) -> int:
        taken.append(bytes(data[:3]))
        return len(taken[-1])

    monkeypatch.setattr(os, "write", write)
    write_all(1, b"12345678")
    assert taken == [b"123", b"456", b"78"]


@pytest.mark.parametrize(
    ("cache", "expected"),
    [("/cache", "/cache/fasttrain"), ("relative", "/home/me/.cache/fasttrain"), ("", None)],
)
def test_circumstances_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str, expected: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    found = read_invocation(Target("script", "train.py"), Settings(), read_environ(), ScriptFacts())
    assert found.cache_dir == (expected or "/home/me/.cache/fasttrain")
    assert found.run_dir == str(tmp_path / "fasttrain_runs" / found.run_id)
    assert Path(found.shim).is_file()
    assert Path(found.agent).is_file()
    named = Settings(run_dir=Setting("../mine", FLAG))
    circumstances = read_invocation(Target("script", "train.py"), named, {}, ScriptFacts())
    assert circumstances.run_dir == str(tmp_path / "../mine")


# Makes room, as its report says, and then ends in some way of its own.
MADE_ROOM = """
import os, sys
from fasttrain.model.codec import dumps
from fasttrain.model.outcome import PREEMPTED, Outcome, RankReport, State, StepStats
outcome = Outcome("preempt", "snapshot", State.APPLIED, "", True, counts={PREEMPTED: 1})
made = RankReport(0, "cpu", "2.13.0", (outcome,), StepStats(steps=3), finished=True)
open(sys.argv[1] + "/rank-0.json", "w").write(dumps(made))
sys.exit(1)
"""


def test_a_run_that_made_room_is_not_started_again(
    plan: LaunchPlan, of_command: Callable[..., LaunchPlan]
) -> None:
    command = of_command(sys.executable, sys.executable, "-c", MADE_ROOM, plan.run_dir)
    restarts = Decision(Restarts(2, "any", first_s=0.0), "", FLAG)
    preempt = Decision(Preempt("snapshot"), "", FLAG)
    plan = replace(command, restarts=restarts, preempt=preempt)
    receipt = start(plan, plan, {"PATH": os.defpath}, Observers(Recorder()))
    assert (receipt.exit_code, receipt.attempts, receipt.crash) == (85, (), None)
    assert not Path(plan.run_dir, "crash.json").exists()


@pytest.mark.parametrize("before", ["abc", "", "٣", "9" * 5000, "-1"])
def test_a_count_of_restarts_that_is_none_counts_as_0(
    of_command: Callable[..., LaunchPlan], before: str
) -> None:
    failing_once = '[ "$FASTTRAIN_RESTART_COUNT" = 1 ]'
    restarts = Decision(Restarts(1, "any", first_s=0.0), "", FLAG)
    plan = replace(of_command("sh", "sh", "-c", failing_once), restarts=restarts)
    environ = {"PATH": os.defpath, "FASTTRAIN_RESTART_COUNT": before}
    receipt = start(plan, plan, environ, Observers(Recorder()))
    assert (receipt.exit_code, len(receipt.attempts)) == (0, 1)


def test_another_environment_than_the_active_one_is_told(tmp_path: Path) -> None:
    other = str(tmp_path)
    assert active_elsewhere({"VIRTUAL_ENV": other}) == f"VIRTUAL_ENV={other}"
    assert active_elsewhere({"CONDA_PREFIX": other}) == f"CONDA_PREFIX={other}"
    assert active_elsewhere({"VIRTUAL_ENV": sys.prefix, "CONDA_PREFIX": other}) == ""
    assert active_elsewhere({"VIRTUAL_ENV": f"{other}/gone"}) == ""
    assert active_elsewhere({}) == ""
    assert active_elsewhere({"CONDA_PREFIX": other, "CONDA_DEFAULT_ENV": "base"}) == ""
