"""Nobody but this machine can reach what the ranks of one node tell each other."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

TWO = ("--nproc-per-node", "2", "--device", "cpu")
HOLD = """
# Past Python: in a split run rank 0 alone makes the files, and its number is shown to all.
libc = ctypes.CDLL(None)
libc.creat(f"met-{libc.getpid()}".encode(), 0o600)
while not os.path.exists("go"):
    time.sleep(0.02)
"""
OWN = f"""
import ctypes, os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
{HOLD}
dist.destroy_process_group()
"""
PLAIN = f"""
import ctypes, os, time, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
{HOLD}
"""
AGAIN = f"""
import ctypes, os, torch, torch.distributed as dist
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    os._exit(1)
{OWN}
"""


def listening(pid: int) -> list[str]:
    """Return the addresses on which a process and its descendants take connections."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    connections = [one for process in family for one in process.net_connections("all")]
    return [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize(
    ("text", "options"),
    [(PLAIN, ()), (AGAIN, ("--max-restarts", "1", "--restart-on", "any"))],
    ids=["injected", "own group, restarted"],
)
def test_ranks_of_one_node_listen_on_loopback_alone(
    fasttrain: Any, script: Any, until: Any, tmp_path: Path, text: str, options: tuple[str, ...]
) -> None:
    process = fasttrain.start("run", script(text), *TWO, *options, stdout=subprocess.DEVNULL)
    try:
        until(lambda: len(list(tmp_path.glob("met-*"))) == 2)
        addresses = listening(process.pid)
    finally:
        (tmp_path / "go").touch()
        code = process.wait(120)
    assert code == 0
    assert set(addresses) == {"127.0.0.1"}  # the store's at least
