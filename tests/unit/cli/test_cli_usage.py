from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest

from fasttrain import __version__
from fasttrain.cli.usage import unknown_option


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("--ampp", "--amp"),
        ("--compille", "--compile"),
        ("--nproc_per_node", "--nproc-per-node"),
        ("--gpu", "--gpus"),
        ("--dryrun", "--dry-run"),
        ("--optimiser", "--optimizer"),
    ],
)
def test_the_nearest_option_is_named(option: str, near: str) -> None:
    assert near in unknown_option(option, ["train.py", option]).why.split()[-1]


@pytest.mark.parametrize(
    ("words", "form"),
    [
        (["train.py", "--lr", "0.1"], "train.py -- --lr 0.1"),
        (["train.py", "--amp", "off", "--lr=0.1", "x"], "train.py --amp off -- --lr=0.1 x"),
        (["--lr", "0.1", "train.py", "a b"], "train.py -- --lr 0.1 'a b'"),
        (["--amp", "off", "--lr", "3"], "--amp off SCRIPT -- --lr 3"),
        (["-m", "pkg.train", "--lr", "3"], "-m pkg.train -- --lr 3"),
        (["train.py", "--lr", "0.1", "--", "--seed", "1"], "train.py -- --lr 0.1 --seed 1"),
    ],
)
def test_the_form_with_two_dashes_is_shown(words: list[str], form: str) -> None:
    assert unknown_option("--lr", words).fix.startswith(f"fasttrain run {form}")


def test_an_unknown_option_never_reaches_the_script(fasttrain_main: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('started', 'w')")
    said = fasttrain_main("run", "train.py", "--epochs", "3")
    assert (said.code, said.out) == (2, "")
    assert "fix: fasttrain run train.py -- --epochs 3" in said.err
    assert "[unknown-option]" in said.err
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("fly",), "fasttrain"),
        (("--fly",), "fasttrain"),
        (("run", "train.py", "--gpus"), "fasttrain run --help"),
        (("report", "a", "b"), "fasttrain report --help"),
        (("init", "--fly"), "fasttrain init --help"),
    ],
)
def test_other_usage_errors(fasttrain_main: Any, words: tuple[str, ...], hint: str) -> None:
    said = fasttrain_main(*words)
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 3
    assert f"fix: see {hint}" in said.err
    assert "[usage]" in said.err


def test_version_and_help(fasttrain_main: Any) -> None:
    said = fasttrain_main("--version")
    assert (said.code, said.out, said.err) == (0, f"fasttrain {__version__}\n", "")
    for words in (("--help",), ("-h",), ("run", "--help"), ("run", "-h")):
        said = fasttrain_main(*words)
        assert (said.code, said.err) == (0, "")
        assert "Usage" in said.out


def test_a_bug_is_told_as_one(fasttrain_main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain.launch.run_dir.latest_run_dir", lambda _: 1 / 0)
    said = fasttrain_main("report")
    assert said.code == 70
    assert "ZeroDivisionError" in said.err
    assert "bug in fasttrain" in said.err


def test_an_interrupt_has_its_own_code(
    fasttrain_main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fasttrain.launch.run_dir.latest_run_dir", interrupt)
    assert fasttrain_main("report").code == 130


def test_no_words_ask_for_help(fasttrain_main: Any) -> None:
    said = fasttrain_main()
    assert said == fasttrain_main("--help")
    assert (said.code, said.err) == (0, "")


@pytest.mark.parametrize(
    "words", [("run", "train.py"), ("ps",), ("doctor", "--quick"), ("report",)]
)
def test_a_working_directory_that_is_gone(
    fasttrain_main: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "gone").mkdir()
    with contextlib.chdir(tmp_path / "gone"):
        (tmp_path / "gone").rmdir()
        said = fasttrain_main(*words)
        os.chdir(tmp_path)
    assert (said.code, said.out, said.err.count("\n")) == (71, "", 3)
    assert "[cwd-gone]" in said.err


def test_a_file_name_makes_no_lines_of_its_own(fasttrain_main: Any) -> None:
    said = fasttrain_main("run", "a\nerror: b\x1b[2J.py")
    assert (said.code, said.err.count("\n")) == (71, 3)
    assert "\x1b" not in said.err


def test_stdout_takes_what_its_encoding_lacks(fasttrain_main: Any, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    (tmp_path / name).write_text("")
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    with contextlib.redirect_stdout(out):
        assert fasttrain_main("doctor", "--quick", name).code in (0, 69)
    out.flush()
    assert b"caf\\udce9.py" in out.buffer.getvalue()


@pytest.mark.parametrize("columns", ["9" * 5000, "9" * 40, "²", "0", "-1", "wide", ""])
def test_a_width_that_no_terminal_has_is_none(
    fasttrain_main: Any, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    before = fasttrain_main("job", "list")
    monkeypatch.setenv("COLUMNS", columns)
    assert fasttrain_main("job", "list") == before
    assert before.code == 0
