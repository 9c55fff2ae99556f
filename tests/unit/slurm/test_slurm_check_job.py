"""What is in a job itself that would fail later."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fasttrain
from fasttrain.model.errors import FasttrainError
from fasttrain.model.plan import Evidence
from fasttrain.model.settings import ClusterFacts
from fasttrain.slurm.check import Checked, check
from fasttrain.slurm.check_facts import NeededPath, Seen, ToolResult, look

Judge = Callable[..., Checked]


@pytest.fixture
def judged(make_draft: Any) -> Judge:
    """Return what is found where these things were seen, in a job with these options."""

    def judge(seen: dict[str, Any] | None = None, **slurm: Any) -> Checked:
        return check(Seen(make_draft(**slurm), ClusterFacts(), {}, **(seen or {})))

    return judge


def told(found: Checked) -> list[tuple[str, str]]:
    return [(finding.check, finding.severity) for finding in found.findings]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"time": "2"}, []),
        ({"signal": "USR2@35"}, []),
        ({"signal": "USR2@34"}, [("slurm-signal", "warning")]),
        ({"time": "1"}, [("slurm-signal", "error")]),
        ({"time": "10", "signal": "USR1@600"}, [("slurm-signal", "error")]),
    ],
)
def test_a_signal_that_leaves_no_time(
    judged: Judge, options: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    found = judged(**options)
    assert told(found) == expected
    assert found.broken == any(severity == "error" for _, severity in expected)


def test_one_gpu_per_task_and_a_script_that_counts_them(judged: Judge) -> None:
    place = Evidence('os.environ["LOCAL_RANK"]', "train.py:3")
    seen = {"gpus_per_task": "--srun-args --gpus-per-task=1", "local_rank": place}
    (finding,) = judged(seen, tasks="per-gpu", gpus_per_node=8).findings
    assert (finding.check, finding.severity) == ("slurm-gpus-per-task", "error")
    assert finding.where == "train.py:3"
    seen.pop("local_rank")
    assert told(judged(seen, tasks="per-gpu", gpus_per_node=8)) == [
        ("slurm-gpus-per-task", "warning")
    ]
    assert told(judged(seen, gpus_per_node=8)) == []  # its only task has them all


@pytest.mark.parametrize(
    ("filesystem", "count"),
    [("tmpfs", 1), ("overlay", 1), ("ext4", 1), ("nfs4", 0), ("lustre", 0), ("fuse.x", 0), ("", 0)],
)
def test_folders_that_one_machine_has_for_itself(
    judged: Judge, filesystem: str, count: int
) -> None:
    found = judged({"places": (NeededPath("the run directory", "/runs/run", filesystem),)})
    assert told(found) == [("slurm-shared", "warning")] * count


def test_places_of_one_file_system_are_told_together_and_those_below_others_not(
    judged: Judge,
) -> None:
    places = (
        NeededPath("the working directory", "/w", "ext4"),
        NeededPath("the run directory", "/w/runs/1", "ext4"),
        NeededPath("the interpreter", "/usr/bin/python", "overlay"),
        NeededPath("fasttrain", "/lib/fasttrain", "ext4"),
    )
    first, second = judged({"places": places}).findings
    assert "ext4" in first.what
    assert first.what.endswith(": the working directory (/w), fasttrain (/lib/fasttrain)")
    assert second.what.endswith(": the interpreter (/usr/bin/python)")


@pytest.mark.parametrize(
    ("trial", "word"),
    [
        (ToolResult(f"{fasttrain.__version__}\n"), ""),
        (ToolResult("0.0.1\n"), "0.0.1"),
        (
            ToolResult("Traceback\nModuleNotFoundError: no fasttrain\n", "it ended"),
            "ModuleNotFound",
        ),
        (ToolResult("", "/p gave no answer in 20 s"), "no answer"),
    ],
)
def test_the_nodes_interpreter(judged: Judge, trial: ToolResult, word: str) -> None:
    found = judged({"python": trial}, python="/p")
    assert told(found) == [("slurm-python", "error")] * bool(word)
    assert all(word in f"{finding.what} {finding.why}" for finding in found.findings)


# sbatch's answers recorded on SLURM 22.05.8.
STARTS = (
    "sbatch: Job 55323654 to start at 2026-11-22T04:44:43 using 2 processors on nodes node[1-2] in"
    " partition main\n"
)


def test_sbatch_foretells_the_start(judged: Judge) -> None:
    found = judged({"sent": ToolResult(STARTS)})
    assert (found.findings, found.sbatch) == ((), STARTS.strip())
    assert found.start.startswith("to start at 2026-11-22T04:44:43 using 2 processors")
    assert judged({"sent": ToolResult("some other words\n")}).start == ""


@pytest.mark.parametrize(
    ("said", "slug", "why"),
    [
        (
            "allocation failure: Requested node configuration is not available",
            "slurm-resources",
            "Requested node configuration",
        ),
        (
            "sbatch: error: invalid partition specified: nope\n"
            "allocation failure: Invalid partition name specified",
            "slurm-partition",
            "invalid partition specified: nope",
        ),
        ("sbatch: error: something new", "slurm-refused", "something new"),
        ("", "slurm-hangs", "it failed"),
    ],
)
def test_sbatchs_refusal_is_told_in_its_words(
    judged: Judge, said: str, slug: str, why: str
) -> None:
    found = judged({"sent": ToolResult(said, "it failed")})
    (finding,) = found.findings
    assert (finding.check, finding.severity, found.start) == (slug, "error", "")
    assert why in finding.why


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Put an sbatch on PATH that shows its script, and its environment, and nothing else."""
    for name, text in {"sbatch": 'cat "$2"; env', "srun": "true"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def test_sbatch_gets_the_very_script_without_the_variables_left_out(
    make_draft: Any, tools: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    environ = {**tools, "SBATCH_PARTITION": "low"}
    seen = look(make_draft(environ=environ, partition="main", sweep=("a=1,2",)), environ)
    assert "#SBATCH --partition=main\n" in seen.sent.said
    assert "#SBATCH --array=0-1%2\n" in seen.sent.said
    assert "SBATCH_PARTITION=low" not in seen.sent.said
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["sbatch", "srun"]


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (("module load cuda", "if true; then", "echo a", "fi"), ""),
        (("touch ran",), ""),
        (("a=1", 'echo "a', "b=2"), 'echo "a'),
        (("a=1", "fi", "b=2"), "fi"),
        (("for x in 1; do", "a=1"), "a=1"),
    ],
)
def test_setup_lines_are_read_by_bash_and_never_run(
    make_draft: Any, tools: dict[str, str], lines: tuple[str, ...], wrong: str
) -> None:
    seen = look(make_draft(setup=lines), tools)
    found = [finding for finding in check(seen).findings if finding.check == "slurm-setup"]
    assert len(found) == bool(wrong)
    assert all(finding.what.startswith("--setup ") for finding in found)
    assert all(finding.what.endswith(f": {wrong!r}") for finding in found)
    assert not Path("ran").exists()


def test_an_interpreter_is_tried_only_where_it_is_another(
    make_draft: Any, tools: dict[str, str], tmp_path: Path
) -> None:
    assert look(make_draft(), tools).python is None
    assert look(make_draft(python=sys.executable), tools).python is None
    other = tmp_path / "other python"
    other.write_text('#!/bin/sh\necho "$2" >&2\nexit 1\n')
    other.chmod(0o755)
    trial = look(make_draft(python=str(other)), tools).python
    assert trial is not None
    assert "import fasttrain.slurm.node_task" in trial.said


@pytest.mark.parametrize(
    ("options", "environ", "expected"),
    [
        ({"sbatch": ("gpus_per_task=1",)}, {}, "--sbatch gpus_per_task=1"),
        ({"srun_args": ("--gpus-per-task", "1")}, {}, "--srun-args --gpus-per-task"),
        ({}, {"SBATCH_GPUS_PER_TASK": "1"}, "SBATCH_GPUS_PER_TASK"),
        ({"gpus_per_node": 8}, {"SBATCH_GPUS_PER_TASK": "1"}, ""),
        ({"sbatch": ("gres-flags=x",)}, {}, ""),
    ],
)
def test_who_binds_gpus_to_tasks(
    make_draft: Any,
    tools: dict[str, str],
    options: dict[str, Any],
    environ: dict[str, str],
    expected: str,
) -> None:
    Path("train.py").write_text('import os\nos.environ["LOCAL_RANK"]\n')
    seen = look(make_draft(environ=environ, **options), {**tools, **environ})
    assert seen.gpus_per_task == expected
    assert bool(seen.local_rank) == bool(expected)


def test_without_slurm_there_is_nothing_to_check(make_draft: Any, tmp_path: Path) -> None:
    with pytest.raises(FasttrainError) as caught:
        look(make_draft(), {"PATH": str(tmp_path)})
    assert caught.value.slug == "slurm-missing"
