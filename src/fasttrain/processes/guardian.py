"""Ends what is left of a run whose launcher was killed: ``python -IS GUARDIAN RUN_ID [SPARED]``.

Standard input is a pipe that the launcher holds open, and never writes to. A launcher that ends by
itself kills the guardian first, so the end of the pipe means that somebody killed the launcher.

What carries the run's mark is found then. A process that has cleared its environment is not, once
its parent has died with the launcher: so the launcher's descendants are noted from time to time.
Spared are those that the launcher had before the run.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path

LOOK_S = 1.0
LEAST_SHARE = 100  # times as long as a look takes are between two: a hundredth of one core

PACKAGE = Path(__file__).parents[2]


def main(run_id: str, *spared: str) -> None:
    """Wait for the death of the launcher, then kill the run."""
    stand_apart()
    sys.path.append(str(PACKAGE))  # at the end, where it shadows nothing
    # Now, because an upgrade may replace the files while the run goes on.
    from fasttrain.processes.ending import end
    from fasttrain.processes.table import Table, alive, descendants, name_of, of_run, table

    launcher, pause_s = os.getppid(), 0.0
    known: Table = {}
    while not hung_up(pause_s):
        began_s = time.monotonic()
        processes = {pid: one for pid, one in table().items() if name_of(one) not in spared}
        known = descendants([launcher], processes)
        pause_s = max(LOOK_S, LEAST_SHARE * (time.monotonic() - began_s))

    def find() -> Table:
        left, processes = alive(known.values()), table()
        found = of_run(run_id) | left | descendants(left, processes)
        found.pop(os.getpid(), None)
        return found

    end(find, grace_s=0)  # as the kernel does to the workers of a dead launcher


def hung_up(pause_s: float) -> bool:
    """Wait so long at most for the launcher to die, and say whether it has."""
    if not select.select([0], [], [], pause_s)[0]:
        return False
    # Nobody means to write, but a closed stdout's number may have gone to the pipe.
    return not os.read(0, 1024)


def stand_apart() -> None:
    """Leave the launcher's session, folder, signals and files: nothing must wait for this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.setsid()
    os.chdir("/")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


if __name__ == "__main__":
    main(*sys.argv[1:])
