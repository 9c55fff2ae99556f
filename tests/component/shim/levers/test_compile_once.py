"""One rank compiles and the others load: who waits for whom, and who doesn't."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.compile.once_per_node import OncePerNode


class Cache:
    """What several ranks look for; it stands in for AOTAutograd's."""

    def __init__(self) -> None:
        self.graphs: dict[str, str] = {}
        self.looked = 0

    def look(self, key: str) -> Callable[[], Any]:
        def look() -> Any:
            self.looked += 1
            return self.graphs.get(key)

        return look


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[..., OncePerNode]]:
    made: list[OncePerNode] = []

    def make(node: str = "0", most_s: float = 30.0) -> OncePerNode:
        recorder = OutcomeRecorder("compile", "default", explicit=True)
        made.append(OncePerNode(tmp_path, node, recorder, most_s))
        return made[-1]

    yield make
    for one in made:
        one.compiling("")


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def test_the_second_waits_and_loads(rank: Any) -> None:
    cache, first, second = Cache(), rank(), rank()
    first.compiling("Net")
    assert first._found(cache.look("a")) is None, "it has to compile"
    second.compiling("Net")
    thread, results = in_thread(lambda: second._found(cache.look("a")))
    thread.join(0.3)
    assert thread.is_alive(), "it waits"
    cache.graphs["a"] = "compiled"
    first.compiling("")
    thread.join(20)
    assert results == ["compiled"]
    third = rank()
    third.compiling("Net")
    assert not third._take(), "the second one has freed the lock at once"


def test_with_a_warm_cache_nobody_waits(rank: Any, tmp_path: Path) -> None:
    cache = Cache()
    cache.graphs["a"] = "compiled"
    for one in (rank(), rank()):
        one.compiling("Net")
        assert one._found(cache.look("a")) == "compiled"
    assert not [*tmp_path.iterdir()]


def test_ranks_of_other_graphs_compile_one_after_the_other(rank: Any) -> None:
    cache, first, second = Cache(), rank(), rank()
    first.compiling("Net")
    assert first._found(cache.look("a")) is None
    assert first._found(cache.look("b")) is None, "the second graph of one compilation"
    second.compiling("Net")
    thread, results = in_thread(lambda: second._found(cache.look("c")))
    first.compiling("")
    thread.join(20)
    assert results == [None], "it compiles by itself"


def test_nobody_waits_for_ever(rank: Any) -> None:
    cache, first, second = Cache(), rank(), rank(most_s=0.2)
    for one in (first, second):
        one.compiling("Net")
        assert one._found(cache.look("a")) is None


def test_nodes_do_not_wait_for_each_other(rank: Any) -> None:
    cache, first, second = Cache(), rank("0"), rank("1")
    for one in (first, second):
        one.compiling("Net")
        assert one._found(cache.look("a")) is None
    assert cache.looked == 2


def test_no_lock_outside_of_a_compilation_whose_end_is_told(rank: Any, tmp_path: Path) -> None:
    cache, one = Cache(), rank()
    assert one._found(cache.look("a")) is None
    one.compiling("Net")
    one.compiling("")
    assert one._found(cache.look("a")) is None
    assert not [*tmp_path.iterdir()]


def test_ranks_that_meet_while_they_compile_do_not_wait(rank: Any, tmp_path: Path) -> None:
    one = rank()
    with torch._dynamo.config.patch(enable_compiler_collectives=True):
        one.compiling("Net")
    assert one._found(Cache().look("a")) is None
    assert not [*tmp_path.iterdir()]


def test_without_a_run_directory_each_compiles(tmp_path: Path) -> None:
    recorder = OutcomeRecorder("compile", "default", explicit=True)
    one = OncePerNode(tmp_path / "gone", "0", recorder)
    one.compiling("Net")
    assert one._found(Cache().look("a")) is None


def test_torchs_lookup_is_watched_and_comes_back(rank: Any) -> None:
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    before = vars(AOTAutogradCache)["_lookup"]
    with ExitStack() as undo:
        rank().install(undo)
        assert vars(AOTAutogradCache)["_lookup"] is not before
    assert vars(AOTAutogradCache)["_lookup"] is before
