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
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fasttrain.agent.worker_exits import Deaths

LOG, FOLDER = "agent.log", "torchrun"  # in the run directory
KEEP_S = 0.1  # between two looks for a signal, and for workers that have not heard of it
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Run torchrun and give the exit code of the run."""
    from fasttrain.agent.worker_exits import Deaths
    from fasttrain.files.writing import give_back, open_log
    from fasttrain.model.crash import EXITS_FILE
    from fasttrain.shim.process.entry import not_by_hand
    from fasttrain.shim.process.log_stream import log_stream
    from fasttrain.shim.process.parent_death import die_with_launcher
    from fasttrain.shim.process.refusal import refuse

    if "--" not in argv[1:]:
        refuse(not_by_hand("PLAN [OPTIONS OF TORCHRUN] -- COMMAND..."))
    die_with_launcher()
    for signum in PASSED_ON:
        signal.signal(signum, _pass_on)
    if held := set(PASSED_ON) & signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        threading.Thread(target=_keep, args=(held,), daemon=True).start()
    run_dir, deaths = Path(argv[0]).parent, Deaths()
    # A launcher has opened a log for our output. Without one, as where a dry run was pasted, all
    # that there is to tell is told here.
    led = any((run_dir / name).exists() for name in ("rank-0.log", LOG))
    deaths.keep_room(run_dir)
    log = log_stream(open_log(run_dir / LOG), sys.stderr) if led else sys.stderr
    # The workers have the streams themselves, and so has what ends the agent itself.
    with contextlib.redirect_stderr(log):
        code, told = _run(argv[1:], run_dir, deaths, _healing(Path(argv[0]), deaths, led))
    give_back(run_dir / EXITS_FILE)
    if told and not led:
        print(f"fasttrain: {told}", file=sys.stderr)  # noqa: T201
    return code


def _healing(plan_path: Path, deaths: Deaths, led: bool) -> AbstractContextManager[None]:
    """Return what has the launcher judge failures, where there is one and something to judge."""
    from fasttrain.model.errors import FasttrainError
    from fasttrain.shim.process.entry import read_plan
    from fasttrain.shim.process.refusal import refuse

    try:
        plan = read_plan(plan_path)
    except FasttrainError as error:
        refuse(error)
    if not (led and plan.judged):
        return contextlib.nullcontext()
    from fasttrain.agent.restart_agent import healing

    return healing(plan, plan_path.parent, deaths)


def _run(
    argv: list[str], run_dir: Path, deaths: Deaths, healing: AbstractContextManager[None]
) -> tuple[int, str]:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from fasttrain.model.attempts import GivenUpError

    try:
        with healing, _files(run_dir) as folder:
            options = (f"--log-dir={folder}", *_as_can_be_had(argv))
            run(parse_args(options))  # type: ignore[no-untyped-call]
    except SignalException as error:
        return 128 + error.sigval, ""
    except GivenUpError as error:
        return error.exit_code, str(error)
    except ChildFailedError as error:
        failures = error.failures.items()
        deaths.leave(run_dir, ((rank, end.pid, end.exitcode) for rank, end in failures))
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        ended = f"exit code {code}" if failure.exitcode >= 0 else failure.signal_name()
        return code, f"rank {rank} failed first, with {ended}"
    return 0, ""


@contextlib.contextmanager
def _files(run_dir: Path) -> Iterator[Path]:
    """Yield a folder for torchrun's files: one that it made itself, it would leave in $TMPDIR."""
    folder = run_dir / FOLDER
    try:
        yield folder
    finally:
        # What can't be removed is in the run directory, and in nobody's way.
        shutil.rmtree(folder, ignore_errors=True)


def _as_can_be_had(argv: list[str]) -> list[str]:
    """Return torchrun's arguments, without the rendezvous of ours if this torch can't have it."""
    from fasttrain.agent import loopback

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
    from fasttrain.agent.worker_exits import children

    for child in children():
        os.kill(child, signum)


def _keep(held: set[Any]) -> None:
    """Pass signals on to workers that are yet to start, too: those that end the run.

    The launcher has held them back, and so they are for this whole process and all that it starts.
    A worker takes them up when it can.
    """
    from fasttrain.agent.worker_exits import children

    kept: set[Any] = set()
    told: set[tuple[int, int]] = set()
    while True:
        for signum in held & signal.sigpending():
            signal.sigwait({signum})
            kept.add(signum)
            told = {one for one in told if one[1] != signum}  # said again, it is passed on again
        for one in {(child, int(signum)) for child in children() for signum in kept} - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(*one)
            told.add(one)
        time.sleep(KEEP_S)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder; see __main__.py
    sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
    import fasttrain  # noqa: F401

    del sys.path[0]
    sys.exit(main(sys.argv[1:]))
