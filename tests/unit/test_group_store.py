"""Choice of a backend, and the store of torch's groups."""

from __future__ import annotations

import socket

import pytest
import zmq

from polopt.common.config import ConfigError
from polopt.rollouts.transport.collective import (
    SMALL_TENSOR_BYTES,
    AllReducer,
    GroupBroken,
    GroupSpec,
    resolve_backend,
    start_store,
)
from polopt.rollouts.transport.endpoint import Address
from polopt.rollouts.transport.messages import MAX_FRAME_BYTES


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
    own, other = (zmq.curve_keypair() for _ in range(2))
    keys = {"public_keys": (own[0], other[0]), "secret_key": own[1], "passwords": ("", "secret")}
    reducer = AllReducer(GroupSpec(1, 2, "zmq", 20.0, 0.3, **keys), 0, host="127.0.0.1")
    with pytest.raises(GroupBroken, match=r"could not join group 1 \(zmq\)"):
        reducer.join([reducer.address, Address("tcp://no port")])


def test_group_of_another_prefix_is_not_joined() -> None:
    store = start_store("127.0.0.1")
    spec = GroupSpec(1, 2, "gloo", 20.0, 0.3, host="127.0.0.1", port=store.port, prefix="a")
    with pytest.raises(GroupBroken, match=r"could not join group 1 \(gloo\) within 0.3 s"):
        AllReducer(spec, 0).join([])


@pytest.mark.parametrize(
    ("backend", "device", "num_gpus", "transport", "num_bytes", "expected"),
    [
        ("auto", "cpu", 0.0, "auto", SMALL_TENSOR_BYTES, "zmq"),
        ("auto", "cpu", 0.0, "zmq", 4, "zmq"),
        ("auto", "cpu", 0.0, "auto", SMALL_TENSOR_BYTES + 4, "gloo"),
        ("auto", "cpu", 0.0, "ray", 4, "gloo"),
        ("auto", "cuda:0", 1.0, "auto", 4, "nccl"),
        ("auto", "cuda", 2.0, "ray", 4, "nccl"),
        ("gloo", "cpu", 0.0, "auto", 4, "gloo"),
        ("zmq", "cpu", 0.0, "ray", 4, "zmq"),
    ],
)
def test_auto_backend(
    backend: str, device: str, num_gpus: float, transport: str, num_bytes: int, expected: str
) -> None:
    assert resolve_backend(backend, device, num_gpus, transport, num_bytes) == expected


@pytest.mark.parametrize(
    ("transport", "num_bytes", "expected"),
    [("auto", 4, "zmq"), ("auto", SMALL_TENSOR_BYTES + 4, "gloo"), ("ray", 4, "gloo")],
)
def test_auto_backend_of_shared_gpus_is_not_nccl(
    transport: str, num_bytes: int, expected: str
) -> None:
    assert resolve_backend("auto", "cuda", 0.5, transport, num_bytes) == expected


def test_zmq_with_too_large_gradients_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'backend': got 'zmq'.*Allowed: up to"):
        resolve_backend("zmq", "cpu", 0.0, "auto", MAX_FRAME_BYTES + 4)
