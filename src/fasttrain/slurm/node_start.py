"""The program of a task, ``python -m fasttrain.slurm.node_start FOLDER``: a check, then submitit.

submitit loads the job's pickle first of all, and a pickle can run any code. So this program has to
check before that whether anybody else could have written to the run directory.
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
