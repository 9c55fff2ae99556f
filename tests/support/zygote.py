"""Runs scripts in forks of a process that has imported torch, as ``python`` or as workers do.

``zygote_process.py`` is that process, and says what this gives up. Whatever tests how processes are
started, signals, crashes, or what is imported when, starts the real command instead.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROCESS = Path(__file__).with_name("zygote_process.py")
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Ended:
    """How a fork has ended.

    Attributes:
        returncode: As of a `subprocess.Popen`.
        stdout: What it printed.
        stderr: The same on the other stream.
    """

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Fork:
    """A fork that has been started."""

    number: int
    stdout: Path
    stderr: Path


class Zygote:
    """The process, from its start to `close`."""

    def __init__(self, environ: dict[str, str]) -> None:
        # As the ranks of a run have it, which is all that such a process can't change later.
        self.environ = {**environ, "PYTHONHASHSEED": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        self._numbers = itertools.count(1)
        self._codes: dict[int, int] = {}
        self._streams = tempfile.TemporaryDirectory(prefix="zygote-")
        self._process = subprocess.Popen(
            [sys.executable, PROCESS], env=self.environ, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def python(self, script: Path, *args: str, cwd: Path, **how: Any) -> Fork:
        """Start a script as ``python`` would, in a directory that exists; see `start`."""
        return self.start("python", script, args, cwd=cwd, **how)

    def worker(self, plan: Path, script: Path, *args: str, cwd: Path, **how: Any) -> Fork:
        """Start a script as a worker of the run whose plan lies there; see `start`."""
        return self.start("worker", script, args, cwd=cwd, plan=str(plan), **how)

    def start(
        self,
        kind: str,
        script: Path,
        args: Sequence[str] = (),
        *,
        cwd: Path,
        environ: dict[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        **job: Any,
    ) -> Fork:
        """Start a fork, and return at once.

        Args:
            kind: ``python``, ``worker`` or ``store``.
            script: What it runs; for a store, the file for its port.
            args: The script's arguments.
            cwd: Its working directory.
            environ: What its environment has besides that of all tests.
            timeout_s: After which it is killed.
            job: ``plan`` of a worker; ``prepare``, calls that are made before the script runs, each
                as ``[path, function, args...]``; ``group`` of those that end when one of them
                fails.
        """
        number = next(self._numbers)
        where = Path(self._streams.name)
        fork = Fork(number, where / f"{number}.out", where / f"{number}.err")
        job = {
            "prepare": (), "group": "", **job,
            "id": number, "kind": kind, "script": str(script), "args": args, "cwd": str(cwd),
            "environ": {**self.environ, **(environ or {})}, "timeout_s": timeout_s,
            "stdout": str(fork.stdout), "stderr": str(fork.stderr),
        }  # fmt: skip
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(job) + "\n")
        stdin.flush()
        return fork

    def wait(self, fork: Fork) -> Ended:
        """Wait until a fork has ended."""
        stdout = self._process.stdout
        assert stdout is not None
        while fork.number not in self._codes:
            number, code = json.loads(stdout.readline())
            self._codes[number] = code
        streams = (path.read_text() if path.exists() else "" for path in (fork.stdout, fork.stderr))
        return Ended(self._codes[fork.number], *streams)

    def port_of_store(self, cwd: Path, group: str, timeout_s: float = TIMEOUT_S) -> str:
        """Have a store kept until the others of a group have ended, and return its port."""
        path = Path(self._streams.name, f"{group}.port")
        self.start("store", path, cwd=cwd, group=group, timeout_s=timeout_s)
        deadline = time.monotonic() + TIMEOUT_S
        while not path.exists():
            assert time.monotonic() < deadline, "there is no store"
            time.sleep(0.005)
        return path.read_text()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
        self._streams.cleanup()
