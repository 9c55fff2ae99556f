"""The C++ compiler that torch.compile's CPU code would be built with."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping


def find_cxx_compiler(environ: Mapping[str, str], *, system: str = "") -> str:
    """Give the path of the compiler that inductor would call; empty if it would find none.

    Inductor calls ``$CXX``, or else ``g++`` (``clang++`` on macOS), and looks no further: with
    clang++ alone on Linux it fails, as it does with ``CXX="ccache g++"``, two words.

    Source: torch 2.13.0, torch/_inductor/config.py, ``cpp.cxx``.
    """
    usual = "clang++" if (system or platform.system()) == "Darwin" else "g++"
    name = environ.get("CXX", usual)
    return shutil.which(name, path=environ.get("PATH", os.defpath)) or ""
