"""Runs one script as ``python`` or a worker would, in a process that has imported torch already."""

import atexit
import io
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import torch

job = globals()["JOB"]
os.chdir(job["cwd"])
os.environ.update(job["environ"])
for name, descriptor in (("stdout", 1), ("stderr", 2)):
    with Path(name).open("wb") as file:
        os.dup2(file.fileno(), descriptor)
    # Both were inherited; a test runner may have put something else in their place.
    setattr(sys, name, io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False)))
torch.set_num_threads(1)
multiprocessing.set_start_method(None, force=True)  # a helper passes its own on to its children
sys.argv = [job["script"], *job["args"]]
sys.path.insert(0, str(Path(job["script"]).parent))
try:
    if job.get("plan"):
        from fasttrain.shim import worker

        vars(worker)["after_torch"] = lambda install: install()  # it is imported already
        try:
            worker.main([job["plan"], "script", job["script"]])
        finally:
            atexit._run_exitfuncs()  # the receipt is written there
    else:
        runpy.run_path(job["script"], run_name="__main__")
finally:
    sys.stdout.flush()
