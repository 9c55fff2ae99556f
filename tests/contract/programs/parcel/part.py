# ruff: noqa: T201
import sys

PART = "a part"
if __name__ == "__main__":
    print(PART, __package__, __spec__.name if __spec__ else None, sys.argv, sys.path[0])
    if sys.argv[1:] == ["fail"]:
        raise ValueError("a module fails")
