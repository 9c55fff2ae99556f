"""``python -m fasttrain`` and the ``fasttrain`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and leave with its exit code."""
    try:
        from fasttrain.cli.app import main as run
    except KeyboardInterrupt:  # ctrl-C while half a second of imports runs: nothing has begun
        sys.exit(130)
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
