from __future__ import annotations

import re
import socket
import threading
from pathlib import Path

import pytest

from fasttrain.model.errors import FasttrainError
from fasttrain.model.job import Allocation, TaskEnd, TaskStart
from fasttrain.slurm.meeting import FIRST_PORT, PORTS, Meeting, choose_port, run_code


def place(task: int, restarts: int = 0) -> Allocation:
    return Allocation("12", ("node1", "node2"), task, task, 0, 2, 0, restarts)


def start(task: int, **facts: str) -> TaskStart:
    return TaskStart(f"node{task + 1}", 20001 if task == 0 else 0, {"torch": "2.13.0", **facts})


def test_all_learn_what_the_first_one_tells(tmp_path: Path) -> None:
    told: dict[int, TaskStart] = {}

    def begin(task: int) -> None:
        told[task] = Meeting(tmp_path, place(task)).begin(start(task), wait_s=10)

    threads = [threading.Thread(target=begin, args=(task,)) for task in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {0: start(0), 1: start(0)}


def test_nodes_that_differ_are_told_with_what_each_has(tmp_path: Path) -> None:
    Meeting(tmp_path, Allocation("12", ("node1",), 0, 0, 0, 1, 0, 0)).begin(start(0), wait_s=0)
    with pytest.raises(FasttrainError) as caught:
        Meeting(tmp_path, place(1)).begin(start(1, torch="2.9.1"), wait_s=0)
    assert caught.value.slug == "nodes-differ"
    assert re.search(r"\btorch\b.* node1 .*\b2\.13\.0\b.* node2 .*\b2\.9\.1\b", caught.value.what)


def test_a_node_that_tells_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FasttrainError) as caught:
        Meeting(tmp_path, place(0)).begin(start(0), wait_s=0)
    assert caught.value.slug == "nodes-missing"
    assert caught.value.what.startswith("node2 ")


def test_an_attempt_meets_nothing_of_the_one_before(tmp_path: Path) -> None:
    Meeting(tmp_path, place(1)).end(TaskEnd(1, 0, 1))
    assert Meeting(tmp_path, place(0, restarts=1)).end(TaskEnd(0, 3, 2)) == [TaskEnd(0, 3, 2)]


def test_the_run_ends_as_the_task_that_failed_first() -> None:
    assert run_code([TaskEnd(0, 143, 30), TaskEnd(1, 7, 20), TaskEnd(2, 0, 10)]) == 7
    assert run_code([TaskEnd(0, 0, 1), TaskEnd(1, 0, 2)]) == 0


def test_an_end_that_is_only_half_written_is_none(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, place(0))
    meeting.end(TaskEnd(0, 0, 1))
    (tmp_path / "tasks" / "0" / "end-1.json").write_text('{"exit_code"')
    assert meeting.end(TaskEnd(0, 0, 1)) == [TaskEnd(0, 0, 1)]


def test_two_jobs_begin_at_different_ports_and_a_taken_one_is_passed_over() -> None:
    port = choose_port("1234")
    assert FIRST_PORT <= port < FIRST_PORT + PORTS
    assert choose_port("1235") != port
    with socket.socket() as taken:
        taken.bind(("", port))
        assert choose_port("1234") != port
