"""Ends the worker when its launcher dies, so that a killed launcher leaves no process behind."""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_launcher() -> None:
    """Have the kernel kill this process when the one that started it ends (Linux only)."""
    if sys.platform != "linux":
        return
    launcher = os.getppid()
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The launcher may have died before the call above: the signal would then never come.
    if os.getppid() != launcher:
        os.kill(os.getpid(), signal.SIGKILL)
