"""Raises in the way that its argument names."""

import asyncio
import atexit
import concurrent.futures
import os
import sys
import threading


def divide(by: int) -> float:
    return 1 / by


def cause() -> None:
    try:
        divide(0)
    except ZeroDivisionError as error:
        raise RuntimeError("the cause is told") from error


def context() -> None:
    try:
        cause()
    except RuntimeError:
        divide(0)


def suppressed() -> None:
    try:
        divide(0)
    except ZeroDivisionError:
        raise RuntimeError("the context is not told") from None


def caught(by: int = 0) -> Exception:
    try:
        divide(by)
    except ZeroDivisionError as error:
        return error
    return ValueError(by)


def group() -> None:
    inner = ExceptionGroup("inner", [caught(), KeyError("k")])
    raise ExceptionGroup("outer", [caught(), inner, ValueError("v")]) from caught()


def cycle() -> None:
    first, second = caught(), ValueError("second")
    first.__context__, second.__context__ = second, first
    raise first


def notes() -> None:
    error = ValueError("with notes")
    error.add_note("a note\nof two lines")
    raise error


def thread() -> None:
    worker = threading.Thread(target=divide, args=(0,), name="worker")
    worker.start()
    worker.join()


def pool() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        executor.submit(divide, 0).result()


def coroutine() -> None:
    async def fail() -> None:
        divide(0)

    asyncio.run(fail())


def hook() -> None:
    def told(kind: type, value: BaseException, trace: object) -> None:
        depth = 0
        while trace is not None:
            depth, trace = depth + 1, trace.tb_next  # type: ignore[attr-defined]
        sys.stderr.write(f"hook: {kind.__name__} {value} from {depth} frames\n")

    sys.excepthook = told
    divide(0)


class Late:
    def __repr__(self) -> str:
        return "Late()"  # without the address that a function would be told by

    def __call__(self) -> None:
        divide(0)


def at_exit() -> None:
    atexit.register(Late())


def syntax() -> None:
    exec(compile("x = (1,\n     2 3)", "made-up.py", "exec"))


def no_text() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    raise MuteError


def closed_stderr() -> None:
    os.close(2)
    divide(0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
