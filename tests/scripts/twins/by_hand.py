"""What the twins share: the precision that is asked for, autocast, and a scaler that counts.

Source: "Automatic Mixed Precision examples" of torch's documentation.
"""

import sys

import torch

_at = sys.argv.index("--precision")
precision = sys.argv[_at + 1]
del sys.argv[_at:_at + 2]  # the scripts' own parsers don't know it
dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def autocast():
    return torch.autocast("cpu", dtype=dtype)


class CountingScaler(torch.amp.GradScaler):
    """A GradScaler that counts the steps that it left out."""

    skipped = 0

    def step(self, optimizer):
        made = []
        hook = optimizer.register_step_post_hook(lambda *_: made.append(True))
        super().step(optimizer)
        hook.remove()
        self.skipped += not made

    def report(self):
        print(f"skipped {self.skipped} scale {self.get_scale():.0f}", file=sys.stderr)


scaler = CountingScaler("cpu", enabled=precision == "fp16")
