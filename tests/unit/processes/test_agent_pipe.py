"""The pipe between a launcher and its agent: what goes through it, and who gets an end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fasttrain.model.attempts import Decided, Message, Verdict
from fasttrain.model.crash import WorkerExit, WorkerExits
from fasttrain.processes.agent_pipe import VARIABLE, AgentPipe, Handed, inherited, open_pipe

# An agent: answers one message, and shows that the process which it starts has no end.
AGENT = """
import os, subprocess, sys
from fasttrain.model.attempts import Message, Verdict
from fasttrain.processes.agent_pipe import VARIABLE, inherited
number = os.environ[VARIABLE]
pipe = inherited(os.environ)
asked = pipe.receive()
seen = subprocess.run(
    [sys.executable, "-c", f"import os; print(os.path.exists('/proc/self/fd/{number}'))"],
    close_fds=False, capture_output=True, text=True,
)
pipe.send(Message(verdict=Verdict(seen.stdout + os.environ.get(VARIABLE, ""), True, "\\n")))
"""


@pytest.fixture
def pipe() -> Iterator[tuple[AgentPipe, Handed]]:
    ours, handed = open_pipe()
    yield ours, handed
    ours.close()
    handed.close()


def test_messages_arrive_whole_and_in_order(pipe: tuple[AgentPipe, Handed]) -> None:
    ours, handed = pipe
    theirs = inherited({VARIABLE: str(os.dup(handed.source))})
    assert theirs
    assert ours.look() is None
    exits = WorkerExits((WorkerExit(0, 1, -9, 5, 5),), 7)
    sent = [Message(exits=exits, asks=True), Message(decided=Decided(again=True, reason="\n"))]
    for message in sent:
        theirs.send(message)
    assert [ours.look(), ours.look(), ours.look()] == [*sent, None]
    ours.send(Message(cleared=True))
    assert theirs.receive() == Message(cleared=True)
    theirs.close()


def test_a_launcher_that_has_ended_answers_nothing() -> None:
    ours, handed = open_pipe()
    theirs = inherited({VARIABLE: str(os.dup(handed.source))})
    handed.close()
    ours.close()
    assert theirs
    theirs.send(Message(cleared=True))
    assert theirs.receive() is None
    theirs.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc")
def test_the_agent_gets_an_end_and_its_workers_do_not(pipe: tuple[AgentPipe, Handed]) -> None:
    ours, handed = pipe
    pid = os.posix_spawn(
        sys.executable, (sys.executable, "-c", AGENT), {**os.environ, **handed.environ},
        file_actions=[(os.POSIX_SPAWN_DUP2, *handed)],
    )  # fmt: skip
    ours.send(Message(exits=WorkerExits(), asks=True))
    assert ours.receive() == Message(verdict=Verdict("False\n", again=True, reason="\n"))
    os.waitpid(pid, 0)


def test_no_other_process_gets_an_end(pipe: tuple[AgentPipe, Handed]) -> None:
    _, handed = pipe
    for descriptor in handed:
        code = f"import os; os.fstat({descriptor})"
        done = subprocess.run(
            [sys.executable, "-c", code], close_fds=False, capture_output=True, check=False
        )
        assert done.returncode == 1


@pytest.mark.parametrize("number", ["", "x", "-1", "99999"])
def test_a_variable_of_somebody_elses_is_no_pipe(number: str) -> None:
    environ = {VARIABLE: number}
    assert inherited(environ) is None
    assert not environ
