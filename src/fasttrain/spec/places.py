"""Where runs and caches lie, and what the processes of a run are known by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

RUN_MARK = "FASTTRAIN_RUN_ID"  # every process of a run has the run's name there
RUNS_FOLDER = "fasttrain_runs"  # of the working directory, for runs for which no other was named
LOCK_FILE = "launcher.lock"  # in a run directory: held as long as its launcher lives
SNAPSHOTS_FOLDER = "snapshots"  # in the run directory
COMPILED_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
COMPILED_FOLDER = "inductor"  # of the cache; triton's kernels lie below inductor's


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Give fasttrain's folder in the user's cache.

    Source: XDG Base Directory Specification 0.8: a relative XDG_CACHE_HOME is ignored.
    """
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    home = Path(environ.get("HOME") or Path.home())
    return (base if base.is_absolute() else home / ".cache") / "fasttrain"
