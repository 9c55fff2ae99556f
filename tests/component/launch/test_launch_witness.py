"""How the launcher knows that a signal went to its whole group."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal
from fasttrain.launch.process.stop import signals_held
from fasttrain.launch.process.witness import Witness

def seen(witness, *send):
    for one in send:
        one(0 if one is os.killpg else os.getpid(), signal.SIGTERM)
    signal.sigwait({signal.SIGTERM})
    if later:
        os.killpg(0, signal.SIGTERM)
    return witness.saw(signal.SIGTERM), signal.SIGTERM in signal.sigpending()

with signals_held(), Witness(os.environ) as witness:
    later = False
    first = witness.pid
    print(seen(witness, os.kill), seen(witness, os.killpg), seen(witness, os.kill))
    later = True
    print(seen(witness, os.kill))
    last = witness.pid
for pid in (first, last):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        print("ended")
"""


def test_a_signal_to_the_group_is_told_from_one_to_the_launcher() -> None:
    argv = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(argv, capture_output=True, text=True, start_new_session=True)
    assert done.stderr == ""
    alone, to_group, alone_again, to_both, *ended = done.stdout.replace(") (", ")\n(").splitlines()
    assert alone == alone_again == "(False, False)"
    assert to_group == "(True, False)"
    assert to_both == "(True, False)", "the second one is taken, too"
    assert ended == ["ended", "ended"]
