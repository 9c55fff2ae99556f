"""What a fork of the process that has imported torch has of its own, as a new process has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.zygote import Zygote

TELLS = """
import json, os, random, sys, threading
seen = sorted(name for name in sys.modules if name.partition(".")[0] in ("fasttrain", "support"))
import numpy, torch
class Own:
    pass
print(json.dumps({
    "cwd": os.getcwd(), "argv": sys.argv, "path": sys.path[0], "main": __name__, "file": __file__,
    "own": Own.__module__, "is main": vars(sys.modules["__main__"]) is globals(),
    "input": sys.stdin.read(), "environ": os.environ.get("OF_TEST"), "modules": seen,
    "threads": torch.get_num_threads(), "tasks": len(os.listdir("/proc/self/task")),
    "drawn": [random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed()],
    "kept": os.environ.setdefault("KEPT", "") + str(getattr(torch, "kept", "")),
}))
torch.kept = os.environ["KEPT"] = "left behind"
"""


@pytest.fixture
def told(zygote: Zygote, script: Any, tmp_path: Path) -> list[dict[str, Any]]:
    """What two forks say of themselves, one after the other."""
    path, found = script(TELLS), []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        fork = zygote.python(path, name, cwd=tmp_path / name, environ={"OF_TEST": name})
        ended = zygote.wait(fork)
        assert ended.returncode == 0, ended.stderr
        found.append(json.loads(ended.stdout))
    return found


def test_it_is_a_script_in_a_place_of_its_own(told: list[dict[str, Any]], tmp_path: Path) -> None:
    path = str(tmp_path / "train.py")
    for name, found in zip(("one", "two"), told, strict=True):
        assert (found["cwd"], found["argv"]) == (str(tmp_path / name), [path, name])
        assert (found["path"], found["file"]) == (str(tmp_path), path)
        assert (found["main"], found["own"], found["is main"]) == ("__main__", "__main__", True)
        assert (found["input"], found["environ"]) == ("", name)


def test_nothing_comes_from_this_repository_or_another_fork(told: list[dict[str, Any]]) -> None:
    for found in told:
        assert (found["modules"], found["kept"]) == ([], "")
        assert (found["threads"], found["tasks"]) == (1, 1)


def test_random_numbers_are_its_own(told: list[dict[str, Any]]) -> None:
    one, two = (found["drawn"] for found in told)
    assert all(a != b for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('its last word')", 1, "its last word\n"),
        ("raise ValueError('of the script')", 1, "ValueError: of the script\n"),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'at the end')", 0, "at the end"),
    ],
)
def test_its_end_is_that_of_a_process(
    zygote: Zygote, script: Any, tmp_path: Path, text: str, code: int, said: str
) -> None:
    ended = zygote.wait(zygote.python(script(text), cwd=tmp_path))
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.endswith(said)
    assert ended.stderr.count("\n") >= said.count("\n")


def test_one_that_takes_too_long_is_killed(zygote: Zygote, script: Any, tmp_path: Path) -> None:
    path = script("import time; time.sleep(60)")
    assert zygote.wait(zygote.python(path, cwd=tmp_path, timeout_s=0.5)).returncode == -9
