"""Which device the worker of each rank shows its script, with real workers and no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fasttrain.cli.cards.crash import print_crash
from fasttrain.launch.crash.evidence import FailedRun
from fasttrain.launch.crash.judge import judge
from fasttrain.model.codec import dumps
from fasttrain.model.crash import Surroundings, WorkerExit, WorkerExits
from fasttrain.model.places import WORKER_PROGRAM, program
from fasttrain.model.plan import LaunchPlan, Target
from fasttrain.source.read import read_script
from support.plans import plan_for

UNAWARE = """
import json, os
names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE")
print(json.dumps({name: os.environ.get(name) for name in names}))
"""
AWARE = f"""{UNAWARE}
local_rank = int(os.environ["LOCAL_RANK"])
"""


DEVICE_1 = """
import sys
sys.path.append("site-packages")
from gpu import ones
x = ones(2, device="cuda:1")
"""
# In the place of torch on a GPU. Source: what CUDA says, pytorch/pytorch#107300
NO_SUCH_DEVICE = """
def ones(size, device):
    raise RuntimeError("CUDA error: invalid device ordinal")
"""


# As research scripts choose the GPU of their one process.
CHOOSES = {
    "before": 'os.environ["CUDA_VISIBLE_DEVICES"] = "0"',
    "both": 'os.environ.update(CUDA_VISIBLE_DEVICES="0,1", OTHER="1")',
    "again": 'del os.environ["CUDA_VISIBLE_DEVICES"]; os.environ["CUDA_VISIBLE_DEVICES"] = "0"',
    "default": 'os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")',
}
# What the process itself and those that it starts have, and not only Python's mapping.
SHOWN_BY_C = """
import os, subprocess
{line}
print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
subprocess.run(["printenv", "CUDA_VISIBLE_DEVICES"], check=True)
assert os.environ.get("OTHER") == ("1" if "OTHER" in {line!r} else None)
"""
CHOOSES_AND_TRAINS = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = "0"
import torch
"""


def plan_in(folder: Path, machine: str, source: str, environ=None, **options: str) -> LaunchPlan:
    """Return a plan whose run directory is a folder, which holds it and its script."""
    script = folder / "train.py"
    script.write_text(source)
    target = Target("script", str(script))
    facts = read_script(target, str(folder), {})
    plan = plan_for(machine, environ=environ, facts=facts, **options)
    plan = replace(plan, run_dir=str(folder), cwd=str(folder))
    (folder / "plan.json").write_text(dumps(plan))
    return plan


def started(plan: LaunchPlan, rank: int, environ=None) -> subprocess.Popen[str]:
    """Start the worker of one rank as the agent does."""
    folder = Path(plan.run_dir)
    variables = {one.name: one.value for one in plan.environment}
    size = plan.processes.value.nproc_per_node
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    return subprocess.Popen(
        [sys.executable, program(WORKER_PROGRAM), "plan.json", "script", "train.py"],
        env={**os.environ, **(environ or {}), **variables, **place}, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def shown(folder: Path, machine: str, source: str, environ=None, **options: str) -> list[dict]:
    """Return the variables that the script of each rank of a plan finds."""
    plan = plan_in(folder, machine, source, environ, **options)
    found = []
    for rank in range(plan.processes.value.nproc_per_node):
        worker = started(plan, rank, environ)
        text, errors = worker.communicate()
        assert worker.returncode == 0, errors
        found.append(json.loads(text or (folder / f"rank-{rank}.log").read_text()))
    return found


def column(found: list[dict], name: str) -> list[str | None]:
    return [variables[name] for variables in found]


@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_each_rank_of_an_unaware_script_sees_its_own_gpu(tmp_path, strategy):
    found = shown(tmp_path, "8xh100", UNAWARE, gpus="2,5", strategy=strategy)
    assert column(found, "CUDA_VISIBLE_DEVICES") == ["2", "5"]
    # Copies keep the other variables: nothing in them was made to work together.
    world = "2" if strategy == "none" else None
    assert column(found, "WORLD_SIZE") == [world, world]
    assert column(found, "LOCAL_RANK") == (["0", "0"] if strategy == "none" else [None, None])


def test_a_script_that_chooses_by_its_local_rank_sees_all(tmp_path):
    found = shown(tmp_path, "8xh100", AWARE, gpus="2,5", strategy="none")
    assert column(found, "CUDA_VISIBLE_DEVICES") == ["2,5", "2,5"]
    assert column(found, "LOCAL_RANK") == ["0", "1"]


def test_ranks_on_different_gpus_see_theirs_by_uuid(tmp_path):
    found = shown(tmp_path, "t4-and-a100", UNAWARE, gpus="1,0")
    names = column(found, "CUDA_VISIBLE_DEVICES")
    assert [name[:8] for name in names] == ["GPU-7e3b", "GPU-4b8f"], "the A100, then the T4"


def test_ranks_on_amd_gpus_count_what_slurm_gave(tmp_path):
    environ = {"ROCR_VISIBLE_DEVICES": "4,5"}
    found = shown(tmp_path, "8xmi300x", UNAWARE, environ, gpus="all")
    assert column(found, "HIP_VISIBLE_DEVICES") == ["0", "1"]


@pytest.mark.parametrize("line", CHOOSES.values(), ids=CHOOSES)
def test_each_rank_keeps_its_own_gpu_where_the_script_chooses_one(tmp_path, line):
    source = SHOWN_BY_C.format(line=line)
    plan = plan_in(tmp_path, "8xh100", source, gpus="2,5", strategy="none")
    for rank, device in enumerate(["2", "5"]):
        worker = started(plan, rank)
        text, errors = worker.communicate()
        assert worker.returncode == 0, errors
        shown = text or (tmp_path / f"rank-{rank}.log").read_text()
        assert shown.split() == [device, device]


def test_the_receipt_says_that_a_choice_of_the_script_does_not_count(tmp_path):
    plan = plan_in(tmp_path, "8xh100", CHOOSES_AND_TRAINS, gpus="2,5", strategy="none")
    worker = started(plan, 1)
    _, errors = worker.communicate()
    assert worker.returncode == 0, errors
    outcomes = json.loads((tmp_path / "rank-1.json").read_text())["outcomes"]
    (notes,) = (outcome["notes"] for outcome in outcomes if outcome["lever"] == "strategy")
    (note,) = notes
    assert "CUDA_VISIBLE_DEVICES to 0 (train.py:3)" in note


@pytest.mark.parametrize("strategy", ["none", "ddp"])
def test_a_script_that_names_device_1_is_told_why_its_rank_has_none(tmp_path, capsys, strategy):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/gpu.py").write_text(NO_SUCH_DEVICE)
    plan = plan_in(tmp_path, "8xh100", DEVICE_1, gpus="0,1", strategy=strategy)
    worker = started(plan, 0)
    worker.communicate()
    exits = WorkerExits((WorkerExit(0, worker.pid, worker.returncode, 1, 1),))
    here = Surroundings()
    crash, problems = judge(FailedRun(plan, plan, {}, 1, here, here, shown=(0,), exits=exits))
    assert (crash.cause, problems) == ("device-number", ())
    print_crash(crash, plan.run_dir, brief=True)
    head, why, fix = capsys.readouterr().err.splitlines()
    assert "[device-number]" in head
    assert "no device 1 (train.py:5): each rank sees one GPU" in why
    assert 'write "cuda"' in fix
    assert "..." not in why + fix, "each is whole in one line"
