"""A script that notes each signal it gets in ``seen-RANK``, and ends a while behind the last."""

RECORDS = """
import os, signal, sys, time
rank, end = os.environ.get("RANK", "0"), time.monotonic() + 20

def record(number, frame):
    global end
    with open(f"seen-{rank}", "a") as seen:
        seen.write(signal.Signals(number).name + "\\n")
    end = time.monotonic() + 0.7  # time for a signal that comes twice

for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT"):
    signal.signal(getattr(signal, name), record)
open(f"ready-{rank}", "w").write(str(os.getpid()))
print("ready", flush=True)
while time.monotonic() < end:
    time.sleep(0.02)
sys.exit(EXIT_CODE)
"""


def records(exit_code: int) -> str:
    """Return the script, to end with this exit code."""
    return RECORDS.replace("EXIT_CODE", str(exit_code))
