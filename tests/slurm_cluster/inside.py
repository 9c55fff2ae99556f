"""Process 1 of a node, in namespaces of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

from slurm_cluster.tools import NotYetError, run, wait_for


def be_node(directory: str, name: str, addr: str) -> int:
    """Set the node's network up, run slurmd, and reap whatever is orphaned; give slurmd's exit."""
    socket.sethostname(name)
    run(["mount", "--bind", f"{directory}/hosts", "/etc/hosts"])
    if Path("/dev/shm").is_dir():
        run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"])
    run(["ip", "link", "set", "lo", "up"])
    wait_for("eth0", _has_eth0, 30)
    run(["ip", "addr", "add", f"{addr}/24", "dev", "eth0"])
    run(["ip", "link", "set", "eth0", "up"])
    slurmd = subprocess.Popen(["slurmd", "-D", "-f", f"{directory}/slurm.conf", "-N", name])
    signal.signal(signal.SIGTERM, lambda *_: slurmd.send_signal(signal.SIGTERM))
    while True:
        pid, status = os.wait()
        if pid == slurmd.pid:
            return os.waitstatus_to_exitcode(status) & 255


def _has_eth0() -> None:
    if "eth0" not in {name for _, name in socket.if_nameindex()}:
        raise NotYetError("the other side adds it")
