"""The store through which ranks find each other."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from polopt.rollouts.transport.collective import AllReducer, GroupBroken, GroupSpec, start_store


def test_store_listens_only_on_its_address() -> None:
    store = start_store("127.0.0.1")
    with socket.create_connection(("127.0.0.1", store.port), 20.0):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), 20.0)


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        start_store("192.0.2.77")


def spec(store: TCPStore, token: bytes, world_size: int) -> GroupSpec:
    return GroupSpec("127.0.0.1", store.port, token, 1, world_size, "gloo", 20.0, 0.3)


def test_store_does_not_hold_the_token() -> None:
    store = start_store("127.0.0.1")
    group = AllReducer(spec(store, b"secret token", 1), 0)
    peer = TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=20))
    for key in ("token", "polopt/1/token", "links/0", "polopt/1/links/0"):
        assert not peer.check([key])
    group.close()


def test_rank_with_another_token_joins_no_group() -> None:
    store = start_store("127.0.0.1")
    with pytest.raises(GroupBroken, match=r"could not join group 1 \(gloo\) within 0.3 s"):
        AllReducer(spec(store, b"other token", 2), 0)
