"""The monotonic clocks, also where a script of several ranks has others in `time`."""

from __future__ import annotations

import time

monotonic, perf_counter = time.monotonic, time.perf_counter
