"""Foretells which backward pass is the last one before a step."""

from __future__ import annotations


class Accumulation:
    """Learns after how many backward passes the script makes a step.

    With gradient accumulation only the last of them has to be averaged. It is foretold from the
    last two steps; where it comes earlier than foretold, what is left is averaged at the step.

    Attributes:
        stepping: Whether a step is being made.
        passes: Passes since the last one.
        windows: Passes of the last two.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self.stepping = False
        self.passes = 0
        self.windows = (0, 0)

    @property
    def last(self) -> bool:
        """Whether the next backward pass is the last one before a step, or may be."""
        before, latest = self.windows
        foretold = before == latest and latest > 1 and self._enabled and not self.stepping
        return not foretold or self.passes + 1 >= latest

    def average_after_pass(self) -> bool:
        """Count a pass, and say whether it was the last one."""
        last = self.last
        self.passes += not self.stepping
        return last

    def on_zero_grad(self) -> None:
        """Forget passes whose gradients were dropped or used up, as between the two of SAM."""
        self.passes = 0

    def after_step(self) -> None:
        """Begin the next window."""
        if self.passes:
            self.windows = (self.windows[1], self.passes)
        self.passes = 0
        self.stepping = False
