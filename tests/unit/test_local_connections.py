"""Connections within a node: a private directory, and tcp where there is none."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.auth.thread import AuthenticationThread
from zmq.utils.monitor import recv_monitor_message

from polopt.rollouts.transport import listener
from polopt.rollouts.transport.endpoint import Endpoint
from polopt.rollouts.transport.messages import AUTO_FRAME_BYTES
from polopt.rollouts.transport.rpc_client import Router

HOST = "127.0.0.1"
LIMIT_S = 60.0
Make = Callable[[], Router]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Router] = []

    def build() -> Router:
        made.append(Router(HOST, 60.0, AUTO_FRAME_BYTES))
        return made[-1]

    yield build
    for router in made:
        router.close()


@pytest.fixture
def peer() -> Iterator[zmq.Socket[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context.socket(zmq.DEALER)
    context.destroy(linger=0)


def directory_of(endpoint: Endpoint) -> Path:
    return Path(endpoint.address.ipc.removeprefix("ipc://")).parent


def test_only_this_user_can_enter_the_directory(make: Make) -> None:
    umask = os.umask(0)
    try:
        directory = directory_of(make().admit())
    finally:
        os.umask(umask)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.stat().st_uid == os.geteuid()


def test_directory_is_removed_at_close(make: Make) -> None:
    router = make()
    directory = directory_of(router.admit())
    assert directory.is_dir()
    router.close()
    assert not directory.exists()


@pytest.mark.parametrize("problem", ["long", "missing", "readable"])
def test_without_a_private_directory_only_tcp(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, problem: str
) -> None:
    parent = tmp_path / ("x" * 120 if problem == "long" else problem)
    if problem != "missing":
        parent.mkdir()
    if problem == "readable":  # as in file systems without modes
        monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(parent))
        parent.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    address = make().admit().address
    assert address.ipc == ""
    assert address.tcp.startswith(f"tcp://{HOST}:")
    assert not parent.exists() or problem == "readable" or not list(parent.iterdir())


def test_process_of_the_node_connects_within_it(make: Make, peer: zmq.Socket[Any]) -> None:
    endpoint = make().admit()
    assert endpoint.authenticate(peer) == endpoint.address.ipc
    assert peer.getsockopt(zmq.MECHANISM) == zmq.PLAIN


@pytest.mark.parametrize("problem", ["no path", "not visible", "open", "link", "nobody listens"])
def test_other_processes_connect_by_tcp_and_curve(
    make: Make, peer: zmq.Socket[Any], tmp_path: Path, problem: str
) -> None:
    endpoint = make().admit()
    directory = directory_of(endpoint)
    ipc = endpoint.address.ipc
    if problem == "no path":
        ipc = ""
    elif problem == "not visible":  # another node, or a container
        ipc = f"ipc://{tmp_path}/elsewhere/s"
    elif problem == "open":  # who else can enter could have put the socket there
        directory.chmod(0o755)
    elif problem == "link":
        (tmp_path / "link").symlink_to(directory)
        ipc = f"ipc://{tmp_path}/link/s"
    else:  # the listener is on another node that shares files with this one
        private = Path(tempfile.mkdtemp(dir=directory))
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(private / "s"))
        ipc = f"ipc://{private}/s"
    endpoint = endpoint._replace(address=endpoint.address._replace(ipc=ipc))
    assert endpoint.authenticate(peer) == endpoint.address.tcp
    assert peer.getsockopt(zmq.MECHANISM) == zmq.CURVE


def test_secrets_are_not_printed(make: Make) -> None:
    endpoint = make().admit()
    assert endpoint.password not in repr(endpoint)
    assert endpoint.secret_key.decode() not in repr(endpoint)


def event_of(endpoint: Endpoint, peer: zmq.Socket[Any]) -> int:
    """How the handshake of a peer ends; 0: not within `LIMIT_S`."""
    events = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.HANDSHAKE_FAILED_AUTH
    monitor = peer.get_monitor_socket(events)
    peer.connect(endpoint.authenticate(peer))
    if not monitor.poll(int(1e3 * LIMIT_S)):
        return 0
    return int(recv_monitor_message(monitor)["event"])


def test_passwords_are_not_logged(
    make: Make, peer: zmq.Socket[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "zmq.auth")
    endpoint = make().admit()
    assert event_of(endpoint, peer) == zmq.Event.HANDSHAKE_SUCCEEDED
    assert endpoint.password not in caplog.text


def test_user_revoked_in_a_handshake_is_refused(
    make: Make, peer: zmq.Socket[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class RevokedOnceFound(listener.Passwords):
        """Removes a user between the look-ups of the authenticator's thread."""

        def __contains__(self, user_id: object) -> bool:
            return self.pop(str(user_id), None) is not None

    monkeypatch.setattr(listener, "Passwords", RevokedOnceFound)
    router = make()
    assert event_of(router.admit(), peer) == zmq.Event.HANDSHAKE_FAILED_AUTH
    router.close()  # would wait for ever for a thread that an error has ended


def test_authenticator_that_cannot_start_is_a_zmq_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: AuthenticationThread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(AuthenticationThread, "start", start)
    with pytest.raises(zmq.ZMQError, match="can't start new thread"):
        Router(HOST, LIMIT_S, AUTO_FRAME_BYTES)
