"""torch is the script's own: imported when it says so, with what it set before, and unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_what_a_script_sets_before_it_imports_torch(same_as_python: Any) -> None:
    plain = same_as_python("torch_threads.py")
    assert plain.stdout.startswith(b"False\n2 True")


def user_frames(stderr: bytes, programs: Path) -> list[str]:
    """Return what a traceback says of the script's own frames, torch's left out."""
    return [line for line in stderr.decode().splitlines() if str(programs) in line]


def test_an_error_in_forward(fasttrain: Any, programs: Path, same_as_python: Any) -> None:
    plain = same_as_python("torch_forward.py")
    assert plain.stdout.count(b"\n") == 2
    assert plain.stderr.count(b"in forward") == 2
    assert b"shape '[3, -1]' is invalid for input of size 8" in plain.stderr

    levers = ("--amp", "bf16", "--optimizer", "fused", "--quiet")
    fast = fasttrain("run", "torch_forward.py", *levers, "--run-dir", fasttrain.cwd, cwd=programs)
    assert user_frames(fast.stderr, programs) == user_frames(plain.stderr, programs)
    assert b"fasttrain/shim" not in fast.stderr
    receipt = (fasttrain.cwd / "receipt.json").read_text()
    assert receipt.count('"applied"') == 2, "the frames of a lever were there to be taken out"
