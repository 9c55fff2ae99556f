"""Trials of the script's torch, in processes of their own that may fail, crash or hang."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from fasttrain.hardware.tool import KILL_S, TICK_S, end_group
from fasttrain.model.codec import CodecError, from_data
from fasttrain.model.machine import TorchTrial, Trial
from fasttrain.model.places import TRIAL_PROGRAM, program

MARKER = "fasttrain-answer "
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
LINE_BYTES = 65536
LINE_LENGTH = 300

# Switches off what makes the first compilation of a real run slow: probing the CPU's vector
# instructions (nine runs of the compiler), precompiled headers (which inductor keeps outside of its
# cache folder), and a pool of compile processes. Older torch ignores unknown variables.
# Source: torch 2.13.0, torch/_inductor/config.py, `cpp.vec_isa_ok`,
# `cpp_cache_precompile_headers`, `compile_threads`.
PLAIN_COMPILE = {
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
# Set to an empty folder, because a cached kernel would prove nothing about the compiler.
FRESH = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")
# With one of these set, torch.compile returns the function unchanged.
SWITCHED_OFF = ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")


class Talk:
    """A conversation with a program that answers in marked lines of JSON.

    Attributes:
        last: The last line that was no answer.
        doing: The step that it announced last.
        hung: True if it gave no answer within its limit.
        garbled: True if a marked line held no JSON object.
    """

    def __init__(self, argv: list[str], environ: Mapping[str, str], timeout_s: float) -> None:
        """Start the program, in a session of its own, so that its children can be killed with it.

        Raises:
            OSError: If it can't be started.
        """
        self.last = self.doing = ""
        self.hung = self.garbled = False
        self.allow(timeout_s)
        self.process = subprocess.Popen(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def allow(self, timeout_s: float) -> None:
        """Set the limit to `timeout_s` from now on."""
        self.timeout_s = timeout_s
        self.deadline_s = time.monotonic() + timeout_s

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield answers until the program ends or hangs; then kill what is left of it."""
        try:
            for line in self._lines():
                if (answer := self._read(line)) is not None:
                    yield answer
            self._wait(max(self.deadline_s - time.monotonic(), 0))
            self.hung = self.process.returncode is None
        finally:
            self.end()

    def end(self) -> None:
        """Kill the program and all that it has started."""
        end_group(self.process)
        self._wait(KILL_S)
        assert self.process.stdout
        self.process.stdout.close()

    def ending(self) -> Trial:
        """Return how the program failed to answer a question."""
        code = self.process.returncode
        where = f" while {self.doing}" if self.doing else ""
        if self.hung:
            return Trial("hung", self.timeout_s, f"no answer in {self.timeout_s:g} s{where}")
        if code < 0:
            return Trial("crashed", message=f"{_signal_name(-code)}{where}")
        if code and not self.garbled:
            return Trial("failed", message=self.last or f"it ended with {code} and said nothing")
        return Trial("unreadable", message=f"it printed: {self.last}" if self.last else "no answer")

    def _lines(self) -> Iterator[str]:
        assert self.process.stdout
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while data := self._data(selector):
                *whole, rest = (rest + data).split(b"\n")
                rest = rest[-LINE_BYTES:]
                yield from (line.decode(errors="replace") for line in whole)
        yield rest.decode(errors="replace")

    def _data(self, selector: selectors.BaseSelector) -> bytes:
        """Wait for output and return it; empty at its end or after the limit."""
        assert self.process.stdout
        while (left_s := self.deadline_s - time.monotonic()) > 0:
            # Polled before the pipe is read: its last output is in the pipe by then. Its end can't
            # be told from the pipe, which children that it left behind may hold open for ever.
            ended = self.process.poll() is not None
            if selector.select(0 if ended else min(left_s, TICK_S)):
                return os.read(self.process.stdout.fileno(), LINE_BYTES)
            if ended:
                return b""
        return b""

    def _read(self, line: str) -> dict[str, Any] | None:
        if not line.startswith(MARKER):
            self.last = _shown(line) or self.last
            return None
        try:
            answer = json.loads(line.removeprefix(MARKER))
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self.garbled, self.last = True, _shown(line)
            return None
        self.doing = str(answer.get("doing", ""))
        return None if self.doing else answer

    def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)


def _shown(text: str) -> str:
    """Return a line without control characters, cut to `LINE_LENGTH`."""
    return "".join(c for c in text if c.isprintable()).strip()[:LINE_LENGTH]


def _signal_name(number: int) -> str:
    try:
        return f"it died of {signal.Signals(number).name}"
    except ValueError:
        return f"it died of signal {number}"


def try_torch(
    python: str, environ: Mapping[str, str], *, timeout_s: float = 20.0, devices: int = 0
) -> TorchTrial:
    """Return whether torch imports, compiles and sums over two processes; never raise.

    Args:
        python: The interpreter that runs scripts.
        environ: The environment that a run would start in.
        timeout_s: Limit of each question, in seconds.
        devices: Number of CUDA devices; with two or more, NCCL is tried too.
    """
    first = _attempt(python, environ, timeout_s, devices)
    if not first.autoload_error:
        return first
    # Only the extension of a device fails to load: the rest is tried without it.
    again = _attempt(python, {**environ, AUTOLOAD: "0"}, timeout_s, devices)
    return replace(again, autoload_error=first.autoload_error)


def _attempt(python: str, environ: Mapping[str, str], timeout_s: float, devices: int) -> TorchTrial:
    backends = ["gloo", *(["nccl"] if devices > 1 else [])]
    try:
        with tempfile.TemporaryDirectory(prefix="fasttrain-", ignore_cleanup_errors=True) as folder:
            base = {name: value for name, value in environ.items() if name not in SWITCHED_OFF}
            environ = {**base, **PLAIN_COMPILE, **dict.fromkeys(FRESH, folder)}
            # The sums have a process of their own: ranks are forked from it, and CUDA can't be
            # used after a fork of a process that has used it.
            asked = _ask(python, environ, timeout_s, [["torch", "compile"], backends])
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in a variable
        return TorchTrial(Trial("failed", message=f"it can't be tried: {error}"))
    return _gather(*asked)


Said = dict[str, tuple[Trial, dict[str, Any]]]


def _ask(
    python: str, environ: Mapping[str, str], timeout_s: float, groups: list[list[str]]
) -> list[Said]:
    """Ask each group of questions in a process of its own, all at the same time."""
    argv = [python, program(TRIAL_PROGRAM), MARKER]
    talks: list[Talk] = []
    try:
        # All are started by this thread, which outlives them. The parent-death signal comes when
        # the thread that started a process ends, so a pool's thread would kill them too early.
        talks += [Talk([*argv, *group], environ, timeout_s) for group in groups]
        with ThreadPoolExecutor(len(groups)) as pool:
            return list(pool.map(_listen, talks, groups))
    finally:
        for talk in talks:
            talk.end()


def _listen(talk: Talk, questions: list[str]) -> Said:
    """Return each question's trial with its whole answer."""
    said: Said = {}
    for answer in talk.answers():
        talk.allow(talk.timeout_s)
        try:
            trial = {name: answer.get(name) for name in ("state", "took_s", "message")}
            said[questions[len(said)]] = (from_data(Trial, trial), answer)
        except (CodecError, IndexError) as error:
            talk.garbled, talk.last = True, str(error)
    waiting = [question for question in questions if question not in said]
    if waiting and all(trial.state == "ok" for trial, _ in said.values()):
        said[waiting[0]] = (talk.ending(), {})
    return said


def _gather(first: Said, second: Said) -> TorchTrial:
    imported, answer = first["torch"]
    if imported.state != "ok":
        autoload = str(answer.get("cause")) or imported.message
        blamed = AUTOLOAD in imported.message  # torch's error names it if an extension failed
        return TorchTrial(imported, autoload_error=autoload if blamed else "")
    sums = [
        (replace(trial, message=f"{backend}: {trial.message}"), trial.state == "ok")
        for backend, (trial, _) in second.items()
    ]
    try:
        trial = from_data(TorchTrial, answer.get("facts"))
    except CodecError as error:
        return TorchTrial(Trial("unreadable", imported.took_s, str(error)))
    compiled, _ = first.get("compile", (Trial(), {}))
    took_s = sum(trial.took_s for trial, _ in second.values())
    summed = next((trial for trial, fine in sums if not fine), Trial("ok", took_s))
    return replace(trial, imported=imported, compiled=compiled, all_reduced=summed)
