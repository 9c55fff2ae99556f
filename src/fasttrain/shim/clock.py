"""The time of a run's events, and when the time of day was set meanwhile."""

from __future__ import annotations

import time

JUMP_S = 2.0  # slewing a clock moves it by 1.8 s an hour at most; Source: ntpd(8), 500 ppm


class Clock:
    """The time of day beside the clock that nobody sets, which stands while the machine sleeps.

    Attributes:
        warnings: The first jump, in a sentence; the events hold them all.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self._apart_s = time.time() - time.monotonic()

    def read(self, step: int) -> dict[str, float]:
        """Give both times in seconds, and by how much the time of day has jumped since last time.

        Args:
            step: Optimizer steps so far.
        """
        time_s, monotonic_s = time.time(), time.monotonic()
        jump_s = time_s - monotonic_s - self._apart_s
        self._apart_s += jump_s
        now = {"time_s": time_s, "monotonic_s": monotonic_s}
        if abs(jump_s) <= JUMP_S:
            return now
        if not self.warnings:
            self.warnings.append(
                f"the time of day jumped {'ahead' if jump_s > 0 else 'back'} by"
                f" {abs(jump_s):,.0f} s before step {step}: it was set, or the machine slept; go by"
                " monotonic_s in the events"
            )
        return {**now, "clock_jump_s": jump_s}
