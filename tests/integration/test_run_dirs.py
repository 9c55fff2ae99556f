"""One run directory and several launchers, and directories that somebody else could write to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fasttrain.files import owned, shared
from fasttrain.model.codec import loads
from fasttrain.model.outcome import Receipt

WAITS = """
import os, time
open("begun", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
print("ended well")
"""
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
SOMEBODY = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


def test_the_second_launcher_is_refused_and_the_first_goes_on(
    fasttrain: Any, script: Any, until: Any, tmp_path: Path
) -> None:
    words = ("run", script(WAITS), "--run-dir", "run")
    first = fasttrain.start(*words, **PIPES)
    until((tmp_path / "begun").exists)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    second = fasttrain(*words)
    assert second.returncode == 71
    assert f" {first.pid} " in second.stderr.decode()
    assert "[run-dir-busy]" in second.stderr.decode()
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    (tmp_path / "go").touch()
    said, _ = first.communicate(timeout=240)
    assert (first.returncode, said) == (0, b"ended well\n")
    assert loads(Receipt, (tmp_path / "run" / "receipt.json").read_bytes()).exit_code == 0
    third = fasttrain(*words)
    assert (third.returncode, third.stdout) == (71, b"")
    assert "[run-dir-used]" in third.stderr.decode()


def test_of_those_that_start_at_once_one_runs(fasttrain: Any, script: Any, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    path = script(WAITS)
    started = [fasttrain.start("run", path, "--run-dir", "run", **PIPES) for _ in range(4)]
    said = [process.communicate(timeout=240) for process in started]
    assert sorted(process.returncode for process in started) == [0, 71, 71, 71]
    assert sorted(out for out, _ in said) == [b"", b"", b"", b"ended well\n"]
    assert loads(Receipt, (tmp_path / "run" / "receipt.json").read_bytes()).exit_code == 0


def test_a_launcher_that_was_killed_leaves_no_lock(
    fasttrain: Any, script: Any, until: Any, tmp_path: Path
) -> None:
    words = ("run", script(WAITS), "--run-dir", "run")
    first = fasttrain.start(*words, **PIPES)
    until((tmp_path / "begun").exists)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=240)
    assert "[run-dir-used]" in fasttrain(*words).stderr.decode(), "and not run-dir-busy"
    (tmp_path / "go").touch()
    for path in (tmp_path / "run").iterdir():
        if path.name != "launcher.lock":
            path.unlink()
    assert fasttrain(*words).returncode == 0


@as_root
def test_what_belongs_to_somebody_else_is_refused_before_anything_starts(
    fasttrain: Any, script: Any, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", SOMEBODY, SOMEBODY)
    (tmp_path / "link").symlink_to("theirs")
    os.chown(tmp_path / "link", SOMEBODY, SOMEBODY, follow_symlinks=False)
    for name in ("theirs", "link", "link/below"):
        done = fasttrain("run", script(WAITS), "--run-dir", name)
        assert done.returncode == 71
        what, why, fix = done.stderr.decode().splitlines()
        assert what.startswith("error: ")
        assert f"{tmp_path / name} " in what
        assert owned("", SOMEBODY) in why
        assert fix.endswith("[run-dir-unsafe]")
    assert not (tmp_path / "begun").exists()
    assert list((tmp_path / "theirs").iterdir()) == []


@as_root
def test_who_could_swap_it_is_a_warning_that_the_receipt_keeps(
    fasttrain: Any, script: Any, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    (tmp_path / "project").mkdir()
    os.chown(tmp_path / "project", -1, SOMEBODY)
    (tmp_path / "project").chmod(0o775)
    done = fasttrain("run", script(WAITS), "--run-dir", "project/run")
    assert done.returncode == 0
    told = shared(tmp_path / "project", SOMEBODY)
    assert f"fasttrain: warning: {told}" in done.stderr.decode()
    receipt = json.loads((tmp_path / "project" / "run" / "receipt.json").read_bytes())
    assert any(warning.startswith(told) for warning in receipt["warnings"])
