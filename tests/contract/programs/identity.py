# ruff: noqa: T201, PTH109, PTH110, PTH119
"""Prints all that a program can see of how it was started."""

import inspect
import os
import signal
import sys
import threading
import warnings

import __main__

for name, value in list(vars(__main__).items()):
    shown = value if isinstance(value, str | dict | type(None)) else type(value)
    if name == "__builtins__":
        shown = value is sys.modules["builtins"]
    print(name, shown if name != "__annotations__" else dict(value))
print("argv", [os.fsencode(word) for word in sys.argv])
print("path", sys.path)
print("executable", sys.executable, sys.flags, sys.dont_write_bytecode)
print("cwd", os.getcwd(), "umask", os.umask(0))
print("main", __main__ is sys.modules["__main__"], __name__ == "__main__")
print("stack", [os.path.basename(one.filename) for one in inspect.stack()])
print("torch imported", "torch" in sys.modules)
print("hooks", sys.excepthook is sys.__excepthook__, threading.excepthook, sys.displayhook)
print("limits", sys.getrecursionlimit(), sys.getswitchinterval())
print("threads", threading.active_count(), threading.main_thread() is threading.current_thread())
print("blocked", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
for number in sorted(signal.valid_signals() - {signal.SIGINT}):  # its handler has an address
    print("signal", number, signal.getsignal(number))
print("SIGINT", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print("warnings", warnings.filters)
print("streams", [(s.isatty(), s.encoding, s.errors, s.line_buffering)
                  for s in (sys.stdin, sys.stdout, sys.stderr)])  # fmt: skip
print("files", sorted(fd for fd in range(200) if os.path.exists(f"/proc/self/fd/{fd}")))
print("environ", sorted((k, v) for k, v in os.environ.items() if not k.startswith("FASTTRAIN_")))
