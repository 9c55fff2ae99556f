"""A run as it is seen from outside: who is in it, and what it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

PATIENCE_S = 60.0
GONE_S = 8.0  # for what is left of a run to be gone: its guardian has to be told by the kernel
# As fasttrain's files say what they are: a worker, and torchrun's agent.
PROGRAMS = {"agent": "agent/agent.py", "worker": "shim/__main__.py"}
KEPT_APART = ("tmp", "shm")  # what lies in $TMPDIR and /dev/shm
# As under plain python: torch's cache, and what multiprocessing made in a worker of a DataLoader.
NOT_OURS = re.compile("/(torchinductor_|pymp-)")
# Its own /dev/shm, so that what is left there is this run's: a folder, or a size.
OWN_SHM = {
    "folder": 'mount --bind "$0" /dev/shm && exec "$@"',
    "small": 'mount -t tmpfs -o size=256k none /dev/shm && exec "$@"',
    "disk": 'mount -t tmpfs -o size=1m none disk && mount --bind "$0" /dev/shm && exec "$@"',
}


@functools.cache
def can_mount() -> bool:
    """Say whether a process here can have mounts of its own."""
    words = [*_mounting("small", Path("/dev/shm")), "true"]
    try:
        return subprocess.run(words, stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False


def _mounting(how: str, folder: Path) -> list[str]:
    return ["unshare", "--mount", "sh", "-c", OWN_SHM[how], str(folder)]


class ObservedRun:
    """One run in a folder of its own.

    Args:
        folder: Its working directory.
        argv: Its command line.
        environ: Its environment.
        mount: What takes the place of /dev/shm; see `OWN_SHM`.
        popen: Further arguments of `subprocess.Popen`.
    """

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        environ: dict[str, str],
        mount: str = "folder",
        **popen: Any,
    ) -> None:
        self.folder = folder
        self.seen: set[psutil.Process] = set()
        (folder / "disk").mkdir()
        # Not below the folder: the path of a Unix socket has 107 bytes at most.
        self.scratch = Path(tempfile.mkdtemp(prefix="run-"))
        for name in KEPT_APART:
            (self.scratch / name).mkdir()
        prefix = _mounting(mount, self.scratch / "shm") if can_mount() else []
        with (folder / "said").open("wb") as said:
            self.launcher = subprocess.Popen(
                [*prefix, *argv], cwd=folder, env={**environ, "TMPDIR": str(self.scratch / "tmp")},
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, **popen,
            )  # fmt: skip

    @property
    def said(self) -> str:
        """What it has printed."""
        return (self.folder / "said").read_text(errors="replace")

    @property
    def run_dir(self) -> Path | None:
        """Its run directory; None while there is none."""
        return next(self.folder.glob("fasttrain_runs/[!.]*/"), None)

    def look(self) -> list[psutil.Process]:
        """Return what of it is alive: by descent, by the mark, and by what the script wrote."""
        self._add(self._descendants)
        mark = self.run_dir.name if self.run_dir else None
        for process in psutil.process_iter() if mark else ():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("FASTTRAIN_RUN_ID") == mark:
                    self.seen.add(process)
        for path in self.folder.glob("pid-*"):
            self._add(functools.partial(_numbered, int(path.name.split("-")[2])))
        return sorted(filter(lives, self.seen), key=lambda process: process.pid)

    def _add(self, find: Callable[[], list[psutil.Process]]) -> None:
        with contextlib.suppress(psutil.Error):
            self.seen.update(find())

    def _descendants(self) -> list[psutil.Process]:
        launcher = psutil.Process(self.launcher.pid)
        return [launcher, *launcher.children(recursive=True)]

    def victim(self, target: str | int) -> psutil.Process:
        """Return ``launcher``, ``agent``, a ``worker``, or any of its processes by a number."""
        if target == "launcher":
            return psutil.Process(self.launcher.pid)
        processes = self.look()
        if isinstance(target, int):
            return processes[target % len(processes)]
        program = PROGRAMS[target]
        return next(one for one in processes if program in command(one).split(" --")[0])

    def left(self, *, files: bool = True) -> list[str]:
        """Return what is left of it a while after its launcher has ended: processes and files."""
        wait_for(lambda: not self.look(), GONE_S)
        paths = [path for name in KEPT_APART for path in (self.scratch / name).iterdir()]
        names = [f"{path.parent.name}/{path.name}" for path in paths if files]
        return [*map(command, self.look()), *(n for n in names if not NOT_OURS.search(n))]

    def end(self) -> None:
        """End whatever still runs."""
        for process in self.look():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.launcher.wait()
        shutil.rmtree(self.scratch)


def _numbered(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid)]


def lives(process: psutil.Process) -> bool:
    """Whether a process runs, zombies excepted."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command(process: psutil.Process) -> str:
    """Return the command line of a process."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "ended while it was looked at"


def wait_for(condition: Callable[[], object], patience_s: float = PATIENCE_S) -> bool:
    """Wait until a condition holds, and say whether it does."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
