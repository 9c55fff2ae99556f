"""What joining the other ranks leaves as it was."""

from __future__ import annotations

import sys
from pathlib import Path

from fasttrain.shim.data_parallel.ranks import Ranks
from support.forked_ranks import on_ranks


def joined(ranks: Ranks) -> bool:
    before = sys.excepthook
    ranks.join()
    return sys.excepthook is before


def test_a_traceback_is_printed_as_before(tmp_path: Path) -> None:
    assert [end.good for end in on_ranks(tmp_path, joined)] == [True, True]
