"""Names as faulthandler writes them: the expected ones are what it was given."""

from __future__ import annotations

import faulthandler
from pathlib import Path

import pytest

from fasttrain.launch.crash.evidence import read_stack
from fasttrain.launch.hang import stacks
from fasttrain.launch.hang.stacks import parse


def dumped(folder: Path, file: str, function: str = "f") -> str:
    """Return what faulthandler writes of a call in a file."""
    answers = folder / "answers.txt"
    source = f"def {function}():\n    dump()\n{function}()\n"
    with answers.open("wb") as stream:
        names = {"dump": lambda: faulthandler.dump_traceback(stream, all_threads=False)}
        exec(compile(source, file, "exec"), names)
    return answers.read_text(encoding="ascii").replace("Stack", "Current thread 0x1", 1)


@pytest.mark.parametrize(
    "name",
    ["ünï.py", "训练.py", "a 🚀 [b].py", "back\\slash.py", "\\x41.py", "\\xfg", "\\u00fc"],
)
def test_a_name_comes_back(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("first\nsecond\n")
    frame = parse(dumped(tmp_path, str(file)))[0][1]
    assert (frame.file, frame.source) == (str(file), "second")


def test_the_stack_of_a_fatal_signal(tmp_path: Path) -> None:
    file = tmp_path / "ünï.py"
    file.write_text("first\nsecond\n")
    text = dumped(tmp_path, str(file), "größe")
    (tmp_path / "fault-0.txt").write_text(text)
    frame = read_stack(tmp_path / "fault-0.txt")[-2]
    assert (frame.file, frame.function, frame.source) == (str(file), "größe", "second")


def test_a_file_whose_name_looks_escaped(tmp_path: Path) -> None:
    file = tmp_path / "\\xfc.py"
    file.touch()
    assert stacks.path(str(file)) == str(file)


@pytest.mark.parametrize("name", ["two\\x0alines.py", "caf\\udce9.py", "\\U00110000", "\\x"])
def test_what_cannot_be_shown_stays_escaped(name: str) -> None:
    assert stacks.name(name) == name
