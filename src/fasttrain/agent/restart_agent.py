"""torchrun's agent, changed so that it asks the launcher before it starts its workers again.

torchrun restarts after any failure, at once, and each of its nodes for itself. Here the launcher
judges the failure, the nodes exchange their verdicts, and all of them do the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import launcher
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from fasttrain.agent.loopback import BACKEND
from fasttrain.agent.nodes import Nodes
from fasttrain.agent.worker_exits import ExitWatch
from fasttrain.model.attempts import (
    NODE_CAME,
    Decided,
    GivenUpError,
    Message,
    Verdict,
    agree,
)
from fasttrain.model.crash import WorkerExits
from fasttrain.model.plan import LaunchPlan
from fasttrain.processes.agent_pipe import AgentPipe


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
        self._nodes: Nodes | None = None
        self._attempt = self._used = 0
        self._settled = False
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
        self._nodes = Nodes(worker_group)
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
        self._used, self._settled = decided.used, True
        self._remaining_restarts = 1  # torch's loop restarts only with one left, and counts it down
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if not self._settled:
            came = Decided(again=True, reason=NODE_CAME, used=self._used)
            self._make_way(worker_group, came)
        self._settled = False
        self._attempt += 1
        super()._restart_workers(worker_group)

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
