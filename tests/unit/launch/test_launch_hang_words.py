"""Where ranks stand, in words; the stacks are shortened from real ones."""

from __future__ import annotations

import pytest

from fasttrain.launch.hang.verdict import rank_list, role_of, since_fork, verdict
from fasttrain.model.hang import Frame, StuckProcess, StuckRank

DIST = "torch/distributed/distributed_c10d.py"
WRAPPER = Frame("torch/distributed/c10d_logger.py", 83, "wrapper")
SLEEPS = (Frame("train.py", 28, "main", "time.sleep(600)", user=True),)
LOOP = Frame("torch/utils/data/_utils/worker.py", 349, "_worker_loop")
FETCH = Frame("torch/utils/data/_utils/fetch.py", 54, "fetch")
FORKED_FROM = Frame("train.py", 12, "<module>", "for batch in loader:", user=True)


def user(line: int, source: str = "") -> Frame:
    return Frame("train.py", line, "main", source, user=True)


def collective(name: str, line: int) -> tuple[Frame, ...]:
    return (Frame(DIST, 3252, name), WRAPPER, user(line))


def rank(number: int, *stacks: tuple[Frame, ...], missing: str = "") -> StuckRank:
    main = StuckProcess(100 + number, "rank", stacks, missing)
    return StuckRank(number, 5, (main,))


def test_who_waits_and_who_does_not() -> None:
    ranks = (rank(0, SLEEPS), rank(1, collective("all_reduce", 31)))
    assert verdict(ranks, ()) == (
        "rank 1 waits in all_reduce (train.py:31)",
        "rank 0 doesn't: it is at train.py:28 in main: time.sleep(600)",
    )


def test_ranks_at_one_place_are_told_together() -> None:
    waiting = [rank(n, collective("barrier", 9)) for n in (1, 2, 3, 5)]
    told = verdict((rank(0, SLEEPS), *waiting), (4,))
    assert told[0] == "ranks 1-3, 5 wait in barrier (train.py:9)"
    assert told[-1] == "rank 4 has ended"


def test_ranks_in_different_collectives() -> None:
    told = verdict((rank(0, collective("barrier", 9)), rank(1, collective("send", 4))), ())
    assert told == (
        "rank 0 waits in barrier (train.py:9)",
        "rank 1 waits in send (train.py:4)",
        "they wait at different places, so none can go on",
    )


def test_the_collective_that_the_user_called_is_told() -> None:
    inside = Frame(DIST, 4100, "all_gather")
    stack = (inside, WRAPPER, Frame(DIST, 3300, "all_gather_object"), WRAPPER, user(7))
    assert verdict((rank(0, stack),), ()) == ("rank 0 waits in all_gather_object (train.py:7)",)


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ((Frame("fasttrain/shim/data_parallel/ranks.py", 97, "_read"), user(4)),
         "rank 0 waits for what they add up (train.py:4)"),
        ((Frame("torch/autograd/graph.py", 9, "_engine_run_backward"), user(4)),
         "rank 0 is in backward (train.py:4)"),
        ((Frame("torch/utils/data/dataloader.py", 9, "_try_get_data"), user(4)),
         "rank 0 is waiting for a batch of its DataLoader (train.py:4)"),
        ((Frame("subprocess.py", 2, "wait"), user(4, "run(x)")),
         "rank 0 is in wait, called at train.py:4 in main: run(x)"),
        ((Frame("lib.py", 3, "run"),), "rank 0 is at lib.py:3 in run"),
    ],
)  # fmt: skip
def test_places_of_one_rank(stack: tuple[Frame, ...], words: str) -> None:
    assert verdict((rank(0, stack),), ()) == (words,)


def test_a_place_that_nobody_knows() -> None:
    (told,) = verdict((rank(0, missing="py-spy is not installed"),), ())
    assert told == "rank 0 is at a place that is not known: py-spy is not installed"


def test_helpers_of_a_rank() -> None:
    reads = (Frame("data.py", 9, "__getitem__", "load()", user=True), FETCH, LOOP)
    processes = (
        StuckProcess(7, "rank", (SLEEPS,)),
        StuckProcess(8, "loader worker", (reads,)),
        StuckProcess(9, "loader worker", ((Frame("selectors.py", 1, "select"), LOOP),)),  # idle
        StuckProcess(10, "child", (collective("barrier", 3),)),
        StuckProcess(11, "child", (), "no way in"),
    )
    assert verdict((StuckRank(0, 5, processes),), ())[1:] == (
        "DataLoader worker 8 of rank 0 is at data.py:9 in __getitem__: load()",
        "child process 10 of rank 0 waits in barrier (train.py:3)",
        "no stack of child process 11 of rank 0: no way in",
    )


def test_a_loader_worker_is_known_by_its_loop() -> None:
    stack = (FETCH, LOOP, FORKED_FROM)
    assert role_of(stack) == "loader worker"
    assert since_fork(stack) == (FETCH, LOOP)
    assert role_of(SLEEPS) == role_of(()) == "child"


def test_lists_of_ranks() -> None:
    assert rank_list([3]) == "rank 3"
    assert rank_list([7, 0, 1, 2]) == "ranks 0-2, 7"
    assert rank_list([4, 5]) == "ranks 4-5"
