"""The real fasttrain as a user starts it: by a command line, or on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

Completed = subprocess.CompletedProcess[bytes]

# What would change what fasttrain or torch does: a test says what it needs of these itself.
# Inductor sets the folder of its cache for all that a process starts in which it was used.
_FOREIGN = re.compile(
    r"FASTTRAIN_|(LOCAL_|GROUP_|NODE_)?RANK$|(LOCAL_)?WORLD_SIZE$|MASTER_|SLURM_|SBATCH_|TORCHELASTIC_"
    r"|VIRTUAL_ENV$|CONDA_PREFIX$|TORCHINDUCTOR_CACHE_DIR$|PYTHONUNBUFFERED$|PYTHONWARNINGS$|NO_COLOR$|FORCE_COLOR$|COLUMNS$|LINES$"
)
# What torch says on a CPU for which oneDNN has no LSTM in bf16: by hand a script ends there.
NO_BF16_LSTM = "could not create a primitive descriptor for the LSTM"


def clean_environ() -> dict[str, str]:
    """Return this environment without what could steer fasttrain, and with one thread for torch.

    Inductor's kernels for a CPU don't use vectors in it: compiling them takes 40 % less time. The
    README's first command compiles with them.
    """
    kept = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
    return {**kept, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}


class Command:
    """``fasttrain`` as a user runs it, in a directory of the test's own."""

    def __init__(self, cwd: Path) -> None:
        self.cwd = cwd
        self.environ = clean_environ()

    def argv(self, *words: str | Path) -> list[str]:
        """Return the command line."""
        return [sys.executable, "-m", "fasttrain", *map(str, words)]

    def __call__(
        self,
        *words: str | Path,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 200,
    ) -> Completed:
        """Run it to its end."""
        return subprocess.run(
            self.argv(*words),
            cwd=cwd or self.cwd,
            env={**self.environ, **(env or {})},
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
        )

    def start(self, *words: str | Path, **popen: Any) -> subprocess.Popen[bytes]:
        """Start it; the caller stays with it."""
        settings = {"cwd": self.cwd, "env": self.environ, "stdin": subprocess.DEVNULL}
        return subprocess.Popen(self.argv(*words), **{**settings, **popen})


class Terminal:
    """A terminal of 33 lines and 91 columns with one command in its foreground."""

    def __init__(self, argv: list[str], cwd: Path, environ: dict[str, str]) -> None:
        self.screen = b""
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 91, 0, 0))
        self.process = subprocess.Popen(
            argv, cwd=cwd, env=environ, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)

    def type(self, data: bytes) -> None:
        """Press keys."""
        os.write(self._ours, data)

    def read_until(self, text: bytes) -> None:
        """Wait until the screen has shown a text."""
        while text not in self.screen:
            self.screen += os.read(self._ours, 65536)  # OSError when it ends without the text

    def hang_up(self) -> None:
        """Take the terminal away, as a closed window or a lost connection does."""
        os.close(self._ours)

    def end(self) -> int:
        """Read all that is shown until the command has left, and give its exit code."""
        with contextlib.suppress(OSError):  # EIO: the last program has left the terminal
            while data := os.read(self._ours, 65536):
                self.screen += data
        os.close(self._ours)
        return self.process.wait(120)
