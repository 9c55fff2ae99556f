# ruff: noqa: T201
"""Shows in which order things end: threads, atexit handlers, the objects of ``__main__``."""

import atexit
import pickle
import threading
import time


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


class Last:
    def __del__(self) -> None:
        print("finalized; __main__ still has", sorted(k for k in globals() if k[0].isupper()))


def at_exit(name: str) -> None:
    copy = pickle.loads(pickle.dumps(Point(3)))
    print("atexit", name, copy.x, type(copy) is Point)


def outlive() -> None:
    time.sleep(0.2)
    print("the thread outlived main", threading.main_thread().is_alive())


if __name__ == "__main__":
    last = Last()
    atexit.register(at_exit, "first")
    atexit.register(at_exit, "second")
    threading.Thread(target=outlive).start()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    print("main ends")
