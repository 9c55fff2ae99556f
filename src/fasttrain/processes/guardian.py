"""Kill the rest of a run whose launcher was killed: ``python -IS GUARDIAN RUN_ID [SPARED]``.

Standard input is a pipe that the launcher holds open and never writes to. A launcher that ends by
itself kills the guardian first, so the end of the pipe means that the launcher was killed.

The guardian then kills every process with the run's mark in its environment. A process that cleared
its environment has no mark, and no parent to be found by once the launcher is dead. So the guardian
records the launcher's descendants from time to time, except SPARED ones from before the run.
"""

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

SCAN_S = 1.0
SCAN_PAUSES = 100  # a pause is at least as long as so many scans: 1 % of one core at most

PACKAGE = Path(__file__).parents[2]


def main(run_id: str, *spared: str) -> None:
    """Wait for the death of the launcher, then kill the run."""
    stand_apart()
    sys.path.append(str(PACKAGE))  # at the end, where it shadows nothing
    # Imported now, because an upgrade may replace the files while the run goes on.
    from fasttrain.files import remove_whole
    from fasttrain.model.places import scratch_folder
    from fasttrain.processes.table import Table, alive, descendants, end, name_of, of_run, table

    launcher, pause_s = os.getppid(), 0.0
    known: Table = {}
    while not hung_up(pause_s):
        began_s = time.monotonic()
        processes = {pid: one for pid, one in table().items() if name_of(one) not in spared}
        known = descendants([launcher], processes)
        pause_s = max(SCAN_S, SCAN_PAUSES * (time.monotonic() - began_s))

    def find() -> Table:
        left, processes = alive(known.values()), table()
        found = of_run(run_id) | left | descendants(left, processes)
        found.pop(os.getpid(), None)
        return found

    end(find, grace_s=0)  # the kernel's parent-death signal to the workers is SIGKILL, too
    with suppress(OSError, ValueError):  # nobody is left to be told
        remove_whole(scratch_folder(run_id))


def hung_up(pause_s: float) -> bool:
    """Wait at most so long for the launcher's death; return True if it has died."""
    if not select.select([0], [], [], pause_s)[0]:
        return False
    # Nobody writes on purpose, but the pipe may have got the number of a closed stdout.
    return not os.read(0, 1024)


def stand_apart() -> None:
    """Leave the launcher's session and folder, close its files, and block every signal.

    Nothing must wait for this process: a terminal for its session, a reader for an open pipe, or an
    unmount for its folder.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.setsid()
    os.chdir("/")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


if __name__ == "__main__":
    main(*sys.argv[1:])
