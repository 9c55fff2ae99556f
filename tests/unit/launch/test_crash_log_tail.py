"""The end of a log, tracebacks in it, and the stacks of faulthandler."""

from __future__ import annotations

import os
from pathlib import Path

from fasttrain.launch.crash.evidence import (
    before_traceback,
    last_lines,
    last_traceback,
    read_stack,
    read_traceback,
    recent_traceback,
    tail,
)

# Source: CPython 3.11's own output for a chained exception.
CHAINED = """\
step 1
step 2
Traceback (most recent call last):
  File "/home/me/train.py", line 3, in <module>
    1 / 0
    ~~^~~
ZeroDivisionError: division by zero

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 8, in <module>
    main()
  File "/home/me/train.py", line 5, in main
    raise torch.cuda.OutOfMemoryError("two\\nlines")
torch.cuda.OutOfMemoryError: two
lines
"""
# Source: CPython 3.11's faulthandler; a thread without Python crashed.
STACKS = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f1 (most recent call first):
  <no Python frame>

Thread 0x00007f2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Thread 0x00007f3 (most recent call first):
  File "/opt/site-packages/torch/_tensor.py", line 9 in backward
  File "/home/me/train.py", line 12 in step
  File "/home/me/train.py", line 20 in <module>
  File "/home/me/fasttrain/shim/script.py", line 1 in _run_script

Extension modules: numpy.core (total: 1)
"""


def test_the_end_of_a_log_as_it_was_seen(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    assert tail(log) == ""
    log.write_bytes(b"0%\r50%\r100%\r\n\x1b[31mred\x1b[0m\x07 \xff\nlast")
    assert last_lines(tail(log), 3) == ("100%", "red \ufffd", "last")


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"x\n" * 200_000 + b"end\n")
    text = tail(log)
    assert len(text) < 70_000
    assert last_lines(text, 2) == ("x", "end")


def test_the_last_traceback_of_a_text() -> None:
    raised = read_traceback(CHAINED)
    assert raised is not None
    assert (raised.kinds, raised.message) == (("torch.cuda.OutOfMemoryError",), "two\nlines")
    assert [(f.line, f.function, f.source[:6]) for f in raised.frames] == [
        (8, "<module>", "main()"), (5, "main", "raise "),
    ]  # fmt: skip
    assert read_traceback("no traceback") is None
    assert read_traceback("Traceback (most recent call last):\n  cut off") is None


ONE = CHAINED.partition("exception occurred:\n")[2].replace("two\nlines", "one")
# Source: evo-design/evo#136, and CPython 3.11's multiprocessing/resource_tracker.py
CUDA = ONE + "CUDA kernel errors might be asynchronously reported at some other API call\n\n"
WARNED = (
    ONE + "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: leaked\n"
    "  warnings.warn('leaked')\n"
)


def test_a_traceback_that_output_follows_did_not_end_the_script() -> None:
    for text in (ONE, CUDA, WARNED):
        assert last_traceback(text) is not None
    assert last_traceback(f"{ONE}step 1\n") is None
    assert last_traceback("step 1\n") is None


def test_a_recent_traceback_may_be_followed_by_output() -> None:
    raised = recent_traceback(f"{CUDA}closing\n")
    assert raised is not None
    assert raised.message == CUDA[:-2].partition("Error: ")[2]
    assert recent_traceback(ONE + "step\n" * 60) is None


def test_what_was_said_in_front_of_tracebacks() -> None:
    assert last_lines(before_traceback(CHAINED), 9) == ("step 1", "step 2")
    caught = f"{CHAINED}went on\n" + CHAINED.partition("step 2\n")[2]
    assert last_lines(before_traceback(caught), 1) == ("went on",)


def test_the_stack_of_the_thread_that_runs_the_users_code(tmp_path: Path) -> None:
    path = tmp_path / "fault-0.txt"
    assert read_stack(path) == ()
    path.write_text(STACKS)
    assert [(f.line, f.function) for f in read_stack(path)] == [
        (20, "<module>"), (12, "step"), (9, "backward"),
    ]  # fmt: skip
    path.write_text(STACKS.replace("  <no Python frame>", '  File "/home/me/net.py", line 7 in f'))
    assert [f.line for f in read_stack(path)] == [7]


def test_a_line_number_that_no_file_has_is_no_call() -> None:
    text = f'Traceback (most recent call last):\n  File "a.py", line {"9" * 5000}, in f\nE: m\n'
    assert read_traceback(text) is None


def test_what_lies_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert tail(pipe) == ""
    assert read_stack(pipe) == ()
    stack = tmp_path / "fault-0.txt"
    stack.write_text(
        f'Current thread 0x1 (most recent call first):\n  File "{pipe}", line 1 in f\n'
    )
    assert [frame.source for frame in read_stack(stack)] == [""]
