# ruff: noqa: T201
"""Ends in the way that its argument names."""

import atexit
import os
import signal
import sys
import threading


class Odd:
    def __str__(self) -> str:
        return "an object as exit code"


def by_thread() -> None:
    thread = threading.Thread(target=sys.exit, args=(5,))
    thread.start()
    thread.join()


def by_hook() -> None:
    def leave(*_: object) -> None:
        sys.exit(9)

    sys.excepthook = leave
    raise ValueError("the hook leaves with 9")


def interrupted() -> None:
    raise KeyboardInterrupt


def ignoring_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)
    sys.exit(4)


WAYS = {
    "end": lambda: None,
    "text": lambda: sys.exit("a text as exit code"),
    "object": lambda: sys.exit(Odd()),
    "none": lambda: sys.exit(None),
    "true": lambda: sys.exit(True),
    "3": lambda: sys.exit(3),
    "256": lambda: sys.exit(256),
    "259": lambda: sys.exit(259),
    "-1": lambda: sys.exit(-1),
    "huge": lambda: sys.exit(2**70),
    "thread": by_thread,
    "hook": by_hook,
    "at-once": lambda: os._exit(7),
    "interrupted": interrupted,
    "ignoring-interrupt": ignoring_interrupt,
    "SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGPIPE": lambda: (signal.signal(signal.SIGPIPE, signal.SIG_DFL),
                        signal.raise_signal(signal.SIGPIPE)),
    "abort": os.abort,
}  # fmt: skip

if __name__ == "__main__":
    atexit.register(print, "atexit")
    print("before the end", flush=sys.argv[1] not in ("at-once", "SIGKILL"))
    WAYS[sys.argv[1]]()
    print("after")
