"""Snapshots on disk: each is a directory with a manifest, and complete as soon as it has its name.

A snapshot is written under a draft name. Its files and then its directory are synced to the disk,
and only then is the directory renamed. The last two are kept, in case the newest gets damaged.

A snapshot holds only tensors, numbers, strings and containers of them, so that
`torch.load(weights_only=True)` can read it: a pickle names classes and functions, which loading it
would call.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import shutil
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fasttrain.files import load, refused_folder
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.errors import FasttrainError
from fasttrain.model.places import SNAPSHOTS_FOLDER
from fasttrain.shim.process.refusal import refuse

# The messages of a resumed run, and the errors that end it.


def log(text: str) -> None:
    """Print a line to stderr: stdout belongs to the script."""
    print(f"fasttrain: {text}", file=sys.stderr, flush=True)  # noqa: T201


def refuse_diverged(why: str) -> NoReturn:
    """End the run since the script took another path than before."""
    refuse(
        FasttrainError(
            "the run can't go on from its snapshot",
            why=f"the script took another path than the run that took the snapshot: {why}",
            fix="let the loop's decisions depend on seeds, losses and counts, not on the time or"
            " the machine; without --resume the run starts from the beginning",
            slug="snapshot-diverged",
        )
    )


def refuse_mismatch(why: str) -> NoReturn:
    """End the run since the snapshot is another run's."""
    refuse(
        FasttrainError(
            "the snapshot belongs to another run",
            why=why,
            fix="start the run as before, or without --resume to start from the beginning",
            slug="snapshot-mismatch",
        )
    )


@contextmanager
def refusing_what_fails(doing: str) -> Iterator[None]:
    """End the run if the block fails: the script would go on with half of its state.

    Args:
        doing: What the failure means, such as ``the snapshot can't be restored``.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever failed, half a snapshot is useless
        refuse(
            FasttrainError(
                f"--preempt snapshot fails: {doing}",
                why=f"{type(error).__name__}: {error}",
                fix="use the versions of fasttrain and torch that took the snapshot; without"
                " --resume the run starts from the beginning, and with --preempt signal it takes"
                " no snapshots",
                slug="snapshot-failed",
            )
        )


_KIND, _OF = "fasttrain: kind", "of"  # keys of a dictionary that encodes another type
_AS_THEY_ARE = frozenset({type(None), bool, int, float, str})
_KINDS = (Counter, OrderedDict, set, frozenset, torch.Size)
_MAKE: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: kind for kind in _KINDS},
    "deque": lambda items_and_maxlen: deque(*items_and_maxlen),
    "Counter": lambda pairs: Counter(dict(pairs)),  # Counter(pairs) would count the pairs
}


class NeedsPickleError(Exception):
    """Raised if something can't be saved without pickling it.

    Attributes:
        where: Where it is, such as ``schedulers.0.state.model``.
        kind: Its type.
    """

    def __init__(self, where: str, kind: type) -> None:
        super().__init__(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        self.where, self.kind = where, kind


def packed(value: Any, where: str = "") -> Any:
    """Return a value in plain types.

    Raises:
        NeedsPickleError: If it holds anything that has no such form.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if isinstance(value, Tensor):
        return _tensor(value, where)
    if kind is dict:
        return {_key(key, where): packed(item, f"{where}.{key}") for key, item in value.items()}
    if kind in (list, tuple):
        if _AS_THEY_ARE.issuperset(map(type, value)):  # a million recorded numbers: no copy
            return value
        return kind(packed(item, f"{where}.{index}") for index, item in enumerate(value))
    return _encoded(value, kind, where)


def unpacked(value: Any) -> Any:
    """Return the value that `packed` was called with."""
    if type(value) in (list, tuple):
        if _AS_THEY_ARE.issuperset(map(type, value)):
            return value
        return type(value)(map(unpacked, value))
    if type(value) is not dict:
        return value
    if _KIND not in value:
        return {key: unpacked(item) for key, item in value.items()}
    name, of = value[_KIND], unpacked(value[_OF])
    if name == "device":
        return torch.device(of)
    if name == "numpy":
        return _numpy_again(*of)
    return _content(of) if name == "bytes" else _MAKE[name](of)


def _key(key: Any, where: str) -> Any:
    if type(key) not in _AS_THEY_ARE or key == _KIND:
        raise NeedsPickleError(f"a key of {where}", type(key))
    return key


def _tensor(tensor: Tensor, where: str) -> Tensor:
    own = tensor.detach()
    if type(own) is not Tensor:
        raise NeedsPickleError(where, type(own))
    # torch.save writes a slice with its whole storage, so that a small slice is copied first.
    whole = own.layout is not torch.strided or _storage_bytes(own) <= own.nelement() * own.itemsize
    return own if whole else own.clone()


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _encoded(value: Any, kind: type, where: str) -> dict[str, Any]:
    """Return a dictionary that encodes a type which ``weights_only`` doesn't read."""
    numpy = sys.modules.get("numpy")
    if kind in _KINDS:
        pairs = isinstance(value, dict)
        return {_KIND: kind.__name__, _OF: packed(list(value.items() if pairs else value), where)}
    if kind is deque:
        return {_KIND: "deque", _OF: packed((list(value), value.maxlen), where)}
    if kind is torch.device:
        return {_KIND: "device", _OF: str(value)}
    if kind is bytes:
        return {_KIND: "bytes", _OF: _bytes(value)}
    if numpy and isinstance(value, numpy.generic | numpy.ndarray) and not value.dtype.hasobject:
        shape = value.shape if isinstance(value, numpy.ndarray) else None
        return {_KIND: "numpy", _OF: (value.dtype.str, shape, _bytes(value.tobytes()))}
    raise NeedsPickleError(where, kind)


def _bytes(value: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(value), dtype=torch.uint8)
        if value
        else torch.empty(0, device="cpu")
    )


def _content(of: Tensor) -> bytes:
    """Return what `_bytes` was called with; by address, as NumPy may be missing."""
    return ctypes.string_at(of.data_ptr(), of.nbytes) if of.numel() else b""


def _numpy_again(dtype: str, shape: tuple[int, ...] | None, of: Tensor) -> Any:
    numpy = importlib.import_module("numpy")  # torch imports it if it is installed
    flat = numpy.frombuffer(of.numpy().tobytes(), dtype=dtype)
    return flat[0] if shape is None else flat.reshape(shape).copy()


KEPT = 2
_MANIFEST, _DRAFT = "manifest.json", "draft-"
_NAMED = "step-*"


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a snapshot and its files.

    Attributes:
        step: Number of optimizer steps made before it.
        identity: Properties that a run must share to resume from it, by name.
        files: SHA-256 of each file, by name.
    """

    step: int
    identity: dict[str, str]
    files: dict[str, str]
    schema: int = 1


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """A snapshot whose files match its manifest."""

    path: Path
    manifest: Manifest

    def read(self, name: str) -> Any:
        """Return the content of one of its files, without running code from it."""
        return unpacked(torch.load(self.path / name, weights_only=True))


class UntrustedError(Exception):
    """Raised if other users could have written what would be read."""


class Snapshots:
    """The snapshots of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / SNAPSHOTS_FOLDER

    def prepare(self) -> None:
        """Create the folder.

        Raises:
            UntrustedError: If others can write into it.
            OSError: If it can't be created.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._check()

    def write(self, name: str, content: Any, step: int) -> str:
        """Write one file of the snapshot in progress; return the file's SHA-256.

        Raises:
            OSError: If it can't be written.
            NeedsPickleError: If something in it would have to be pickled.
        """
        draft = self._draft(step)
        for folder in (self._folder, draft):  # several ranks create them at once
            folder.mkdir(mode=0o700, exist_ok=True)
        path = draft / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w+b") as file:
            torch.save(packed(content, name), file)
            file.flush()
            os.fsync(file.fileno())
        return _digest(path)

    def finish(self, manifest: Manifest) -> None:
        """Rename the draft to its final name once all files are written; delete older snapshots.

        Raises:
            OSError: If a file is missing here, or the manifest can't be written.
        """
        draft, final = self._draft(manifest.step), self.place(manifest.step)
        for name in manifest.files:  # a rank on another node may have another disk
            (draft / name).stat()
        descriptor = os.open(draft / _MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(dumps(manifest))
            file.flush()
            os.fsync(file.fileno())
        # Files, their directory, the rename: after a power cut a named snapshot is complete.
        _sync(draft)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one, which no run resumed from
        draft.rename(final)
        _sync(self._folder)
        for path in [*self._named()[KEPT:], *self._folder.glob(f"{_DRAFT}*")]:
            shutil.rmtree(path)

    def newest(self) -> FoundSnapshot | None:
        """Return the newest undamaged snapshot; log each one that is skipped.

        Raises:
            UntrustedError: If others could have written it.
        """
        if self.any:
            self._check()
        for path in self._named():
            manifest, why = _checked(path)
            if manifest is not None and not why:
                return FoundSnapshot(path, manifest)
            log(f"the snapshot {path.name} is skipped: {why}")
        return None

    def named(self, name: str) -> FoundSnapshot:
        """Return a snapshot that another rank has checked.

        Raises:
            UntrustedError: If others could have written it.
            OSError, CodecError: If it can't be read here.
        """
        self._check()
        path = self._folder / name
        return FoundSnapshot(path, load(Manifest, path / _MANIFEST))

    def place(self, step: int) -> Path:
        """Return the folder of the snapshot of a step."""
        return self._folder / f"step-{step:09d}"

    @property
    def any(self) -> bool:
        """True if there is one, damaged or not."""
        return bool(self._named())

    def _check(self) -> None:
        for path in (self._folder.parent, self._folder, *self._named()):
            _check_ours(path)

    def _named(self) -> list[Path]:
        return sorted(self._folder.glob(_NAMED), reverse=True)

    def _draft(self, step: int) -> Path:
        return self._folder / f"{_DRAFT}{step:09d}"


def _check_ours(path: Path) -> None:
    if danger := refused_folder(path, path.stat()):
        raise UntrustedError(f"{path} can't be trusted: {danger.why}")


def _checked(path: Path) -> tuple[Manifest | None, str]:
    """Return a snapshot's manifest, and what is wrong with the snapshot (empty if nothing)."""
    try:
        manifest = load(Manifest, path / _MANIFEST)
        wrong = [name for name, digest in manifest.files.items() if _digest(path / name) != digest]
    except (OSError, CodecError) as error:
        return None, str(error)
    return manifest, f"{wrong[0]} is damaged" if wrong else ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Sync a directory's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
