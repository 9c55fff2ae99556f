"""``fasttrain slurm`` on the real cluster: what is sent runs, and what it tells is true."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

TEMPLATES = Path(__file__).parents[2] / "templates"
TWO_NODES = ("--nodes", "2", "--gpus-per-node", "8", "--device", "cpu", "--time", "10")
SHORT = ("--steps", "4", "--width", "32", "--layers", "1", "--batch", "4", "--block", "16")

ARGUMENTS = (
    "a b", "q'u\"o", "$(touch pwned)", "; touch pwned", "new\nline", "ünï", "", "-x", "`touch p`",
    "back\\slash", "*", "--", "%j", "#SBATCH --time=1",
)  # fmt: skip
TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MULTI", "MY_API_KEY")
json.dump({"args": sys.argv[1:], "env": {n: os.environ.get(n) for n in names}}, open(
    f"told-{os.environ.get('RANK', '0')}.json", "w"))
"""


def run_dir(folder: Path) -> Path:
    (found,) = (folder / "fasttrain_runs").glob("[!.]*/")
    return found


def job_id(folder: Path) -> str:
    number: str = json.loads((run_dir(folder) / "submitted.json").read_text())["job_id"]
    return number


@pytest.mark.parametrize("tasks", ["per-node", "per-gpu"])
def test_a_template_is_one_data_parallel_run_over_two_nodes(
    fasttrain: Any, cluster: Any, shared_folder: Path, tasks: str
) -> None:
    script = TEMPLATES / "language_model" / "char_lm.py"
    done = fasttrain(
        "slurm", script, *TWO_NODES, "--nproc-per-node", "2", "--tasks", tasks, "--wait", "--amp",
        "off", "--", *SHORT, timeout_s=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    folder = run_dir(shared_folder)
    receipt = json.loads((folder / "receipt.json").read_text())
    assert [rank["rank"] for rank in receipt["ranks"]] == [0, 1, 2, 3]
    assert {rank["outcomes"][0]["state"] for rank in receipt["ranks"]} == {"applied"}
    printed = [fasttrain("job", "logs", "--rank", rank).stdout.decode() for rank in "0123"]
    losses = [[line for line in text.splitlines() if "loss" in line] for text in printed]
    assert losses[0]
    assert losses == [losses[0]] * 4
    plans = [json.loads((folder / name / "plan.json").read_text()) for name in ("", "task-1")]
    backend = "torchrun" if tasks == "per-node" else "slurm"
    assert [plan["processes"]["value"]["backend"] for plan in plans] == [backend, backend]
    assert cluster.job_field(job_id(shared_folder), "JobState") == "COMPLETED"


# Each node has a cache of its own, as where homes aren't shared.
COMPILED = """
import os
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath("cache-" + os.environ["SLURM_NODEID"])
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    loss = net(torch.randn(8, 8)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
"""


def test_one_node_compiles_and_the_other_has_the_graphs_by_the_run_directory(
    fasttrain: Any, shared_folder: Path
) -> None:
    (shared_folder / "compiled.py").write_text(COMPILED)
    done = fasttrain(
        "slurm", "compiled.py", *TWO_NODES, "--nproc-per-node", "1", "--compile", "default",
        "--amp", "off", "--wait", timeout_s=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    receipt = json.loads((run_dir(shared_folder) / "receipt.json").read_text())
    outcomes = (one for rank in receipt["ranks"] for one in rank["outcomes"])
    found = [one for one in outcomes if one["lever"] == "compile"]
    assert [one["state"] for one in found] == ["applied", "applied"]
    counts = [one["counts"] for one in found]
    graphs, cached = ([it.get(name, 0) for it in counts] for name in ("graphs", "cached graphs"))
    assert graphs[0] == graphs[1] > 0
    assert sorted(cached) == [0, graphs[0]], "one has compiled, and the other none"
    (loads,) = (one for one in found if one["counts"].get("cached graphs"))
    assert any("another node" in note for note in loads["notes"])
    assert {path.name for path in shared_folder.glob("cache-*")} == {"cache-0", "cache-1"}


def test_submitits_own_view_agrees(fasttrain: Any, cluster: Any, shared_folder: Path) -> None:
    (shared_folder / "train.py").write_text("print('hello')")
    assert fasttrain("slurm", "train.py", "--nodes", "2", "--wait").returncode == 0
    code = (
        "import sys, submitit\n"
        "job = submitit.SlurmJob(sys.argv[1], sys.argv[2], tasks=[0, 1])\n"
        "print(job.results(), job.task(0).stdout().count('hello'))"
    )
    python = fasttrain.argv()[0]
    folder = run_dir(shared_folder) / "slurm"
    said = cluster.run(python, "-c", code, folder, job_id(shared_folder)).stdout
    assert said.strip() == "[0, 0] 1"


def test_the_script_and_its_shape_may_come_from_the_file(
    fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    (shared_folder / "train.py").write_text(TELL)
    (shared_folder / "fasttrain.yaml").write_text(
        "script: train.py\nargs: [--lr, 1e-3]\ndevice: cpu\nstrategy: none\n"
        "slurm:\n  time: 10\n  nproc_per_node: 2\n  cluster: here\n"
        "  clusters:\n    here: {job_name: of the profile}\n"
    )
    # The command of the design card, with nothing else.
    sent = fasttrain("slurm", "--nodes", "2", "--gpus-per-node", "8")
    assert sent.returncode == 0, sent.stderr.decode()
    done = fasttrain("job", "wait", timeout_s=240)
    assert done.returncode == 0, done.stderr.decode()
    told = [json.loads((shared_folder / f"told-{rank}.json").read_text()) for rank in range(4)]
    assert {tuple(each["args"]) for each in told} == {("--lr", "1e-3")}
    assert {each["env"]["WORLD_SIZE"] for each in told} == {"4"}
    number = job_id(shared_folder)
    assert cluster.job_field(number, "JobName") == "of the profile"
    assert cluster.job_field(number, "TimeLimit") == "00:10:00"
    assert cluster.job_field(number, "TresPerNode") == "gres:gpu:8"


def test_nodes_that_differ_end_the_job_and_say_how(fasttrain: Any, shared_folder: Path) -> None:
    (shared_folder / "train.py").write_text("print('never')")
    other = shared_folder / "other" / "torch"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    (other / "version.py").write_text("__version__ = '1.2.3'\ncuda = None\n")
    python = shared_folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'[ "$(hostname)" = node1 ] || export PYTHONPATH={shared_folder}/other\n'
        f'exec {fasttrain.argv()[0]} "$@"\n'
    )
    python.chmod(0o755)
    done = fasttrain("slurm", "train.py", "--nodes", "2", "--python", python, "--wait")
    assert done.returncode == 78, done.stderr.decode()
    said = done.stderr.decode()
    assert "[nodes-differ]" in said
    assert "torch" in said
    assert "1.2.3" in said
    assert not (run_dir(shared_folder) / "rank-0.log").exists()


def test_modules_and_other_commands_run_too(fasttrain: Any, shared_folder: Path) -> None:
    (shared_folder / "mod.py").write_text("import sys; print('module', sys.argv[1:])")
    assert fasttrain("slurm", "-m", "mod", "--wait", "--", "--x").returncode == 0
    assert fasttrain("job", "logs").stdout == b"module ['--x']\n"
    done = fasttrain(
        "slurm", "--no-python", "--wait", "--", "sh", "-c", "echo $0 $1; exit 9", "a b"
    )
    assert done.returncode == 9, done.stderr.decode()
    assert fasttrain("job", "logs").stdout == b"a b\n"


def test_arguments_and_variables_arrive_whole_and_nothing_else_is_run(
    fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    folder = shared_folder / 'it\'s "a" $(touch pwned);*[x] é #1'
    folder.mkdir()
    (folder / "te ll.py").write_text(TELL)
    stray = {"RANK": "3", "MASTER_ADDR": "evil", "MULTI": "a\nb", "WORLD_SIZE": "9"}
    done = fasttrain(
        "slurm", "te ll.py", "--wait", "--job-name", "a 'b' $(touch pwned)", "--comment",
        "x; touch pwned #", "--env", "MY_API_KEY=hunter2", "--", *ARGUMENTS, "--api-key",
        "hunter3", cwd=folder, env=stray,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    told = json.loads((folder / "told-0.json").read_text())
    assert tuple(told["args"]) == (*ARGUMENTS, "--api-key", "hunter3")
    assert told["env"]["MULTI"] == "a\nb"
    assert told["env"]["MY_API_KEY"] == "hunter2"
    assert (told["env"]["RANK"], told["env"]["MASTER_ADDR"]) == (None, None)
    assert cluster.job_field(job_id(folder), "JobName") == "a 'b' $(touch pwned)"
    assert not [path for path in shared_folder.rglob("p*") if path.name in ("pwned", "p")]
    written = [path for path in run_dir(folder).rglob("*") if path.is_file()]
    assert not [path for path in written if b"hunter" in path.read_bytes()]
    assert run_dir(folder).stat().st_mode & 0o77 == 0


def test_a_failing_rank_ends_the_job_in_seconds_with_its_code(
    fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    (shared_folder / "train.py").write_text(
        "import os, sys, time\n"
        "time.sleep(1)\n"
        "sys.exit(7) if os.environ['RANK'] == '3' else time.sleep(120)\n"
    )
    began_s = time.monotonic()
    done = fasttrain(
        "slurm", "train.py", *TWO_NODES, "--tasks", "per-gpu", "--nproc-per-node", "2",
        "--strategy", "none", "--max-restarts", "1", "--wait", timeout_s=240,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr.decode()
    assert time.monotonic() - began_s < 60
    number = job_id(shared_folder)
    assert cluster.job_field(number, "ExitCode") == "7:0"
    assert cluster.job_field(number, "Restarts") == "0"  # a failing script is not queued again
    assert json.loads((run_dir(shared_folder) / "receipt.json").read_text())["exit_code"] == 7


def test_the_rank_that_failed_first_is_told_whichever_its_node(
    fasttrain: Any, shared_folder: Path
) -> None:
    (shared_folder / "train.py").write_text(
        "import os, time\n"
        "time.sleep(1)\n"
        "if os.environ['RANK'] == '2':\n"
        "    raise ValueError('bad shard')\n"
        "time.sleep(60)\n"
    )
    done = fasttrain(
        "slurm", "train.py", *TWO_NODES, "--nproc-per-node", "2", "--strategy", "none", "--wait",
        timeout_s=240,
    )  # fmt: skip
    said = done.stderr.decode()
    assert done.returncode == 1
    assert "fasttrain: rank 2 " in said
    assert "ValueError: bad shard" in said
    assert "task-1/rank-2.log" in said


def test_a_cancelled_job_ends_with_time_to_save(
    fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    (shared_folder / "train.py").write_text(
        "import signal, sys, time\n"
        "def save(signum, frame):\n"
        "    signal.signal(signum, signal.SIG_IGN)  # without cgroups it comes from SLURM too\n"
        "    open('saved', 'w')\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('begun', flush=True)\n"
        "time.sleep(120)\n"
    )
    waiting = fasttrain.start("slurm", "train.py", "--wait")
    log = "fasttrain_runs/*/rank-0.log"
    cluster.until(
        lambda: [p for p in shared_folder.glob(log) if "begun" in p.read_text()], 30, lambda: log
    )
    assert fasttrain("job", "cancel").returncode == 0
    assert waiting.wait(120) == 3
    assert (shared_folder / "saved").exists()
    assert cluster.job_field(job_id(shared_folder), "JobState") == "CANCELLED"


def test_leaving_does_not_end_the_job(fasttrain: Any, cluster: Any, shared_folder: Path) -> None:
    (shared_folder / "train.py").write_text("import time; print('on', flush=True); time.sleep(60)")
    following = fasttrain.start("slurm", "train.py", "--follow", stdout=-1, stderr=-1)
    assert following.stdout.readline() == b"on\n"
    following.send_signal(signal.SIGINT)
    _, said = following.communicate(timeout=240)
    number = job_id(shared_folder)
    assert following.returncode == 130
    assert f"fasttrain job cancel {number}" in said.decode()
    assert cluster.job_field(number, "JobState") == "RUNNING"
    listed = json.loads(fasttrain("job", "list", "--json").stdout)["data"]
    assert [(row["job_id"], row["state"]) for row in listed] == [(number, "RUNNING")]


def test_a_sweep_is_one_array_with_a_table(
    fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    (shared_folder / "train.py").write_text(
        "import sys\n"
        "lr, seed = float(sys.argv[2]), int(sys.argv[4])\n"
        "print('loss', lr * 10 + seed)\n"
        "sys.exit(5 if (lr, seed) == (1e-4, 1) else 0)\n"
    )
    done = fasttrain(
        "slurm", "train.py", "--sweep", "lr=1e-3,1e-4", "--sweep", "seed=0:2", "--parallel", "2",
        "--wait", timeout_s=240,
    )  # fmt: skip
    assert done.returncode == 5, done.stderr.decode()
    number = job_id(shared_folder)
    cells = json.loads(fasttrain("job", "show", "--json").stdout)["data"]["cells"]
    assert [cell["exit_code"] for cell in cells] == [0, 0, 0, 5]
    assert [Path(cell["run_dir"]).name for cell in cells] == [f"cell-{n}" for n in range(4)]
    assert fasttrain("job", "logs", f"{number}_3").stdout == b"loss 1.001\n"
    table = fasttrain("job", "show", number).stdout.decode()
    assert all(text in table for text in ("1e-3", "loss 0.01", "FAILED"))
    assert cluster.run("squeue", "-h", "-t", "all", "-r", "-j", number).stdout.count("\n") == 4


def test_sending_needs_no_torch(fasttrain: Any, shared_folder: Path) -> None:
    (shared_folder / "train.py").write_text("import torch")
    # A login node without torch: an import of it would be an error.
    (shared_folder / "no").mkdir()
    (shared_folder / "no" / "torch.py").write_text("raise RuntimeError('torch was imported')")
    done = fasttrain("slurm", "train.py", env={"PYTHONPATH": str(shared_folder / "no")})
    assert done.returncode == 0, done.stderr.decode()
    assert fasttrain("job", "cancel").returncode == 0


def test_two_submissions_in_one_second_are_two_jobs(fasttrain: Any, shared_folder: Path) -> None:
    (shared_folder / "train.py").write_text("print(1)")
    both = [fasttrain.start("slurm", "train.py", "--wait", stderr=-1) for _ in range(2)]
    assert [each.communicate(timeout=240) and each.returncode for each in both] == [0, 0]
    assert len(list((shared_folder / "fasttrain_runs").glob("[!.]*/"))) == 2


def test_another_folder_finds_the_job_by_its_log(
    fasttrain: Any, cluster: Any, shared_folder: Path
) -> None:
    (shared_folder / "train.py").write_text("print('found')")
    assert fasttrain("slurm", "train.py", "--wait").returncode == 0
    elsewhere = shared_folder / "elsewhere"
    elsewhere.mkdir()
    assert fasttrain("job", "logs", job_id(shared_folder), cwd=elsewhere).stdout == b"found\n"
    foreign = cluster.submit("sleep 60")
    done = fasttrain("job", "cancel", foreign, cwd=elsewhere)
    assert b"[job-unknown]" in done.stderr
    assert cluster.job_field(foreign, "JobState") in ("PENDING", "RUNNING")


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        (("--nodes", "3"), "slurm-nodes"),
        (("--partition", "nope"), "slurm-partition"),
        (("--gpus-per-node", "9"), "slurm-resources"),
        (("--mem", "900G"), "slurm-resources"),
        (("--constraint", "zz"), "slurm-constraint"),
        (("--gpus", "0"), "slurm-option"),
        (("--run-dir", "x%u"), "slurm-folder"),
        (("--reservation", "nope"), "slurm-reservation"),
    ],
)
def test_what_slurm_or_we_refuse_leaves_nothing_behind(
    fasttrain: Any, shared_folder: Path, words: tuple[str, ...], slug: str
) -> None:
    (shared_folder / "train.py").write_text("print(1)")
    done = fasttrain("slurm", "train.py", *words)
    assert f"[{slug}]" in done.stderr.decode()
    assert done.returncode in (2, 78)
    assert not list((shared_folder / "fasttrain_runs").glob("[!.]*/"))


def test_an_sbatch_that_hangs_is_ended(fasttrain: Any, cluster: Any, shared_folder: Path) -> None:
    (shared_folder / "train.py").write_text("print(1)")
    tools = shared_folder / "tools"
    tools.mkdir()
    # timeout(1) itself is made impatient: the real one would wait for a minute.
    (tools / "sbatch").write_text("#!/bin/sh\nsleep 100\n")
    (tools / "timeout").write_text('#!/bin/sh\nshift 2\nexec /usr/bin/timeout 1 "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    path = {"PATH": f"{tools}:{os.environ['PATH']}"}
    done = fasttrain("slurm", "train.py", env=path)
    assert b"[slurm-hangs]" in done.stderr


def test_a_controller_that_is_down_is_told(fasttrain: Any, shared_folder: Path) -> None:
    (shared_folder / "train.py").write_text("print(1)")
    conf = (Path(fasttrain.environ["SLURM_CONF"])).read_text()
    lines = [line for line in conf.splitlines() if not line.startswith("SlurmctldPort")]
    (shared_folder / "slurm.conf").write_text(
        "\n".join([*lines, "SlurmctldPort=1", "SlurmctldTimeout=1", "MessageTimeout=2"]) + "\n"
    )
    done = fasttrain(
        "slurm", "train.py", env={"SLURM_CONF": str(shared_folder / "slurm.conf")}, timeout_s=240
    )
    assert b"[slurm-down]" in done.stderr, done.stderr
    assert done.returncode == 69
