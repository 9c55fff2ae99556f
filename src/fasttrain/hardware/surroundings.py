"""What of this machine explains the failure of a run: memory that ran out."""

from __future__ import annotations

from fasttrain.hardware.cgroup import memory_limit_bytes, oom_kills
from fasttrain.hardware.host import Host
from fasttrain.hardware.host_state import shared_memory
from fasttrain.model.crash import Surroundings


def look_around(host: Host) -> Surroundings:
    """Give the machine's memory, and how many processes the lack of it has cost so far."""
    return Surroundings(
        group_oom_kills=oom_kills(host),
        machine_oom_kills=_counted(host, "proc/vmstat", "oom_kill"),
        memory_limit_bytes=_limit(host),
        memory_bytes=_memory_bytes(host),
        shm_bytes=shared_memory(host)[0],
    )


def _limit(host: Host) -> int | None:
    """Give the limit; version 1 says "none" by a number that no machine has."""
    limit, total = memory_limit_bytes(host), _memory_bytes(host)
    return None if limit is None or (total and limit > total) else limit


def _memory_bytes(host: Host) -> int | None:
    kib = _counted(host, "proc/meminfo", "MemTotal:")
    return None if kib is None else kib * 1024


def _counted(host: Host, path: str, name: str) -> int | None:
    for line in host.read(path).splitlines():
        words = line.split()
        if words[:1] == [name] and words[1:] and words[1].isdecimal():
            return int(words[1])
    return None
