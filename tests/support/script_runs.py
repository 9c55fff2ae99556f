"""Runs scripts alone and as several ranks, and compares what they print and save."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from support.rank_forks import run_ranks
from support.zygote import Zygote

TIMEOUT_S = 120.0
LEVERS_OFF = ("--amp", "off", "--optimizer", "keep", "--compile", "off")
_MARKED = re.compile(r"^\[rank (\d+)\] (.*)$")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Run:
    """What one run printed and left behind."""

    cwd: Path
    returncode: int
    stdout: str
    stderr: str

    @property
    def good(self) -> Run:
        """Itself, if it ended well."""
        assert self.returncode == 0, self.stderr
        return self

    def saved(self, name: str = "model.pt") -> Any:
        """What the script saved."""
        return torch.load(self.good.cwd / name, weights_only=False)

    def lines(self, rank: int = 0) -> list[str]:
        """What a rank printed; other ranks' lines, and rank 0's of an elastic run, are marked."""
        found = ((_MARKED.match(line), line) for line in self.good.stdout.splitlines())
        told = [(int(mark[1]), mark[2]) if mark else (0, line) for mark, line in found]
        return [line for of, line in told if of == rank]

    def outcomes(self, lever: str) -> list[dict[str, Any]]:
        """What became of a lever, by rank."""
        ranks = json.loads((self.cwd / "run/receipt.json").read_text())["ranks"]
        return [
            outcome for rank in ranks for outcome in rank["outcomes"] if outcome["lever"] == lever
        ]

    def outcome(self, lever: str) -> dict[str, Any]:
        """What became of a lever on rank 0."""
        return self.outcomes(lever)[0]


class Alone:
    """Runs scripts as ``python`` would, without the seconds that importing torch takes."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote

    def __call__(self, cwd: Path, script: Path, *args: str) -> Run:
        """Run one in a directory of its own."""
        cwd.mkdir(parents=True)
        end = self._zygote.wait(self._zygote.python(script, *args, cwd=cwd, timeout_s=TIMEOUT_S))
        return Run(cwd, end.returncode, end.stdout, end.stderr)


def forked_ranks(
    zygote: Zygote,
    cwd: Path,
    script: Path,
    *args: str,
    ranks: int = 2,
    options: tuple[str, ...] = LEVERS_OFF,
    timeout_s: float = TIMEOUT_S,
) -> Run:
    """Run a script as `with_ranks` does, with forks as ranks; see `support.rank_forks`."""
    cwd.mkdir(parents=True)
    how: dict[str, Any] = {"ranks": ranks, "options": options, "timeout_s": timeout_s}
    done = run_ranks(zygote, cwd, script, *args, **how)
    return Run(cwd, done.returncode, done.stdout, done.stderr)


def with_ranks(
    fasttrain: Any,
    cwd: Path,
    script: Path,
    *args: str,
    ranks: int = 2,
    options: tuple[str, ...] = LEVERS_OFF,
    environ: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Run:
    """Run a script as several ranks on the CPU, in a directory of its own."""
    cwd.mkdir(parents=True)
    done: subprocess.CompletedProcess[bytes] = fasttrain(
        "run", script, "--nproc-per-node", str(ranks), "--device", "cpu", *options,
        "--quiet", "--run-dir", "run", "--", *args, cwd=cwd, env=environ, timeout_s=timeout_s,
    )  # fmt: skip
    return Run(cwd, done.returncode, done.stdout.decode(), done.stderr.decode())


def assert_same_prints(
    found: list[str], expected: list[str], tolerance: Callable[[str], dict[str, Any]]
) -> None:
    """Compare lines: their words exactly, and their numbers within what a line may differ by."""
    assert [_NUMBER.sub("#", line) for line in found] == [
        _NUMBER.sub("#", line) for line in expected
    ]
    for got, wanted in zip(found, expected, strict=True):
        numbers = [float(number) for number in _NUMBER.findall(wanted)]
        assert [float(number) for number in _NUMBER.findall(got)] == pytest.approx(
            numbers, **tolerance(wanted)
        ), f"{got!r} instead of {wanted!r}"


def differences(
    found: Any, expected: Any, *, rtol: float = 1e-4, atol: float = 1e-6, where: str = "saved"
) -> list[str]:
    """Name what is not the same: types, keys, shapes, and values further off than allowed."""
    if type(found) is not type(expected):
        return [f"{where} is a {type(found).__name__}"]
    if isinstance(expected, torch.nn.Module):
        pairs = [(str(found), str(expected), "repr"), (found.training, expected.training, "mode"),
                 (found.state_dict(), expected.state_dict(), "state")]  # fmt: skip
    elif isinstance(expected, torch.Tensor):
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            return [f"{where} is {found.dtype} {tuple(found.shape)}"]
        # What a sum is rounded by goes with its largest part, and not with what is left of it.
        largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
        close = torch.allclose(found, expected, rtol=rtol, atol=atol * max(1.0, largest))
        return [] if close else [where]
    elif isinstance(expected, dict):
        if list(found) != list(expected):
            return [f"keys of {where}"]
        pairs = [(found[key], expected[key], key) for key in expected]
    elif isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return [f"length of {where}"]
        pairs = [(a, b, str(i)) for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    elif isinstance(expected, float):
        return [] if found == pytest.approx(expected, rel=rtol, abs=atol) else [where]
    else:
        return [] if found == expected else [where]
    return [
        text
        for a, b, key in pairs
        for text in differences(a, b, rtol=rtol, atol=atol, where=f"{where}[{key}]")
    ]
