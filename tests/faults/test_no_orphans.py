"""Each signal to each kind of process: nothing of the run is left on this machine."""

from __future__ import annotations

import signal
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.observed_run import PATIENCE_S, ObservedRun, lives, wait_for

pytestmark = pytest.mark.faults

HERE = Path(__file__).parent
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2", "SIGKILL")
# Nothing says any more whose the last one is: no environment, and a parent that has ended.
CLEARED = """
import subprocess, sys, time
NOTE = "import os, time; open(f'pid-0-{os.getpid()}', 'w'); time.sleep(60)"
DETACH = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
subprocess.run([sys.executable, "-Sc", DETACH, NOTE], env={}, start_new_session=True)
time.sleep(60)
"""
HITS = [*product((1,), ("launcher", "worker"), SIGNALS),
        *product((2,), ("launcher", "agent", "worker"), SIGNALS)]  # fmt: skip
# .ci/run makes every third of them; -m faults makes all.
SOME = [pytest.param(*hit, marks=() if i % 3 == 0 else pytest.mark.full)
        for i, hit in enumerate(HITS)]  # fmt: skip


def started(folder: Path, environ: dict[str, str], program: str, ranks: int) -> Any:
    """Return a run all of whose processes are there."""
    several = ["--nproc-per-node", "2", "--strategy", "none"] if ranks == 2 else []
    words = ["run", str(HERE / "programs" / program), "--device", "cpu", *several]
    run = ObservedRun(folder, [sys.executable, "-m", "fasttrain", *words], environ)
    if not wait_for(lambda: len(list(folder.glob("ready-*"))) == ranks):
        run.end()
        pytest.fail(run.said)
    return run


@pytest.mark.parametrize(("ranks", "target", "name"), SOME)
def test_nothing_of_the_run_is_left(
    tmp_path: Path,
    environ: dict[str, str],
    record_property: Any,
    ranks: int,
    target: str,
    name: str,
) -> None:
    run, number = started(tmp_path, environ, "family.py", ranks), getattr(signal, name)
    try:
        run.victim(target).send_signal(number)
        code = run.launcher.wait(PATIENCE_S)
        left = run.left()
    finally:
        run.end()
    verdict = "ok" if not left else f"left: {left}"
    record_property(
        "table", ("processes of a run that was hit", name, f"{target} of {ranks}", verdict)
    )
    assert left == []
    killed = target == "launcher" and number == signal.SIGKILL
    assert code == (-number if killed else 128 + number)


@pytest.mark.parametrize("target", ["launcher", "worker"])
def test_workers_of_a_data_loader_end_too(
    tmp_path: Path, environ: dict[str, str], target: str
) -> None:
    run = started(tmp_path, environ, "loads.py", 1)
    try:
        assert len(run.look()) == 5, "launcher, guardian, worker and two of the loader's"
        run.victim(target).kill()
        run.launcher.wait(PATIENCE_S)
        assert run.left() == []
    finally:
        run.end()


def test_what_has_neither_mark_nor_parent_ends_with_a_killed_launcher(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    (tmp_path / "train.py").write_text(CLEARED)
    words = [sys.executable, "-m", "fasttrain", "run", "train.py"]
    run = ObservedRun(tmp_path, words, environ)
    try:
        assert wait_for(lambda: list(tmp_path.glob("pid-*")))
        time.sleep(3)  # the guardian looks once a second
        assert len(run.look()) == 4, "launcher, guardian, worker and what it left"
        run.launcher.kill()
        run.launcher.wait(PATIENCE_S)
        assert run.left() == []
    finally:
        run.end()


def test_what_a_shell_had_started_before_lives_on(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "train.py").write_text("import time\nopen('ready', 'w')\ntime.sleep(60)\n")
    # Python, as a shell that becomes the launcher by exec.
    shell = (
        "import os, subprocess, sys\n"
        "job = subprocess.Popen([sys.executable, '-Sc', 'import time; time.sleep(60)'])\n"
        "open(f'job-{job.pid}', 'w').close()\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'fasttrain', 'run', 'train.py'])\n"
    )
    run = ObservedRun(tmp_path, [sys.executable, "-c", shell], environ)
    try:
        assert wait_for((tmp_path / "ready").exists)
        (path,) = tmp_path.glob("job-*")
        job = psutil.Process(int(path.name.partition("-")[2]))
        time.sleep(3)
        others = [process for process in run.look() if process != job]
        run.launcher.kill()
        run.launcher.wait(PATIENCE_S)
        assert wait_for(lambda: not any(map(lives, others)), 8)
        time.sleep(0.5)
        assert lives(job)
    finally:
        run.end()
