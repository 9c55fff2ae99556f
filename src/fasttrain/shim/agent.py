"""Entry point of the torchrun agent: ``python AGENT [torchrun options] COMMAND...``.

torchrun itself ends with exit code 1 whatever its workers ended with; this one ends with the exit
code of the first worker that failed, or 128 + signal. And where torchrun takes SIGUSR1 and SIGUSR2
as the end of the run, these only pass through: a script may save at such a signal and train on.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Run torchrun and give the exit code of the run."""
    from fasttrain.shim.parent import die_with_launcher

    die_with_launcher()
    for signum in PASSED_ON:
        signal.signal(signum, _pass_on)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(_as_can_be_had(argv)))  # type: ignore[no-untyped-call]
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        ended = f"exit code {code}" if failure.exitcode >= 0 else failure.signal_name()
        print(f"fasttrain: rank {rank} failed first, with {ended}", file=sys.stderr)  # noqa: T201
        return code
    return 0


def _as_can_be_had(argv: list[str]) -> list[str]:
    """Give torchrun's arguments, without the rendezvous of ours if this torch can't have it."""
    from fasttrain.shim import loopback

    ours = f"--rdzv-backend={loopback.BACKEND}"
    if ours not in argv[: argv.index("--")] or loopback.offer():
        return argv
    print(  # noqa: T201
        "fasttrain: warning: the store of this torch listens on all interfaces; newer ones can be"
        " bound to loopback",
        file=sys.stderr,
    )
    at = argv.index(ours)
    return [*argv[:at], "--rdzv-backend=c10d", *argv[at + 1 :]]


def _pass_on(signum: int, _frame: Any) -> None:
    """Send a signal to every worker; they were all started by the main thread."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    for child in children.split():
        os.kill(int(child), signum)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder; see __main__.py
    sys.exit(main(sys.argv[1:]))
