"""Entry point of a worker: ``python SHIM PLAN script|module TARGET [ARGS...]``."""

import os
import sys

if __name__ == "__main__":
    # Started by path, so that nothing in the working directory can shadow a standard module;
    # for the same reason this folder leaves the path before anything else is imported.
    if not sys.flags.safe_path:
        del sys.path[0]
    # The Python that runs this may have no fasttrain, or another one: this one is taken, and
    # nothing else from the folder that it is installed in.
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))  # noqa: PTH100
    import fasttrain  # noqa: F401

    del sys.path[0]
    from fasttrain.shim.worker import main

    main(sys.argv[1:])
