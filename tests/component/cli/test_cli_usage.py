from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fasttrain import __version__
from fasttrain.cli.app import BUG_NOTE
from fasttrain.cli.typed import unknown_option
from fasttrain.model.codec import dumps


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("--ampp", "--amp"),
        ("--compille", "--compile"),
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
def test_the_form_with_two_dashes_is_shown(
    words: list[str], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert unknown_option("--lr", words).fix == f"fasttrain run {form}"


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("print(1)", True),
        ("import argparse\nargparse.ArgumentParser().add_argument('--ampp')", False),
    ],
)
def test_an_option_that_the_script_does_not_take_may_be_misspelt(
    text: str, asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    line = "fasttrain run train.py -- --ampp bf16"
    fix = unknown_option("--ampp", ["train.py", "--ampp", "bf16"]).fix
    assert fix == (f"did you mean --amp? if it is the script's: {line}" if asked else line)


def test_a_script_that_the_configuration_names_is_left_out_of_the_form(
    fasttrain_main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("script: train.py")
    said = fasttrain_main("run", "--config", "mine.yaml", "--lr", "3")
    assert "fix: fasttrain run --config mine.yaml -- --lr 3  " in said.err
    monkeypatch.setenv("FASTTRAIN_CONFIG", "mine.yaml")
    assert "fix: fasttrain run -- --lr 3  " in fasttrain_main("run", "--lr", "3").err
    monkeypatch.delenv("FASTTRAIN_CONFIG")
    (tmp_path / "mine.yaml").rename(tmp_path / "fasttrain.yaml")
    assert "fix: fasttrain run -- --lr 3  " in fasttrain_main("run", "--lr", "3").err


def test_all_of_a_script_that_cannot_be_read_stands_behind_the_dashes(
    fasttrain_main: Any,
) -> None:
    said = fasttrain_main("run", "--debug", "train.py", "x", "--amp", "off", "--lr", "3")
    assert "fix: fasttrain run --debug train.py -- x --amp off --lr 3  " in said.err


# nanoGPT's way of taking options, and its own line for a CPU.
CONFIGURATOR = """
device, compile, eval_iters = "cuda", True, 200
exec(open("configurator.py").read())
"""
CPU_LINE = ("config.py", "--device=cpu", "--compile=False", "--eval_iters=20")


def test_options_that_a_script_has_as_well_go_to_it(fasttrain_main: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CONFIGURATOR)
    said = fasttrain_main("run", "train.py", *CPU_LINE, "--amp", "off")
    assert f"fix: fasttrain run train.py --amp off -- {' '.join(CPU_LINE)}  " in said.err
    assert (said.code, said.err.count("\n")) == (2, 3)


@pytest.mark.parametrize("command", ["run", "slurm"])
def test_a_quiet_environment_is_told_of_no_shared_option(
    fasttrain_main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "train.py").write_text("amp = 'off'\nexec(open('configurator.py').read())")
    words = (command, "train.py", "--amp", "off", "--dry-run")
    assert "fasttrain: note: --amp " in fasttrain_main(*words).err
    monkeypatch.setenv("FASTTRAIN_QUIET", "1")
    assert fasttrain_main(*words).err == ""


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_an_option_that_both_have_is_told_once(
    fasttrain_main: Any, tmp_path: Path, quiet: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(CONFIGURATOR)
    said = fasttrain_main("run", *quiet, "train.py", *CPU_LINE[:2], "--explain", "--", "--x")
    (told,) = said.err.splitlines() or [""]
    assert said.code == 0
    assert ("fasttrain: note: --device " in told) is not bool(quiet)
    assert told.endswith("fasttrain run train.py --explain -- config.py --device=cpu --x") or quiet


def test_options_before_the_script_are_fasttrains(fasttrain_main: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CONFIGURATOR)
    said = fasttrain_main("run", "--device", "cpu", "train.py", "--amp", "off", "--explain")
    assert (said.code, said.err) == (0, "")


def test_torchruns_spelling_is_taken(fasttrain_main: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ("run", "--nproc_per_node=2", "train.py", "--master_port", "2345", "--json")
    said = fasttrain_main(*words, "--dry-run", "--", "--nproc_per_node=3")
    plan = json.loads(said.out)["data"]
    assert plan["processes"]["value"]["nproc_per_node"] == 2
    assert plan["target"]["args"] == ["--nproc_per_node=3"]


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
        (("job",), "fasttrain job --help"),
    ],
)
def test_other_usage_errors(fasttrain_main: Any, words: tuple[str, ...], hint: str) -> None:
    said = fasttrain_main(*words)
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 3
    assert hint in said.err.splitlines()[2]
    assert "[usage]" in said.err
    assert not said.err.startswith("error: \n")


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("train.py --lr 3", "train.py -- --lr 3"),
        ("train.py --amp off", "train.py --amp off"),
        ("--amp off train.py", "--amp off train.py"),
    ],
)
def test_a_script_without_a_command_is_told_of_run(
    fasttrain_main: Any, typed: str, fix: str
) -> None:
    said = fasttrain_main(*typed.split())
    assert (said.code, said.err.count("\n")) == (2, 3)
    assert f"fix: fasttrain run {fix} " in said.err


def test_a_misspelt_command_is_no_script(fasttrain_main: Any) -> None:
    assert "Did you mean 'run'?" in fasttrain_main("rum", "train.py").err


def test_m_behind_a_script_is_the_scripts(fasttrain_main: Any) -> None:
    said = fasttrain_main("run", "train.py", "-m", "test")
    assert said.code == 2
    assert "fix: fasttrain run train.py -- -m test " in said.err


def test_torchruns_spelling_stays_fasttrains_in_a_fix(fasttrain_main: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    said = fasttrain_main("run", "train.py", "--nproc_per_node=2", "--foo", "1")
    assert "fix: fasttrain run train.py --nproc_per_node=2 -- --foo 1 " in said.err


def test_a_report_is_found_by_a_part_of_its_name(
    fasttrain_main: Any, receipt: Any, tmp_path: Path
) -> None:
    for name in ("2026_train_1f9c", "2026_train_77aa"):
        (tmp_path / "fasttrain_runs" / name).mkdir(parents=True)
        (tmp_path / "fasttrain_runs" / name / "plan.json").touch()
        text = dumps(dataclasses.replace(receipt(), command=name))
        (tmp_path / "fasttrain_runs" / name / "receipt.json").write_text(text)
    for part in ("2026_train_1f9c", "1f9c", "fasttrain_runs/2026_train_1f9c"):
        said = fasttrain_main("report", part)
        assert said.code == 0
        assert said.err.startswith("fasttrain: 2026_train_1f9c ")
    said = fasttrain_main("report", "train")
    assert (said.code, "2026_train_1f9c, 2026_train_77aa" in said.err) == (69, True)


def test_version_and_help(fasttrain_main: Any) -> None:
    said = fasttrain_main("--version")
    assert (said.code, said.out, said.err) == (0, f"fasttrain {__version__}\n", "")
    for words in (("--help",), ("-h",), ("run", "--help"), ("run", "-h")):
        said = fasttrain_main(*words)
        assert (said.code, said.err) == (0, "")
        assert "Usage" in said.out


def test_a_bug_is_told_as_one(fasttrain_main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasttrain.launch.run_dir.paths.latest_run_dir", lambda _: 1 / 0)
    said = fasttrain_main("report")
    assert said.code == 70
    assert "ZeroDivisionError" in said.err
    assert BUG_NOTE in said.err


def test_an_interrupt_has_its_own_code(
    fasttrain_main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fasttrain.launch.run_dir.paths.latest_run_dir", interrupt)
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


def test_a_run_outside_the_active_environment_says_so(
    fasttrain_main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    said = fasttrain_main("run", "train.py", "--dry-run")
    (warning,) = re.findall("^# warning: .*", said.out, re.MULTILINE)
    assert f"VIRTUAL_ENV={tmp_path} " in warning
    assert f"{sys.executable} " in warning


def test_help_is_as_wide_as_the_terminal(
    fasttrain_main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (90, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        widest = max(map(len, fasttrain_main("run", "--help").out.splitlines()))
        assert columns - 20 < widest <= columns
