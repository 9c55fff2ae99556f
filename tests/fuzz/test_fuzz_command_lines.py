"""Any words, in any environment and any working directory: done, or refused in three lines."""

from __future__ import annotations

import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given

WORDS = runpy.run_path(str(Path(__file__).with_name("words.py")))


def test_command_lines(
    say: Callable[..., Any], rounds: Any, figures: Counter[int], recorder: Any, ground: Any
) -> None:
    log = f"{ground.work}/fasttrain_runs/r/slurm/7.out"
    recorder.answers = {
        "squeue": f"7|COMPLETED|None|0|0|n1|{log}|\n",
        "sbatch": "Submitted batch job 7\n",
    }

    @rounds(700, 5000)
    @given(WORDS["LINES"], WORDS["ENVIRONS"], WORDS["PLACES"], WORDS["ENCODINGS"])
    def check(words: list[str], environ: dict[str, str], place: str, encoding: str) -> None:
        recorder.exit_code = len(words) % 2
        said = say(words, environ, place, encoding)
        figures[said.code] += 1
        assert not said.problems, f"{words}\n{environ}\n{place} {encoding}\n{said}"

    check()
