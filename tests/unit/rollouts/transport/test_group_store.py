"""The choice of a backend for all-reduce, and the store of torch's process groups."""

from __future__ import annotations

import socket

import pytest

from polopt.rollouts.transport.collective import (
    SMALL_TENSOR_BYTES,
    AllReducer,
    GroupBroken,
    GroupSpec,
    resolve_backend,
    start_store,
)


def test_store_listens_only_on_its_address() -> None:
    store = start_store("127.0.0.1")
    with socket.create_connection(("127.0.0.1", store.port), 20.0):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), 20.0)


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        start_store("192.0.2.77")


def test_unusable_address_of_a_rank_breaks_the_group() -> None:
    reducer = AllReducer(GroupSpec(1, 2, "socket", 20.0, 0.3, key=b"key"), 1)
    with pytest.raises(GroupBroken, match=r"could not join group 1 \(socket\)"):
        reducer.join(["/no/such/socket", reducer.address])


def test_group_of_another_prefix_is_not_joined() -> None:
    store = start_store("127.0.0.1")
    spec = GroupSpec(1, 2, "gloo", 20.0, 0.3, host="127.0.0.1", port=store.port, prefix="a")
    with pytest.raises(GroupBroken, match=r"could not join group 1 \(gloo\) within 0.3 s"):
        AllReducer(spec, 0).join([])


ONE, TWO = ["a", "a"], ["a", "b"]


@pytest.mark.parametrize(
    ("backend", "device", "num_gpus", "transport", "num_bytes", "nodes", "expected"),
    [
        ("auto", "cpu", 0.0, "auto", SMALL_TENSOR_BYTES, ONE, "socket"),
        ("auto", "cpu", 0.0, "auto", SMALL_TENSOR_BYTES, TWO, "gloo"),
        ("auto", "cpu", 0.0, "socket", 4, ONE, "socket"),
        ("auto", "cpu", 0.0, "auto", SMALL_TENSOR_BYTES + 4, ONE, "gloo"),
        ("auto", "cpu", 0.0, "ray", 4, ONE, "gloo"),
        ("auto", "cuda:0", 1.0, "auto", 4, ONE, "nccl"),
        ("auto", "cuda", 2.0, "ray", 4, TWO, "nccl"),
        ("auto", "cuda", 0.5, "auto", 4, ONE, "socket"),  # NCCL refuses ranks that share a GPU
        ("auto", "cuda", 0.5, "auto", SMALL_TENSOR_BYTES + 4, ONE, "gloo"),
        ("gloo", "cpu", 0.0, "auto", 4, ONE, "gloo"),
        ("socket", "cpu", 0.0, "ray", 4, ONE, "socket"),
    ],
)
def test_auto_backend(
    backend: str,
    device: str,
    num_gpus: float,
    transport: str,
    num_bytes: int,
    nodes: list[str],
    expected: str,
) -> None:
    assert resolve_backend(backend, device, num_gpus, transport, num_bytes, nodes) == expected
