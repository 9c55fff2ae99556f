"""What a shell sees of a command that ctrl-C has ended: that it died of the signal."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

IMPORTED = """
import sys
from fasttrain.__main__ import main

class Interrupts:
    def find_spec(self, name, *_):
        if name == "fasttrain.cli.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
main()
"""
ENDED = """
import types, sys
from fasttrain.model.errors import ExitCode
sys.modules["fasttrain.cli.app"] = types.SimpleNamespace(main=lambda _: {code})
from fasttrain.__main__ import main
print("said")
main()
"""


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (IMPORTED, -signal.SIGINT, b""),
        (ENDED.format(code="ExitCode.INTERRUPTED"), -signal.SIGINT, b"said\n"),
        (ENDED.format(code="130"), 130, b"said\n"),
    ],
    ids=["while it is imported", "while it ran", "by a script that ended itself"],
)
def test_it_dies_of_the_signal_without_a_traceback(text: str, code: int, said: bytes) -> None:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, said, b"")
