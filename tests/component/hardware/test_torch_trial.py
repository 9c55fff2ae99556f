"""Interpreters that hang, crash, lie and break, and one that answers as it should."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fasttrain.hardware.torch_trial import MARKER, Talk, try_torch
from fasttrain.model.machine import TorchTrial, Trial, TrialState

Tries = Callable[..., TorchTrial]

OK = '"state": "ok", "took_s": 0.5, "message": ""'
FACTS = (
    '"facts": {"version": "2.9.0+cu128", "available": ["cuda"], "device_counts": {"cuda": 2},'
    ' "architectures": ["sm_90"], "init_error": "", "cudnn": "9.10.2", "nccl": "2.27.5",'
    ' "triton": "3.5.0", "backends": ["gloo", "nccl"]}'
)
TORCH = f"""echo '{MARKER}{{"question": "torch", {OK}, {FACTS}}}'"""
COMPILE = f"""echo '{MARKER}{{"question": "compile", {OK}}}'"""
GLOO = f"""echo '{MARKER}{{"question": "gloo", {OK}}}'"""
NCCL = f"""echo '{MARKER}{{"question": "nccl", {OK}}}'"""
FAILED = '"state": "failed", "took_s": 1'
BAD_NCCL = f"""echo '{MARKER}{{"question": "nccl", {FAILED}, "message": "no P2P"}}'"""
NO_EXTENSION = (
    f"""echo '{MARKER}{{"question": "torch", {FAILED}, "cause": "no libhccl","""
    """ "message": "RuntimeError: You can disable it with TORCH_DEVICE_BACKEND_AUTOLOAD=0."}'"""
)


@pytest.fixture
def tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tries]:
    """Write an interpreter, have torch tried by it, and see that nothing stays behind."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def go(torch: str = TORCH, sums: str = GLOO, timeout_s: float = 5, devices: int = 0):  # type: ignore[no-untyped-def]
        python = tmp_path / "python"
        asked = f'case "$3" in torch) {torch}\n;; *) {sums}\n;; esac\n'
        python.write_text(f"#!/bin/sh\n{asked}")
        python.chmod(0o755)
        environ = {"PATH": os.environ["PATH"], "TORCHDYNAMO_DISABLE": "1"}
        return try_torch(str(python), environ, timeout_s=timeout_s, devices=devices)

    yield go
    assert list(temporary.iterdir()) == []


def test_right_answers_are_taken_over(tries: Tries) -> None:
    found = tries(f"echo a warning\n{TORCH}\necho another\n{COMPILE}", f"{GLOO}\n{NCCL}", devices=2)
    assert found == TorchTrial(
        imported=Trial("ok", 0.5),
        version="2.9.0+cu128",
        available=("cuda",),
        device_counts={"cuda": 2},
        architectures=("sm_90",),
        cudnn="9.10.2",
        nccl="2.27.5",
        triton="3.5.0",
        backends=("gloo", "nccl"),
        compiled=Trial("ok", 0.5),
        all_reduced=Trial("ok", 1.0),
    )


@pytest.mark.parametrize(
    ("torch", "state", "message"),
    [
        ("echo Traceback >&2; echo 'ImportError: no cudart' >&2; exit 1", "failed", "no cudart"),
        ("exit 3", "failed", "3"),
        ("kill -SEGV $$", "crashed", "SIGSEGV"),
        ("sleep 60", "hung", "0.4 s"),
        ("exec >&- 2>&-; sleep 60", "hung", "0.4 s"),
        ("while :; do echo rubbish; done", "hung", "0.4 s"),
        ("head -c 300000 /dev/zero; echo hello", "unreadable", "hello"),
        ("exit 0", "unreadable", ""),
        (f"echo '{MARKER}[1]'", "unreadable", MARKER),
        (f"echo '{MARKER}{{\"state\": 1}}'; exit 1", "unreadable", "state"),
        (TORCH.replace('"2.9.0+cu128"', "2.9"), "unreadable", "version"),
    ],
    ids=[
        "traceback", "exit 3", "signal", "sleeps", "closes its output", "rubbish for ever",
        "rubbish", "silent", "no object", "wrong state", "wrong facts",
    ],
)  # fmt: skip
def test_an_import_that_goes_wrong(
    tries: Tries, torch: str, state: TrialState, message: str
) -> None:
    started_s = time.monotonic()
    found = tries(torch, timeout_s=0.4 if state == "hung" else 60)
    assert time.monotonic() - started_s < 30
    assert (found.imported.state, found.compiled, found.version) == (state, Trial(), "")
    assert message in found.imported.message


def test_a_missing_interpreter_is_told(tmp_path: Path) -> None:
    found = try_torch(str(tmp_path / "nowhere"), {}).imported
    assert found.state == "failed"
    assert "nowhere" in found.message


@pytest.mark.parametrize(
    ("then", "state"),
    [("sleep 60", "hung"), ("kill -BUS $$", "crashed"), ("exit 1", "failed"), ("", "unreadable")],
)
def test_a_later_trial_leaves_the_first_answers(tries: Tries, then: str, state: TrialState) -> None:
    doing = f"""echo '{MARKER}{{"question": "compile", "doing": "compiling for cuda"}}'"""
    found = tries(f"{TORCH}\n{doing}\n{then}", timeout_s=2 if state == "hung" else 60)
    assert (found.version, found.compiled.state) == ("2.9.0+cu128", state)
    if state in ("hung", "crashed"):
        assert "compiling for cuda" in found.compiled.message


def test_each_question_has_the_whole_time(tries: Tries) -> None:
    found = tries(f"sleep 1.2\n{TORCH}\nsleep 1.2\n{COMPILE}", timeout_s=2.2)
    assert found.compiled.state == "ok"


def test_the_backend_that_failed_is_named(tries: Tries) -> None:
    found = tries(f"{TORCH}\n{COMPILE}", f"{GLOO}\n{BAD_NCCL}\nexit 1", devices=2)
    assert (found.all_reduced.state, found.all_reduced.message) == ("failed", "nccl: no P2P")


def test_nccl_is_asked_of_two_devices_on(tries: Tries) -> None:
    tell = """echo "asked for $3 $4" >&2; exit 1"""
    assert tries(sums=tell, devices=1).all_reduced.message == "gloo: asked for gloo"
    assert tries(sums=tell, devices=2).all_reduced.message == "gloo: asked for gloo nccl"


def test_torch_without_a_broken_extension_is_tried_again(tries: Tries) -> None:
    found = tries(
        f'if [ "$TORCH_DEVICE_BACKEND_AUTOLOAD" = 0 ]; then {TORCH}; else {NO_EXTENSION}; fi'
    )
    assert (found.imported.state, found.autoload_error) == ("ok", "no libhccl")
    assert tries(NO_EXTENSION).imported.state == "failed"


def test_the_compiler_is_tried_and_no_cache(tries: Tries) -> None:
    tell = f"""{TORCH}; echo "${{TORCHDYNAMO_DISABLE-unset}} $TORCHINDUCTOR_CACHE_DIR"; exit 1"""
    said = tries(tell).compiled.message
    assert said.startswith(f"unset {tempfile.gettempdir()}/")


def test_children_of_a_hang_are_ended_with_it(tmp_path: Path) -> None:
    argv = ["/bin/sh", "-c", "sleep 61 & echo $!; sleep 62"]
    talk = Talk(argv, os.environ, 2)
    assert (list(talk.answers()), talk.ending().state) == ([], "hung")
    child = int(talk.last)
    deadline_s = time.monotonic() + 20
    while _lives(child) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_ended_program_is_not_waited_for_because_of_its_children() -> None:
    started_s = time.monotonic()
    argv = ["/bin/sh", "-c", f"sleep 63 & {GLOO}"]
    assert [answer["question"] for answer in Talk(argv, os.environ, 30).answers()] == ["gloo"]
    assert time.monotonic() - started_s < 25
