"""The real ``fasttrain doctor`` on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

EXAMINATIONS = Path(__file__).parents[1] / "data/examinations"
MACHINES = Path(__file__).parents[1] / "data/machines"
SCRIPTS = Path(__file__).parents[1] / "scripts"


def told(done: Any) -> Any:
    """Return the data of what ``--json`` printed."""
    content = json.loads(done.stdout)
    assert (content["schema"], content["kind"]) == (1, "doctor")
    return content["data"]


def plan_of(done: Any) -> Any:
    """Return a printed plan without the name that each run gets."""
    text = done.stdout.decode()
    return json.loads(text.replace(json.loads(text)["data"]["run_id"], "RUN"))["data"]


def test_json_is_the_machine_that_a_dry_run_takes(fasttrain: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    doctor = fasttrain("doctor", "--quick", "--json")
    (tmp_path / "here.json").write_bytes(doctor.stdout)
    plan = ("run", "train.py", "--dry-run", "--json", "--run-dir", "run")
    described = fasttrain(*plan, "--machine", "here.json")
    assert described.returncode == 0, described.stderr
    here, there = (plan_of(done) for done in (fasttrain(*plan), described))
    assert there == here
    again = fasttrain("doctor", "--machine", "here.json", "--json")
    assert told(again)["examination"] == told(doctor)["examination"]


def test_the_whole_examination_tries_torch(fasttrain: Any) -> None:
    done = fasttrain("doctor", "--json", "--skip", "load")
    trial = told(done)["examination"]["torch"]
    states = [trial[name]["state"] for name in ("imported", "compiled", "all_reduced")]
    assert states == ["ok", "ok", "ok"], trial
    assert trial["version"].startswith("2.")
    assert "gloo" in trial["backends"]
    assert done.returncode == 0, done.stdout


def test_exit_code_tells_whether_something_is_broken(fasttrain: Any) -> None:
    for name, code in (("8xh100-nvlink", 0), ("4xt4", 0), ("3090-and-1080", 69)):
        done = fasttrain("doctor", "--machine", EXAMINATIONS / f"{name}.json")
        assert done.returncode == code, name
        assert done.stderr == b""


def test_a_bare_machine_description_is_judged_too(fasttrain: Any) -> None:
    done = fasttrain("doctor", "--machine", MACHINES / "1xa100.json")
    assert done.returncode == 0
    assert b"A100" in done.stdout


def test_80_columns_are_enough(fasttrain: Any) -> None:
    for path in sorted(EXAMINATIONS.glob("*.json")):
        lines = fasttrain("doctor", "--machine", path).stdout.decode().splitlines()
        assert max(map(len, lines)) <= 80, path.name
        assert not any(line.isspace() for line in lines), path.name
        assert not any("\x1b" in line for line in lines)


def test_only_and_skip_choose_checks(fasttrain: Any) -> None:
    def findings(*options: str) -> set[str]:
        done = fasttrain("doctor", "--json", "--machine", EXAMINATIONS / "4xt4.json", *options)
        return {finding["check"] for finding in told(done)["findings"]}

    assert findings("--only", "throttling, persistence") == {"throttling", "persistence"}
    assert findings("--skip", "throttling") == findings() - {"throttling"}
    wrong = fasttrain("doctor", "--only", "throtling")
    assert wrong.returncode == 2
    assert wrong.stderr.rstrip().endswith(b"[doctor-check]")
    assert b"throttling" in wrong.stderr


def test_list_names_every_check_in_a_line(fasttrain: Any) -> None:
    lines = fasttrain("doctor", "--list").stdout.decode().splitlines()
    assert len(lines) >= 30
    assert len({line.split()[0] for line in lines}) == len(lines)


def test_markdown_masks_names_and_secrets(fasttrain: Any, tmp_path: Path) -> None:
    home = tmp_path / "ada-lovelace"
    cache = home / "torch-cache"
    cache.mkdir(parents=True)
    environ = {
        "HOME": str(home),
        "USER": "ada-lovelace",
        "LOGNAME": "ada-lovelace",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "NCCL_SECRET_THING": "swordfish",
    }
    done = fasttrain("doctor", "--quick", "--markdown", env=environ)
    text = done.stdout.decode()
    assert "TORCHINDUCTOR_CACHE_DIR=~/torch-cache" in text
    assert "ada-lovelace" not in text
    assert "swordfish" not in text
    assert "NCCL_SECRET_THING=***" in text


def test_a_script_is_judged_with_file_and_line(fasttrain: Any, tmp_path: Path) -> None:
    script = tmp_path / "own_amp.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.RMSprop(model.parameters())\n"
        "for step in range(4):\n"
        "    with torch.autocast('cpu', torch.bfloat16):\n"
        "        loss = model(torch.randn(2, 3)).float().pow(2).mean()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    bf16 = {"FASTTRAIN_AMP": "bf16"}  # a CPU without bf16 leaves the lever off by itself
    done = fasttrain("doctor", "own_amp.py", "--quick", "--json", env=bf16)
    levers = {line["lever"]: line for line in told(done)["levers"]}
    assert (levers["amp"]["verdict"], levers["amp"]["where"]) == ("ceded", "own_amp.py:5")
    assert levers["optimizer"]["verdict"] == "skipped"
    assert "RMSprop" in levers["optimizer"]["why"]
    screen = fasttrain("doctor", "own_amp.py", "--quick", env=bf16).stdout
    assert b"what fasttrain run own_amp.py would do:" in screen
    report = fasttrain("doctor", "own_amp.py", "--quick", "--markdown", env=bf16).stdout
    assert b"the script manages precision itself (own_amp.py:5) |" in report
    assert fasttrain("doctor", "absent.py", "--quick").stderr.startswith(b"error: ")


def test_fix_ends_the_workers_of_a_dead_run_and_nothing_else(
    fasttrain: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import ctypes, os, subprocess, sys, time\n"
        # As where the kernel has no such signal: torch's own launcher leaves its workers so.
        "ctypes.CDLL(None).prctl(1, 0)\n"
        "beside = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open('pids', 'w').write(f'{os.getpid()} {beside.pid}')\n"
        "time.sleep(60)\n"
    )
    run = fasttrain.start("run", "train.py", start_new_session=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "pids").exists() or " " not in (tmp_path / "pids").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker, beside = (psutil.Process(int(p)) for p in (tmp_path / "pids").read_text().split())
    try:
        guardian = next(p for p in psutil.Process(run.pid).children() if "-IS" in p.cmdline())
        run.send_signal(signal.SIGSTOP)  # or it would start another
        guardian.kill()
        run.send_signal(signal.SIGKILL)
        run.wait()
        found = fasttrain("doctor", "--quick", "--only", "orphans")
        assert str(worker.pid).encode() in found.stdout
        assert worker.is_running()
        done = fasttrain("doctor", "--quick", "--only", "orphans", "--fix")
        assert re.search(rb"\b1 worker\b.*: python", done.stderr)
        assert f"(pid {worker.pid})".encode() in done.stderr
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
        assert beside.is_running()
    finally:
        for process in (worker, beside):
            if process.is_running():
                os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("option", ["--bench", "--fix", "--python=python3"])
def test_a_recorded_machine_is_not_touched(fasttrain: Any, option: str) -> None:
    done = fasttrain("doctor", "--machine", EXAMINATIONS / "4xt4.json", option)
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith(b"[machine-recorded]")


def test_quick_imports_no_torch(fasttrain: Any, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("open('imported', 'w')\n")
    fasttrain("doctor", "--quick", env={"PYTHONPATH": str(tmp_path)})
    assert not (tmp_path / "imported").exists()
