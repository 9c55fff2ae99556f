"""Any words, in any environment and any working directory: done, or refused in three lines."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given

from support.fuzz.words import ENCODINGS, ENVIRONS, LINES, PLACES

WAITS = """
import pathlib
import time
pathlib.Path("ready").touch()
while not pathlib.Path("enough").exists():
    time.sleep(0.05)
"""


def test_command_lines(
    say: Callable[..., Any], rounds: Any, figures: Counter[int], recorder: Any, ground: Any
) -> None:
    log = f"{ground.work}/fasttrain_runs/r/slurm/7.out"
    recorder.answers = {
        "squeue": f"7|COMPLETED|None|0|0|n1|{log}|\n",
        "sbatch": "Submitted batch job 7\n",
    }

    @rounds(70, 5000)
    @given(LINES, ENVIRONS, PLACES, ENCODINGS)
    def check(words: list[str], environ: dict[str, str], place: str, encoding: str) -> None:
        recorder.exit_code = len(words) % 2
        said = say(words, environ, place, encoding)
        figures[said.code] += 1
        assert not said.problems, f"{words}\n{environ}\n{place} {encoding}\n{said}"

    check()


def test_runs_of_others_are_out_of_reach(
    say: Callable[..., Any], fasttrain: Any, script: Any, until: Callable[..., Any], tmp_path: Path
) -> None:
    line = fasttrain.argv("run", script(WAITS))
    # By a shell that ends: no child of this process.
    in_background = 'cd "$0" && "$@" > said 2>&1 &'
    argv = ["sh", "-c", in_background, str(tmp_path), *line]
    assert os.spawnve(os.P_WAIT, "/bin/sh", argv, fasttrain.environ) == 0
    until((tmp_path / "ready").exists)
    try:
        for words in (["ps"], ["kill", "--all"], ["doctor", "--fix", "--yes"]):
            said = say(words)
            assert not said.problems, said
            assert tmp_path.name not in said.out
    finally:
        (tmp_path / "enough").touch()
    until(
        lambda: re.search(
            r"^fasttrain: .* exit code 0\b", (tmp_path / "said").read_text(), re.MULTILINE
        )
    )
