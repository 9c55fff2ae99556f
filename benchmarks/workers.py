"""Starts and drives a process that takes training steps on demand."""

import json
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Block:
    """A worker's answer: the seconds of each step by two clocks, and the last loss."""

    wall_s: list[float]
    cpu_s: list[float]
    loss: float


class Worker:
    """A process that connects to a Unix socket and takes steps on demand; a context manager."""

    def __init__(self, argv: Sequence[str], address: Path, environ: dict[str, str]) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen()
            listener.settimeout(1.0)
            self.process = subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL)
            self.connection = self._accept(listener)
        self.stream = self.connection.makefile("rw", encoding="utf-8")

    def _accept(self, listener: socket.socket) -> socket.socket:
        while self.process.poll() is None:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue  # importing torch is slow: check that the worker is alive, and wait
            connection.settimeout(None)
            return connection
        raise SystemExit(f"a worker ended with {self.process.returncode} before its first step")

    def take_steps(self, count: int) -> Block:
        """Let the worker take steps.

        Raises:
            SystemExit: If it died.
        """
        print(count, file=self.stream, flush=True)
        answer = self.stream.readline()
        if not answer:
            raise SystemExit(f"a worker ended with {self.process.wait()} in the midst of its steps")
        return Block(**json.loads(answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connection, which ends the worker; kill it if it does not end."""
        self.stream.close()
        self.connection.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
