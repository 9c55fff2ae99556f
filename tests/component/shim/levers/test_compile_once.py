"""One rank compiles and the others load: who waits for whom, and who doesn't."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from fasttrain.shim.levers.compile.compile_once import (
    FROM_ANOTHER_NODE,
    CompileOnce,
    SharedGraphs,
)


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
def rank(tmp_path: Path) -> Iterator[Callable[..., CompileOnce]]:
    made: list[CompileOnce] = []

    def make(node: str = "0", most_s: float = 30.0, graphs: Any = None) -> CompileOnce:
        recorder = OutcomeRecorder("compile", "default", explicit=True)
        made.append(CompileOnce(tmp_path, node, recorder, graphs, most_s))
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
    assert not third._of_node.take()[0], "the second one has freed the lock at once"


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
    one = CompileOnce(tmp_path / "gone", "0", recorder)
    one.compiling("Net")
    assert one._found(Cache().look("a")) is None


def test_torchs_lookup_is_watched_and_comes_back(rank: Any) -> None:
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    before = vars(AOTAutogradCache)["_lookup"]
    with ExitStack() as undo:
        rank().install(undo)
        assert vars(AOTAutogradCache)["_lookup"] is not before
    assert vars(AOTAutogradCache)["_lookup"] is before


# Several nodes, with caches of their own and a folder in common.


@pytest.fixture
def nodes(rank: Any, tmp_path: Path, monkeypatch: Any) -> Callable[[int], tuple[Cache, Any]]:
    """Return a function that makes a node, with its cache; torch's bytes are keys of graphs."""
    compiled: dict[str, Cache] = {}

    def save() -> tuple[bytes, None]:
        return ",".join(compiled["now"].graphs).encode(), None

    def load(data: bytes) -> None:
        compiled["now"].graphs |= dict.fromkeys(data.decode().split(","), "from another node")

    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", save)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", load)

    def make(number: int) -> tuple[Cache, Any]:
        cache, one = Cache(), rank(str(number), graphs=SharedGraphs(tmp_path, number))

        def of_this(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any) -> Any:
                compiled["now"] = cache
                return call(*args)

            return called

        monkeypatch.setattr(one._graphs, "save", of_this(one._graphs.save))
        monkeypatch.setattr(one._graphs, "load", of_this(one._graphs.load))
        one.compiling("Net")
        return cache, one

    return make


def test_one_node_compiles_and_another_loads(nodes: Any, tmp_path: Path) -> None:
    (cache, first), (other, second) = nodes(0), nodes(1)
    assert first._found(cache.look("a")) is None, "it has to compile"
    thread, results = in_thread(lambda: second._found(other.look("a")))
    thread.join(0.3)
    assert thread.is_alive(), "it waits"
    cache.graphs["a"] = "compiled"
    first.compiling("")
    thread.join(20)
    assert results == ["from another node"]
    assert FROM_ANOTHER_NODE in second._recorder.outcome().notes
    assert (tmp_path / "graphs-0.bin").stat().st_mode & 0o777 == 0o600
    second.compiling("")
    assert not (tmp_path / "graphs-1.bin").exists(), "it has compiled nothing"


def test_nodes_that_differ_compile_beside_each_other(nodes: Any) -> None:
    (cache, first), (other, second), (_, third) = nodes(0), nodes(1), nodes(2)
    assert first._found(cache.look("a")) is None
    thread, results = in_thread(lambda: second._found(other.look("b")))
    thread.join(0.3)
    assert thread.is_alive(), "it waits"
    cache.graphs["a"] = "compiled"
    first.compiling("")
    thread.join(20)
    assert results == [None]
    began_s = time.monotonic()
    assert third._found(Cache().look("c")) is None
    assert time.monotonic() - began_s < 15, "nobody waits for the second one, which compiles"


def test_what_came_once_is_not_loaded_again_and_nobody_elses_is(
    nodes: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "graphs-0.bin").write_bytes(b"a,b")
    cache, one = nodes(1)
    assert one._graphs.load()
    assert cache.graphs.keys() == {"a", "b"}
    assert not one._graphs.load()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    _, another = nodes(2)
    assert not another._graphs.load()


def test_a_full_disk_ends_nothing(nodes: Any, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fasttrain.shim.levers.compile.compile_once.write_private", full)
    cache, one = nodes(0)
    assert one._found(cache.look("a")) is None
    cache.graphs["a"] = "compiled"
    one.compiling("")
    assert not (tmp_path / "graphs-0.bin").exists()
