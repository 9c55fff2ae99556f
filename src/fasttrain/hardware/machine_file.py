"""A machine described in a file, for planning a run on one machine that is meant for another."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from fasttrain.model.codec import CodecError, from_data
from fasttrain.model.errors import FasttrainError
from fasttrain.model.examination import Examination
from fasttrain.model.machine import MACHINE_SCHEMA, Device, Machine

NO_FILE = "no such file"
NOT_REGULAR = "it is not a regular file"
BINARY = "it is not text but binary data"
NOT_JSON = "it is not JSON"


def other_version(version: object) -> str:
    """Return what is wrong with a file of this version."""
    return f"schema is {version!r}; this fasttrain reads version {MACHINE_SCHEMA}"


def read_machine(path: Path) -> Machine:
    """Return the machine that a JSON file describes, by itself or as ``doctor --json`` prints it.

    Raises:
        FasttrainError: ``machine-file``: there is no such regular file, it can't be read, is not
            JSON, is of another schema version, or lacks, misspells or contradicts a field.
    """
    return read_examination(path).machine


def read_examination(path: Path) -> Examination:
    """Return what a JSON file holds of a machine: a description alone, or all that doctor saw.

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
    """Return the examination out of what ``doctor --json`` prints, and anything else as it is."""
    if (
        isinstance(data, dict)
        and data.get("kind") == "doctor"
        and isinstance(data.get("data"), dict)
    ):
        return data["data"].get("examination")
    return data


def _read_json(path: Path) -> Any:
    try:
        # A pipe or a device could block for ever or never end.
        if not path.is_file():
            raise _refused(path, NOT_REGULAR if path.exists() else NO_FILE)
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(path, BINARY) from error
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"{NOT_JSON}: {error}") from error


def _problem(machine: Machine) -> str:
    """Give what is impossible in a description of the right shape; empty if nothing is."""
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
        fix="mend the file as docs/machine.md describes, or leave out --machine",
        slug="machine-file",
    )


# A machine in a few words, for error texts.


NO_GPU = "no GPU"


def describe(machine: Machine) -> str:
    """Return accelerators in one phrase: ``8 x NVIDIA H100 80GB HBM3``, ``no GPU, 2 CPU cores``.

    Devices of one name are counted together, in the order in which the names first appear.
    """
    names = Counter(device.name for device in machine.devices)
    if names:
        return ", ".join(f"{count} x {name}" for name, count in names.items())
    cores = machine.cpu.cores
    return f"{NO_GPU}, {cores} CPU core{'' if cores == 1 else 's'}"
