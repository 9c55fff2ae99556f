"""What only a device's driver can free, in processes where that ends them."""

from __future__ import annotations

import subprocess
import sys

import pytest

# torch.cuda.Event and pinned memory of a device that fails wherever a real one does: in a forked
# child, and once it has found an error.
PROGRAM = """
import gc, os, sys
from types import SimpleNamespace
import torch
from fasttrain.shim.hooks import device_clock

HOME, failed = os.getpid(), []

class Freed:
    __slots__ = ()  # so that it can't be referenced weakly, as torch's must not be
    def __init__(self, **_): pass
    def record(self, stream): pass
    def query(self): return True
    def __del__(self, getpid=os.getpid, end=os._exit):
        if failed or getpid() != HOME:
            end(134)

real_empty = torch.empty
torch.cuda.Event = Freed
torch.cuda.current_stream = lambda device: None
torch.cuda.is_current_stream_capturing = lambda: False
class Memory(Freed, torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
def empty(shape, *, dtype, device, pin_memory):
    assert pin_memory and device == "cpu"
    return real_empty(shape, dtype=dtype).as_subclass(Memory)
torch.empty = empty

class Numbers(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device("cuda", 0)
numbers = real_empty(4).as_subclass(Numbers)

clock = device_clock.DeviceClock()
clock.follow(numbers.device)
held = [clock.mark() for _ in range(3)] + [device_clock.HostCopy(numbers) for _ in range(2)]
assert held[-1].has_arrived()
del held[0], held[-1]
{then}
"""
FORKED = """
if not os.fork():
    held.clear()
    gc.collect()
    sys.exit()
_, status = os.wait()
os._exit(os.waitstatus_to_exitcode(status) % 256)
"""
WORKER = """
import multiprocessing
def work():
    held.clear()
    gc.collect()
process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join()
os._exit(process.exitcode % 256)
"""
FAILED = """
failed.append(1)
raise RuntimeError("CUDA error: device-side assert triggered")
"""
CAUGHT = """
failed.append(1)
held.clear()
gc.collect()
sys.exit(3)
"""
AGAIN = """
event, memory = held[0].event, held[-1]._host
known = id(event.event), id(memory)
copied = held.pop()
copied.has_arrived()
del held[:], event, memory, copied
again = device_clock.record_event(numbers.device, timed=True), device_clock.HostCopy(numbers)
made = {id(thing) for idle in device_clock._idle.values() for thing in idle}
assert {id(again[0].event), id(again[1]._host)} | made >= set(known)
"""
ENDED = """
failed.append(1)
"""


@pytest.mark.parametrize(
    ("then", "code"),
    [(FORKED, 0), (WORKER, 0), (FAILED, 1), (CAUGHT, 3), (AGAIN, 0), (ENDED, 0)],
)
def test_nothing_is_freed_where_the_driver_would_end_the_process(then: str, code: int) -> None:
    program = PROGRAM.replace("{then}", then)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=100)
    assert done.returncode == code, done.stderr.decode()
