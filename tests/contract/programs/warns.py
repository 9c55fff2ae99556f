"""Warns from itself, through a function, and from a module."""

import warnings

import warns_too


def old_function() -> None:
    warnings.warn("use the new one", DeprecationWarning, stacklevel=2)


warnings.warn("from the script")  # noqa: B028
old_function()
warns_too.warn()
warnings.warn("told once", ResourceWarning, stacklevel=1)
warnings.warn("of the future", FutureWarning, stacklevel=1)
for _ in range(2):
    warnings.warn("told once in a loop", RuntimeWarning, stacklevel=1)
