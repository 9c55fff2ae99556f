"""Entry point of the torchrun agent: ``python AGENT PLAN [torchrun options] COMMAND...``.

torchrun itself ends with exit code 1 whatever its workers ended with; this one ends with the exit
code of the first worker that failed, or 128 + signal. And where torchrun takes SIGUSR1 and SIGUSR2
as the end of the run, these only pass through: a script may save at such a signal and train on.
What torchrun logs goes into agent.log; how each worker ended, into ends.json, and the launcher
tells it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from fasttrain.shim.deaths import Deaths

LOG = "agent.log"  # in the run directory
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Run torchrun and give the exit code of the run."""
    from fasttrain.shim.deaths import Deaths
    from fasttrain.shim.parent import die_with_launcher

    die_with_launcher()
    for signum in PASSED_ON:
        signal.signal(signum, _pass_on)
    run_dir, deaths = Path(argv[0]).parent, Deaths()
    # A launcher has opened a log for our output. Without one, as where a dry run was pasted, all
    # that there is to tell is told here.
    led = any((run_dir / name).exists() for name in ("rank-0.log", LOG))
    log = _open_private(run_dir / LOG) if led else sys.stderr
    # The workers have the streams themselves, and so has what ends the agent itself.
    with contextlib.redirect_stderr(log):
        code, told = _run(argv[1:], run_dir, deaths)
    if told and not led:
        print(f"fasttrain: {told}", file=sys.stderr)  # noqa: T201
    return code


def _run(argv: list[str], run_dir: Path, deaths: Deaths) -> tuple[int, str]:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(_as_can_be_had(argv)))  # type: ignore[no-untyped-call]
    except SignalException as error:
        return 128 + error.sigval, ""
    except ChildFailedError as error:
        failures = error.failures.items()
        deaths.leave(run_dir, ((rank, end.pid, end.exitcode) for rank, end in failures))
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        ended = f"exit code {code}" if failure.exitcode >= 0 else failure.signal_name()
        return code, f"rank {rank} failed first, with {ended}"
    return 0, ""


def _open_private(path: Path) -> TextIO:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return os.fdopen(descriptor, "a", buffering=1)


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
    """Send a signal to every worker."""
    from fasttrain.shim.deaths import children

    for child in children():
        os.kill(child, signum)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder; see __main__.py
    sys.exit(main(sys.argv[1:]))
