"""Runs beside each other: how one is started, why one failed, and whether they train the same."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from fasttrain.files import load, remove_whole
from fasttrain.hardware.host import Host
from fasttrain.hardware.host_state import look_around
from fasttrain.launch.alternation import COMPARED, Alternation
from fasttrain.launch.output.display import QuietDisplay
from fasttrain.launch.receipts import trains_in_children
from fasttrain.launch.sides import Sides
from fasttrain.model.codec import CodecError
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.outcome import RECEIPT_FILE, Receipt
from fasttrain.model.places import COMPILED_VARIABLE, scratch_folder
from fasttrain.model.plan import Invocation, LaunchPlan
from fasttrain.model.proof import Curves, Proof, Side
from fasttrain.planning.explain import mask_plan
from fasttrain.planning.proof import CONTROLS, SIDES
from fasttrain.processes.handover import Handover
from fasttrain.statistics import curves

MOST_BYTES = 2000
CHILDREN_S = 30.0  # for the script's own process to make a step, too, which may compile first
THREADS_TRAIN = "several threads of the script train, and no two runs have their steps in one order"
DRAWS = (
    "the model draws random numbers where ranks split its batch, such as for dropout, and each rank"
    " draws its own: compare without them, such as with a dropout of 0"
)
# What a run lacks because another one runs beside it, by the cause of its crash.
_NO_MEMORY = "there is no memory for it beside the other run"
_BESIDE = {
    "device-memory": _NO_MEMORY, "host-memory": _NO_MEMORY, "shared-memory": _NO_MEMORY,
    "port-in-use": "it wants a port that the other run has, and the two run at once",
}  # fmt: skip


class Children:
    """Knows when a script has shown that only processes that it starts train.

    Args:
        run_dir: Of a run with levers: without any, such processes write no reports.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._since_s = math.inf

    def train_alone(self) -> bool:
        """True if they have for a while, in which the script's own process has made no step."""
        now_s = time.monotonic()
        self._since_s = min(self._since_s, now_s) if trains_in_children(self._run_dir) else math.inf
        return now_s - self._since_s >= CHILDREN_S


class Silent(QuietDisplay):
    """Keeps the script's output to its log, where it can be read.

    Attributes:
        last: The end of it.
    """

    shows = False
    last = b""

    def write(self, descriptor: int, data: bytes) -> None:  # noqa: ARG002 - the display's
        """Write nothing."""
        self.last = (self.last + data)[-MOST_BYTES:]


@contextmanager
def scratch_made(folder: str) -> Iterator[None]:
    """Have a scratch folder during a run, if it needs one."""
    if not folder:
        yield
        return
    try:
        Path(folder).mkdir(mode=0o700)
    except OSError as error:
        raise FasttrainError(
            "what the script writes can't be kept apart here",
            why=f"{folder} can't be made: {error.strerror}",
            fix="--keep-writes, if the script may write its files",
            slug="tune-writes",
            exit_code=ExitCode.UNAVAILABLE,
        ) from error
    try:
        yield
    finally:
        try:
            remove_whole(Path(folder))
        except OSError as error:
            sys.stderr.write(f"fasttrain: warning: {folder} can't be removed: {error.strerror}\n")


def proof_of(
    side: Side, plan: LaunchPlan, descriptor: int, rounding: float, *, apart: bool
) -> Proof:
    """Return what the worker of a side is asked for.

    Args:
        side: The side.
        plan: The plan of its run.
        descriptor: The end of the socket over which it gets its turns.
        rounding: What a control rounds by.
        apart: Whether what the script writes is thrown away.
    """
    cache = [v.value for v in plan.environment if v.name == COMPILED_VARIABLE and v.value]
    return Proof(
        side=side,
        descriptor=descriptor,
        scratch=str(scratch_folder(plan.run_id)) if apart else "",
        keep=(plan.run_dir, *cache),
        rounding=rounding if side in CONTROLS else 0.0,
        errors=SIDES.index(side),
    )


def run_side(plan: LaunchPlan, invocation: Invocation) -> int:
    """Run one side to its end, in a process of its own."""
    from fasttrain.launch.node_run import Observers
    from fasttrain.launch.start import start

    assert plan.proof is not None
    observers = Observers(Silent(), partial(look_around, Host(invocation.environ)))
    try:
        with scratch_made(plan.proof.scratch), _handed_over(plan) as (whole, watches):
            masked = mask_plan(whole, invocation.environ)
            observers = replace(observers, watches=watches)
            return start(whole, masked, invocation.environ, observers).exit_code
    except FasttrainError as error:
        if plan.proof.side == "chosen":  # the others fail for the same reason
            sys.stderr.write(f"{error}\n")
        return int(error.exit_code)


@contextmanager
def _handed_over(plan: LaunchPlan) -> Iterator[tuple[LaunchPlan, tuple[Handover, ...]]]:
    """Yield a plan by which each rank finds its turns, and what is to hand them over."""
    proof, processes = plan.proof, plan.processes.value
    assert proof is not None
    if processes.backend == "direct":  # the worker inherits the socket
        yield plan, ()
        return
    os.set_inheritable(proof.descriptor, False)  # noqa: FBT003 - no keyword
    with closing(Handover(proof.descriptor, processes.world_size)) as handover:
        yield replace(plan, proof=replace(proof, address=handover.address)), (handover,)


def judged(sides: Sides, turns: Alternation) -> Curves:
    """Return what the curves say, with as many controls as that takes."""
    plain, chosen = (turns.runs[side].losses for side in COMPARED)
    found = curves.compare(plain, chosen)
    if found.finding != "same bits" and any(turns.runs[it].threads_train for it in COMPARED):
        return Curves("can't tell", THREADS_TRAIN, found.windows)
    if turns.runs["chosen"].draws and curves.needs_control(found):  # no control does so
        return replace(found, finding="can't tell", reason=DRAWS)
    controls: list[list[float | None]] = []
    for side in CONTROLS:
        if (
            not curves.needs_control(found)
            or sides.signum
            or any(sides.exit_code(it) for it in COMPARED)
        ):
            break
        controls.append(turns.follow(side).losses)
        sides.end(side)
        found = curves.compare(plain, chosen, controls)
        if sides.exit_code(side):  # so will the others
            break
    return found


def receipt_of(plan: LaunchPlan) -> Receipt | None:
    """Return the receipt of a run; None if it was never started."""
    try:
        return load(Receipt, Path(plan.run_dir, RECEIPT_FILE))
    except (OSError, CodecError):
        return None


def lacking(receipt: Receipt | None) -> str:
    """Return why a run fails beside another one, which may succeed alone; empty if it isn't so."""
    crash = receipt.crash if receipt is not None else None
    return _BESIDE.get(crash.cause, "") if crash is not None else ""


def why_failed(code: int | None, receipt: Receipt | None) -> str:
    """Return why a run failed, in one sentence."""
    if receipt is not None and receipt.crash is not None:
        step = receipt.crash.step
        at = f" after {step:,} steps" if step else ""
        return f"{receipt.crash.error or receipt.crash.why}{at}"
    if code == ExitCode.HUNG:
        return "it made no progress any more"
    if code is not None and code > 128:
        return f"it was ended by {_name(code - 128)}"
    return f"exit code {code}"


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
