"""Ends what is left of a run whose launcher was killed: ``python -IS GUARDIAN RUN_ID``.

Standard input is a pipe that the launcher holds open, and never writes to. A launcher that ends by
itself kills the guardian first, so the end of the pipe means that somebody killed the launcher.
"""

import os
import signal
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2]


def main(run_id: str) -> None:
    """Wait for the death of the launcher, then kill the run."""
    stand_apart()
    sys.path.append(str(PACKAGE))  # at the end, where it shadows nothing
    # Now, because an upgrade may replace the files while the run goes on.
    from fasttrain.processes.ending import end
    from fasttrain.processes.table import of_run

    while os.read(0, 1024):
        pass  # nobody means to write, but a closed stdout's number may have gone to the pipe
    end(lambda: of_run(run_id), grace_s=0)  # as the kernel does to the workers of a dead launcher


def stand_apart() -> None:
    """Leave the launcher's session, folder, signals and files: nothing must wait for this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.setsid()
    os.chdir("/")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


if __name__ == "__main__":
    main(sys.argv[1])
