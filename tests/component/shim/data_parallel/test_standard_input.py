"""All ranks read the same standard input, whichever of Python's functions they use."""

from __future__ import annotations

import io
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fasttrain.shim.data_parallel.answers.answers import Answers
from fasttrain.shim.data_parallel.answers.files import Files
from fasttrain.shim.data_parallel.answers.own_copies import OwnCopies
from fasttrain.shim.data_parallel.answers.standard_input import StandardInput
from fasttrain.shim.data_parallel.ranks import Ranks
from fasttrain.shim.hooks.outcome_recorder import OutcomeRecorder
from support.forked_ranks import on_ranks

CODE = ("utf-8", "surrogateescape")
REST = bytes(range(256)) * 100
TEXT = "first\nhéad\r\nline\nlast\n".encode()


def test_every_rank_reads_all_of_standard_input(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, TEXT + REST)
    os.close(write)

    def act(ranks: Ranks) -> Any:
        pipe = io.BufferedReader(io.FileIO(read))
        sys.stdin = io.TextIOWrapper(pipe, *CODE, newline="\n")
        answers = Answers(ranks)
        recorder = OutcomeRecorder("strategy", "ddp", explicit=False)
        files = Files(answers, OwnCopies(ranks.rank, tmp_path), recorder)
        with ExitStack() as undo:
            answers.install(undo)
            StandardInput(answers, files).install(undo)
            found = [input(), sys.stdin.readline(), next(sys.stdin), input()]
            found += [sys.stdin.fileno() == read, sys.stdin.isatty()]
            later = sys.stdin.buffer.read()  # the first of the rest is decoded already
            assert sys.stdin.read().encode(*CODE) + later == REST
        return found

    first, second = (end.good for end in on_ranks(tmp_path, act))
    os.close(read)
    assert first == ["first", "héad\r\n", "line\n", "last", True, False]
    assert second == first
