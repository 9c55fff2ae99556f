"""Entry point of a worker: ``python SHIM PLAN script|module TARGET [ARGS...]``."""

import sys

if __name__ == "__main__":
    # Started by path, so that nothing in the working directory can shadow a standard module;
    # for the same reason this folder leaves the path before anything else is imported.
    if not sys.flags.safe_path:
        del sys.path[0]
    from fasttrain.shim.worker import main

    main(sys.argv[1:])
