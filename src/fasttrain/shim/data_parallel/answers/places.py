"""Finds the line of the user's code that asks for something, and numbers it alike on all ranks."""

from __future__ import annotations

import re
import sys
import sysconfig
import tempfile
import zlib
from enum import Enum, auto
from functools import cache
from types import CodeType, FrameType
from typing import Any

from fasttrain.model.places import REPLAYED_FILES
from fasttrain.shim.process.callsite import is_installed, is_own_file, location, own_prefixes

MOST = 4096  # places remembered at once: a script that compiles code has ever new ones
_STDLIB = sysconfig.get_path("stdlib")
# Modules of the standard library that only forward their caller's request to the operating system.
_PASSING = (
    "/pathlib.py", "/pathlib/__init__.py", "/pathlib/_local.py", "/pathlib/_abc.py",
    "/pathlib/_os.py", "/os.py", "/genericpath.py", "/posixpath.py", "/glob.py", "/shutil.py",
    "/contextlib.py", "/logging/__init__.py", "/logging/handlers.py", "/logging/config.py",
    "/zipfile.py", "/zipfile/__init__.py", "/tarfile.py", "/gzip.py", "/bz2.py", "/lzma.py",
    "/configparser.py", "/fileinput.py", "/filecmp.py", "/xml/etree/ElementTree.py", "/wave.py",
    "/random.py", "/secrets.py", "/uuid.py", "/functools.py", "/shelve.py", "/dbm/__init__.py",
    "/dbm/dumb.py", "/sqlite3/__init__.py", "/sqlite3/dbapi2.py",
)  # fmt: skip
_LOGGING = ("/logging/__init__.py", "/logging/handlers.py")
# Functions of libraries that write a file named by their caller, such as np.save, to_csv, imwrite.
_SAVING = re.compile(r"_*(save|to_|dump|write|m?im(write|save)|export|open_memmap)")
_ONNX = "/torch/onnx/"
_MAPPING = "/memmap.py"  # NumPy's: the caller changes the mapped file by assignments


class _Kind(Enum):
    USERS = auto()
    PASSING = auto()
    LIBRARY = auto()
    NOT_ASKING = auto()  # the import system, torch, or fasttrain itself


@cache
def _kind(path: str) -> _Kind:
    if is_own_file(path):
        return _Kind.PASSING if path.endswith(REPLAYED_FILES) else _Kind.NOT_ASKING
    if path.startswith("<"):
        return _Kind.NOT_ASKING if "importlib" in path else _Kind.PASSING
    if path.startswith(_STDLIB) and path.endswith(_PASSING):
        return _Kind.PASSING
    if path.startswith(_program()):
        return _Kind.USERS
    if path.startswith(own_prefixes()):  # torch's: saving checkpoints is wrapped separately
        return _Kind.LIBRARY if _ONNX in path else _Kind.NOT_ASKING
    return _Kind.LIBRARY if is_installed(path) else _Kind.USERS


@cache
def _program() -> tuple[str, ...]:
    """Return the folder of the package that runs as ``-m``, which may be installed."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    package = sys.modules.get(spec.name.partition(".")[0]) if spec is not None else None
    return tuple(f"{folder}/" for folder in getattr(package, "__path__", ()))


def is_users(path: str) -> bool:
    """True if a file of code is neither installed nor fasttrain's."""
    return _kind(path) is _Kind.USERS


def is_handing_on(path: str) -> bool:
    """True if a file of code is fasttrain's, or only forwards its caller's requests."""
    return _kind(path) in (_Kind.PASSING, _Kind.NOT_ASKING)


def asking(frame: FrameType | None, *, for_libraries: bool = False) -> FrameType | None:
    """Return the frame of the user's code that asks; None if a library asks for itself.

    Args:
        frame: The caller of the patched function.
        for_libraries: Count a library's request as that of the user's code which has called it.
    """
    library = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path == tempfile.__file__:
            return None  # each rank has its own temporary files
        kind = _kind(path)
        if kind is _Kind.PASSING and path.endswith(_LOGGING):
            for_libraries = True  # as for Hydra's handlers: no library reads its log again
        if kind is _Kind.USERS:
            return frame if for_libraries or _is_for_caller(library) else None
        if kind is _Kind.NOT_ASKING:
            return None
        if kind is _Kind.LIBRARY:
            library = frame.f_code.co_name
            if path.endswith(_MAPPING):
                library = "open_memmap"
        frame = frame.f_back
    return None


def _is_for_caller(library: str) -> bool:
    return not library or _SAVING.match(library) is not None


def outside_of_torch(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame that is neither torch's nor fasttrain's."""
    prefixes = own_prefixes()
    while frame is not None and frame.f_code.co_filename.startswith(prefixes):
        frame = frame.f_back
    return frame


def users_place(thread: int) -> str:
    """Return the line of the user's code at which a thread is."""
    frame = sys._current_frames().get(thread)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return location(frame.f_code.co_filename, frame.f_lineno) if frame else "unknown"


class Places:
    """Numbers places (a line and what it does), and publishes them in words.

    Args:
        store: Key-value store of all ranks.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._known: dict[tuple[int, int, str], int] = {}
        self._codes: list[CodeType] = []  # kept alive, so that their ids aren't reused

    def number(self, frame: FrameType, doing: str) -> int:
        """Return the number of a frame's line and action: below 2**31 and never 0.

        Args:
            frame: A frame of the user's code.
            doing: What it does, in words that continue "is to".
        """
        key = (id(frame.f_code), frame.f_lasti, doing)
        number = self._known.get(key)
        if number is None:
            number = self._new(frame, doing)
            if len(self._known) >= MOST:
                self._known.clear()
                self._codes.clear()
            self._codes.append(frame.f_code)
            self._known[key] = number
        return number

    def _new(self, frame: FrameType, doing: str) -> int:
        path, line = frame.f_code.co_filename, frame.f_lineno
        number = zlib.crc32(f"{doing} {path}:{line}".encode()) & 0x7FFFFFFF or 1
        self._store.set(f"place/{number}", f"{doing} at {location(path, line)}")
        return number

    def words(self, number: int) -> str:
        """Return in words what a rank does at the place of this number."""
        key = f"place/{number}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else "end"
