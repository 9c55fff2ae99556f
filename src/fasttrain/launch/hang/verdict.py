"""Describes in words where ranks are, and which of them wait for others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from fasttrain.launch.hang.heartbeats import HeartbeatRecord
from fasttrain.launch.process import procfs
from fasttrain.launch.process.procfs import Call
from fasttrain.model.hang import Frame, Role, StuckProcess, StuckRank
from fasttrain.model.places import RANKS_WAIT_IN

# Recognises what only looks like a hang.
#
# Some excuses count only if fasttrain chose the time limit itself, and not if the user did: with
# an automatic limit, stopping a good run is worse than never reporting a hang.


# What shows that ranks make progress, and what their processes do while none does.


@dataclass(frozen=True, slots=True)
class Activity:
    """What processes and their descendants had done at a moment.

    Attributes:
        quiet_s: The moment, in seconds without progress.
        done: Processor time in s and bytes read and written, by process.
    """

    quiet_s: float
    done: Mapping[int, tuple[float, int]]

    @classmethod
    def at(cls, quiet_s: float, pids: Iterable[int]) -> Activity:
        """Read the counters of processes now."""
        family = {member for pid in pids for member in procfs.family(pid)}
        return cls(quiet_s, {pid: (procfs.cpu_s(pid), procfs.all_bytes(pid)) for pid in family})

    def cores_since(self, before: Activity) -> float:
        """Return how many cores were used on average."""
        used_s = sum(cpu_s for cpu_s, _ in self.done.values())
        used_before_s = sum(cpu_s for cpu_s, _ in before.done.values())
        return (used_s - used_before_s) / max(self.quiet_s - before.quiet_s, 1e-9)

    def active_since(self, before: Activity) -> frozenset[int]:
        """Return the processes that have computed, read or written anything, or are new."""
        return frozenset(pid for pid, done in self.done.items() if before.done.get(pid) != done)

    def moved_since(self, before: Activity) -> frozenset[int]:
        """Return the processes of which some thread has read or written anything, or are new."""
        none = (0.0, -1)
        return frozenset(
            pid for pid, (_, moved) in self.done.items() if before.done.get(pid, none)[1] != moved
        )


@dataclass(frozen=True, slots=True)
class Doing:
    """What the worker of a rank does.

    Attributes:
        call: The system call that its main thread is in.
        children: What it may wait for: the child that its call names, or all of its children, with
            their descendants.
        active: Processes that have done something since the last progress.
    """

    call: Call
    children: frozenset[int]
    active: frozenset[int]


def doing(pid: int, active: frozenset[int]) -> Doing:
    """Return what the main thread of a process does, and what it may wait for."""
    call = procfs.call(pid)
    of_one = call.name == "wait" and call.argument > 0
    children = procfs.family(call.argument) if of_one else procfs.family(pid)[1:]
    return Doing(call, frozenset(children), active)


def signs(running: list[HeartbeatRecord]) -> object:
    """Return what changes with any progress; bytes count because checkpoints are progress, too."""
    return [(heartbeat, procfs.transferred_bytes(heartbeat.address.pid)) for heartbeat in running]


def have_begun(running: list[HeartbeatRecord]) -> bool:
    """True if every rank has made a step, by itself or in a process that it started."""
    steps: dict[int, int] = {}
    for heartbeat in running:
        rank = heartbeat.address.rank
        steps[rank] = max(steps.get(rank, 0), heartbeat.steps)
    return bool(steps) and all(steps.values())


def are_stopped(running: list[HeartbeatRecord]) -> bool:
    """True if a process of the ranks is stopped, by a signal or a debugger."""
    return any(procfs.is_stopped(heartbeat.address.pid) for heartbeat in running)


COMPILES, IN_DEBUGGER = "compiles", "is in a debugger"
AT_PROMPT, FOR_INPUT = "is at a prompt", "waits for its input"
# Rows of files, functions (empty for any) and what a main thread does there. The stack of a
# compiled function that merely runs has none of these frames.
Rows = tuple[tuple[str, frozenset[str], str], ...]
_LEGITIMATE: Rows = (
    ("torch/_dynamo/convert_frame.py", frozenset(), COMPILES),
    ("torch/_inductor/compile_fx.py", frozenset({"compile_fx", "compile_fx_inner",
     "compile_fx_backward", "fx_codegen_and_compile"}), COMPILES),
    ("torch/_inductor/select_algorithm.py", frozenset(), COMPILES),
    ("torch/utils/cpp_extension.py", frozenset(), COMPILES),
    ("triton/compiler/compiler.py", frozenset(), COMPILES),
    ("triton/runtime/autotuner.py", frozenset(), COMPILES),
    ("bdb.py", frozenset(), IN_DEBUGGER),
    ("pdb.py", frozenset(), IN_DEBUGGER),
    ("IPython/terminal/embed.py", frozenset(), AT_PROMPT),
)  # fmt: skip
# input() with readline loaded, which waits by select() instead of reading standard input.
_PROMPT = re.compile(r"(?<![\w.])input\(")

_FOR_A_CHILD: Rows = (
    ("subprocess.py", frozenset(), "waits for a process"),
    ("multiprocessing/popen_fork.py", frozenset(), "waits for a process"),
    # wandb uploads from a process of its own. Source: wandb 0.31.0, Run._on_finish
    ("wandb/sdk/wandb_run.py", frozenset({"_on_finish"}), "waits for wandb"),
)  # fmt: skip
# Where Python waits for the network, by the innermost frame.
_NETWORK = ("selectors.py", "socket.py", "ssl.py", "asyncio/runners.py", "asyncio/base_events.py")
# A server whose main thread only sleeps. Source: gradio 6.31.0, Blocks.block_thread
_SERVERS: Rows = (("gradio/blocks.py", frozenset({"block_thread"}), "serves"),)
# Callers of the same functions that wait for processes of the run instead.
_NOT_NETWORK = ("subprocess.py", "multiprocessing/connection.py")
_NOT_NETWORK_BELOW = ("torch/distributed/", "torch/utils/data/", "torch/autograd/")
_REQUEST = "http/client.py"
# Libraries that transfer by threads, event loops or C of their own while their caller waits.
_CLIENTS = ("fsspec/", "huggingface_hub/", "s3transfer/", "grpc/")


def excuse(ranks: Iterable[StuckRank], doing: Mapping[int, Doing], *, automatic: bool) -> str:
    """Return why there may be no progress, such as ``rank 0 compiles``; empty without a reason.

    Args:
        ranks: The ranks with their stacks.
        doing: What their workers do, by process.
        automatic: Whether fasttrain chose the time limit.
    """
    for rank in ranks:
        for what in _excuses(rank, doing.get(rank.processes[0].pid), automatic):
            return f"rank {rank.rank} {what}"
    return ""


def _excuses(rank: StuckRank, doing: Doing | None, automatic: bool) -> Iterator[str]:
    for frame in chain.from_iterable(map(_main, rank.processes)):
        yield from _named(frame, _LEGITIMATE)
    worker = rank.processes[0]
    if _asks(worker, doing):
        yield FOR_INPUT
    if automatic and doing and _awaits_work(rank, doing):
        yield "waits for a process that does something"


def on_network(rank: StuckRank, doing: Mapping[int, Doing], *, alone: bool) -> bool:
    """True if a rank sends, receives or serves, and doesn't wait for other ranks.

    Args:
        rank: The rank with its stacks.
        doing: What workers do, by process.
        alone: Whether there is no other rank that a socket could be connected to.
    """
    worker = rank.processes[0]
    stack = _main(worker)
    if waits_for_ranks(worker) or any(map(_is_of_run, stack)):
        return False
    if alone and (found := doing.get(worker.pid)) and found.call.name == "network":
        return True
    if stack and _is_in(stack[0], _NETWORK):
        return True
    if any(_named(frame, _SERVERS) or _is_of_client(frame) for frame in stack):
        return True
    # Libraries upload in threads of their own while the main thread waits for them.
    return any(_is_in(frame, (_REQUEST,)) for frame in chain.from_iterable(worker.threads[1:]))


def transfers(rank: StuckRank, moved: frozenset[int]) -> bool:
    """True if any thread of a rank, or of the processes that it works with, transfers anything.

    Those are its DataLoader workers and others of multiprocessing, but no programs such as
    TensorBoard and wandb's service, which write now and then whatever the training does.

    Args:
        rank: The rank with its stacks.
        moved: Processes that have read or written something since there was no progress.
    """
    return any(
        process.pid in moved or procfs.waits_for_disk(process.pid, any_thread=True)
        for process in rank.processes
    ) or any(
        _receives(stack)
        for process in rank.processes
        if process.role == "loader worker"
        for stack in process.threads
    )


def _receives(stack: tuple[Frame, ...]) -> bool:
    """True if a thread of a DataLoader worker waits for the network, and not for its parent."""
    if any(_is_in(frame, _NOT_NETWORK) for frame in stack):
        return False
    return bool(stack) and (_is_in(stack[0], _NETWORK) or any(map(_is_of_client, stack)))


def _is_of_client(frame: Frame) -> bool:
    return any(f"/{client}" in f"/{frame.file}" for client in _CLIENTS)


def _main(process: StuckProcess) -> tuple[Frame, ...]:
    return process.threads[0] if process.threads else ()


def _asks(worker: StuckProcess, doing: Doing | None) -> bool:
    """True if the main thread waits for keyboard input."""
    if doing and doing.call.name == "read" and doing.call.argument == 0:
        return True
    stack = _main(worker)
    return bool(stack) and bool(_PROMPT.search(stack[0].source))


def _awaits_work(rank: StuckRank, doing: Doing) -> bool:
    """True if the main thread waits for a child that does something."""
    worker = rank.processes[0]
    named = any(_named(frame, _FOR_A_CHILD) for frame in _main(worker))
    if doing.call.name != "wait" and not named:
        return False
    loaders = {process.pid for process in rank.processes if process.role == "loader worker"}
    return bool((doing.children & doing.active) - loaders)


def _named(frame: Frame, rows: Rows) -> list[str]:
    return [
        what
        for file, functions, what in rows
        if _is_in(frame, (file,)) and (not functions or frame.function in functions)
    ]


def _is_in(frame: Frame, files: tuple[str, ...]) -> bool:
    # A library installed in place (pip install -e) shows its whole path.
    return any(frame.file == file or frame.file.endswith(f"/{file}") for file in files)


def _is_of_run(frame: Frame) -> bool:
    return _is_in(frame, _NOT_NETWORK) or any(part in frame.file for part in _NOT_NETWORK_BELOW)


# Describes in words where ranks are, and which of them wait for others.


Stack = tuple[Frame, ...]

# Public functions of torch.distributed that wait for other ranks.
_COLLECTIVES = frozenset({
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "destroy_process_group",
    "gather", "gather_object", "init_process_group", "monitored_barrier", "new_group", "recv",
    "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "send_object_list",
})  # fmt: skip
_OF_LOADER = ("torch/utils/data/dataloader.py", "torch/utils/data/_utils/pin_memory.py")
_OF_READING = "torch/utils/data/_utils/fetch.py"
_OF_LOADER_WORKER = "torch/utils/data/_utils/worker.py"


@dataclass(frozen=True, slots=True)
class _Place:
    """What a main thread does: whether it waits for other ranks, and the words for it."""

    waits: bool
    words: str


def verdict(ranks: tuple[StuckRank, ...], ended: tuple[int, ...]) -> tuple[str, ...]:
    """Return one sentence for each place where ranks are, first where they wait for others."""
    places: defaultdict[_Place, list[int]] = defaultdict(list)
    for rank in ranks:
        places[_place(rank.processes[0])].append(rank.rank)
    waiting = [place for place in places if place.waits]
    others = [place for place in places if not place.waits]
    sentences = [_sentence(places[place], "waits", "wait", place.words) for place in waiting]
    for place in others:
        but = "doesn't: it is" if waiting else "is"
        buts = "don't: they are" if waiting else "are"
        sentences.append(_sentence(places[place], but, buts, place.words))
    if ended:
        sentences.append(_sentence(list(ended), "has ended", "have ended", ""))
    if len(waiting) > 1 and not others:
        sentences.append("they wait at different places, so none can go on")
    return (*sentences, *(line for rank in ranks for line in _helpers(rank)))


def waits_for_ranks(process: StuckProcess) -> bool:
    """True if the main thread of a process waits for other ranks."""
    return _place(process).waits


def role_of(stack: Stack) -> Role:
    """Return the role of a process that a rank has started, by its stack."""
    return "loader worker" if any(map(_is_worker_loop, stack)) else "child"


def since_fork(stack: Stack) -> Stack:
    """Return a DataLoader worker's own frames, without those that its parent had at the fork."""
    return stack[: next(i for i, frame in enumerate(stack) if _is_worker_loop(frame)) + 1]


def rank_list(numbers: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-5, 7``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    numbers_text = ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs
    )
    return f"rank {numbers_text}" if numbers_text.isdecimal() else f"ranks {numbers_text}"


def _sentence(ranks: list[int], one: str, several: str, rest: str) -> str:
    return f"{rank_list(ranks)} {one if len(ranks) == 1 else several} {rest}".rstrip()


def _place(process: StuckProcess) -> _Place:
    stack = process.threads[0] if process.threads else ()
    if not stack:
        return _Place(waits=False, words=f"at a place that is not known: {process.missing}")
    depth = next((i for i, frame in enumerate(stack) if frame.user), len(stack) - 1)
    site, inside = stack[depth], stack[:depth]
    called = f"({site.file}:{site.line})"
    for frame in reversed(inside):
        if "torch/distributed/" in frame.file and frame.function in _COLLECTIVES:
            return _Place(waits=True, words=f"in {frame.function} {called}")
    if any(frame.file.endswith(RANKS_WAIT_IN) for frame in inside):
        return _Place(waits=True, words=f"for what they add up {called}")
    if any(frame.file.endswith(_OF_LOADER) for frame in inside):
        return _Place(waits=False, words=f"waiting for a batch of its DataLoader {called}")
    if any(frame.function == "_engine_run_backward" for frame in inside):
        return _Place(waits=False, words=f"in backward {called}")
    return _Place(waits=False, words=_at(site, inside))


def _at(site: Frame, inside: Stack) -> str:
    at = f"{site.file}:{site.line} in {site.function}"
    at = f"{at}: {site.source}" if site.source else at
    return f"in {inside[0].function}, called at {at}" if inside else f"at {at}"


def _helpers(rank: StuckRank) -> Iterator[str]:
    """Yield a line for each further process of a rank that does something or can't be seen."""
    for process in rank.processes[1:]:
        what = "DataLoader worker" if process.role == "loader worker" else "child process"
        name = f"{what} {process.pid} of rank {rank.rank}"
        if process.missing:
            yield f"no stack of {name}: {process.missing}"
        elif process.role == "child":
            place = _place(process)
            yield f"{name} {'waits' if place.waits else 'is'} {place.words}"
        elif at := _reads(process.threads[0]):
            yield f"{name} is {at}"


def _reads(stack: Stack) -> str:
    """Return where a DataLoader worker reads a sample; empty while it waits for work."""
    if not any(frame.file.endswith(_OF_READING) for frame in stack):
        return ""
    depth = next((i for i, frame in enumerate(stack) if frame.user), 0)
    return _at(stack[depth], stack[:depth])


def _is_worker_loop(frame: Frame) -> bool:
    return frame.file.endswith(_OF_LOADER_WORKER) and frame.function == "_worker_loop"
