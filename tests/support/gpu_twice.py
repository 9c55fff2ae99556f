"""One GPU that is seen as two, so that two ranks and NCCL can be tested with it.

NVML's binding counts each GPU twice, and a process that is to use the second one gets the first.
NCCL refuses two ranks on one GPU of a host; by its own variable each rank has another host, so
that what they send goes through a socket. Their kernels take turns: no times are measured.

Source: NVIDIA NCCL User Guide 2.27, environment variables, NCCL_HOSTID.
"""

from __future__ import annotations

from pathlib import Path

SITE = '''
"""Let a process that is to use the second GPU use the first, as a rank of another host."""
import os

put = os._Environ.__setitem__


def put_first(environ, name, value):
    put(environ, name, "0" if (name, value) == ("CUDA_VISIBLE_DEVICES", "1") else value)


os._Environ.__setitem__ = put_first  # fasttrain shows a rank its GPU when the process runs already
if "LOCAL_RANK" in os.environ:
    os.environ["NCCL_HOSTID"] = f"host-{os.environ['LOCAL_RANK']}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_IB_DISABLE"] = "1"
'''
BINDING = '''
"""The binding of NVML, with a second GPU that is the first one but for its UUID."""
import sys
from pathlib import Path

here = str(Path(__file__).parent)
sys.path.remove(here)
del sys.modules["pynvml"]
import pynvml as real

sys.path.insert(0, here)
uuid_of, by_index, by_uuid = (
    real.nvmlDeviceGetUUID, real.nvmlDeviceGetHandleByIndex, real.nvmlDeviceGetHandleByUUID
)
seconds = []


def second():
    seconds.append(by_index(0))
    return seconds[-1]


def told(handle):
    uuid = uuid_of(handle)
    return uuid[:-4] + "ffff" if any(handle is one for one in seconds) else uuid


real.nvmlDeviceGetCount = lambda: 2
real.nvmlDeviceGetHandleByIndex = lambda index: second() if index == 1 else by_index(index)
real.nvmlDeviceGetHandleByUUID = lambda it: second() if it.endswith("ffff") else by_uuid(it)
real.nvmlDeviceGetUUID = told
'''


def write(folder: Path) -> str:
    """Make a folder for the front of PYTHONPATH, and return its path."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(SITE)
    (folder / "pynvml.py").write_text(BINDING)
    return str(folder)
