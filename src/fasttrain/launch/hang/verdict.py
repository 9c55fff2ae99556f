"""Describes in words where ranks are, and which of them wait for others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fasttrain.model.hang import Frame, Role, StuckProcess, StuckRank
from fasttrain.model.places import RANKS_WAIT_IN

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
