from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fasttrain.config.options import OPTIONS, OptionSpec


@pytest.fixture
def planned(fasttrain_main: Any, tmp_path: Path) -> Any:
    """Return the plan of a command line as data."""
    (tmp_path / "train.py").write_text("")

    def plan(*words: str) -> Any:
        said = fasttrain_main("run", *words, "--dry-run", "--json")
        assert said.code == 0, said.err
        return json.loads(said.out)["data"]

    return plan


@pytest.mark.parametrize("spec", OPTIONS, ids=lambda spec: spec.name)
def test_every_option_stands_in_help(
    fasttrain_main: Any, monkeypatch: pytest.MonkeyPatch, spec: OptionSpec
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = fasttrain_main("run", "--help").out
    assert spec.flag in text
    assert " ".join(spec.help.split()[:4]) in text
    assert spec.panel in text


def test_options_may_stand_anywhere(planned: Any) -> None:
    for words in (
        ("train.py", "--amp", "off", "--strict", "a", "b"),
        ("--amp", "off", "train.py", "a", "--strict", "b"),
        ("--amp=off", "--strict", "train.py", "a", "b"),
    ):
        plan = planned(*words)
        assert plan["levers"]["amp"]["source"] == {"kind": "flag", "where": "--amp"}
        assert plan["strict"] is True
        assert plan["target"] == {"kind": "script", "name": "train.py", "args": ["a", "b"]}


def test_what_is_not_given_stays_with_weaker_layers(planned: Any, tmp_path: Path) -> None:
    (tmp_path / "fasttrain.yaml").write_text("strict: true\namp: off\n")
    plan = planned("train.py")
    assert plan["strict"] is True
    assert plan["levers"]["amp"]["source"]["where"] == "fasttrain.yaml:2"
    assert planned("train.py", "--no-strict")["strict"] is False


def test_env_may_be_repeated(planned: Any) -> None:
    plan = planned("train.py", "--env", "A=1 2", "--env", "B=x=y", "--env", "A=3")
    values = {change["name"]: change["value"] for change in plan["environment"]}
    assert (values["A"], values["B"]) == ("3", "x=y")


def test_words_behind_two_dashes_are_the_scripts(fasttrain_main: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    behind = ["--amp", "off", "--", "-m", "--help", "-mx", "a b", "", "$(x)"]
    said = fasttrain_main("run", "train.py", "one", "--dry-run", "--json", "--", *behind)
    plan = json.loads(said.out)["data"]
    assert plan["target"]["args"] == ["one", *behind]
    assert plan["argv"][-len(behind) :] == behind
    assert plan["levers"]["amp"]["source"]["kind"] != "flag"


def test_script_and_its_arguments_from_the_file(planned: Any, tmp_path: Path) -> None:
    (tmp_path / "fasttrain.yaml").write_text("script: train.py\nargs: [--lr, '0.1']\n")
    assert planned()["target"]["args"] == ["--lr", "0.1"]
    (tmp_path / "other.py").write_text("")
    assert planned("other.py", "x")["target"] == {
        "kind": "script", "name": "other.py", "args": ["x"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "args"),
    [
        (("train.py",), ["--lr", "0.1"]),
        (("./train.py", "x"), ["--lr", "0.1", "x"]),
        (("other.py",), []),
        (("-m", "train"), []),
        (("sub/train.py",), ["--sub"]),
        (("sub/other.py",), []),
        (("any/train.py",), ["--any"]),
        (("--quiet", "other.py"), []),
    ],
)
def test_arguments_of_the_file_are_for_the_script_that_it_names(
    fasttrain_main: Any, tmp_path: Path, words: tuple[str, ...], args: list[str]
) -> None:
    for folder, script in (("", "script: train.py"), ("sub", "script: train.py"), ("any", "")):
        (tmp_path / folder).mkdir(exist_ok=True)
        word = "--" + folder if folder else "--lr, '0.1'"
        (tmp_path / folder / "fasttrain.yaml").write_text(f"{script}\nargs: [{word}]\n")
        for name in ("train.py", "other.py"):
            (tmp_path / folder / name).write_text("")
    said = fasttrain_main("run", "--dry-run", "--json", *words)
    assert json.loads(said.out)["data"]["target"]["args"] == args
    reported = "fasttrain.yaml:2 are for train.py" in said.err
    assert reported == (not args and "--quiet" not in words)


def test_modules_and_commands(planned: Any) -> None:
    assert planned("-m", "pkg.train", "x")["target"] == {
        "kind": "module", "name": "pkg.train", "args": ["x"],
    }  # fmt: skip
    assert planned("--no-python", "sh", "x.sh")["argv"] == ["sh", "x.sh"]
