# ruff: noqa: T201
import sys

from . import part
from .part import PART

print(PART, part.__name__, __package__, __spec__.name if __spec__ else None, __file__)
print(sys.argv, sys.path[0], list(globals()))
