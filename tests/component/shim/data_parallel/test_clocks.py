"""The script sees rank 0's time on all ranks; libraries and threads see the real one."""

from __future__ import annotations

import datetime as dt
import pickle
import re
import sys
import threading
import time
import timeit
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.clocks import Clocks
from fasttrain.shim.data_parallel.ranks import Ranks
from support.forked_ranks import on_ranks

NODES = pytest.mark.parametrize("nodes", [1, 2])


def install(ranks: Ranks) -> tuple[Answers, ExitStack]:
    answers, undo = Answers(ranks), ExitStack()
    answers.install(undo)
    Clocks(answers).install(undo)
    return answers, undo


def readings() -> list[Any]:
    """Read every clock that a script may read; the ranks come here at other times."""
    names = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    found: list[Any] = [getattr(time, name)() for name in names]
    found += [getattr(time, f"{name}_ns")() for name in names]
    found += [timeit.default_timer(), time.ctime(), time.asctime(), time.strftime("%H:%M:%S")]
    found += [list(time.localtime()), list(time.gmtime(None)), str(dt.date.today())]
    moments = [dt.datetime.now(), dt.datetime.now(dt.UTC), dt.datetime.today()]
    moments.append(dt.datetime.utcnow())
    return [*found, *map(str, moments)]


@NODES
def test_all_ranks_read_rank_0s_clocks(tmp_path: Path, nodes: int) -> None:
    def act(ranks: Ranks) -> Any:
        _, undo = install(ranks)
        time.sleep(1.1 * ranks.rank)  # text has seconds alone
        with undo:
            return readings()

    first, second = (end.good for end in on_ranks(tmp_path, act, nodes=nodes))
    assert first == second
    assert abs(first[0] - time.time()) < 60
    assert abs(first[5] / 1e9 - first[0]) < 10
    now = dt.datetime.now()
    for text in (first[-4], first[-2]):
        assert abs(dt.datetime.fromisoformat(text) - now) < dt.timedelta(minutes=1)
    utc = now.astimezone(dt.UTC)
    assert abs(dt.datetime.fromisoformat(first[-3]) - utc) < dt.timedelta(minutes=1)
    assert abs(dt.datetime.fromisoformat(first[-1]) - utc.replace(tzinfo=None)).seconds < 60


def test_a_class_of_the_scripts_own_has_rank_0s_time(tmp_path: Path) -> None:
    class Moment(dt.datetime):
        pass

    def act(ranks: Ranks) -> Any:
        install(ranks)
        now = Moment.now(tz=dt.UTC)
        return [type(now).__name__, now.isoformat()]

    first, second = (end.good for end in on_ranks(tmp_path, act))
    assert first == second
    assert first[0] == "Moment"


def test_libraries_threads_and_given_times_are_left_alone(tmp_path: Path) -> None:
    library = tmp_path / "site-packages/library.py"
    library.parent.mkdir()
    code = compile("import time\ndef read():\n    return time.time()", str(library), "exec")
    space: dict[str, Any] = {}
    exec(code, space)

    def act(ranks: Ranks) -> Any:
        answers, _ = install(ranks)
        space["read"]()
        thread = threading.Thread(target=lambda: time.time())
        thread.start()
        thread.join()
        with answers.apart():
            time.time()
        assert time.strftime("%Y", time.gmtime(0)) == "1970"
        assert time.localtime(0.0).tm_year in (1969, 1970)
        assert answers.number == 0
        time.time()
        return answers.number

    assert [end.good for end in on_ranks(tmp_path, act)] == [1, 1]


def test_names_imported_before_are_replaced_and_all_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = ModuleType("users")
    users.__file__ = str(tmp_path / "users.py")
    vars(users).update(clock=time.time, timer=timeit.default_timer)
    monkeypatch.setitem(sys.modules, "users", users)
    kind = dt.datetime

    def held() -> list[Any]:
        return [time.time, time.localtime, timeit.default_timer, vars(kind)["now"], vars(users)]

    def act(ranks: Ranks) -> Any:
        before = [*held()[:-1], dict(vars(users))]
        _, undo = install(ranks)
        assert vars(users)["clock"] is time.time
        assert vars(users)["timer"] is time.perf_counter
        assert all(a is not b for a, b in zip(before, held(), strict=True))
        assert pickle.loads(pickle.dumps(time.time)) is time.time
        assert isinstance(pickle.loads(pickle.dumps(dt.datetime.now())), kind)
        with undo:
            got = vars(users)["clock"]()
        assert [*held()[:-1], dict(vars(users))] == before
        return [got, kind.now() > kind(2000, 1, 1)]

    first, second = (end.good for end in on_ranks(tmp_path, act))
    assert first == second


def test_ranks_that_read_the_clock_at_other_lines_are_told(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> Any:
        install(ranks)
        if ranks.rank:
            time.time()
        time.monotonic()
        return ""

    first, second = on_ranks(tmp_path, act)
    assert (first.code, second.code) == (0, 78)
    parted = r"\brank 0\b.*\btime\.monotonic\b.*\brank 1\b.*\btime\.time\b"
    assert re.search(parted, second.stderr, re.DOTALL)


def test_a_compiled_function_reads_the_clock_at_each_call(tmp_path: Path) -> None:
    def step(x: torch.Tensor) -> Any:
        return x + 1, time.perf_counter_ns()

    def act(ranks: Ranks) -> Any:
        install(ranks)
        compiled = torch.compile(step, backend="eager")
        return [compiled(torch.ones(2))[1] for _ in range(3)]

    first, second = (end.good for end in on_ranks(tmp_path, act))
    assert first == second
    assert len(set(first)) == 3
