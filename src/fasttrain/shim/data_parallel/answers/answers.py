"""Rank 0 answers what processes may answer differently: the time, the files that there are.

All ranks run one script, and so they ask the same questions in the same order. Every rank gets what
rank 0 has found for its k-th question. An answer carries the place in the script that has asked: a
rank that asks elsewhere has parted from rank 0, and the run ends with both places.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.shim.data_parallel.answers.channels import Ring, StoredAnswers
from fasttrain.shim.data_parallel.answers.encoding import NotPlainError, heard, told, told_error
from fasttrain.shim.data_parallel.answers.places import Places, users_place
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.data_parallel.shared_memory import shared_memory
from fasttrain.shim.process import refusal
from fasttrain.shim.process.refusal import refuse

WAIT = "wait for other ranks"

SPINS = 200  # looks before a rank that waits begins to sleep
SLEEP_S = 5e-5
LOOK_EVERY = 2000  # looks, 0.1 to 0.2 s, after which it is asked whether others have ended
STUCK_S = 4.0  # in which neither of two ranks goes on that wait for each other
POLL_S = 0.5


def _itself(value: Any) -> Any:
    return value


class Answers:
    """The questions that this rank has asked so far.

    Args:
        ranks: All ranks.

    Attributes:
        live: Whether rank 0 answers: not in processes that the script forks, and not inside of what
            rank 0 does alone.
        number: Of the last question.
        thread: The one whose questions are answered.
        places: Their numbers.
        waiting_elsewhere: Each returns a rank that waits for this one in another way than by a
            question, what this one is to do by the number of its place, and how often it has.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.live = False
        self.number = 0
        self.rank = ranks.rank
        self.thread = threading.get_ident()
        self.places = Places(ranks.store)
        self.channel: Ring | StoredAnswers
        self.waiting_elsewhere: list[Callable[[], tuple[int, int, int] | None]] = []
        self._ranks = ranks
        self._place = 0
        self._closed = threading.Event()

    def install(self, undo: ExitStack) -> None:
        """Meet the other ranks, and answer from here on; every rank must call this alike."""
        ranks = self._ranks
        with ranks.waits():
            size = Ring.size(ranks.world_size)
            memory = shared_memory(ranks.store, "ring", ranks.rank, ranks.world_size, size)
        whom = ranks.rank, ranks.world_size, ranks.store, self._wait
        self.channel = StoredAnswers(*whom) if memory is None else Ring(memory, *whom)
        self.live = True
        _forget_in_children(self)
        # In front of what else waits at the end: other ranks must not wait for an answer then.
        refusal.at_clean_end.insert(0, self.close)
        undo.callback(refusal.at_clean_end.remove, self.close)
        undo.callback(self.close)
        watch = threading.Thread(target=self._watch, name="fasttrain-answers", daemon=True)
        watch.start()
        undo.callback(watch.join)
        undo.callback(self._closed.set)

    def close(self) -> None:
        """Have each rank find its own answers from here on."""
        if self.live:
            self.live = False
            self._closed.set()
            self.channel.end()

    @property
    def ended(self) -> bool:
        """True if the run is over for them; processes that the script forks are a part of it."""
        return self._closed.is_set()

    def answers(self) -> bool:
        """Return whether rank 0 answers this thread."""
        return self.live and threading.get_ident() == self.thread

    def next_number(self, place: int) -> int:
        """Count a question, and return its number."""
        self._place = place
        self.number = number = self.number + 1
        return number

    def ask(self, place: int, find: Callable[[], Any], tell: Callable[[Any], Any] = _itself) -> Any:
        """Return what ``find`` returns on rank 0, or raise what it raises there.

        Args:
            place: The number of what is asked where.
            find: Finds an answer; called on other ranks only where it can't be told.
            tell: What other ranks get of what that returns.
        """
        number = self.next_number(place)
        if self.rank == 0:
            return self._find(number, place, find, tell)
        try:
            return self._hear(number, place)
        except NotPlainError:
            with self.apart():
                return find()

    def do(
        self, place: int, act: Callable[[], Any], tell: Callable[[Any], Any] = lambda _: None
    ) -> Any:
        """Have rank 0 act when all ranks have come here, and return when it has.

        Args:
            place: The number of what is done where.
            act: Acts on rank 0.
            tell: What other ranks get of what that returns.

        Returns:
            What ``act`` returns on rank 0, and on other ranks what ``tell`` does.
        """
        number = self.next_number(place)
        if self.rank:
            return self._hear(number, place)
        others = self.channel.gather(number, place)
        for rank, other in enumerate(others, 1):
            if other != place:
                self.channel.give_text(number, place, b"null")
                self._part(place, rank, other)
        return self._find(number, place, act, tell)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Have this rank find its own answers inside of a block that others may not run."""
        if threading.get_ident() != self.thread:
            yield  # it does so there anyway, and the other thread goes on asking meanwhile
            return
        before, self.live = self.live, False
        try:
            yield
        finally:
            self.live = before and not self._closed.is_set()

    def _find(
        self, number: int, place: int, find: Callable[[], Any], tell: Callable[[Any], Any]
    ) -> Any:
        try:
            with self.apart():
                found = find()
        except Exception as error:
            self.channel.give_text(number, place, told_error(error))
            raise
        self.channel.give_text(number, place, told(tell(found)))
        return found

    def _hear(self, number: int, place: int) -> Any:
        return heard(self.take(number, place << 32))

    def take(self, number: int, tag: int) -> Any:
        """Return rank 0's answer to a question.

        Raises:
            SystemExit: ``ranks-parted`` where rank 0 has asked another one.
        """
        place = tag >> 32
        found, value = self.channel.take(number, place)
        if found >> 32 != place:
            self._part(place, 0, found >> 32)
        return value

    def _part(self, place: int, rank: int, other: int) -> NoReturn:
        told_places = {self.rank: self.places.told(place), rank: self.places.told(other)}
        refuse(_parted(told_places))

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait for other ranks.

        Raises:
            SystemExit: ``ranks-parted`` where one of them has ended.
        """
        looks = 0
        with self._ranks.waits(), self.apart():
            while not is_over():
                looks += 1
                time.sleep(SLEEP_S if looks > SPINS else 0)
                if not looks % LOOK_EVERY:
                    self._look_for_ended(is_over)

    def _look_for_ended(self, is_over: Callable[[], bool]) -> None:
        ended = self.channel.ended()
        gone = [rank for rank in ended if self.rank == 0 or rank == 0]
        if gone and not is_over():
            refuse(_parted({self.rank: self.places.told(self._place), gone[0]: "end"}))

    # --- ranks that wait for each other

    def _watch(self) -> None:
        """End the run when this rank waits elsewhere while rank 0 and it wait for each other."""
        before: Any = None
        since_s = 0.0
        while not self._closed.wait(POLL_S):
            try:
                now = self._stuck()
            except (RuntimeError, OSError):  # the store is gone, and with it the run
                return
            if now is None or now != before:
                before, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > STUCK_S:
                self._end_stuck(*now[:2])

    def _stuck(self) -> tuple[int, int, int, float] | None:
        """Return a rank that waits for this one to ask, its place and question, and since when."""
        elsewhere = [found for look in self.waiting_elsewhere if (found := look())]
        waiting_s = self._ranks.waiting_since_s
        if not waiting_s or not self.live:  # it isn't live while it waits for an answer itself
            return None
        come = self.channel.come_to()
        for rank, (number, place) in enumerate(come):
            if rank != self.rank and 0 in (rank, self.rank) and number > self.number:
                return rank, place, number, waiting_s
        return (*elsewhere[0], waiting_s) if elsewhere else None

    def _end_stuck(self, rank: int, place: int) -> None:
        here = f"{WAIT} at {users_place(self.thread)}"
        error = _parted({self.rank: here, rank: self.places.told(place)})
        with suppress(OSError, ValueError):
            os.write(2, f"{error}\n".encode())
        refusal.ended_by_us(error)
        os._exit(int(error.exit_code))  # from a thread, with the main thread inside of a collective


_IN_CHILDREN: weakref.WeakSet[Answers] = weakref.WeakSet()


def _forget_in_children(answers: Answers) -> None:
    """Have processes that the script forks find their own answers."""
    if not _IN_CHILDREN:
        os.register_at_fork(after_in_child=_in_child)
    _IN_CHILDREN.add(answers)


def _in_child() -> None:
    for answers in _IN_CHILDREN:
        answers.live = False


def _parted(told_places: dict[int, str]) -> FasttrainError:
    (one, first), (two, second) = sorted(told_places.items())
    return FasttrainError(
        f"the ranks parted: rank {one} is to {first}, rank {two} to {second}",
        why="something in front of these lines was decided by what differs between processes, such"
        " as threads, the process id, or the machine",
        fix="let the decision follow from the data or from a seeded generator, or use one process",
        slug="ranks-parted",
        exit_code=ExitCode.CONTRADICTION,
    )
