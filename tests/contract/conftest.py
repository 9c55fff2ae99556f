"""Runs a program as ``python`` runs it and under fasttrain, and compares all that it does."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.rig import backend, rig
from support.zygote import Zygote

PROGRAMS = Path(__file__).parent / "programs"
LEVERS_OFF = ("--preset", "exact", "--quiet")

Completed = subprocess.CompletedProcess[bytes]
SameAsPython = Callable[..., Completed]


@pytest.fixture(scope="session")
def zygote(environ: dict[str, str]) -> Iterator[Zygote]:
    """Run scripts in forks of one process that has imported torch."""
    zygote = Zygote(environ)
    yield zygote
    zygote.close()


@pytest.fixture
def programs() -> Path:
    return PROGRAMS


@pytest.fixture
def same_as_python(fasttrain: Any, tmp_path: Path) -> SameAsPython:
    """Check that stdout, stderr and exit code are Python's own, and give what Python did."""

    runs = itertools.count()

    def check(
        program: str | Path,
        *args: str,
        module: bool = False,
        cwd: Path = PROGRAMS,
        env: dict[str, str] | None = None,
        stdin: bytes = b"",
        prepare: Callable[[], object] = lambda: None,
    ) -> Completed:
        target = ["-m", str(program)] if module else [str(program)]
        environ = {**fasttrain.environ, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        prepare()
        plain = subprocess.run(
            [sys.executable, *target, *args],
            cwd=cwd, env=environ, input=stdin, capture_output=True, timeout=240,
        )  # fmt: skip
        prepare()
        options = (*LEVERS_OFF, "--run-dir", str(tmp_path / f"run-{next(runs)}"))
        fast = fasttrain("run", *target, *options, "--", *args, cwd=cwd, env=environ, stdin=stdin)
        assert fast.stdout == plain.stdout
        assert fast.stderr.decode(errors="replace") == plain.stderr.decode(errors="replace")
        # A shell, too, tells the death of a program by signal N as 128 + N.
        assert fast.returncode == (
            plain.returncode if plain.returncode >= 0 else 128 - plain.returncode
        )
        return plain

    return check


@pytest.fixture
def compiled() -> Iterator[Any]:
    """Compile without generating code, and give what became of it."""
    with backend("eager"), rig(compile="default") as runtime:
        yield lambda: runtime.outcomes()["compile"]
