"""What trials and measurements share: ranks forked from a process with torch, and its output."""

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

from fasttrain.shim.process.entry import die_with_launcher

JOIN_S = 10.0  # ranks of one machine meet in well under a second
TICK_S = 0.005
GRACE_S = 0.5
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
MESSAGE_LENGTH = 300


class RankError(RuntimeError):
    """The message of a rank that failed, or the signal that killed it."""


def say(marker: str, data: dict[str, Any]) -> None:
    """Print one marked line."""
    # The leading newline ends a line that other code may have printed without one.
    sys.stdout.write(f"\n{marker}{json.dumps(data)}\n")
    sys.stdout.flush()


def one_line(error: BaseException) -> str:
    """Return the line of an error that has a C++ compiler's error in it, else the first one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = next((line for line in lines if " error: " in line), lines[0] if lines else "")
    if not isinstance(error, RankError):
        line = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return line[:MESSAGE_LENGTH]


def stay_on_this_machine() -> None:
    """Make ranks connect on the loopback interface, unless the user has chosen another."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, LOOPBACK)


def join(backend: str, rank: int, world: int, listener: socket.socket) -> None:
    """Join the default process group, through a store that listens on `listener`."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = listener.getsockname()
    own: dict[str, Any] = {}
    if rank == 0 and "master_listen_fd" in (TCPStore.__init__.__doc__ or ""):
        own = {"master_listen_fd": listener.detach()}
    else:  # torch 2.0 takes no open socket, so its store opens the port again
        listener.close()
    limit = timedelta(seconds=JOIN_S)
    store = TCPStore(host, port, world, rank == 0, timeout=limit, wait_for_workers=False, **own)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


def run_ranks(world: int, work: Callable[[int], None]) -> None:
    """Run ``work(rank)`` in `world` forked processes, which need not import torch again.

    When one fails, the others are killed: they may wait for it without a limit.

    Raises:
        RankError: If one of them failed.
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
        # Ranks that lose their connection to a dead rank may be reaped before it: wait for it too.
        until_s = min(until_s, time.monotonic() + GRACE_S) if failed else until_s
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(reader, errors="replace") as pipe:
        said = pipe.read()
    for rank, code in failed.items():
        if code < 0:  # the others only report a lost connection
            raise RankError(f"rank {rank} died of {signal.Signals(-code).name}")
    if failed:
        raise RankError(said.splitlines()[0] if said else "a rank failed and gave no reason")


def _reap(running: dict[int, int]) -> dict[int, int]:
    """Remove the ranks that have ended, and return the exit codes of those that failed."""
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
    except Exception as error:  # noqa: BLE001 - the parent reports it
        os.write(writer, f"{one_line(error)}\n".encode())
    finally:
        sys.stdout.flush()
        os._exit(code)
