"""Measures the speed of devices: ``python BENCH MARKER REQUEST``, REQUEST as JSON.

Each measurement is printed as soon as it is made, as a line of JSON after MARKER. REQUEST has
``devices`` (each with torch's ``name`` and the ``types`` of its products), ``ranks`` and
``backend`` of the all-reduce, ``folder`` of the file to read, ``each_s`` for one measurement, and
``all_s`` for all of them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

if __name__ == "__main__":  # see __main__.py
    if not sys.flags.safe_path:
        del sys.path[0]
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))  # noqa: PTH100
    import fasttrain  # noqa: F401

    del sys.path[0]

from fasttrain.probes.forked import join, one_line, run_ranks, say, stay_on_this_machine
from fasttrain.shim.process.entry import die_with_launcher

TYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LARGEST_MATRIX = 8192
COPY_BYTES = 256 * 2**20  # larger than the caches of a GPU, and of most processors
DISK_BYTES = 256 * 2**20
CHUNK_BYTES = 8 * 2**20
REDUCE_BYTES = {"gloo": 16 * 2**20, "nccl": 128 * 2**20}
GIGA, TERA = 1e9, 1e12

Measure = Callable[[], float]


def main(argv: list[str]) -> None:
    """Make the requested measurements, and print each as soon as it is made."""
    marker, request = argv[0], json.loads(argv[1])
    end_s = time.monotonic() + request["all_s"]
    for what, device, unit, measure in _measurements(request):
        answer: dict[str, Any] = {"what": what, "device": device, "unit": unit, "value": 0.0}
        try:
            if time.monotonic() > end_s:
                raise TimeoutError("no time was left")
            answer["value"] = measure()
        except Exception as error:  # noqa: BLE001 - the other measurements go on
            answer["problem"] = one_line(error)
        say(marker, answer)


def _measurements(request: dict[str, Any]) -> Iterator[tuple[str, str, str, Measure]]:
    """Yield each measurement's name, device and unit, and the function that makes it."""
    # Ranks come first: CUDA can't be used in a forked process once this one has used it.
    each_s = request["each_s"]
    if request["ranks"] > 1:
        reduce = partial(all_reduce, request["backend"], request["ranks"], each_s)
        yield f"all-reduce of {request['ranks']} by {request['backend']}", "", "GB/s", reduce
    if request["folder"]:
        yield "disk read", "", "GB/s", partial(disk_read, request["folder"], each_s)
    for device in request["devices"]:
        name = device["name"]
        for kind in device["types"]:
            yield f"matmul {kind}", name, "TFLOP/s", partial(matmul, name, kind, each_s)
        yield "memory copy", name, "GB/s", partial(memory_copy, name, each_s)
        if name != "cpu":
            for pinned in (False, True):
                what = "copy to it, pinned" if pinned else "copy to it"
                yield what, name, "GB/s", partial(host_copy, name, pinned, each_s)


def per_second(call: Callable[[], object], wait: Callable[[], object], each_s: float) -> float:
    """Return the calls per second, measured for `each_s` after one call to warm up."""
    call()
    wait()
    count, started_s = 0, time.perf_counter()
    while True:
        call()
        wait()
        count += 1
        if (took_s := time.perf_counter() - started_s) >= each_s:
            return count / took_s


def matmul(device: str, kind: str, each_s: float) -> float:
    """Return TFLOP/s of a product of square matrices, the largest that fits into the time."""
    import torch

    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    dtype = getattr(torch, TYPES[kind])
    size, wait = 256, _waiter(device)
    while True:
        left = torch.rand(size, size, device=device).to(dtype)
        product = partial(torch.mm, left, left, out=torch.empty_like(left))
        rate = per_second(product, wait, each_s / 20)
        # Twice the size takes eight times as long.
        if size >= LARGEST_MATRIX or 8 / rate > each_s:
            break
        size *= 2
    return 2 * size**3 * per_second(product, wait, each_s) / TERA


def memory_copy(device: str, each_s: float) -> float:
    """Return GB/s of a copy within the device's memory; reading and writing both count."""
    import torch

    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return 2 * COPY_BYTES * per_second(copy, _waiter(device), each_s) / GIGA


def host_copy(device: str, pinned: bool, each_s: float) -> float:
    """Return GB/s of a copy from the host's memory to the device."""
    import torch

    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    source = source.pin_memory() if pinned else source
    target = torch.empty_like(source, device=device)
    copy = partial(target.copy_, source, non_blocking=pinned)
    return COPY_BYTES * per_second(copy, _waiter(device), each_s) / GIGA


def _waiter(device: str) -> Callable[[], object]:
    """Return a function that waits for the device; on the CPU, calls return when they are done."""
    import torch

    kind = device.partition(":")[0]
    if kind == "cpu":
        return lambda: None
    module = getattr(torch, kind)
    return partial(module.synchronize, device) if kind != "mps" else module.synchronize


def all_reduce(backend: str, world: int, each_s: float) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s, as rank 0 measured it.

    Source: nccl-tests, doc/PERFORMANCE.md: size / time * 2 (n - 1) / n.
    """
    import torch  # noqa: F401 - once, for all ranks

    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryFile() as result:
        run_ranks(world, partial(_reduce, backend, world, each_s, listener, result))
        result.seek(0)
        rate = float(result.read())
    return REDUCE_BYTES[backend] * rate * 2 * (world - 1) / world / GIGA


def _reduce(
    backend: str, world: int, each_s: float, listener: socket.socket, result: Any, rank: int
) -> None:
    import torch
    import torch.distributed as dist

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    join(backend, rank, world, listener)
    total = torch.zeros(REDUCE_BYTES[backend] // 4, device=device)
    wait = _waiter(device)
    reduce = partial(dist.all_reduce, total)
    # All ranks must make the same number of calls: the slowest rank's first try decides.
    once_s = torch.tensor([1 / per_second(reduce, wait, 0)], device=device)
    dist.all_reduce(once_s, op=dist.ReduceOp.MAX)
    count = max(1, min(1000, int(each_s / once_s.item())))
    started_s = time.perf_counter()
    for _ in range(count):
        reduce()
    wait()
    if rank == 0:
        result.write(str(count / (time.perf_counter() - started_s)).encode())
        result.flush()
    dist.destroy_process_group()


def disk_read(folder: str, each_s: float) -> float:
    """Return GB/s of reading an uncached file from the disk, in large blocks.

    Raises:
        OSError: If the folder can't be written, or this system can't drop a file from its cache.
    """
    if not hasattr(os, "posix_fadvise"):
        raise OSError("this system can't drop a file that was just written from its cache")
    chunk = os.urandom(CHUNK_BYTES)
    # The file has no name where the system allows that, so nothing is left if this process dies.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        written, until_s = 0, time.perf_counter() + 4 * each_s
        while written < DISK_BYTES and time.perf_counter() < until_s:
            written += file.write(chunk)
            os.fsync(file.fileno())  # per chunk: a whole file at the end could take minutes
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        block, read, started_s = bytearray(CHUNK_BYTES), 0, time.perf_counter()
        while time.perf_counter() - started_s < each_s and (size := file.readinto(block)):
            read += size
        return read / (time.perf_counter() - started_s) / GIGA


if __name__ == "__main__":
    die_with_launcher()
    stay_on_this_machine()
    main(sys.argv[1:])
