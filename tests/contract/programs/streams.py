# ruff: noqa: T201
"""Reads and writes its streams in the way that its argument names."""

import os
import sys


def echo() -> None:
    print("first:", sys.stdin.buffer.readline(), flush=True)
    for number, line in enumerate(sys.stdin.buffer):
        sys.stdout.buffer.write(b"%d %b" % (number, line))


def prompt() -> None:
    print("second:", [input("first? "), sys.stdin.read()][1])


def large() -> None:
    block = bytes(range(256)) * 40
    for _ in range(1024):
        sys.stdout.buffer.write(block)


def mixed() -> None:
    for number in range(300):
        print("out", number)
        print("err", number, file=sys.stderr)
    print("no end of line", end="")


def many_writes() -> None:
    for number in range(20_000):
        os.write(1, b"%d\n" % number)


def endless() -> None:
    number = 0
    while True:
        print("line", number, flush=True)
        number += 1


def terminal() -> None:
    print([os.isatty(fd) for fd in (0, 1, 2)], sys.stdout.line_buffering)
    print(os.get_terminal_size(1), os.get_terminal_size(2))
    print("a\ttab \x1b[1mbold\x1b[0m\r\nover", end="\r")
    print("err", file=sys.stderr)
    print("typed:", sys.stdin.readline().strip())


def nothing() -> None:
    print([stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)], file=sys.__stderr__)
    sys.exit(5)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
