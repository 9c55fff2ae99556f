"""The guardian of a run: a process of its own that outlives a launcher that is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from fasttrain.model.errors import FasttrainError
from fasttrain.model.places import GUARDIAN_PROGRAM, RUN_MARK, program
from fasttrain.processes.table import Process, name_of

STARTS = 4  # a guardian that keeps dying must not be started for ever
PROGRAM = program(GUARDIAN_PROGRAM)


class Guardian:
    """Ends the run when this process dies; see `fasttrain.processes.guardian`.

    Attributes:
        pid: Its number; 0 while there is none.
        failure: Why there is none; empty while there is one.
    """

    def __init__(
        self, run_id: str, environ: Mapping[str, str], spared: Iterable[Process] = ()
    ) -> None:
        self.pid = 0
        self.failure = ""
        self._starts_left = STARTS
        self._about = (run_id, *map(name_of, spared))
        # Without the run's mark, by which it finds what to end; Python may need the rest.
        self._environ = {name: value for name, value in environ.items() if name != RUN_MARK}
        self._read, self._write = os.pipe()
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        if not self._starts_left:
            self.pid, self.failure = 0, "its guardian ended again and again"
            return
        self._starts_left -= 1
        null = os.devnull
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                (sys.executable, "-IS", str(PROGRAM), *self._about),
                self._environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, self._read, 0),
                    # Whoever reads our output to its end must not have to wait for the guardian.
                    (os.POSIX_SPAWN_OPEN, 1, null, os.O_WRONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, null, os.O_WRONLY, 0),
                ],
                setsigmask=signal.valid_signals(),
            )
        except (OSError, ValueError) as error:
            self.pid = 0
            self.failure = getattr(error, "strerror", None) or str(error)

    def dismiss(self) -> None:
        """End it: there is nothing left that it should end."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self._close()

    def act(self) -> None:
        """Have it end the run, as if this process had been killed."""
        self._close()

    def _close(self) -> None:
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        if self.pid:
            with suppress(ChildProcessError):  # reaped with the others
                os.waitpid(self.pid, 0)


@contextmanager
def guarded(environ: Mapping[str, str], spared: Iterable[Process]) -> Iterator[Guardian]:
    """Have a guardian during a run with this environment.

    It ends the run at an unexpected error, too. A `FasttrainError` means that nothing was started.

    Args:
        environ: The environment of the run.
        spared: Children of this process that are not of the run.
    """
    guardian = Guardian(environ.get(RUN_MARK, ""), environ, spared)
    try:
        yield guardian
    except FasttrainError:
        guardian.dismiss()
        raise
    except BaseException:
        guardian.act()
        raise
    guardian.dismiss()
