"""``--compile auto`` in a rank that does what rank 0 decides, at the same steps."""

from __future__ import annotations

from dataclasses import replace

from fasttrain.model.decision import Decision
from fasttrain.model.levers import Compile
from fasttrain.shim.compile_auto.peers import Ready, Steps
from fasttrain.shim.compile_auto.ranks import Follower, Notice
from fasttrain.shim.compile_auto.switch import NO_GRAPH, SwitchedProcess
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder, Shared

WAITS = "the run ended before rank 0 had decided"


class FollowingCompile(SwitchedProcess):
    """Compiles roots when rank 0 says so.

    Args:
        shared: What the levers share.
        decision: What was decided: how to compile.
        recorder: Records what becomes of it.
        follower: Hears what rank 0 says.
    """

    leads = False

    def __init__(
        self,
        shared: Shared,
        decision: Decision[Compile],
        recorder: OutcomeRecorder,
        follower: Follower,
    ) -> None:
        super().__init__(shared, decision, recorder, follower)
        self._follower = follower

    def _end_background(self) -> None:
        """Do nothing: rank 0 compiles for all."""

    def _decide(self, plain_s: float, ready: Ready) -> Steps[None]:  # noqa: ARG002
        self._follower.say(ready)
        self._found = replace(self._found, reason=WAITS)
        while self._found.phase not in ("eager", "dropped"):
            notice = yield from self._follower.next_notice()
            if notice.what == "eager":
                self._run_eagerly(notice.reason)
            elif late := (yield from self._follower.reach(notice)):
                self._run_eagerly(late)
            else:
                yield from self._follow(notice)

    def _follow(self, notice: Notice) -> Steps[None]:
        """Do what holds from this step on."""
        if notice.what == "switched":
            yield from self._switch_now(notice)
        elif notice.what == "pairs":
            self.lever.refresh()
            if not self.recorder.counts["graphs"]:
                self._drop(NO_GRAPH)
                return
            for side in notice.sides:
                self._on = side
                for _ in range(notice.each):
                    yield 1
        elif notice.what == "kept":
            self._keep(notice.reason)
        elif notice.what == "dropped":
            self._drop(notice.reason)

    def _switch_now(self, notice: Notice) -> Steps[None]:
        compiled = [self._named[at] for at in notice.roots]
        self._forms = {root: self._forms[root] for root in compiled}
        self._begin_comparing()
        if self._begin():
            yield 1
            self._has_switched = True

    def _run_eagerly(self, why: str) -> None:
        if self._on_since_switch:
            self._drop(why)
        else:
            self._stay(why)
