"""Runs many training scripts in one process, each in a directory of its own.

The arguments are the scripts' paths. Starting several ranks takes seconds, and so one launch makes
do for many: for fasttrain this file is the training script. A line ``=== NAME`` stands in front of
what each script prints, and ``ERROR TYPE MESSAGE`` in the place of what it didn't come to. Whatever
ends a process ends this one too. With ``--lazily`` in front of the paths, outputs of models are
gathered when they are used, as large ones are, whatever their size.
"""

from __future__ import annotations

import gc
import os
import random
import runpy
import sys
from pathlib import Path

import numpy as np
import torch


def run_one(path: Path) -> None:
    """Run a script as ``python`` would, from random numbers that don't depend on other scripts."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        runpy.run_path(str(path), run_name="__main__")
    except Exception as error:  # noqa: BLE001 - of the script, and told
        sys.stdout.write(f"ERROR {type(error).__name__} {str(error).partition(chr(10))[0]}\n")
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        gc.collect()  # what has cycles, such as gradients that have a graph


def main() -> None:
    """Run the scripts one after the other."""
    home = Path.cwd()
    gc.freeze()  # torch itself, which takes longer to look through than a script to run
    scripts = sys.argv[1:]
    if scripts[0] == "--lazily":
        del scripts[0]
        sys.modules["fasttrain.shim.data_parallel.split.row_operators"].LARGE = 1  # type: ignore[attr-defined]
    for argument in scripts:
        path = Path(argument)
        sys.stdout.write(f"=== {path.stem}\n")
        sys.stdout.flush()
        own = home / path.stem
        own.mkdir(exist_ok=True)
        os.chdir(own)
        try:
            run_one(path)
        finally:
            os.chdir(home)
    sys.stdout.write("=== end\n")


if __name__ == "__main__":
    main()
