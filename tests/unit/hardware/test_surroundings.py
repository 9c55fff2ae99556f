from __future__ import annotations

from collections.abc import Callable

from fasttrain.hardware.host import Host
from fasttrain.hardware.host_state import look_around
from fasttrain.model.crash import Surroundings

MEMORY = {"proc/meminfo": "MemTotal:       2097152 kB\nMemFree: 5 kB\n",
          "proc/vmstat": "pgfault 7\noom_kill 3\n"}  # fmt: skip
# Source: Linux 6.12, cgroup-v2.rst and cgroup-v1/memory.rst
EVENTS = "low 0\nhigh 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"


def test_version_2(make_host: Callable[..., Host]) -> None:
    group = "sys/fs/cgroup/all/job"
    host = make_host({
        **MEMORY, "proc/self/cgroup": "0::/all/job\n", f"{group}/memory.events": EVENTS,
        "sys/fs/cgroup/all/memory.events": EVENTS.replace("2", "7"),  # of others as well
        f"{group}/memory.max": "1073741824\n",
    })  # fmt: skip
    assert look_around(host) == Surroundings(2, 3, 1 << 30, 2 << 30, None)


def test_version_1(make_host: Callable[..., Host]) -> None:
    top = "sys/fs/cgroup/memory"
    host = make_host({
        **MEMORY, "proc/self/cgroup": "4:memory:/job\n", f"{top}/job/memory.oom_control": CONTROL,
        f"{top}/memory.oom_control": CONTROL.replace("4", "9"),
        f"{top}/job/memory.limit_in_bytes": "9223372036854771712\n",  # none
    })  # fmt: skip
    assert look_around(host) == Surroundings(4, 3, None, 2 << 30, None)


def test_in_a_container_the_mount_is_the_group(make_host: Callable[..., Host]) -> None:
    host = make_host({
        "proc/self/cgroup": "0::/../../job\n", "sys/fs/cgroup/memory.events": EVENTS
    })  # fmt: skip
    assert look_around(host).group_oom_kills == 2


def test_a_machine_that_tells_nothing(make_host: Callable[..., Host]) -> None:
    assert look_around(make_host()) == Surroundings()
