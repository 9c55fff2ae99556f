"""Where runs and caches are stored, and the marks by which processes of a run are found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import fasttrain

RUN_MARK = "FASTTRAIN_RUN_ID"  # every process of a run has the run's name there
RUNS_FOLDER = "fasttrain_runs"  # in the working directory, for runs without --run-dir
LOCK_FILE = "launcher.lock"  # in a run directory; locked while its launcher lives
SCRATCH = "/var/tmp"  # noqa: S108 - on a disk; what is made there is private, see `scratch_folder`
SNAPSHOTS_FOLDER = "snapshots"  # in the run directory
COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
COMPILED_FOLDER = "inductor"  # in the cache; triton's kernels are in a folder of inductor's

# Files of fasttrain that other processes know by name: programs that are started by path, and files
# whose frames mean something in a stack or a traceback. Each is relative to the package's parent.
# When a file moves and its name here does not, hang verdicts and the search for orphans break
# without an error; a test compares every name with the tree.
PACKAGE = Path(fasttrain.__file__).parent
WORKER_PROGRAM = "fasttrain/shim/__main__.py"
AGENT_PROGRAM = "fasttrain/agent/agent.py"
LAUNCHER_PROGRAM = "fasttrain/__main__.py"
TASK_MODULE = "fasttrain.slurm.node_start"
GUARDIAN_PROGRAM = "fasttrain/processes/guardian.py"
REMAINING_OUTPUT_PROGRAM = "fasttrain/processes/remaining_output.py"
BENCH_PROGRAM = "fasttrain/probes/bench.py"
TRIAL_PROGRAM = "fasttrain/probes/trial.py"
SPAWN_MODULE = "fasttrain.shim.multiprocessing_hooks"  # in the command line of a spawned child
WORKER_FOLDER = "fasttrain/shim/"
RANKS_WAIT_IN = (
    "fasttrain/shim/data_parallel/ranks.py",
    "fasttrain/shim/data_parallel/node_memory.py",
    "fasttrain/shim/data_parallel/answers/answers.py",
)
REPLAYED_FILES = "fasttrain/shim/snapshots/replayed_files.py"


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return fasttrain's folder in the user's cache.

    Source: XDG Base Directory Specification 0.8: a relative XDG_CACHE_HOME is ignored.
    """
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    home = Path(environ.get("HOME") or Path.home())
    return (base if base.is_absolute() else home / ".cache") / "fasttrain"


def scratch_folder(run_id: str) -> Path:
    """Return the folder that takes what the script of a run that tunes writes.

    Raises:
        ValueError: If the name of the run could lead elsewhere.
    """
    if "/" in run_id or not run_id:
        raise ValueError(f"{run_id!r} is no name of a run")
    return Path(SCRATCH, f"fasttrain-{run_id}")


def program(name: str) -> str:
    """Return the path of one of fasttrain's own files, such as `WORKER_PROGRAM`."""
    return str(PACKAGE.parent / name)
