"""The allocator that ``fasttrain tune`` tries does keep memory in a real process."""

from __future__ import annotations

import os
import subprocess
import sys

from fasttrain.planning.process_settings import ALLOCATOR_VARIABLE, KEEP_MEMORY

# Takes 64 MiB and leaves it, ten times, as tensors do.
TAKES = """
import resource
for _ in range(10):
    bytearray(1) * (64 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


def faults(**environ: str) -> int:
    own = {name: value for name, value in os.environ.items() if name != ALLOCATOR_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", TAKES], env={**own, **environ}, capture_output=True, check=True
    )
    return int(done.stdout)


def test_memory_that_is_kept_is_not_cleared_again_by_the_kernel() -> None:
    assert faults(**{ALLOCATOR_VARIABLE: KEEP_MEMORY}) < 0.5 * faults()
