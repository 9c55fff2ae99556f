"""What trials and measurements share: processes forked from one that has torch, and its voice."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from fasttrain.shim.process.parent_death import die_with_launcher

JOIN_S = 10.0  # ranks of one machine meet in well under a second
TICK_S = 0.005
GRACE_S = 0.5
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
MESSAGE_LENGTH = 300


class RankError(RuntimeError):
    """What a rank said before it failed, or the signal that it died of."""


def say(marker: str, data: dict[str, Any]) -> None:
    """Print one marked line; whatever else was printed may have left its own line open."""
    sys.stdout.write(f"\n{marker}{json.dumps(data)}\n")
    sys.stdout.flush()


def told(error: BaseException) -> str:
    """Return an error in one line: a C++ compiler's error where it holds one, else its first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = next((line for line in lines if " error: " in line), lines[0] if lines else "")
    if not isinstance(error, RankError):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line[:MESSAGE_LENGTH]


def stay_on_this_machine() -> None:
    """Have ranks meet on the loopback interface, unless the user names another."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, LOOPBACK)


def join(backend: str, rank: int, world: int, listener: socket.socket) -> None:
    """Join the default group through a store on the loopback interface."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = listener.getsockname()
    own: dict[str, Any] = {}
    if rank == 0 and "master_listen_fd" in (TCPStore.__init__.__doc__ or ""):
        own = {"master_listen_fd": listener.detach()}
    else:  # torch 2.0 opens the port itself
        listener.close()
    limit = timedelta(seconds=JOIN_S)
    store = TCPStore(host, port, world, rank == 0, timeout=limit, wait_for_workers=False, **own)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


def run_ranks(world: int, work: Callable[[int], None]) -> None:
    """Run ``work(rank)`` in `world` forked processes, which share what is imported already.

    The first that fails ends the others: they may wait for it without a limit.

    Raises:
        RankError: One of them failed.
    """
    sys.stdout.flush()
    reader, writer = os.pipe()
    running = {_fork(rank, work, writer): rank for rank in range(world)}
    os.close(writer)
    failed: dict[int, int] = {}
    until_s = math.inf
    while running and time.monotonic() < until_s:
        time.sleep(TICK_S)
        failed |= _reap(running)
        # A rank that dies leaves the others before its death is seen here.
        until_s = min(until_s, time.monotonic() + GRACE_S) if failed else until_s
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(reader, errors="replace") as pipe:
        said = pipe.read()
    for rank, code in failed.items():
        if code < 0:  # the others only say that it left them
            raise RankError(f"rank {rank} died of {signal.Signals(-code).name}")
    if failed:
        raise RankError(said.splitlines()[0] if said else "a rank failed and gave no reason")


def _reap(running: dict[int, int]) -> dict[int, int]:
    """Take out the ranks that have ended, and give the exit codes of those that failed."""
    failed = {}
    for pid, rank in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del running[pid]
            failed[rank] = os.waitstatus_to_exitcode(status)
    return {rank: code for rank, code in failed.items() if code}


def _fork(rank: int, work: Callable[[int], None], writer: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_launcher()
        work(rank)
        code = 0
    except Exception as error:  # noqa: BLE001 - told to the parent, which has the only voice
        os.write(writer, f"{told(error)}\n".encode())
    finally:
        sys.stdout.flush()
        os._exit(code)
