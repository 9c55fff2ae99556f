"""Processes that outlive the command that started them, known by pid and start time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from slurm_cluster.tools import say


def start_time(line: str) -> int:
    """Return the start time in a line of /proc/PID/stat: it tells a pid from its reuse."""
    return int(line.rsplit(")", 1)[1].split()[19])


def proc_stat(pid: int) -> tuple[str, int] | None:
    """Return the state and start time of a process, or None when there is none."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
        return line.rsplit(")", 1)[1].split()[0], start_time(line)
    except (OSError, IndexError):
        return None


@dataclass(frozen=True)
class Proc:
    """One process of the cluster."""

    name: str
    pid: int
    start: int
    log: Path | None = None

    def alive(self) -> bool:
        """Say whether it runs. A process 1 that is no init reaps late: a zombie has ended."""
        with contextlib.suppress(ChildProcessError):  # reap it if it is our own child
            os.waitpid(self.pid, os.WNOHANG)
        now = proc_stat(self.pid)
        return now is not None and now[1] == self.start and now[0] not in "ZX"

    def signal(self, signum: int) -> None:
        """Send a signal, if it still runs."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def stop(self, timeout_s: float = 10) -> None:
        """End it by SIGTERM, and by SIGKILL where that is ignored."""
        self.signal(signal.SIGTERM)
        if not self.ends_within(timeout_s):
            say(f"{self.name} (pid {self.pid}) ignores SIGTERM: SIGKILL")
            self.kill()

    def kill(self, timeout_s: float = 10) -> None:
        """End it by SIGKILL."""
        self.signal(signal.SIGKILL)
        self.ends_within(timeout_s)

    def ends_within(self, timeout_s: float) -> bool:
        """Wait until it has ended; say whether it has."""
        end = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines that it has printed."""
        if self.log is None or not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
