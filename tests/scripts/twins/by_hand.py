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


_attention = torch.nn.functional.scaled_dot_product_attention


def attention(query, key, value, *args, **kwargs):
    """Attend in fp32 with autocast to bf16, whose backward takes long for few positions."""
    low = dtype is torch.bfloat16 and torch.is_autocast_enabled("cpu")
    if not low or not torch.is_grad_enabled():
        return _attention(query, key, value, *args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        found = _attention(query.float(), key.float(), value.float(), *args, **kwargs)
    return found.to(dtype)


@torch.no_grad()
def normalised(output, *, logarithms=False):
    """Have probabilities in bf16 along the second dimension, or logarithms of them, sum to 1."""
    if dtype is torch.bfloat16:
        if logarithms:
            output.detach().sub_(output.logsumexp(1, keepdim=True))
        else:
            output.detach().div_(output.sum(1, keepdim=True))
    return output


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
