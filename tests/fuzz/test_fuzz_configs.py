"""Any fasttrain.yaml: taken, or refused in three lines that name it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fuzz.no_files import KINDS, in_place
from support.fuzz.texts import CONTENTS

LINES = (
    ["run", "train.py", "--dry-run"], ["run", "--explain", "--machine", "../gpus.json"], ["run"],
    ["run", "--dry-run", "--json", "--machine", "../gpus.json"],
    ["slurm", "train.py", "--dry-run"], ["slurm", "--dry-run", "--cluster", "one"],
    ["slurm", "train.py"], ["doctor", "--quick", "train.py"],
)  # fmt: skip


def test_configs(
    say: Callable[..., Any], rounds: Any, figures: Counter[int], ground: Any, recorder: Any
) -> None:
    recorder.answers = {"sbatch": "Submitted batch job 7\n"}
    path = ground.work / "fasttrain.yaml"

    @rounds(60, 2400)
    @given(CONTENTS, st.sampled_from(LINES))
    def check(content: bytes, words: list[str]) -> None:
        path.write_bytes(content)
        said = say(words)
        path.unlink()
        figures[said.code] += 1
        assert not said.problems, f"{content!r}\n{words}\n{said}"

    check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
def test_what_is_no_file(say: Callable[..., Any], ground: Any, kind: str, named: bool) -> None:
    path = ground.work / "fasttrain.yaml"
    with in_place(path, kind):
        said = say(["run", "train.py", "--dry-run", *(["--config", path.name] if named else [])])
    assert not said.problems, said
