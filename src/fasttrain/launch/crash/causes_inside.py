"""Causes inside the script: checkpoints, its processes, shapes, gradients."""

from __future__ import annotations

from fasttrain.launch.crash.cause_rules import Cause, Retry, argparse_refused, kind, own_check, text

INSIDE = (
    # Checkpoints and pickles.
    Cause(
        "weights-only", Retry.NEVER, text(r"Weights only load failed"),
        "torch.load takes tensors alone by default, and the file holds more, or is no checkpoint",
        "if you trust the file: torch.load(..., weights_only=False), or"
        " torch.serialization.add_safe_globals for its classes",
    ),
    Cause(
        "checkpoint-broken", Retry.NEVER,
        text(r"PytorchStreamReader failed", r"invalid load key", r"pickle data was truncated"),
        "the checkpoint is cut off, or is none",
        "take an older one; a run that was killed while it saved leaves such files",
    ),
    Cause(
        "state-dict", Retry.NEVER, text(r"Error\(s\) in loading state_dict for (?P<model>\w+)"),
        "the checkpoint's names or shapes are not those of {model}",
        "build the model as it was saved; a prefix such as module. or _orig_mod. has to be cut off",
    ),
    Cause(
        "main-guard", Retry.NEVER,
        text(r"before the\s+current process has finished its bootstrapping phase"),
        "the script starts processes while it is imported by one of them",
        'put what runs it below `if __name__ == "__main__":`',
    ),
    Cause(
        "pickling", Retry.NEVER, text(r"Can't pickle", r"[Cc]annot pickle", r"Can't get attribute"),
        "something that goes to another process or into a file can't be pickled: {message}",
        "define it at the top of a module, not inside of a function; a lambda and an open file"
        " can't go",
    ),
    # Other processes of the script.
    Cause(
        "loader-worker", Retry.ONCE,
        text(r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) (?P<how>[^.\n]+)"),
        "a DataLoader worker died: {how}",
        "run with num_workers=0 once, to see the error itself",
    ),
    Cause(
        "child-died", Retry.ONCE,
        text(r"process \d+ terminated with (?P<how>signal \w+|exit code \d+)"),
        "a process that the script started died with {how}", "see what it said in the log",
    ),
    # Shapes and types. Source: messages of torch 2.13 on a CPU.
    Cause(
        "shape-mismatch", Retry.TRAINED,
        text(
            r"(?P<shapes>mat1 and mat2 shapes cannot be multiplied.*)",
            r"(?P<shapes>The size of tensor a .* must match .*)",
            r"(?P<shapes>Given groups=.*)", r"(?P<shapes>Sizes of tensors must match.*)",
            r"(?P<shapes>shape '.*' is invalid for input of size \d+)",
            r"(?P<shapes>stack expects each tensor to be equal size.*)",
            r"(?P<shapes>Expected input batch_size .* to match target batch_size.*)",
            r"(?P<shapes>[Ss]ize mismatch.*)",
        ),
        "shapes don't fit: {shapes}", "print the shapes in front of {place}",
    ),
    Cause(
        "index-range", Retry.TRAINED,
        text(r"(?P<what>Target -?\d+) is out of bounds", r"(?P<what>index) out of range in self"),
        "{what} is outside of the classes or rows that there are",
        "compare the largest value with the size of the layer at {place}",
    ),
    Cause(
        "dtype-mismatch", Retry.TRAINED,
        text(
            r"(?P<types>.*must have the same dtype.*)", r"(?P<types>expected .*scalar type.*)",
            r"(?P<types>Input type .* and (?:bias|weight) type .* should be the same)",
        ),
        "dtypes don't fit: {types}", "convert one of them (.float(), .to(dtype)) at {place}",
    ),
    Cause(
        "device-mismatch", Retry.TRAINED,
        text(
            r"Expected all tensors to be on the same device(?:, )?(?P<which>.*)",
            r"Tensor on device (?P<which>\w+ is not on the expected device \w+)",
        ),
        "tensors of one call are on different devices: {which}",
        "move the inputs to the model's device in front of {place}",
    ),
    # Gradients.
    Cause(
        "no-gradient", Retry.TRAINED, text(r"does not require grad and does not have a grad_fn"),
        "backward() was called on what doesn't depend on a parameter",
        "look for detach(), .item(), no_grad or frozen parameters between the model and the loss",
    ),
    Cause(
        "backward-twice", Retry.TRAINED, text(r"backward through the graph a second time"),
        "the graph of this loss is gone: a backward pass has used it up",
        "compute the loss again for each backward pass, or detach() what is kept from the last one",
    ),
    Cause(
        "inplace", Retry.TRAINED, text(r"has been modified by an inplace operation"),
        "a tensor that the backward pass needs was changed in place",
        "write x = x + y instead of x += y;"
        " torch.autograd.set_detect_anomaly(True) names the operation",
    ),
    # Exceptions of Python itself.
    Cause(
        "interrupted", Retry.NEVER,
        kind("KeyboardInterrupt"), "it was interrupted by SIGINT (ctrl-C)", "",
    ),
    Cause(
        "assertion", Retry.TRAINED,
        own_check, "the script's own check at {place} failed: {source}",
        "print the values that it compares",
    ),
    Cause(
        "assertion", Retry.TRAINED,
        kind("AssertionError"), "a check at {checked_at} failed: {check}",
        "see what it is given at {place}",
    ),
    Cause(
        "usage", Retry.NEVER, argparse_refused, "the script refused its arguments: {arguments}",
        "its own options go after --: fasttrain run SCRIPT -- --its-option",
    ),
    Cause(
        "recursion", Retry.TRAINED,
        kind("RecursionError"), "a function calls itself without an end", "",
    ),
)  # fmt: skip
