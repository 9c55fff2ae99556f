"""Carry what processes that a script left running print: ``python -IS PROGRAM LOG READ:SHOWN ...``.

LOG, READ and SHOWN are descriptors that the launcher hands down before it ends: the log, the read
end of a stream, and where its output is shown, or -1. It ends with the last writer of its streams.
If a reader goes away, the stream is closed, so that its writers learn that as they would alone.
"""

import os
import selectors
import signal
import sys
from contextlib import suppress

CHUNK_BYTES = 65536


def main(log: int, *streams: str) -> None:
    """Carry all streams to their ends."""
    # Nothing that ends a terminal or a shell may cut off processes that plain python leaves alone.
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - {signal.SIGTERM})
    os.setsid()
    os.chdir("/")
    selector = selectors.DefaultSelector()
    for stream in streams:
        read, shown = map(int, stream.split(":"))
        selector.register(read, selectors.EVENT_READ, shown)
    while selector.get_map():
        for key, _ in selector.select():
            if not carry(key.fd, key.data, log):
                selector.unregister(key.fd)
                os.close(key.fd)


def carry(read: int, shown: int, log: int) -> bool:
    """Carry what there is; False at the end of a stream or of its reader."""
    try:
        data = os.read(read, CHUNK_BYTES)
        with suppress(OSError):  # a full disk must not stop the output
            write_all(log, data)
        if shown >= 0:
            write_all(shown, data)
    except OSError:  # also EIO: the last holder of a pty's other end is gone
        return False
    return bool(data)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of ``data``, in as many calls as the descriptor needs."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
