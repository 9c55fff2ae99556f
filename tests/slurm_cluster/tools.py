"""Runs the small commands that a cluster is made with, and waits for what they start."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from slurm_cluster.processes import Proc

Words = Iterable[str | Path | int]
Completed = subprocess.CompletedProcess[str]
T = TypeVar("T")


class ClusterError(Exception):
    """The cluster can't be made, or is not what was asked for."""


class UnavailableError(ClusterError):
    """This machine lacks what a cluster needs."""


class NotYetError(ClusterError):
    """What is waited for may still come."""


def say(*words: object) -> None:
    """Tell the user; stdout stays for what a shell evaluates."""
    print("slurm_cluster:", *words, file=sys.stderr, flush=True)  # noqa: T201


def run(argv: Words, *, check: bool = True, timeout_s: float = 60, **popen: Any) -> Completed:
    """Run a command, its output captured; a failure carries what it printed."""
    words = [str(word) for word in argv]
    if "input" not in popen:
        popen.setdefault("stdin", subprocess.DEVNULL)
    try:
        done = subprocess.run(
            words,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=timeout_s, **popen,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotYetError(f"no answer in {timeout_s} s from: {' '.join(words)}") from None
    if check and done.returncode:
        raise NotYetError(f"exit status {done.returncode} from: {' '.join(words)}\n{done.stdout}")
    return done


def wait_for(what: str, ready: Callable[[], T], timeout_s: float, procs: Iterable[Proc] = ()) -> T:
    """Poll until it gives no `NotYetError`; stop early when one of the processes has ended."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return ready()
        except NotYetError as error:
            last = error
        for proc in procs:
            if not proc.alive():
                raise ClusterError(
                    f"{proc.name} ended while waiting for {what}:\n{proc.log_tail()}"
                )
        if time.monotonic() > end:
            tails = "\n".join(f"--- {proc.name}\n{proc.log_tail()}" for proc in procs)
            raise ClusterError(f"{what}: not ready after {timeout_s} s: {last}\n{tails}")
        time.sleep(0.05)


def connect(address: str | tuple[str, int]) -> None:
    """Connect to a Unix socket's path or a host and port, and close again.

    Raises:
        NotYetError: Nothing listens there.
    """
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as sock:
        sock.settimeout(2)
        try:
            sock.connect(address)
        except OSError as error:
            raise NotYetError(str(error)) from None
