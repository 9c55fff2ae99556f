"""Rank 0 answers the k-th question of all ranks, and ranks that part are told where."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fasttrain.shim.data_parallel.answers import answers as module
from fasttrain.shim.data_parallel.answers.answers import WAIT, Answers
from fasttrain.shim.data_parallel.answers.channels import SLOTS, Ring, StoredAnswers
from fasttrain.shim.data_parallel.ranks import Ranks
from support.forked_ranks import on_ranks

NODES = pytest.mark.parametrize("nodes", [1, 2])
ONE, OTHER = 5, 6  # numbers of places


def installed(ranks: Ranks) -> Answers:
    answers = Answers(ranks)
    answers.install(ExitStack())
    return answers


@NODES
def test_every_rank_gets_what_rank_0_has_found(tmp_path: Path, nodes: int) -> None:
    values = [None, True, 3, 1.5, "é\udc80", ["a", ["b"]], "long" * 1000]

    def act(ranks: Ranks) -> Any:
        answers = installed(ranks)
        assert isinstance(answers.channel, Ring if nodes == 1 else StoredAnswers)
        found = [answers.ask(ONE, lambda v=v: [ranks.rank, v]) for v in values]  # type: ignore[misc]
        path = answers.ask(ONE, lambda: Path("a") / str(ranks.rank))
        size = answers.ask(ONE, lambda: Path(__file__).stat()).st_mtime_ns
        own = answers.ask(ONE, lambda: object() if ranks.rank == 0 else ranks.rank)
        return [found, str(path), size, own if ranks.rank else 0]

    stat = Path(__file__).stat().st_mtime_ns
    expected = [[[0, v] for v in values], "a/0", stat]
    for rank, end in enumerate(on_ranks(tmp_path, act, world_size=4, nodes=nodes)):
        assert end.good == [*expected, rank]


@NODES
def test_errors_of_rank_0_are_raised_on_every_rank(tmp_path: Path, nodes: int) -> None:
    def fail(ranks: Ranks, error: Exception) -> None:
        raise error if ranks.rank == 0 else AssertionError

    def act(ranks: Ranks) -> Any:
        answers, told = installed(ranks), []
        errors: list[Exception] = [
            FileExistsError(17, "File exists", "a"),
            OSError(18, "across", "a", None, "b"),
            ValueError("a", 1),
            UnicodeDecodeError("utf-8", b"a", 0, 1, "bad"),
        ]
        for error in errors:
            for call in (answers.ask, answers.do):
                try:
                    call(ONE, lambda error=error: fail(ranks, error))
                except Exception as met:  # noqa: BLE001
                    told.append([type(met).__name__, str(met), getattr(met, "filename2", None)])
        return told

    first, second = (end.good for end in on_ranks(tmp_path, act, nodes=nodes))
    assert first[:6] == second[:6]
    assert first[0] == ["FileExistsError", "[Errno 17] File exists: 'a'", None]
    assert first[2][2] == "b"
    assert second[6][0] == "RuntimeError"  # its arguments can't be told
    assert "bad" in second[6][1]


@NODES
def test_rank_0_acts_when_all_have_come_and_none_goes_on_before(tmp_path: Path, nodes: int) -> None:
    def act(ranks: Ranks) -> Any:
        answers = installed(ranks)
        for number in range(20):
            (tmp_path / f"came-{number}-{ranks.rank}").touch()
            came = answers.do(
                ONE,
                lambda n=number: (
                    sorted(p.name for p in tmp_path.glob(f"came-{n}-*")),
                    (tmp_path / f"acted-{n}").touch(),
                )[0],
                lambda names: names,
            )
            assert (tmp_path / f"acted-{number}").exists()
            assert came == [f"came-{number}-{rank}" for rank in range(3)]
        return answers.number

    assert [end.good for end in on_ranks(tmp_path, act, world_size=3, nodes=nodes)] == [20] * 3


@NODES
def test_rank_0_goes_ahead_by_as_much_as_there_is_room(tmp_path: Path, nodes: int) -> None:
    count = 2 * SLOTS + 7

    def act(ranks: Ranks) -> Any:
        answers = installed(ranks)
        if ranks.rank:
            while not (tmp_path / "ahead").exists():
                time.sleep(0.01)
        for number in range(count):
            if ranks.rank == 0 and number == SLOTS:
                (tmp_path / "ahead").touch()  # it never comes here if it waits before
            found = answers.ask(ONE, lambda n=number: n if ranks.rank == 0 else None)
            assert found == number
        return answers.number

    ends = on_ranks(tmp_path, act, world_size=4, nodes=nodes)
    assert [end.good for end in ends] == [count] * 4


@NODES
def test_answers_by_the_store_are_deleted(tmp_path: Path, nodes: int) -> None:
    def act(ranks: Ranks) -> Any:
        answers = installed(ranks)
        for _ in range(3):  # after two, all ranks have read and said so; then rank 0 deletes
            for _ in range(300):
                answers.ask(ONE, lambda: "x" * 1000)
            answers.do(ONE, lambda: None)
        return [n for n in range(1, 301) if ranks.store.check([f"answer/{n}"])]

    assert [end.good for end in on_ranks(tmp_path, act, nodes=nodes)] == [[]] * 2


@NODES
@pytest.mark.parametrize("how", ["ask", "do"])
def test_ranks_that_ask_at_other_places_are_told_both(tmp_path: Path, nodes: int, how: str) -> None:
    acted = tmp_path / "acted"

    def act(ranks: Ranks) -> Any:
        answers = installed(ranks)
        ranks.store.set(f"place/{ONE}", "read a clock at here.py:1")
        ranks.store.set(f"place/{OTHER}", "call os.mkdir at there.py:2")
        answers.ask(ONE, lambda: None)
        getattr(answers, how)(OTHER if ranks.rank else ONE, acted.touch)

    ends = on_ranks(tmp_path, act, nodes=nodes)
    line = "the ranks parted: rank 0 is to read a clock at here.py:1, rank 1 to call os.mkdir at"
    for end in ends if how == "do" else ends[1:]:
        assert (end.code, line in end.stderr, "[ranks-parted]" in end.stderr) == (78, True, True)
    assert acted.exists() is (how == "ask")


@NODES
@pytest.mark.parametrize("ending", [0, 1])
def test_a_rank_that_waits_for_one_that_has_ended_is_told(
    tmp_path: Path, nodes: int, ending: int
) -> None:
    def act(ranks: Ranks) -> Any:
        answers = installed(ranks)
        if ranks.rank == ending:
            answers.close()
        else:
            answers.do(ONE, lambda: None)

    end = on_ranks(tmp_path, act, nodes=nodes)[1 - ending]
    assert end.code == 78
    assert f"rank {ending} " in end.stderr
    assert "end\n" in end.stderr.replace(",", "\n")


@NODES
@pytest.mark.parametrize("asking", [0, 1])
def test_ranks_that_wait_for_each_other_are_told(
    tmp_path: Path, nodes: int, asking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STUCK_S", 0.2)
    monkeypatch.setattr(module, "POLL_S", 0.1)

    def act(ranks: Ranks) -> Any:
        os.dup2(os.open(tmp_path / f"stderr-{ranks.rank}", os.O_WRONLY | os.O_APPEND), 2)
        answers = installed(ranks)
        ranks.store.set(f"place/{ONE}", "run the trainer")
        if ranks.rank == asking:
            answers.do(ONE, lambda: None)
        with ranks.waits():
            time.sleep(15.0)  # as in a collective

    end = on_ranks(tmp_path, act, nodes=nodes, wait_s=3.0)[1 - asking]
    assert end.code == 78, end.stderr
    assert "[ranks-parted]" in end.stderr
    assert "run the trainer" in end.stderr
    assert WAIT in end.stderr
    assert "test_answers.py" in end.stderr


def test_forked_children_and_blocks_apart_find_their_own_answers(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        answers = installed(ranks)
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            os.write(writer, b"no" if answers.answers() else b"own")
            os._exit(0)
        os.waitpid(pid, 0)
        with answers.apart():
            inside = answers.answers()
        return [os.read(reader, 3).decode(), inside, answers.answers()]

    assert [end.good for end in on_ranks(tmp_path, act)] == [["own", False, True]] * 2


def test_a_block_apart_in_another_thread_changes_nothing_here(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        answers, inside, go_on = installed(ranks), threading.Event(), threading.Event()

        def stay() -> None:
            with answers.apart():
                inside.set()
                go_on.wait()

        thread = threading.Thread(target=stay)
        thread.start()
        inside.wait()
        meanwhile = answers.answers()
        with answers.apart():
            go_on.set()
            thread.join()
        return [meanwhile, answers.answers()]

    assert [end.good for end in on_ranks(tmp_path, act)] == [[True, True]] * 2
