import warnings


def warn() -> None:
    warnings.warn("deprecated in a module: not told", DeprecationWarning, stacklevel=1)
    warnings.warn("from a module, told at its caller", UserWarning, stacklevel=2)
