"""Entry point of the torchrun agent: ``python AGENT PLAN [torchrun options] COMMAND...``.

torchrun itself ends with exit code 1 whatever its workers ended with; this one ends with the exit
code of the first worker that failed, or 128 + signal. torchrun takes SIGUSR1 and SIGUSR2 as the end
of the run; here they are only passed on, because a script may save at such a signal and train on.
What torchrun logs goes into agent.log. How each worker ended goes into ends.json and, by a pipe, to
the launcher, which reports it.
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
    from fasttrain.agent.worker_exits import ExitWatch
    from fasttrain.model.plan import LaunchPlan
    from fasttrain.processes.agent_pipe import AgentPipe

LOG, FOLDER = "agent.log", "torchrun"  # in the run directory
KEEP_S = 0.1  # between two looks for signals, and for workers that have not got them yet
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Run torchrun and return the exit code of the run."""
    from fasttrain.agent.worker_exits import ExitWatch
    from fasttrain.files import give_back, open_log
    from fasttrain.model.crash import EXITS_FILE
    from fasttrain.model.errors import FasttrainError
    from fasttrain.processes.agent_pipe import inherited
    from fasttrain.shim.process.entry import die_with_launcher, not_by_hand, read_plan
    from fasttrain.shim.process.log_stream import log_stream
    from fasttrain.shim.process.refusal import refuse
    from fasttrain.shim.process.writes import throw_writes_away

    if "--" not in argv[1:]:
        refuse(not_by_hand("PLAN [OPTIONS OF TORCHRUN] -- COMMAND..."))
    die_with_launcher()
    try:
        plan = read_plan(Path(argv[0]))
    except FasttrainError as error:
        refuse(error)
    throw_writes_away(plan)  # before there is any thread, for this process and its workers
    for signum in PASSED_ON:
        signal.signal(signum, _pass_on)
    if held := set(PASSED_ON) & signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        threading.Thread(target=_keep, args=(held,), daemon=True).start()
    # Before torchrun copies the environment for its workers. Without a launcher, as where a dry run
    # was pasted, torchrun restarts by itself, and a failure is reported here.
    pipe = inherited(os.environ)
    run_dir, watch = Path(argv[0]).parent, ExitWatch()
    watch.reserve(run_dir)
    log = log_stream(open_log(run_dir / LOG), sys.stderr) if pipe else sys.stderr
    # Only Python's stderr: workers, and a fatal error of the agent itself, have the real one.
    with contextlib.redirect_stderr(log):
        code, told = _run(argv[1:], run_dir, watch, pipe, _restarts(plan, run_dir, watch, pipe))
    give_back(run_dir / EXITS_FILE)
    if told and not pipe:
        print(f"fasttrain: {told}", file=sys.stderr)  # noqa: T201
    return code


def _restarts(
    plan: LaunchPlan, run_dir: Path, watch: ExitWatch, pipe: AgentPipe | None
) -> AbstractContextManager[None]:
    """Return what has the launcher decide on restarts, where there is one and restarts may come."""
    if not (pipe and plan.judged):
        return contextlib.nullcontext()
    from fasttrain.agent.restart_agent import asking_launcher

    return asking_launcher(plan, run_dir, watch, pipe)


def _run(
    argv: list[str],
    run_dir: Path,
    watch: ExitWatch,
    pipe: AgentPipe | None,
    restarts: AbstractContextManager[None],
) -> tuple[int, str]:
    """Return the exit code of the run, and one sentence on its failure; empty without one."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from fasttrain.model.attempts import GivenUpError, Message

    try:
        with restarts, _files(run_dir) as folder:
            options = (f"--log-dir={folder}", *_supported(argv))
            run(parse_args(options))  # type: ignore[no-untyped-call]
    except SignalException as error:
        return 128 + error.sigval, ""
    except GivenUpError as error:
        return error.exit_code, str(error)
    except ChildFailedError as error:
        failures = error.failures.items()
        exits = watch.record(run_dir, ((rank, end.pid, end.exitcode) for rank, end in failures))
        if pipe:
            pipe.send(Message(exits=exits))
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        ended = f"exit code {code}" if failure.exitcode >= 0 else failure.signal_name()
        return code, f"rank {rank} failed first, with {ended}"
    return 0, ""


@contextlib.contextmanager
def _files(run_dir: Path) -> Iterator[Path]:
    """Yield a folder for torchrun's files; one of its own making it would leave in $TMPDIR."""
    folder = run_dir / FOLDER
    try:
        yield folder
    finally:
        # A file that can't be removed stays in the run directory, where it harms nobody.
        shutil.rmtree(folder, ignore_errors=True)


def _supported(argv: list[str]) -> list[str]:
    """Return torchrun's arguments, with its own rendezvous if this torch doesn't support ours."""
    from fasttrain.agent import restart_agent

    ours = f"--rdzv-backend={restart_agent.BACKEND}"
    if ours not in argv[: argv.index("--")] or restart_agent.offer():
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
    """Pass signals that end the run on to workers, including those that are yet to start.

    The launcher has blocked these signals, so they are blocked in this process and in all that it
    starts. A worker unblocks them when it can handle them.
    """
    from fasttrain.agent.worker_exits import children

    kept: set[Any] = set()
    sent: set[tuple[int, int]] = set()
    while True:
        for signum in held & signal.sigpending():
            signal.sigwait({signum})
            kept.add(signum)
            sent = {one for one in sent if one[1] != signum}  # a second signal is passed on again
        for one in {(child, int(signum)) for child in children() for signum in kept} - sent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(*one)
            sent.add(one)
        time.sleep(KEEP_S)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder; see __main__.py
    sys.path.insert(0, str(Path(__file__).absolute().parents[2]))
    import fasttrain  # noqa: F401

    del sys.path[0]
    sys.exit(main(sys.argv[1:]))
