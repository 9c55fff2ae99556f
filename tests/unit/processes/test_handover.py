"""The sockets that ranks fetch: whose they are, who gets them, and what is left."""

from __future__ import annotations

import fcntl
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fasttrain.model.errors import FasttrainError
from fasttrain.processes import handover as module
from fasttrain.processes.handover import HIGH_DESCRIPTOR, Handover, fetch


def handed(handover: Handover, ranks: int) -> list[list[int]]:
    """Return what the ranks fetch, the last one first."""
    with ThreadPoolExecutor(ranks) as pool:
        asked = [pool.submit(fetch, handover.address, rank) for rank in reversed(range(ranks))]
        while not all(it.done() for it in asked):
            handover.tick()
        return [it.result() for it in reversed(asked)]


def test_each_rank_gets_its_own_and_nothing_is_left() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    ours, theirs = socket.socketpair()
    handover = Handover(theirs.detach(), 3)
    first, second, third = handed(handover, 3)
    assert [len(first), len(second), len(third)] == [3, 1, 1]
    for one, other in ((ours.fileno(), first[0]), (first[1], second[0]), (first[2], third[0])):
        os.write(one, b"a turn")
        assert os.read(other, 100) == b"a turn"
    for end in (*first, *second, *third):
        assert end >= HIGH_DESCRIPTOR, "the script's files keep the low ones"
        assert fcntl.fcntl(end, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.close(end)
    assert ours.recv(1) == b"", "the launcher keeps no copy: it sees the end of rank 0"
    handover.close()
    ours.close()
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_what_nobody_has_fetched_is_closed() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    ours, theirs = socket.socketpair()
    handover = Handover(theirs.detach(), 2)
    handover.tick()
    handover.close()
    assert ours.recv(1) == b""
    ours.close()
    assert set(Path("/proc/self/fd").iterdir()) == before
    with pytest.raises(FasttrainError) as caught:
        fetch(handover.address, 0)
    assert caught.value.slug == "prove-socket"


def test_who_has_gone_takes_nothing_along() -> None:
    ours, theirs = socket.socketpair()
    handover = Handover(theirs.detach(), 1)
    with socket.socket(socket.AF_UNIX) as gone:
        gone.connect(f"\0{handover.address}-0")
    ((end,),) = handed(handover, 1)
    os.close(end)
    ours.close()


def test_another_users_process_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    handover = Handover(theirs.detach(), 1)
    monkeypatch.setattr(module, "_is_own", lambda _: False)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(f"\0{handover.address}-0")
        handover.tick()
        assert socket.recv_fds(peer, 10, 1)[:2] == (b"", [])
    with pytest.raises(FasttrainError) as caught:
        fetch(handover.address, 0)
    assert "another user" in caught.value.why
    monkeypatch.undo()
    ((end,),) = handed(handover, 1)
    os.close(end)
    ours.close()
