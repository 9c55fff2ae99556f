"""No command line ends in a traceback, and none that only plans leaves a file."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fasttrain.cli.app import main
from fasttrain.config.options import OPTIONS, OptionSpec
from fasttrain.model.errors import ExitCode

pytestmark = pytest.mark.matrix

MACHINES = Path(__file__).parents[2] / "data" / "machines"
FLAGS = [spec.flag for spec in OPTIONS]
VALUES = ["0,3", "all", "auto:2", "bf16", "default", "2", "1:4", "-1", "", "0", "A=b", "h:1", "é"]
FILES = ["train.py", "folder", "nowhere.py", "good.yaml", "bad.yaml", "/dev/null", "-", "~"]
OTHERS = ["--", "-m", "--no-python", "--json", "--explain", "--preset", "exact", "--config",
          "--machine", "--no-strict", "--help", "-h", "--version", "-x", "--=", "---"]  # fmt: skip
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
VALUE = st.sampled_from(VALUES + FILES) | TEXT


def option(spec: OptionSpec) -> st.SearchStrategy[list[str]]:
    """Return an option, most often with a value that it takes."""
    if spec.kind == "bool":
        return st.sampled_from([[spec.flag], [spec.flag.replace("--", "--no-", 1)]])
    usual = {"int": ("1", "2"), "list": ("A=b", "C="), "str": ("0,1", "all", "1", "h:1")}
    good = st.sampled_from(spec.choices or usual[spec.kind])
    return st.builds(lambda value: [spec.flag, value], good | good | VALUE)


PIECE = st.one_of(
    st.sampled_from(OPTIONS).flatmap(option),
    st.builds(lambda word: [word], st.sampled_from(FLAGS + FILES + OTHERS) | TEXT),
    st.builds("{}={}".format, st.sampled_from(FLAGS), VALUE).map(lambda word: [word]),
)
SCRIPT = st.sampled_from([["train.py"], ["train.py"], ["-m", "pkg"], []])
LINE = st.builds(lambda *parts: sum(parts[1], parts[0]), SCRIPT, st.lists(PIECE, max_size=6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fuzz")
    (made / "train.py").write_text("open('started', 'w')")
    (made / "folder").mkdir()
    (made / "good.yaml").write_text("amp: off\n")
    (made / "bad.yaml").write_text("amp: {\n")
    return made


def run(folder: Path, words: list[str]) -> tuple[int, str, str]:
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    out.seek(0)
    return code, out.read(), err.getvalue()


@settings(max_examples=60, deadline=None)
@given(LINE, st.sampled_from(["cpu-laptop", "4xt4", "8xh100", "8xascend910b"]))
def test_any_words(folder: Path, words: list[str], machine: str) -> None:
    before = sorted(folder.rglob("*"))
    # In front, because words behind -- are the script's.
    planning = ["run", "--dry-run", "--machine", str(MACHINES / f"{machine}.json")]
    code, out, err = run(folder, [*planning, *words])
    told = f"{words}\n{err}"
    assert code in set(ExitCode) - {ExitCode.BUG} | {0}, told
    assert "Traceback" not in err, told
    assert sorted(folder.rglob("*")) == before, told
    if code:
        assert (out, err.count("\n")) == ("", 3), told


@settings(max_examples=50, deadline=None)
@given(st.lists(VALUE | st.sampled_from(OTHERS), max_size=3))
def test_any_first_word(folder: Path, words: list[str]) -> None:
    code, _, err = run(folder, ["report", *words])
    assert code in (0, ExitCode.USAGE, ExitCode.UNAVAILABLE), f"{words}\n{err}"
    assert "torch" not in sys.modules or "Traceback" not in err
