"""Decides which ranks' output is shown live."""

from __future__ import annotations

import re

from fasttrain.model.decision import Setting
from fasttrain.model.errors import ExitCode, FasttrainError
from fasttrain.model.plan import Processes

_LIST = re.compile(r"[0-9]{1,7}(,[0-9]{1,7})*")


def decide_show_ranks(setting: Setting[str], processes: Processes) -> tuple[int, ...] | None:
    """Give the global ranks in the order asked, each once; None for all.

    Raises:
        FasttrainError: ``show-ranks``.
    """
    text = setting.value.replace(" ", "")
    if text == "all":
        return None
    if not _LIST.fullmatch(text):
        raise FasttrainError(
            f"--show-ranks {setting.value!r} is not a list of ranks",
            why="it takes all, or ranks such as 0,3",
            fix="write it like --show-ranks 0,3",
            slug="show-ranks",
            exit_code=ExitCode.USAGE,
        )
    ranks = tuple(dict.fromkeys(int(word) for word in text.split(",")))
    if max(ranks) >= processes.world_size:
        raise FasttrainError(
            f"--show-ranks {setting.value}: rank {max(ranks)} does not exist",
            why=f"the run has {processes.world_size} ranks, from 0",
            fix="use --show-ranks all, or smaller ranks",
            slug="show-ranks",
        )
    return ranks
