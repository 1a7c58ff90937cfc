"""Starts the server of the live page like `polopt dashboard`, in its own process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

SERVE = """
import sys
from pathlib import Path
from polopt.dashboards.server import serve
serve(Path(sys.argv[1]), int(sys.argv[2]), browser=False)
"""


@contextlib.contextmanager
def running_server(
    results: Path, environment: Mapping[str, str], cwd: Path | None = None
) -> Iterator[str]:
    """Starts a server of the directory `results` with the current directory `cwd`. Yields its
    address, and stops the server at the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, str(results), str(port)]
    process = subprocess.Popen(command, env=environment, cwd=cwd, stdout=subprocess.PIPE, text=True)
    address = f"http://127.0.0.1:{port}"
    assert process.stdout is not None
    try:
        lines = []
        while address not in (line := process.stdout.readline()):
            assert line, f"the server ended: {lines}"
            lines.append(line)
        yield address
    finally:
        process.terminate()
        process.wait(30)
