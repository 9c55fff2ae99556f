"""Every wrong request ends in three lines, before anything has started or been written."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

MACHINES = Path(__file__).parents[1] / "data" / "machines"
THREE_LINES = re.compile(r"error: .+\n  why: .+\n  fix: .+ {8}\[([a-z0-9-]+)\]\n")
T4 = ("--machine", str(MACHINES / "4xt4.json"), "--dry-run")
CPU = ("--machine", str(MACHINES / "cpu-laptop.json"), "--dry-run")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with good and bad scripts, configuration files and machines in it."""
    (tmp_path / "good.py").write_text("open('started', 'w')\n")
    (tmp_path / "bad.py").write_text("def f(:\n    pass\n")
    (tmp_path / "binary.py").write_bytes(b"\x7fELF\x00\x01\x02")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo.py")
    (tmp_path / "list.yaml").write_text("- amp: bf16\n")
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "unknown.yaml").write_text("amp: bf16\ncompille: default\n")
    (tmp_path / "tagged.yaml").write_text("amp: !!python/object/apply:os.system ['touch started']")
    (tmp_path / "broken.yaml").write_text("amp: [bf16\n")
    laptop = json.loads((MACHINES / "cpu-laptop.json").read_text())
    for name, change in {
        "old.json": {"torch": {"version": "1.13.1", "build": "cpu", "build_version": ""}},
        "bare.json": {"cxx_compiler": ""},
        "none.json": {"torch": {"version": "", "build": "", "build_version": ""}},
    }.items():
        (tmp_path / name).write_text(json.dumps({**laptop, **change}))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "slug", "code"),
    [
        (("nowhere.py",), "script-unusable", 71),
        (("folder",), "script-unusable", 71),
        (("fifo.py",), "script-unusable", 71),
        (("/dev/null/x.py",), "script-unusable", 71),
        (("/dev/null",), "script-unusable", 71),
        (("binary.py",), "script-syntax", 78),
        (("x" * 5000,), "script-unusable", 71),
        (("",), "script-unusable", 71),
        (("bad.py",), "script-syntax", 78),
        ((), "script-missing", 2),
        (("-m", "x", "--no-python"), "target-contradiction", 2),
        (("good.py", "--amp", "bf17"), "option-value", 2),
        (("good.py", "--ampp", "bf16"), "unknown-option", 2),
        (("good.py", "-momentum"), "unknown-option", 2),
        (("good.py", "--lr=0.1"), "unknown-option", 2),
        (("good.py", "--amp"), "usage", 2),
        (("good.py", "--gpus", "0", *CPU), "gpus-none", 69),
        (("good.py", "--gpus", "0,7", *T4), "gpus-missing", 69),
        (("good.py", "--gpus", "auto:9", *T4), "gpus-missing", 69),
        (("good.py", "--gpus", "1,1", *T4), "gpus-twice", 78),
        (("good.py", "--gpus", "0,,3", *T4), "gpus-syntax", 2),
        (("good.py", "--gpus", "0-", *T4), "gpus-syntax", 2),
        (("good.py", "--gpus", "-1", *T4), "gpus-syntax", 2),
        (("good.py", "--gpus", "0;reboot", *T4), "gpus-syntax", 2),
        (("good.py", "--gpus", "", *T4), "option-value", 2),
        (("good.py", "--amp", "bf16", *T4), "amp-unsupported", 78),
        (("good.py", "--device", "cuda", *CPU), "device-missing", 69),
        (("good.py", "--compile", "default", "--machine", "old.json", "--dry-run"),
         "compile-torch", 78),
        (("good.py", "--compile", "default", "--machine", "bare.json", "--dry-run"),
         "compile-compiler", 69),
        (("good.py", "--machine", "bare.json"), "machine-dry-run", 2),
        (("good.py", "--machine", "nowhere.json", "--dry-run"), "machine-file", 78),
        (("good.py", "--machine", "bad.py", "--dry-run"), "machine-file", 78),
        (("good.py", "--nproc-per-node", "0"), "option-value", 2),
        (("good.py", "--nproc-per-node", "two"), "option-value", 2),
        (("good.py", "--nproc-per-node", "5", *T4), "nproc-devices", 78),
        (("good.py", "--nodes", "2"), "nodes-master", 78),
        (("good.py", "--nodes", "2", "--node-rank", "0"), "nodes-master", 78),
        (("good.py", "--nodes", "1:2"), "nodes-rdzv", 78),
        (("good.py", "--nodes", "0"), "nodes-syntax", 2),
        (("good.py", "--nodes", "2", "--node-rank", "2", "--master-addr", "h"), "node-rank", 78),
        (("good.py", "--env", "1X=2"), "env-value", 2),
        (("good.py", "--preset", "fastest"), "preset", 2),
        (("good.py", "--config", "list.yaml"), "config-mapping", 78),
        (("good.py", "--config", "binary.yaml"), "config-syntax", 78),
        (("good.py", "--config", "broken.yaml"), "config-syntax", 78),
        (("good.py", "--config", "tagged.yaml"), "config-syntax", 78),
        (("good.py", "--config", "nowhere.yaml"), "config-missing", 78),
        (("good.py", "--config", "folder"), "config-missing", 78),
        (("good.py", "--config", "unknown.yaml"), "config-key", 78),
        (("good.py", "--run-dir", "good.py/below"), "run-dir", 71),
        (("good.py", "--run-dir", "good.py"), "run-dir", 71),
        (("good.py", "--run-dir", "/proc/here"), "run-dir", 71),
        (("--no-python", "no-such-program-anywhere"), "cannot-start", 71),
        (("--no-python", "./good.py"), "cannot-start", 71),
        (("--no-python", "no-such-program", "--nproc-per-node", "2"), "cannot-start", 71),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else None,
)  # fmt: skip
def test_three_lines_and_nothing_done(
    fasttrain: Any, place: Path, words: tuple[str, ...], slug: str, code: int
) -> None:
    before = sorted(place.rglob("*"))
    done = fasttrain("run", *words)
    told = done.stderr.decode()
    match = THREE_LINES.fullmatch(told)
    assert match, told
    assert (match[1], done.returncode, done.stdout) == (slug, code, b"")
    assert sorted(place.rglob("*")) == before


def test_a_port_in_use(fasttrain: Any, place: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        static = ("--nodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1")
        done = fasttrain("run", "good.py", *static, "--master-port", port)
    assert (done.returncode, done.stdout) == (71, b"")
    assert b"[port-in-use]" in done.stderr
    assert not (place / "fasttrain_runs").exists()


def test_a_run_directory_is_used_once(fasttrain: Any, place: Path) -> None:
    assert fasttrain("run", "good.py", "--run-dir", "mine").returncode == 0
    again = fasttrain("run", "good.py", "--run-dir", "mine")
    assert (again.returncode, THREE_LINES.fullmatch(again.stderr.decode())[1]) == (
        71,
        "run-dir-used",
    )


@pytest.mark.parametrize(("name", "code"), [("good.py", 0), ("nowhere.py", 71)])
def test_nobody_listens(fasttrain: Any, place: Path, name: str, code: int) -> None:
    shell = ["sh", "-c", '"$@" 2>&-', "sh", *fasttrain.argv("run", name)]
    done = subprocess.run(shell, cwd=place, env=fasttrain.environ, stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (code, b"")


@pytest.mark.parametrize("variable", ["FASTTRAIN_AMP=bf17", "FASTTRAIN_AMPP=bf16"])
def test_wrong_variables(fasttrain: Any, place: Path, variable: str) -> None:
    name, value = variable.split("=")
    done = fasttrain("run", "good.py", env={name: value})
    assert (done.returncode, done.stdout) == (78, b"")
    assert name in done.stderr.decode()
