# ruff: noqa: T201
"""Starts processes that need ``__main__`` in the way that its argument names."""

import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass


@dataclass
class Point:
    x: int


def double(point: Point) -> tuple[Point, str, bool]:
    return Point(2 * point.x), __name__, "torch" in sys.modules


def fail(point: Point) -> None:
    raise ValueError(point)


def pooled(method: str) -> None:
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        print(pool.map(double, [Point(1), Point(2)]))
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        print(
            executor.submit(double, Point(3)).result(),
            repr(executor.submit(fail, Point(4)).exception()),
        )
    child = context.Process(target=sys.exit, args=(3,))
    child.start()
    child.join()
    print(child.exitcode)


def forked() -> None:
    child = os.fork()
    if not child:
        print("child", pickle.loads(pickle.dumps(Point(5))))
        sys.exit(6)
    print("parent", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def failing_fork() -> None:
    child = os.fork()
    if not child:
        raise ValueError("in the child")
    print("parent", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def command() -> None:
    sys.stdout.flush()
    code = "import sys; print('torch' in sys.modules, sys.argv); sys.exit(2)"
    print(subprocess.run([sys.executable, "-c", code, "a b"]).returncode)


if __name__ == "__main__":
    how = sys.argv[1]
    if how in globals():
        globals()[how]()
    else:
        pooled(how)
