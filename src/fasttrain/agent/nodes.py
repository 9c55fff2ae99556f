"""How the agents of a run's nodes exchange verdicts, at the store of their rendezvous."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerGroup

from fasttrain.model.attempts import Verdict
from fasttrain.model.codec import dumps, loads

LOOK_S = 0.05
ENDED_WELL = "a node had ended well already, and can't train again"
# The time that torchrun's agent gives its workers between SIGTERM and SIGKILL, and some more.
# Source: torch 2.13, LocalElasticAgent._shutdown
STATIC_S = 35.0
ELASTIC_S = 10.0  # a silent node has most likely left; if it comes later, it joins again
FINAL_S = 5.0  # the run ends anyway; other verdicts only improve its crash card


class Nodes:
    """The nodes of one attempt.

    Attributes:
        host: Name of this one.
        count: How many there are.
        store_is_gone: Whether the node with the store is gone, so that the others can't meet.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.host = socket.gethostname()
        self.count = int(group.group_world_size or 1)
        self._rank = int(group.group_rank or 0)
        self._store: Any = group.store
        self.store_is_gone = self._one_ended_well = False

    def highest(self, *counts: int) -> tuple[int, ...]:
        """Return the highest of each count over all nodes."""
        self._store.set(f"fasttrain/counts/{self._rank}", " ".join(map(str, counts)))
        all_counts = [
            map(int, self._store.get(f"fasttrain/counts/{rank}").decode().split())
            for rank in range(self.count)
        ]
        return tuple(map(max, zip(*all_counts, strict=True)))

    def renew_store(self, group: WorkerGroup, attempt: int) -> Any:
        """Have the workers share a new store; return it on the node that holds it.

        torch keeps one for all attempts, in which gloo and NCCL find the addresses of the ranks of
        the previous attempt. Source: torch 2.13, rendezvous.py, "no need to add prefix for each
        attempt", and DynamicRendezvousHandler.next_rendezvous, which makes one store.
        """
        if not getattr(group.spec.rdzv_handler, "use_agent_store", False):
            return None  # the first rank opens its own
        workers: Any = group
        key, made = f"{_key(attempt)}/store", None
        if self._rank == 0:
            made = TCPStore(workers.master_addr, 0, is_master=True, wait_for_workers=False)
            self._store.set(key, f"{workers.master_addr} {made.port}")
        workers.master_addr, port = self._store.get(key).decode().split()
        workers.master_port = int(port)
        return made

    def failed(self, attempt: int) -> bool:
        """True if a node has reported that the attempt failed, or was lost with the store.

        A node that ended well takes the store away, too, once it has waited for the others.
        """
        try:
            if not self._one_ended_well:
                self._one_ended_well = self._store.add(f"{_key(attempt)}/ended", 0) > 0
            return bool(self._store.add(f"{_key(attempt)}/failed", 0) > 0)
        except RuntimeError:
            return not self._one_ended_well

    def ended_well(self, attempt: int) -> None:
        """Report to the others that this node's workers have ended well."""
        verdict = Verdict(self.host, again=False, reason=ENDED_WELL)
        with suppress(RuntimeError):  # a node that ended earlier took the store with it
            self.say(attempt, verdict)
            self._store.add(f"{_key(attempt)}/ended", 1)

    def say(self, attempt: int, verdict: Verdict) -> None:
        """Publish this node's verdict."""
        self._store.set(f"{_key(attempt)}/verdict/{self._rank}", dumps(verdict))
        self._store.add(f"{_key(attempt)}/said/{self._rank}", 1)

    def exchange(
        self, attempt: int, verdict: Verdict, *, elastic: bool, final: bool
    ) -> tuple[list[Verdict], int]:
        """Return the verdicts of all nodes in their order, and how many gave none in time.

        Args:
            attempt: The attempt that failed.
            verdict: That of this node.
            elastic: Whether the run can continue without a node.
            final: Whether this verdict alone ends the run.
        """
        found = {self._rank: verdict}
        try:
            self.say(attempt, verdict)
            self._store.add(f"{_key(attempt)}/failed", 1)
            wait_s = FINAL_S if final else ELASTIC_S if elastic else STATIC_S
            due_s = time.monotonic() + wait_s
            while len(found) < self.count and time.monotonic() < due_s:
                found |= self._heard(attempt, found)
                time.sleep(LOOK_S)
        except RuntimeError:
            self.store_is_gone = True
        return [found[rank] for rank in sorted(found)], self.count - len(found)

    def _heard(self, attempt: int, found: dict[int, Verdict]) -> dict[int, Verdict]:
        return {
            rank: loads(Verdict, self._store.get(f"{_key(attempt)}/verdict/{rank}"))
            for rank in range(self.count)
            if rank not in found and self._store.add(f"{_key(attempt)}/said/{rank}", 0) > 0
        }


def _key(attempt: int) -> str:
    return f"fasttrain/attempt/{attempt}"
