"""torchrun's agent, which asks before it starts its workers again.

torchrun starts again whatever failed, at once, and each of its nodes for itself. Here the launcher
judges the failure, the nodes tell each other their verdicts, and all of them do the same.
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
from fasttrain.agent.worker_exits import Deaths
from fasttrain.files.writing import write_private
from fasttrain.model.attempts import (
    DECIDED_FILE,
    NODE_CAME,
    VERDICT_FILE,
    Decided,
    GivenUpError,
    Verdict,
    agree,
)
from fasttrain.model.codec import dumps
from fasttrain.model.plan import LaunchPlan
from fasttrain.model.reading import load

LOOK_S = 0.05


class HealingAgent(LocalElasticAgent):
    """The agent of one node; `plan`, `run_dir` and `deaths` are those of its run."""

    def __init__(
        self, plan: LaunchPlan, run_dir: Path, deaths: Deaths, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        processes = plan.processes.value
        self._run_dir, self._deaths = run_dir, deaths
        self._most = plan.restarts.value.most
        # With restarts, a run of a fixed size waits for another node in the place of one that died.
        ranged = processes.min_nodes < processes.max_nodes
        self._elastic = bool(processes.rdzv_endpoint) and (ranged or self._most > 0)
        self._nodes: Nodes | None = None
        self._attempt = self._used = 0
        self._settled = False
        self._store_of_workers: Any = None  # lives as long as they do

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # A node that keeps the rank 0 doesn't tell one that comes where the store is, and that one
        # waits for it until it fails. Source: torch 2.13, DynamicRendezvousHandler.next_rendezvous
        handler: Any = worker_group.spec.rdzv_handler
        if hasattr(handler, "_bootstrap_store_info"):
            handler._bootstrap_store_info = None
        super()._rendezvous(worker_group)
        self._deaths.keep_room(self._run_dir, DECIDED_FILE)
        self._nodes = Nodes(worker_group)
        if self._elastic:  # a node that came late has counted nothing yet
            self._attempt, self._used = self._nodes.highest(self._attempt, self._used)
        if self._attempt and worker_group.spec.rdzv_handler.get_backend() != BACKEND:
            self._store_of_workers = self._nodes.renew_store(worker_group, self._attempt)
        # What the workers are told, and divide attempts by: it must be the same on all nodes.
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
        """Do what becomes of an attempt that failed, here or on another node."""
        ends = [(rank, end.pid, end.exitcode) for rank, end in result.failures.items()]
        if not self._deaths.leave(self._run_dir, ends):
            self._remaining_restarts = 0  # the launcher can't be asked
            return result
        verdict = self._ask()
        # Workers that lose those of a node which makes room for a new one have not failed.
        if verdict.of_a_peer and group.spec.rdzv_handler.num_nodes_waiting() > 0:
            return RunResult(state=WorkerState.HEALTHY)
        decided = self._decide(verdict)
        if not decided.again:
            self._leave(decided)
            self._remaining_restarts = 0
            if result.failures:
                return result
            self._stop_workers(group)
            raise GivenUpError(decided.crash.exit_code if decided.crash else 1, decided.reason)
        self._make_way(group, decided)
        time.sleep(decided.delay_s)
        self._used, self._settled = decided.used, True
        self._remaining_restarts = 1  # for torch's loop, which takes it away again
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if not self._settled:
            came = Decided(again=True, reason=NODE_CAME, used=self._used)
            self._make_way(worker_group, came)
        self._settled = False
        self._attempt += 1
        super()._restart_workers(worker_group)

    def _ask(self) -> Verdict:
        """Return the launcher's verdict; it sees that the ends of the workers are written."""
        path = self._run_dir / VERDICT_FILE
        while not path.exists():
            time.sleep(LOOK_S)  # a launcher that dies takes this process with it
        return load(Verdict, path)

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
        self._leave(decided)
        while (self._run_dir / DECIDED_FILE).exists():
            time.sleep(LOOK_S)

    def _leave(self, decided: Decided) -> None:
        write_private(self._run_dir / DECIDED_FILE, dumps(decided))


@contextmanager
def healing(plan: LaunchPlan, run_dir: Path, deaths: Deaths) -> Iterator[None]:
    """Have torchrun make this agent: it has no option for another one than its own."""
    api: Any = launcher.api
    its_own = api.LocalElasticAgent
    api.LocalElasticAgent = partial(HealingAgent, plan, run_dir, deaths)
    try:
        yield
    finally:
        api.LocalElasticAgent = its_own
