from __future__ import annotations

import ast
import tokenize
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.model.plan import ScriptFacts, Target
from fasttrain.source.ranks import FRAMEWORKS, OPTIONS, VARIABLES
from fasttrain.source.read import read_script

pytestmark = pytest.mark.matrix

PIECES = [
    *("import ", "from ", " import ", " as ", ".", "..", "*", ", ", "\n", "\n  ", "\n    ", ": "),
    *(
        "if ",
        "else",
        "try",
        "except",
        "class ",
        "def ",
        "async ",
        "with ",
        "match ",
        "case ",
        "not ",
    ),
    *("(", ")", "[", "]", "{", "}", "=", " in ", " == ", "lambda ", "@", "'", '"', "#", "\\", "f'"),
    *("a", "b", "train", "other", "os", "environ", "getenv", "__name__", "'__main__'", "1", "True"),
    *(
        "TYPE_CHECKING",
        "add_argument",
        "import_module",
        "\0",
        "é",
        "\ud800",
        "\ufeff",
        "\x0c",
        "\r",
    ),
    *FRAMEWORKS,
    *(f"'{name}'" for name in (*VARIABLES, *OPTIONS)),
    *("init_process_group", "Accelerator", "Trainer"),
    *("import os\n", "from other import *\n", "from train import a\n", "a = a.b\n", "# coding: "),
]
PYTHONLIKE = st.lists(st.sampled_from(PIECES), max_size=40).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def readable(path: Path) -> bool:
    try:
        with tokenize.open(path) as file:
            ast.parse(file.read())
    except (SyntaxError, ValueError, LookupError, RecursionError, MemoryError):
        return False
    return True


def check(folder: Path, script: bytes, other: bytes) -> None:
    """Nothing is raised, and the script is told as unread exactly where Python can't parse it."""
    (folder / "train.py").write_bytes(script)
    (folder / "other.py").write_bytes(other)
    target = Target("script", "train.py")
    facts = read_script(target, str(folder), {}, lambda _: None)
    assert isinstance(facts, ScriptFacts)
    told = any(text.startswith("train.py: ") for text in facts.unread)
    assert told is not readable(folder / "train.py")
    assert read_script(target, str(folder), {}, lambda _: None) == facts


@settings(max_examples=200, deadline=None)
@given(script=st.binary(max_size=200), other=st.binary(max_size=50))
def test_random_bytes(folder: Path, script: bytes, other: bytes) -> None:
    check(folder, script, other)


@settings(max_examples=300, deadline=None)
@given(script=st.text(max_size=200), other=PYTHONLIKE)
def test_random_text(folder: Path, script: str, other: str) -> None:
    check(folder, script.encode(errors="surrogatepass"), other.encode(errors="surrogatepass"))


@settings(max_examples=200, deadline=None)
@given(script=PYTHONLIKE, other=PYTHONLIKE)
def test_random_python_like_text(folder: Path, script: str, other: str) -> None:
    script_bytes = ("from other import *\n" + script).encode(errors="surrogatepass")
    check(folder, script_bytes, other.encode(errors="surrogatepass"))


@settings(max_examples=200, deadline=None)
@given(name=st.text(max_size=30), kind=st.sampled_from(["script", "module"]), path=st.text())
def test_random_targets_and_search_paths(folder: Path, name: str, kind, path: str) -> None:
    facts = read_script(Target(kind, name), str(folder), {"PYTHONPATH": path}, lambda _: None)
    assert isinstance(facts, ScriptFacts)
