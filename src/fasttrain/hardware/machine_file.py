"""A machine described in a file: a run can be planned here for that machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fasttrain.model.codec import CodecError, from_data
from fasttrain.model.errors import FasttrainError
from fasttrain.model.machine import MACHINE_SCHEMA, Device, Examination, Machine

NO_FILE = "no such file"
NOT_REGULAR = "it is not a regular file"
BINARY = "it is not text but binary data"
NOT_JSON = "it is not JSON"


def other_version(version: object) -> str:
    """Return what is wrong with a file of this version."""
    return f"schema is {version!r}; this fasttrain reads version {MACHINE_SCHEMA}"


def read_machine(path: Path) -> Machine:
    """Return the machine in a JSON file: a description alone, or output of ``doctor --json``.

    Raises:
        FasttrainError: ``machine-file`` if it is no regular file, can't be read, is not JSON, has
            another schema version, or a field is missing, misspelt or contradictory.
    """
    return read_examination(path).machine


def read_examination(path: Path) -> Examination:
    """Return the examination in a JSON file; it has the machine alone if the file has no more.

    Raises:
        FasttrainError: ``machine-file``, as in `read_machine`.
    """
    data = _within_envelope(_read_json(path))
    whole = isinstance(data, dict) and "machine" in data
    described = data["machine"] if whole else data
    if isinstance(described, dict):
        version = described.get("schema", MACHINE_SCHEMA)
        if version != MACHINE_SCHEMA:
            raise _refused(path, other_version(version))
    try:
        seen = from_data(Examination, data) if whole else Examination(from_data(Machine, data))
    except CodecError as error:
        raise _refused(path, str(error)) from error
    if problem := _problem(seen.machine):
        raise _refused(path, problem)
    return seen


def _within_envelope(data: Any) -> Any:
    """Return the examination in output of ``doctor --json``; other data as it is."""
    if (
        isinstance(data, dict)
        and data.get("kind") == "doctor"
        and isinstance(data.get("data"), dict)
    ):
        return data["data"].get("examination")
    return data


def _read_json(path: Path) -> Any:
    try:
        # Reading a pipe or a device could block for ever, or never end.
        if not path.is_file():
            raise _refused(path, NOT_REGULAR if path.exists() else NO_FILE)
        text = path.read_bytes().decode("utf-8-sig")  # editors on Windows write a BOM
    except UnicodeDecodeError as error:
        raise _refused(path, BINARY) from error
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"{NOT_JSON}: {error}") from error


def _problem(machine: Machine) -> str:
    """Return the first impossible value of a machine, as a sentence; empty if there is none."""
    if machine.cpu.cores < 1:
        return f"cpu.cores is {machine.cpu.cores}; a process has at least one core"
    if machine.cpu.memory_bytes < 0:
        return f"cpu.memory_bytes is {machine.cpu.memory_bytes}; 0 stands for unknown"
    problems = (_device_problem(device) for device in machine.devices)
    found = (f"devices[{index}].{text}" for index, text in enumerate(problems) if text)
    return next(found, "")


def _device_problem(device: Device) -> str:
    if device.index < 0:
        return f"index is {device.index}; devices count from 0"
    if device.memory_bytes < 0:
        return f"memory_bytes is {device.memory_bytes}; 0 stands for unknown"
    if device.kind == "cuda" and not re.fullmatch(r"[0-9]+\.[0-9]+", device.capability):
        return f'capability is {device.capability!r}; a CUDA device has one such as "9.0"'
    return ""


def _refused(path: Path, why: str) -> FasttrainError:
    return FasttrainError(
        f"the machine file {path} can't be used",
        # A field name may hold half a surrogate pair, which no terminal can print.
        why=why.encode(errors="backslashreplace").decode(),
        fix="correct the file as docs/machine.md describes, or leave out --machine",
        slug="machine-file",
    )
