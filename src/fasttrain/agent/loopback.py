"""The rendezvous of a run on one node, at a store that listens on the loopback interface alone.

torchrun's own stores listen on all interfaces, whatever their endpoint: anybody who reaches the
machine could read and write what the ranks exchange.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic import rendezvous

BACKEND = "loopback"
HOST = "127.0.0.1"
TIMEOUT_S = 600  # for a worker that asks for a key. Source: static_tcp_rendezvous.py of torch 2.13


class Loopback(rendezvous.RendezvousHandler):
    """The only node of a run, and the store that the workers of an attempt share."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def get_backend(self) -> str:
        """Return its name."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: rank 0 is a client of the agent's store, and opens none of its own."""
        return True

    def next_rendezvous(self) -> Any:
        """Return a new store with its address.

        In an old one, restarted workers would find the addresses of the previous attempt.
        """
        listener = socket.socket()
        listener.bind((HOST, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = TCPStore(
            HOST,
            port,
            is_master=True,
            timeout=timedelta(seconds=TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return rendezvous.RendezvousInfo(
            PrefixStore(self._run_id, store), 0, 1, rendezvous.RendezvousStoreInfo(HOST, port)
        )

    def is_closed(self) -> bool:
        """False: there is no other node to close it."""
        return False

    def set_closed(self) -> None:
        """No-op: there is no other node to notify."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other node can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """True: nothing is open that doesn't end with the agent."""
        return True


def offer() -> bool:
    """Register this rendezvous with torchrun; False if this torch doesn't support it.

    It needs a rendezvous that returns its store (RendezvousInfo), and a TCPStore that takes a
    listening socket (master_listen_fd).
    """
    if not hasattr(rendezvous, "RendezvousInfo"):
        return False
    if "master_listen_fd" not in (TCPStore.__init__.__doc__ or ""):
        return False
    rendezvous.rendezvous_handler_registry.register(BACKEND, _create)
    return True


def _create(parameters: Any) -> Loopback:
    return Loopback(parameters.run_id)
