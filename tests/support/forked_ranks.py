"""Ranks that are forked processes, which share a real store; what each of them tells."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import distributed as dist

from fasttrain.shim.data_parallel.ranks import Ranks

WAIT_S = 90.0  # for a process that another one has left alone


@dataclass(frozen=True)
class Ended:
    """How one rank has ended: its exit code, what it returned, and its stderr."""

    code: int
    value: Any
    stderr: str

    @property
    def good(self) -> Any:
        """What it returned, if it ended well."""
        assert self.code == 0, self.stderr
        return self.value


def on_ranks(
    folder: Path,
    act: Callable[[Ranks], Any],
    *,
    world_size: int = 2,
    nodes: int = 1,
    wait_s: float = WAIT_S,
) -> list[Ended]:
    """Return how each rank has ended that calls a function, whose result JSON can hold.

    Each is ended that hasn't told it after ``wait_s`` seconds, in the order of the ranks.
    """
    folder.mkdir(exist_ok=True)
    port, tell_port = os.pipe()
    keeper = os.fork()
    if not keeper:
        _keep_store(tell_port, world_size)
    processes = []
    for rank in range(world_size):
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            _be_rank(rank, world_size, nodes, port, writer, folder, act)
        os.close(writer)
        processes.append((rank, pid, reader))
    os.close(port)
    os.close(tell_port)
    try:
        return [_end_of(folder, *process, wait_s) for process in processes]
    finally:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


def _end_of(folder: Path, rank: int, pid: int, reader: int, wait_s: float) -> Ended:
    told, _, _ = select.select([reader], [], [], wait_s)
    if not told:
        os.kill(pid, signal.SIGABRT)  # faulthandler tells where it is
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    stderr = (folder / f"stderr-{rank}").read_text()
    return Ended(code, json.loads(text) if text else None, stderr)


def _keep_store(tell_port: int, world_size: int) -> None:
    torchs: Any = dist
    store = torchs.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tell_port, int(store.port).to_bytes(4, "big") * world_size)
    signal.pause()


def _be_rank(
    rank: int,
    world_size: int,
    nodes: int,
    port: int,
    writer: int,
    folder: Path,
    act: Callable[[Ranks], Any],
) -> None:
    code = 1
    sys.stderr = (folder / f"stderr-{rank}").open("w", buffering=1)
    faulthandler.enable(sys.stderr)
    try:
        os.environ["LOCAL_WORLD_SIZE"] = str(world_size // nodes)
        torchs: Any = dist
        number = int.from_bytes(os.read(port, 4), "big")
        store = torchs.TCPStore("127.0.0.1", number, is_master=False, wait_for_workers=False)
        ranks = Ranks(rank, world_size, torchs.PrefixStore("test", store), "gloo")
        os.write(writer, json.dumps(act(ranks)).encode())
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)
