from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace

import pytest

from fasttrain.model.codec import loads
from fasttrain.model.plan import LaunchPlan, Target
from fasttrain.planning.explain import mask_plan, shell_script
from fasttrain.planning.plan import make_plan

# Stands for the shim: writes its arguments and environment as hexadecimal bytes.
DUMP = """
import json, os, sys
argv = [os.fsencode(arg).hex() for arg in sys.argv]
env = {os.fsencode(k).hex(): os.fsencode(v).hex() for k, v in os.environ.items()}
old = os.umask(0)
print(json.dumps({"argv": argv, "env": env, "cwd": os.getcwd(), "umask": old}))
"""
HOSTILE = (
    "--", "", " ", "a b", "a\nb", "\n", "it's", '"', "\\", "\\n", "$(touch PWNED)", "`touch PWNED`",
    "$HOME", "${HOME}", "; touch PWNED", "| touch PWNED", "&", "*", "~", "#", "!", "-n", "--lr=3",
    "\t\r\x1b[31m", "ünï→🔥", "\u2028", os.fsdecode(b"\xff\xfe"), "'\"'\"'", "FASTTRAIN_PLAN",
    "\nFASTTRAIN_PLAN\ntouch PWNED\n", "x" * 5000,
)  # fmt: skip


def _run(text, folder, environ, shell="sh"):
    script = folder / "dry_run.sh"
    script.write_bytes(text.encode(errors="surrogateescape"))
    return subprocess.run([shell, str(script)], cwd=folder, env=environ, capture_output=True)


@pytest.fixture
def plan_in(make, tmp_path):
    """Return a plan whose shim is the dump and whose files are in the test's folder."""

    def build(target, machine=None, environ=None, **options):
        shim = tmp_path / "dump here.py"
        shim.write_text(DUMP)
        invocation = replace(
            make.invocation(environ, target),
            python=sys.executable,
            shim=str(shim),
            cwd=str(tmp_path),
            run_dir=str(tmp_path / "it's a run $(x)"),
        )
        return make_plan(make.settings(**options), machine or make.machine(), invocation)

    return build


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_script_runs_the_very_command_in_the_very_environment(plan_in, tmp_path, shell):
    target = Target("script", "train it.py", HOSTILE)
    env = tuple(f"V{i}={value}" for i, value in enumerate(HOSTILE))
    plan = plan_in(target, env=env)
    done = _run(shell_script(plan, {}), tmp_path, {"PATH": os.environ["PATH"], "MINE": "1"}, shell)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["argv"] == [os.fsencode(word).hex() for word in plan.argv[1:]]
    got = {bytes.fromhex(k): bytes.fromhex(v) for k, v in seen["env"].items()}
    for i, value in enumerate(HOSTILE):
        assert got[f"V{i}".encode()] == os.fsencode(value)
    assert got[b"FASTTRAIN_RUN_ID"] == b"r1"
    assert got[b"MINE"] == b"1"
    assert seen["cwd"] == str(tmp_path)
    assert not (tmp_path / "PWNED").exists()


def test_the_plan_is_written_for_the_user_alone(plan_in, tmp_path):
    plan = plan_in(Target("script", "t.py", HOSTILE))
    done = _run(shell_script(plan, {}), tmp_path, {"PATH": os.environ["PATH"]})
    written = tmp_path / "it's a run $(x)" / "plan.json"
    assert loads(LaunchPlan, written.read_bytes()) == plan
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    assert stat.S_IMODE(written.parent.stat().st_mode) == 0o700
    assert str(written) == plan.argv[2]
    # The script's own files are as open as without fasttrain.
    before = os.umask(0)
    os.umask(before)
    assert json.loads(done.stdout)["umask"] == before


def test_words_of_the_machine_and_the_user_cannot_leave_a_comment(plan_in, make, tmp_path):
    evil = replace(make.npu, name="NPU\ntouch PWNED\r\x1b[2J\u2028touch PWNED")
    plan = plan_in(
        Target("script", "t.py"), make.machine(evil), {"PYTHONFAULTHANDLER": "0\ntouch PWNED"},
        debug=True, env=("A=1",),
    )  # fmt: skip
    text = shell_script(replace(plan, warnings=("a\ntouch PWNED",), hints=("b\r\ntouch PWNED",)),
                        {"A": "0\ntouch PWNED"})  # fmt: skip
    done = _run(text, tmp_path, {"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "PWNED").exists()
    assert "\x1b" not in text
    assert all(not line.startswith("touch") for line in text.splitlines())


def test_kept_variables_are_told_and_not_set(plan_in):
    plan = plan_in(Target("script", "t.py"), environ={"PYTHONFAULTHANDLER": "0"}, debug=True)
    text = shell_script(plan, {"PYTHONFAULTHANDLER": "0"})
    assert "# PYTHONFAULTHANDLER=0 stays: " in text
    assert "export PYTHONFAULTHANDLER" not in text


def test_a_change_says_what_was_before(plan_in):
    plan = plan_in(Target("script", "t.py"), env=("A=2", "MY_KEY=2"))
    text = shell_script(plan, {"A": "1", "MY_KEY": "hush"})
    assert "export A=2  # asked for by name (--env), was 1\n" in text
    assert "hush" not in text


def test_a_variable_can_be_unset(plan_in, tmp_path):
    plan = plan_in(Target("script", "t.py"), env=("GONE=1",))
    gone = replace(plan.environment[-1], value=None)
    text = shell_script(replace(plan, environment=(gone,)), {})
    done = _run(text, tmp_path, {"PATH": os.environ["PATH"], "GONE": "1"})
    assert b"GONE".hex() not in json.loads(done.stdout)["env"]


def test_secrets_are_asked_for_and_arrive(plan_in, tmp_path):
    target = Target("script", "t.py", ("--token", "s3cr3t", "--api-key=s3cr3t", "--lr", "***"))
    plan = plan_in(target, env=("HF_TOKEN=s3cr3t",))
    text = shell_script(plan, {})
    assert "s3cr3t" not in text
    path = {"PATH": os.environ["PATH"]}
    missing = _run(text, tmp_path, path)
    assert missing.returncode != 0
    assert b"HF_TOKEN" in missing.stderr
    half = _run(text, tmp_path, path | {"HF_TOKEN": "s3cr3t"})
    assert (half.returncode != 0, half.stdout) == (True, b"")
    given = {"HF_TOKEN": "s3cr3t", "SECRET_6": "s3 'cr3t", "SECRET_7": "$(x)"}
    seen = json.loads(_run(text, tmp_path, path | given).stdout)
    argv = [bytes.fromhex(word).decode() for word in seen["argv"]]
    assert argv[-5:] == ["--token", "s3 'cr3t", "--api-key=$(x)", "--lr", "***"]
    assert bytes.fromhex(seen["env"][b"HF_TOKEN".hex()]) == b"s3cr3t"
    written = loads(LaunchPlan, (tmp_path / "it's a run $(x)" / "plan.json").read_bytes())
    assert written == mask_plan(plan)


@pytest.mark.parametrize("field", ["cwd", "run_dir"])
def test_nothing_is_started_where_a_step_before_failed(plan_in, tmp_path, field):
    (tmp_path / "file").write_text("")
    plan = replace(plan_in(Target("script", "t.py")), **{field: str(tmp_path / "file" / "x")})
    done = _run(shell_script(plan, {}), tmp_path, {"PATH": os.environ["PATH"]})
    assert (done.returncode != 0, done.stdout) == (True, b"")


def test_every_decision_is_a_comment(make):
    plan = make.plan(make.gpus(2), gpus="all", amp="bf16")
    lines = shell_script(plan, {}).splitlines()
    assert lines[:2] == ["#!/bin/sh", "# fasttrain 0.1.0, run r1"]
    table = [" ".join(line.split()) for line in lines]
    why_amp, why_devices = plan.levers.amp.reason, plan.devices.reason
    assert f"# amp bfloat16 {why_amp} (--amp)" in table
    assert f"# devices 0,1 {why_devices} (--gpus)" in table
    (amp,) = (line.index(why_amp) for line in lines if line.startswith("# amp "))
    (devices,) = (line.index(why_devices) for line in lines if line.startswith("# devices "))
    assert amp == devices, "a table"
    topics = [line.split()[1] for line in lines[2:10]]
    assert topics == ["device", "devices", "processes", "amp", "compile", "optimizer", "matmul",
                      "strategy"]  # fmt: skip
