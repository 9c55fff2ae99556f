# ruff: noqa: T201, PTH107, PTH110, PTH118, PTH120
"""Pulls the ground from under itself, then fails: the traceback shows what is still there."""

import os
import sys

how = sys.argv[1]
if how == "chdir":
    os.chdir("/")
elif how == "delete":
    os.remove(__file__)
elif how == "path":
    sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "parcel"))
    import part

    print(part.__name__, part.PART)
elif how == "modules":
    del sys.modules["__main__"]
print(__file__, os.path.exists(__file__))
raise RuntimeError(how)
