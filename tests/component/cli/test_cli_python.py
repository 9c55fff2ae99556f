"""Which Python a command line comes to, with real virtual environments."""

from __future__ import annotations

import json
import re
import sys
import venv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fasttrain.hardware.interpreter import NOT_PYTHON, ask_interpreter

MakeEnvironment = Callable[..., Path]


@pytest.fixture
def environment(tmp_path: Path) -> MakeEnvironment:
    """Make a virtual environment whose torch, if it has one, is no more than a version."""

    def make(torch: str = "") -> Path:
        folder = tmp_path / "env"
        venv.create(folder, symlinks=True)
        if torch:
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "torch").mkdir()
            (site / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
            (site / "torch" / "version.py").write_text(f"__version__ = {torch!r}\n")
        return folder

    (tmp_path / "train.py").touch()
    return make


def plan(said: Any) -> Any:
    assert said.code == 0, said.err
    return json.loads(said.out)["data"]


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_active_environment_gives_python_and_torch(
    fasttrain_main: Any, environment: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    folder = environment("2.3.1+cpu")
    monkeypatch.setenv(variable, str(folder))
    decided = plan(fasttrain_main("run", "train.py", "--dry-run", "--json"))
    python = str(folder / "bin" / "python")
    assert decided["python"]["value"] == decided["argv"][0] == python
    assert decided["python"]["source"] == {"kind": "env", "where": variable}
    assert "2.3.1+cpu" in decided["levers"]["optimizer"]["reason"]
    [warning] = decided["warnings"]
    assert "torch 2.3.1+cpu" in warning  # older than any with which runs were tried


def test_a_python_is_named_by_flag_file_or_variable(
    fasttrain_main: Any, environment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = environment("2.3.1")
    monkeypatch.setenv("FASTTRAIN_SLURM_PYTHON", "/only/for/slurm")
    words = ("run", "train.py", "--dry-run", "--json")
    python = str(folder / "bin" / "python")
    assert plan(fasttrain_main(*words))["python"] is None
    assert plan(fasttrain_main(*words, "--python", python))["argv"][0] == python
    (tmp_path / "fasttrain.yaml").write_text("python: env/bin/python")
    assert plan(fasttrain_main(*words))["python"]["source"]["where"] == "fasttrain.yaml:1"
    monkeypatch.setenv("FASTTRAIN_PYTHON", sys.executable)
    assert plan(fasttrain_main(*words))["python"] is None
    sent = fasttrain_main("slurm", "train.py", "--dry-run").out
    assert "/only/for/slurm -u -m fasttrain" in sent


def test_an_active_environment_without_torch_is_told(
    fasttrain_main: Any, environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = environment()
    monkeypatch.setenv("VIRTUAL_ENV", str(folder))
    decided = plan(fasttrain_main("run", "train.py", "--dry-run", "--json"))
    assert (decided["python"], decided["argv"][0]) == (None, sys.executable)
    (warning,) = decided["warnings"]
    assert warning.startswith(f"VIRTUAL_ENV={folder} ")
    assert re.search(rf"torch.*{folder}/bin/python.*{sys.executable}", warning)


def test_a_python_without_torch_or_none_at_all_is_refused(
    fasttrain_main: Any, environment: Any, tmp_path: Path
) -> None:
    python = environment() / "bin" / "python"
    said = fasttrain_main("run", "train.py", "--python", str(python))
    what, why, fix = said.err.splitlines()
    assert what.startswith(f"error: {python} ")
    assert "torch" in why
    assert f"{python}" in why
    assert "--python" in fix
    assert fix.endswith("[python-unusable]")
    assert said.code == 71
    for name, why in (("gone", "[python-unusable]"), ("train.py", "Permission denied")):
        said = fasttrain_main("run", "train.py", "--python", str(tmp_path / name))
        assert (said.code, len(said.err.splitlines())) == (71, 3)
        assert why in said.err


def test_a_python_that_answers_nonsense_or_never_is_refused(
    fasttrain_main: Any, environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment()
    monkeypatch.setattr("fasttrain.hardware.interpreter.TIMEOUT_S", 0.2)
    program = tmp_path / "python"
    program.touch(0o755)
    for text, why in (("echo hello", NOT_PYTHON), ("sleep 60", "0.2 s")):
        program.write_text(f"#!/bin/sh\n{text}\n")
        said = fasttrain_main("run", "train.py", "--python", str(program))
        assert (said.code, why in said.err) == (71, True), said.err


def test_a_command_takes_no_python(fasttrain_main: Any) -> None:
    words = ("run", "--no-python", "true", "--dry-run", "--python", "/nowhere")
    warnings = re.findall("^# warning: .*", fasttrain_main(*words).out, re.MULTILINE)
    assert any({"--python", "--no-python"} <= set(re.findall(r"--[\w-]+", w)) for w in warnings)


def test_a_script_is_parsed_here_only_for_the_same_python(
    fasttrain_main: Any, environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = environment("2.3.1") / "bin" / "python"
    (tmp_path / "train.py").write_text("the syntax of a later Python")
    words = ("run", "train.py", "--dry-run", "--python", str(python))
    assert "[script-syntax]" in fasttrain_main(*words).err
    later = replace(ask_interpreter(str(python)), version="3.99.0")
    monkeypatch.setattr("fasttrain.cli.running.ask_interpreter", lambda _: later)
    assert fasttrain_main(*words).code == 0


def test_doctor_examines_for_the_python_that_a_run_takes(
    fasttrain_main: Any, environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = environment("2.3.1+cpu")
    python = str(folder / "bin" / "python")
    monkeypatch.setenv("VIRTUAL_ENV", str(folder))
    told = plan(fasttrain_main("doctor", "train.py", "--quick", "--json"))
    assert told["python"] == python
    assert told["examination"]["machine"]["torch"]["version"] == "2.3.1+cpu"
    (optimizer,) = [line for line in told["levers"] if line["lever"] == "optimizer"]
    assert optimizer["value"] != "fused"  # torch 2.4 has it on a CPU
    assert f"\nfor {python}\n" in fasttrain_main("doctor", "--quick").out
    told = plan(fasttrain_main("doctor", "--quick", "--json", "--python", sys.executable))
    assert told["python"] == ""
    assert told["examination"]["machine"]["torch"]["version"] != "2.3.1+cpu"
    monkeypatch.delenv("VIRTUAL_ENV")
    named = plan(fasttrain_main("doctor", "train.py", "--quick", "--json", "--python", python))
    assert named["command"] == f"fasttrain run train.py --python {python}"


def test_doctor_tells_of_an_active_environment_that_a_run_leaves_aside(
    fasttrain_main: Any, environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = environment()
    monkeypatch.setenv("VIRTUAL_ENV", str(folder))
    told = plan(fasttrain_main("doctor", "--quick", "--json"))
    (found,) = [line for line in told["findings"] if line["check"] == "active-environment"]
    assert found["what"].startswith(f"VIRTUAL_ENV={folder} ")
    assert "torch" in found["what"]
    assert sys.executable in found["why"]
