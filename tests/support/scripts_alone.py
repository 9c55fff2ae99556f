"""Runs one script as ``python`` or a worker would, in a process that has imported torch already."""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def run_alone(job: Mapping[str, Any]) -> None:
    """Run a script in this process, which is to do nothing else.

    Args:
        job: ``script`` and its ``args``; ``cwd``, where it makes the files ``stdout`` and
            ``stderr``; ``environ``, which is added; ``plan``, the path of a worker's plan, if any.
    """
    os.chdir(job["cwd"])
    os.environ.update(job["environ"])
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with Path(name).open("wb") as file:
            os.dup2(file.fileno(), descriptor)
        # Both were inherited; a test runner may have put something else in their place.
        setattr(sys, name, io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False)))
    torch.set_num_threads(1)
    # A helper passes its own method on to its children.
    multiprocessing.set_start_method(None, force=True)
    sys.argv = [job["script"], *job["args"]]
    sys.path.insert(0, str(Path(job["script"]).parent))
    try:
        if job.get("plan"):
            _run_worker(job["plan"], job["script"])
        else:
            runpy.run_path(job["script"], run_name="__main__")
    finally:
        sys.stdout.flush()


def _run_worker(plan: str, script: str) -> None:
    from fasttrain.shim import worker

    vars(worker)["after_torch"] = lambda install: install()  # it is imported already
    try:
        worker.main([plan, "script", script])
    finally:
        atexit._run_exitfuncs()  # the receipt is written there
