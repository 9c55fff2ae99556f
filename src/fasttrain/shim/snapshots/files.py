"""Snapshots on disk: each a directory that is there whole or not at all, with a manifest.

A snapshot is written under another name, every file and then the directory is brought to the disk,
and only then it gets its name. The last two stay, so that a damaged one has one before it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fasttrain.files.trust import refused_folder
from fasttrain.model.codec import CodecError, dumps
from fasttrain.model.places import SNAPSHOTS_FOLDER
from fasttrain.model.reading import load
from fasttrain.shim.snapshots.errors import tell
from fasttrain.shim.snapshots.plain import packed, unpacked

KEPT = 2
_MANIFEST, _DRAFT = "manifest.json", "draft-"
_NAMED = "step-*"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a snapshot is, and what its files must be.

    Attributes:
        step: Optimizer steps behind it.
        identity: What a run must be like to go on from it, by name.
        files: SHA-256 of each file, by name.
    """

    step: int
    identity: dict[str, str]
    files: dict[str, str]
    schema: int = 1


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot whose files are what its manifest says."""

    path: Path
    manifest: Manifest

    def read(self, name: str) -> Any:
        """Give what is in one of its files; nothing that is in it can be run."""
        return unpacked(torch.load(self.path / name, weights_only=True))


class NotOursError(Exception):
    """Others may have written what would be read."""


class Snapshots:
    """The snapshots of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / SNAPSHOTS_FOLDER

    def prepare(self) -> None:
        """Make the folder.

        Raises:
            NotOursError: Others can write into it.
            OSError: It can't be made.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._check()

    def write(self, name: str, content: Any, step: int) -> str:
        """Write one file of the snapshot that is being made, and give its SHA-256.

        Raises:
            OSError: It can't be written.
            UnplainError: Something in it would have to be pickled.
        """
        draft = self._draft(step)
        for folder in (self._folder, draft):  # several ranks make them
            folder.mkdir(mode=0o700, exist_ok=True)
        path = draft / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w+b") as file:
            torch.save(packed(content, name), file)
            file.flush()
            os.fsync(file.fileno())
        return _digest(path)

    def finish(self, manifest: Manifest) -> None:
        """Give the snapshot its name, once all of its files are written, and drop older ones.

        Raises:
            OSError: One of the files is not here, or it can't be written.
        """
        draft, final = self._draft(manifest.step), self._folder / f"step-{manifest.step:09d}"
        for name in manifest.files:  # a rank on another node may have another disk
            (draft / name).stat()
        descriptor = os.open(draft / _MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(dumps(manifest))
            file.flush()
            os.fsync(file.fileno())
        _sync(draft)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one, from which nobody went on
        draft.rename(final)
        _sync(self._folder)
        for path in [*self._named()[KEPT:], *self._folder.glob(f"{_DRAFT}*")]:
            shutil.rmtree(path)

    def newest(self) -> Found | None:
        """Give the newest snapshot that is whole; one that is passed over is told of.

        Raises:
            NotOursError: Others could have written it.
        """
        if self.any:
            self._check()
        for path in self._named():
            manifest, why = _checked(path)
            if manifest is not None and not why:
                return Found(path, manifest)
            tell(f"the snapshot {path.name} is passed over: {why}")
        return None

    def named(self, name: str) -> Found:
        """Give a snapshot that another rank has checked.

        Raises:
            NotOursError: Others could have written it.
            OSError, CodecError: It can't be read here.
        """
        self._check()
        path = self._folder / name
        return Found(path, load(Manifest, path / _MANIFEST))

    @property
    def any(self) -> bool:
        """Whether there is one, whole or not."""
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
        raise NotOursError(f"{path} can't be trusted: {danger.why}")


def _checked(path: Path) -> tuple[Manifest | None, str]:
    """Give a snapshot's manifest, or why it is not to be used."""
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
    """Bring the names in a directory to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
