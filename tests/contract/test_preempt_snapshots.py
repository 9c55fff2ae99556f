"""Loops that are preempted and go on: weights, files and prints are those of one run, exactly."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fasttrain.model.attempts import GOING_ON, NONE_YET, PREEMPTED_AFTER
from support.script_runs import differences
from support.thinned import thinned

HERE = Path(__file__).parent
LOOPS = HERE / "preempt/loops.py"
EXACTLY = {"rtol": 0.0, "atol": 0.0}
pytestmark = pytest.mark.slow

TWO = ("--nproc-per-node", "2", "--device", "cpu", "--amp", "off")
# Of each loop: its options, and the steps behind which it is preempted, one attempt after another.
LOOP_STOPS = {
    "classifier": (("--amp", "bf16"), ("1", "27")),
    "several": (("--amp", "off"), ("9", "65", "109")),
    "steep": (("--amp", "fp16"), ("21",)),
    "endless": (("--amp", "off"), ("10",)),
}


class Attempts:
    """Runs of one loop in a directory of its own."""

    def __init__(self, fasttrain: Any, cwd: Path, name: str, options: tuple[str, ...]) -> None:
        self._fasttrain, self.cwd, self._name, self._options = fasttrain, cwd, name, options
        cwd.mkdir()

    def __call__(self, *where: str, stop_at: str = "0", **environ: str) -> Any:
        return self._fasttrain(
            "run", LOOPS, "--preempt", "snapshot", "--quiet", *self._options, *where,
            "--", self._name, "out.pt", cwd=self.cwd, env={"STOP_AT": stop_at, **environ},
        )  # fmt: skip

    def saved(self, name: str = "out.pt") -> Any:
        return torch.load(self.cwd / name, weights_only=False)


@pytest.mark.parametrize("name", thinned(list(LOOP_STOPS), 4))
def test_a_preempted_run_ends_as_one_that_was_not(
    fasttrain: Any, tmp_path: Path, name: str
) -> None:
    options, stops = LOOP_STOPS[name]
    whole = Attempts(fasttrain, tmp_path / "whole", name, options)
    printed = whole("--run-dir", "run")
    assert printed.returncode == 0, printed.stderr.decode()

    parts = Attempts(fasttrain, tmp_path / "parts", name, options)
    said = []
    for number, stop_at in enumerate((*stops, "0")):
        done = parts("--resume" if number else "--run-dir", "run", stop_at=stop_at)
        told = done.stderr.decode()
        assert done.returncode == (0 if stop_at == "0" else 85), told
        assert (PREEMPTED_AFTER in told) == (stop_at != "0")
        assert (GOING_ON in told) == (number > 0)
        said.append(done.stdout)
    assert b"".join(said) == printed.stdout
    assert differences(parts.saved(), whole.saved(), **EXACTLY) == []
    if name == "classifier":
        best = [runs.saved("out.pt.best") for runs in (parts, whole)]
        assert differences(*best, **EXACTLY) == []


def test_what_a_script_appends_to_files_is_there_once(fasttrain: Any, tmp_path: Path) -> None:
    whole = Attempts(fasttrain, tmp_path / "whole", "logged", ("--amp", "off"))
    printed = whole("--run-dir", "run")
    assert printed.returncode == 0, printed.stderr.decode()

    parts = Attempts(fasttrain, tmp_path / "parts", "logged", ("--amp", "off"))
    first = parts("--run-dir", "run", stop_at="12")
    assert first.returncode == 85, first.stderr.decode()
    with (parts.cwd / "train.log").open("a") as log:
        log.write("of a step that was lost\n")
    second = parts("--resume", "run", stop_at="20")
    assert second.returncode == 85, second.stderr.decode()
    last = parts("--resume", "run")
    assert last.returncode == 0, last.stderr.decode()
    assert first.stdout + second.stdout + last.stdout == printed.stdout
    for name in ("printed.txt", "train.log", "log.csv"):
        assert (parts.cwd / name).read_text() == (whole.cwd / name).read_text()
    (after,) = (parts.cwd / "run/snapshots").glob("*/appended/*train.log")
    assert after.read_text() == "of a step that was lost\n"


@pytest.mark.matrix
def test_ranks_are_preempted_at_one_step_and_go_on(fasttrain: Any, tmp_path: Path) -> None:
    whole = Attempts(fasttrain, tmp_path / "whole", "accumulation", TWO)
    printed = whole("--run-dir", "run")
    assert printed.returncode == 0, printed.stderr.decode()

    parts = Attempts(fasttrain, tmp_path / "parts", "accumulation", TWO)
    # They hear the signal in different steps.
    first = parts("--run-dir", "run", stop_at="6,5")
    assert first.returncode == 85, first.stderr.decode()
    # Somebody ends the launcher, by SIGTERM.
    second = parts("--resume", "run", stop_at="15", STOP_BY="launcher")
    assert second.returncode == 85, second.stderr.decode()
    receipt = json.loads((parts.cwd / "run/receipt.json").read_text())
    assert (receipt["exit_code"], receipt["crash"]) == (85, None)
    assert printed.stdout.startswith(first.stdout + second.stdout)
    # One of them fails, and torchrun starts both anew.
    last = parts("--resume", "run", "--max-restarts", "1", CRASH_AT="21")
    told = last.stderr.decode()
    assert last.returncode == 0, told
    assert told.count(GOING_ON) == 2
    assert differences(parts.saved(), whole.saved(), **EXACTLY) == []


@pytest.fixture(scope="module")
def twice_preempted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("twice") / "fragile"


@pytest.fixture
def fragile(fasttrain: Any, tmp_path: Path, twice_preempted: Path) -> Attempts:
    """A run of 16 steps with snapshots of steps 3 and 9, made once for all tests."""
    options = ("--amp", "off")
    if not twice_preempted.exists():
        attempts = Attempts(fasttrain, twice_preempted, "fragile", options)
        assert attempts("--run-dir", "run", stop_at="3").returncode == 85
        assert attempts("--resume", "run", stop_at="9").returncode == 85
    own = Attempts(fasttrain, tmp_path / "fragile", "fragile", options)
    shutil.copytree(twice_preempted, own.cwd, dirs_exist_ok=True)
    return own


def slug(done: Any) -> str:
    """The name of the error that ended a run."""
    assert done.returncode == 78, done.stderr.decode()
    return re.findall(r"\[([a-z-]+)\]$", done.stderr.decode(), re.MULTILINE)[0]


def take_out(run_dir: Path, key: str) -> None:
    """Leave the newest snapshot as one that is whole, and lacks something."""
    folder = max((run_dir / "snapshots").iterdir())
    rank, manifest = folder / "rank-0.pt", folder / "manifest.json"
    content = torch.load(rank, weights_only=True)
    del content[key]
    torch.save(content, rank)
    told = json.loads(manifest.read_text())
    told["files"]["rank-0.pt"] = hashlib.sha256(rank.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(told))


@pytest.mark.full
def test_what_does_not_fit_is_refused(fragile: Attempts) -> None:
    again = ("--resume", "run")
    assert slug(fragile(*again, "--nproc-per-node", "2")) == "snapshot-mismatch"
    assert slug(fragile(*again, NO_BIAS="1")) == "snapshot-mismatch"
    assert slug(fragile(*again, SAMPLES="4800")) == "snapshot-mismatch"
    assert slug(fragile(*again, READS="1")) == "snapshot-diverged"
    assert slug(fragile(*again, READS="and goes on")) == "snapshot-diverged"
    for key in ("carried", "begun"):  # in its end, and in its beginning
        take_out(fragile.cwd / "run", key)
        assert slug(fragile(*again)) == "snapshot-failed"
    (fragile.cwd / "run/snapshots").chmod(0o707)
    assert slug(fragile(*again)) == "snapshot-untrusted"


@pytest.mark.matrix
def test_a_snapshot_that_can_not_be_used_leaves_the_one_before(fragile: Attempts) -> None:
    whole = Attempts(
        fragile._fasttrain, fragile.cwd.with_name("whole"), "fragile", ("--amp", "off")
    )
    assert whole("--run-dir", "run").returncode == 0
    folder = fragile.cwd / "run/snapshots"

    killed = fragile("--resume", "run", stop_at="12", DIE_SAVING="1")
    assert killed.returncode == 128 + 9
    assert {p.name for p in folder.iterdir()} == {
        "step-000000003", "step-000000009", "draft-000000012",
    }  # fmt: skip

    shared = folder / "step-000000009/shared.pt"
    data = bytearray(shared.read_bytes())
    data[len(data) // 2] ^= 1
    shared.write_bytes(data)
    done = fragile("--resume", "run", stop_at="14")
    told = done.stderr.decode()
    assert done.returncode == 85, told
    assert re.search(r"\bstep-000000009\b.*\bshared\.pt\b", told)
    assert f"{GOING_ON} 3\n" in told
    # The damaged one is the older of two now.
    assert {p.name for p in folder.iterdir()} == {"step-000000009", "step-000000014"}

    assert fragile("--resume", "run").returncode == 0
    assert differences(fragile.saved(), whole.saved(), **EXACTLY) == []

    for path in folder.glob("*/manifest.json"):
        path.write_text("{")
    assert slug(fragile("--resume", "run")) == "snapshot-damaged"


@pytest.mark.parametrize(
    ("name", "environ", "found"),
    [
        ("by_hand", {}, "snapshot-no-loader"),
        ("with_closure", {}, "snapshot-closure"),
        ("read_ahead", {}, "snapshot-thread"),
        ("fragile", {"OBJECT": "1"}, "snapshot-objects"),
    ],
)
def test_what_can_not_be_followed_is_refused_at_once(
    fasttrain: Any, tmp_path: Path, name: str, environ: dict[str, str], found: str
) -> None:
    attempts = Attempts(fasttrain, tmp_path / "loop", name, ())
    assert slug(attempts("--run-dir", "run", **environ)) == found


def starting(launcher: psutil.Process) -> bool:
    """Whether the launcher has started a process that knows the plan."""
    return any("plan.json" in " ".join(child.cmdline()) for child in launcher.children())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--amp", "off"), id="direct", marks=pytest.mark.full),
        pytest.param(TWO, id="torchrun", marks=pytest.mark.matrix),
    ],
)
def test_a_signal_that_comes_while_processes_start_waits_for_them(
    fasttrain: Any, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "early").mkdir()
    run = fasttrain.start(
        "run", LOOPS, "--preempt", "snapshot", "--quiet", *options, "--run-dir", "run",
        "--", "fragile", "out.pt", cwd=tmp_path / "early", stderr=subprocess.PIPE,
    )  # fmt: skip
    while not starting(psutil.Process(run.pid)):
        time.sleep(0.01)
    run.send_signal(signal.SIGUSR2)
    _, told = run.communicate(timeout=240)
    assert run.returncode == 85, told.decode()
    assert PREEMPTED_AFTER.encode() in told


@pytest.mark.matrix
def test_a_run_that_was_queued_again(fasttrain: Any, tmp_path: Path) -> None:
    """In the same run directory, with or without a snapshot in it."""
    attempts = Attempts(fasttrain, tmp_path / "queued", "fragile", ("--amp", "off"))
    here = ("--run-dir", "run")
    assert attempts(*here, "--max-steps", "2").returncode == 0
    assert attempts(*here).returncode == 71
    second = attempts(*here, stop_at="5", FASTTRAIN_RESTART_COUNT="1")
    assert second.returncode == 85
    assert NONE_YET.encode() in second.stderr
    third = attempts(*here, FASTTRAIN_RESTART_COUNT="2")
    assert third.returncode == 0
    assert f"{GOING_ON} 5\n".encode() in third.stderr
