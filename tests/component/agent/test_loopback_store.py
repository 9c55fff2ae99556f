"""The store of a run on one node, with a server that takes no socket, as that of torch 2.7."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fasttrain.agent import restart_agent


def test_the_server_listens_on_loopback_if_the_default_one_takes_no_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("use_libuv"))
        if asked[-1] is None:
            raise NotImplementedError
        return TCPStore(*args, **kwargs)

    monkeypatch.setattr(restart_agent, "TCPStore", make)
    found = restart_agent.Loopback("run").next_rendezvous()
    assert asked == [None, False]
    port = found.bootstrap_store_info.master_port
    socket.create_connection(("127.0.0.1", port), timeout=60).close()
    found.store.set("key", "value")
    assert found.store.get("key") == b"value"
