"""Entry point of a worker: ``python SHIM PLAN script|module TARGET [ARGS...]``."""

import os
import sys

if __name__ == "__main__":
    # Python puts the folder of a program at the head of sys.path. It is removed before anything
    # else is imported, because its files could shadow modules of the standard library.
    if not sys.flags.safe_path:
        del sys.path[0]
    # The user's Python may have no fasttrain, or another version. This one is imported, and its
    # folder (often site-packages) is on the path for this one import only.
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))  # noqa: PTH100
    import fasttrain  # noqa: F401

    del sys.path[0]
    from fasttrain.shim.worker import main

    main(sys.argv[1:])
