"""torchrun's agent, changed so that it asks the launcher before it starts its workers again.

torchrun restarts after any failure, at once, and each of its nodes for itself. Here the launcher
judges the failure, the nodes exchange their verdicts, and all of them do the same.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore, launcher  # type: ignore[attr-defined]
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from fasttrain.agent.worker_exits import ExitWatch
from fasttrain.model.attempts import (
    NODE_CAME,
    Decided,
    GivenUpError,
    Message,
    Verdict,
    agree,
)
from fasttrain.model.codec import dumps, loads
from fasttrain.model.crash import WorkerExits
from fasttrain.model.plan import LaunchPlan
from fasttrain.processes.agent_pipe import AgentPipe

# The rendezvous of a run on one node, at a store that listens on the loopback interface alone.
#
# torchrun's own stores listen on all interfaces, whatever their endpoint: anybody who reaches the
# machine could read and write what the ranks exchange.


BACKEND = "loopback"
HOST = "127.0.0.1"
TIMEOUT_S = 600  # for a worker that asks for a key. Source: static_tcp_rendezvous.py of torch 2.13


def _store_on(port: int, descriptor: int) -> TCPStore:
    """Return a store whose server listens on a socket that is bound already."""
    make = partial(
        TCPStore,
        HOST,
        port,
        is_master=True,
        timeout=timedelta(seconds=TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    try:
        return make()
    except NotImplementedError:  # torch 2.7, whose default server, libuv's, takes no socket
        return make(use_libuv=False)


class Loopback(rendezvous.RendezvousHandler):
    """The only node of a run, and the store that the workers of an attempt share."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        """Return its name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: rank 0 is a client of the agent's store, and opens none of its own."""
        return True

    def next_rendezvous(self) -> Any:
        """Return a new store with its address.

        In an old one, restarted workers would find the addresses of the previous attempt.
        """
        listener = socket.socket()
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = _store_on(port, listener.detach())
        return rendezvous.RendezvousInfo(
            PrefixStore(self._run_id, store), 0, 1, rendezvous.RendezvousStoreInfo(HOST, port)
        )

    def is_closed(self) -> bool:
        """False: there is no other node to close it."""
        return False

    def set_closed(self) -> None:
        """No-op: there is no other node to notify."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other node can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """True: nothing is open that doesn't end with the agent."""
        return True


def offer() -> bool:
    """Register this rendezvous with torchrun; False if this torch doesn't support it.

    It needs a rendezvous that returns its store (RendezvousInfo), and a TCPStore that takes a
    listening socket (master_listen_fd).
    """
    if not hasattr(rendezvous, "RendezvousInfo"):
        return False
    if "master_listen_fd" not in (TCPStore.__init__.__doc__ or ""):
        return False
    rendezvous.rendezvous_handler_registry.register(BACKEND, _create)
    return True


def _create(parameters: Any) -> Loopback:
    return Loopback(parameters.run_id)


# How the agents of a run's nodes exchange verdicts, at the store of their rendezvous.


LOOK_S = 0.05
ENDED_WELL = "a node had ended well already, and can't train again"
# The time that torchrun's agent gives its workers between SIGTERM and SIGKILL, and some more.
# Source: torch 2.13, LocalElasticAgent._shutdown
STATIC_S = 35.0
ELASTIC_S = 10.0  # a silent node has most likely left; if it comes later, it joins again
FINAL_S = 5.0  # the run ends anyway; other verdicts only improve its crash card
# A node that shows no sign of life for so long is gone. Workers may not notice it for half an hour,
# such as those that wait for a key of the store. Longer than an agent takes to judge a failure.
SILENT_S = 60.0
BEAT_S = 0.5
AWAY_S = 2.0  # an agent that has not looked for so long can't say who was silent
SHORTEST_SILENCE_S = 3.0  # several beats, whatever the rendezvous is set to
KEEP_ALIVE_ATTEMPTS = 3  # torch's default of keep_alive_max_attempt


def silence_s(rdzv_conf: str) -> float:
    """Return the seconds after which a silent node is gone.

    Args:
        rdzv_conf: Settings of the rendezvous in torchrun's syntax, by which a node is gone that has
            missed ``keep_alive_max_attempt`` signs of life, ``keep_alive_interval`` seconds apart.
    """
    pairs = (pair.partition("=") for pair in rdzv_conf.split(","))
    settings = {name.strip(): value for name, _, value in pairs}
    with suppress(ValueError):  # torch's rendezvous refuses what is no number
        interval_s = int(settings.get("keep_alive_interval", ""))
        attempts = int(settings.get("keep_alive_max_attempt", KEEP_ALIVE_ATTEMPTS))
        return max(SHORTEST_SILENCE_S, float(interval_s * attempts))
    return SILENT_S


class Nodes:
    """The nodes of one attempt.

    Args:
        group: The workers of this one.
        silent_s: Seconds after which a node that shows no sign of life is gone.

    Attributes:
        host: Name of this one.
        count: How many there are.
        store_is_gone: Whether the node with the store is gone, so that the others can't meet.
    """

    def __init__(self, group: WorkerGroup, silent_s: float = SILENT_S) -> None:
        self.host = socket.gethostname()
        self.count = int(group.group_world_size or 1)
        self._rank = int(group.group_rank or 0)
        self._store: Any = group.store
        self.store_is_gone = self._one_ended_well = False
        self._silent_s = silent_s
        self._looked_s = self._heard_s = time.monotonic()
        self._beats = 0

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
        """True if a node has reported that the attempt failed, is silent, or took the store away.

        A node that ended well takes the store away, too, once it has waited for the others.
        """
        try:
            if not self._one_ended_well:
                self._one_ended_well = self._store.add(f"{_key(attempt)}/ended", 0) > 0
            failed = self._store.add(f"{_key(attempt)}/failed", 0) > 0
            return bool(failed or (self._is_next_silent(attempt) and not self._one_ended_well))
        except RuntimeError:
            return not self._one_ended_well

    def _is_next_silent(self, attempt: int) -> bool:
        """Show a sign of life; True if the next node has shown none for too long.

        Each node looks after one other, so that the store has little to do; the last looks after
        the first.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s > AWAY_S:
            self._heard_s = now_s  # this agent was suspended, or busy, and has not listened
        if now_s - self._looked_s >= BEAT_S:
            self._looked_s = now_s
            key, following = f"{_key(attempt)}/beats", (self._rank + 1) % self.count
            self._store.add(f"{key}/{self._rank}", 1)
            beats = self._store.add(f"{key}/{following}", 0)
            if beats != self._beats:
                self._beats, self._heard_s = beats, now_s
        return now_s - self._heard_s > self._silent_s

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


# torchrun's agent, changed so that it asks the launcher before it starts its workers again.


class RestartAgent(LocalElasticAgent):
    """The agent of one node; the named arguments are those of its run, the others torchrun's."""

    def __init__(
        self,
        plan: LaunchPlan,
        run_dir: Path,
        watch: ExitWatch,
        pipe: AgentPipe,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        processes = plan.processes.value
        self._run_dir, self._watch, self._pipe = run_dir, watch, pipe
        self._most = plan.restarts.value.most
        # With restarts, a run of a fixed size waits for a new node in the place of one that died.
        ranged = processes.min_nodes < processes.max_nodes
        self._elastic = bool(processes.rdzv_endpoint) and (ranged or self._most > 0)
        self._silent_s = silence_s(processes.rdzv_conf)
        self._nodes: Nodes | None = None
        self._attempt = self._used = 0
        self._settled: Decided | None = None  # what led to the restart that is under way
        self._store_of_workers: Any = None  # closed when nothing refers to it

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # A node that stays rank 0 publishes where its store is only once, so a node that comes
        # later waits for it until it fails. Forgetting it has torch publish it again.
        # Source: torch 2.13, DynamicRendezvousHandler.next_rendezvous
        handler: Any = worker_group.spec.rdzv_handler
        if hasattr(handler, "_bootstrap_store_info"):
            handler._bootstrap_store_info = None
        super()._rendezvous(worker_group)
        self._watch.reserve(self._run_dir)
        self._nodes = Nodes(worker_group, self._silent_s)
        if self._elastic:  # a node that came late has not counted the attempts before it
            self._attempt, self._used = self._nodes.highest(self._attempt, self._used)
        if self._attempt and worker_group.spec.rdzv_handler.get_backend() != BACKEND:
            self._store_of_workers = self._nodes.renew_store(worker_group, self._attempt)
        # torch derives the workers' TORCHELASTIC_RESTART_COUNT from it: it must agree on all nodes.
        self._remaining_restarts = worker_group.spec.max_restarts - self._attempt

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        nodes = self._nodes
        if result.state == WorkerState.FAILED:
            return self._settle(worker_group, result)
        if nodes is None or nodes.count == 1:
            return result
        if result.state == WorkerState.SUCCEEDED:
            nodes.ended_well(self._attempt)
        elif result.state == WorkerState.HEALTHY and nodes.failed(self._attempt):
            return self._settle(worker_group, RunResult(state=WorkerState.FAILED))
        return result

    def _settle(self, group: WorkerGroup, result: RunResult) -> RunResult:
        """End the attempt that failed, here or on another node, as all nodes decide."""
        ends = [(rank, end.pid, end.exitcode) for rank, end in result.failures.items()]
        verdict = self._ask(self._watch.record(self._run_dir, ends))
        if verdict is None:
            self._remaining_restarts = 0  # the launcher is gone, and this process soon as well
            return result
        # A node that comes ends the workers of another; those that lose their peers by that have
        # not failed. torch restarts them once it sees the node that waits.
        if verdict.of_a_peer and group.spec.rdzv_handler.num_nodes_waiting() > 0:
            return RunResult(state=WorkerState.HEALTHY)
        decided = self._decide(verdict)
        if not decided.again:
            self._pipe.send(Message(decided=decided))
            self._remaining_restarts = 0
            if result.failures:
                return result
            self._stop_workers(group)
            raise GivenUpError(decided.crash.exit_code if decided.crash else 1, decided.reason)
        self._make_way(group, decided)
        time.sleep(decided.delay_s)
        self._used, self._settled = decided.used, decided
        self._remaining_restarts = 1  # torch's loop restarts only with one left, and counts it down
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        decided, self._settled = self._settled, None
        if decided is None:
            decided = Decided(again=True, reason=NODE_CAME, used=self._used)
            self._make_way(worker_group, decided)
        self._attempt += 1
        try:
            super()._restart_workers(worker_group)
        except OSError as error:  # such as a full disk, on which torchrun makes folders and files
            reason = f"attempt {self._attempt + 1} can't be started: {error}"
            self._pipe.send(Message(decided=replace(decided, again=False, reason=reason)))
            raise GivenUpError(decided.crash.exit_code if decided.crash else 1, reason) from error

    def _ask(self, exits: WorkerExits) -> Verdict | None:
        """Return the launcher's verdict on an attempt; None where the launcher has ended."""
        self._pipe.send(Message(exits=exits, asks=True))
        answer = self._pipe.receive()
        return answer.verdict if answer else None

    def _decide(self, verdict: Verdict) -> Decided:
        verdicts, lost, own, elastic = [verdict], 0, 0, self._elastic
        if self._nodes and self._nodes.count > 1:
            final = not verdict.again or self._used >= self._most
            verdicts, lost = self._nodes.exchange(
                self._attempt, verdict, elastic=self._elastic, final=final
            )
            own = verdicts.index(verdict)
            elastic = elastic and not self._nodes.store_is_gone
        decided = agree(verdicts, used=self._used, most=self._most, lost=lost, elastic=elastic)
        first, here = decided.crash, verdicts[own].crash
        elsewhere = first is not None and (here is None or replace(first, node="") != here)
        crash = first if elsewhere else here
        return replace(decided, crash=crash, elsewhere=elsewhere)

    def _make_way(self, group: WorkerGroup, decided: Decided) -> None:
        """End the workers, and wait until the launcher has put aside what is left of them."""
        self._stop_workers(group)
        self._pipe.send(Message(decided=decided))
        self._pipe.receive()  # that the way is clear


@contextmanager
def asking_launcher(
    plan: LaunchPlan, run_dir: Path, watch: ExitWatch, pipe: AgentPipe
) -> Iterator[None]:
    """Have torchrun use `RestartAgent`; it has no option for another agent than its own."""
    api: Any = launcher.api
    its_own = api.LocalElasticAgent
    api.LocalElasticAgent = partial(RestartAgent, plan, run_dir, watch, pipe)
    try:
        yield
    finally:
        api.LocalElasticAgent = its_own
