"""The program of a task, ``python -m fasttrain.slurm.node_start FOLDER``: submitit behind a check.

A pickle is a program. submitit loads that of the job first of all, so what is asked here can't be
asked later: whether the run directory is still one that nobody else could write to.
"""

from __future__ import annotations

import sys
from pathlib import Path

from submitit.core.submission import submitit_main

from fasttrain.launch.run_dir.lock import check_private
from fasttrain.model.errors import FasttrainError

if __name__ == "__main__":
    try:
        check_private(Path(sys.argv[1]).parent)
    except FasttrainError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(int(error.exit_code))
    submitit_main()
