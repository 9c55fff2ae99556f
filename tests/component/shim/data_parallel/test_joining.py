"""What joining the other ranks leaves as it was, and what their messages leave in the store."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed as dist

from fasttrain.shim.data_parallel.ranks import Ranks
from support.forked_ranks import on_ranks


def joined(ranks: Ranks) -> bool:
    before = sys.excepthook
    ranks.join()
    return sys.excepthook is before


def test_a_traceback_is_printed_as_before(tmp_path: Path) -> None:
    assert [end.good for end in on_ranks(tmp_path, joined)] == [True, True]


def test_texts_that_all_ranks_have_read_are_deleted() -> None:
    torchs: Any = dist
    store = torchs.HashStore()
    store.set_timeout(timedelta(seconds=30))

    def gathered(rank: int) -> list[list[str]]:
        ranks = Ranks(rank, 3, store, "gloo")
        return [ranks.gather(f"{rank} {number}") for number in range(20)]

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(gathered, range(3)))
    assert found == [[[f"{rank} {number}" for rank in range(3)] for number in range(20)]] * 3
    assert store.num_keys() == 3, "the last ones"


def test_where_a_rank_can_communicate() -> None:
    """In its main thread; a forked child is none, and its threads aren't either."""
    ranks = Ranks(0, 1, None, "gloo")

    def seen() -> list[bool]:
        return [ranks.is_here(), ranks.is_forked()]

    assert seen() == [True, False]
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(seen).result() == [False, False]
    child = os.fork()
    if not child:
        os._exit(seen() == [False, True])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
