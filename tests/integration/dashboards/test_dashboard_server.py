"""The WebSocket of the live page, which carries all data, accepts only some hosts and origins."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from dashboard_results import write_trial
from dashboard_server import running_server

for module in ("streamlit", "plotly"):
    pytest.importorskip(module, reason="the extra polopt[dashboard] is not installed")

LIMIT_S = 60.0
ACCEPTED, REFUSED = 101, 403


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    results = tmp_path_factory.mktemp("results")
    write_trial(results, "async_gradients", 0, 4)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    with running_server(results, environment) as address:
        yield int(address.rpartition(":")[2])


def handshake(port: int, host: str, origin: str | None) -> int:
    """Requests the WebSocket, and returns the status of the response."""
    lines = [
        "GET /_stcore/stream HTTP/1.1",
        *([f"Host: {host}"] if host else []),
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
        *([f"Origin: {origin}"] if origin else []),
    ]
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        with connection.makefile("rb") as answer:
            return int(answer.readline().split()[1])


@pytest.mark.parametrize("name", ["attacker.example", "127.0.0.1.attacker.example", "192.0.2.7"])
def test_foreign_host_gets_no_websocket(port: int, name: str) -> None:
    host = f"{name}:{port}"
    for origin in (f"http://{host}", f"http://127.0.0.1:{port}", None):
        assert handshake(port, host, origin) == REFUSED, origin


def test_request_without_a_host_gets_no_websocket(port: int) -> None:
    assert handshake(port, "", None) in (400, REFUSED)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_loopback_host_gets_the_websocket(port: int, name: str) -> None:
    host = f"{name}:{port}"
    assert handshake(port, host, f"http://{host}") == ACCEPTED


def test_forwarded_port_gets_the_websocket(port: int) -> None:
    assert handshake(port, "localhost:9999", "http://localhost:9999") == ACCEPTED


def test_foreign_origin_gets_no_websocket(port: int) -> None:
    assert handshake(port, f"127.0.0.1:{port}", "http://attacker.example") == REFUSED


def test_server_uses_nothing_of_the_current_directory(tmp_path: Path) -> None:
    folder = tmp_path / "unpacked"
    (folder / ".streamlit").mkdir(parents=True)
    (folder / ".streamlit" / "config.toml").write_text('[server]\nbaseUrlPath = "other"\n')
    for name in ("streamlit", "plotly", "pandas"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'EXECUTED')!r}, 'w').close()\n")
    write_trial(folder / "results", "async_gradients", 0, 4)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with (
        running_server(Path("results"), environment, cwd=folder) as address,
        urllib.request.urlopen(f"{address}/_stcore/health", timeout=LIMIT_S) as answer,
    ):
        assert answer.read() == b"ok"
    assert not (tmp_path / "EXECUTED").exists()
