"""``python tests/slurm_cluster up``: a throw-away SLURM cluster on this machine."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a folder, the modules would lie at the top, under names as common as `network`.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from slurm_cluster.commands import main

    sys.exit(main())
