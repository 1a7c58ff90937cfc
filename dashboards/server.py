"""Starts the live page: what `polopt dashboard` calls."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import sys
from pathlib import Path

from polopt.common.config import ConfigError

#: Names of the loopback address. A page of another site whose name its owner has pointed at this
#: machine (DNS rebinding) sends its own name.
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_EXTRA = "the dashboards need Streamlit and Plotly: pip install 'polopt[dashboard]'"


def check_installed(*modules: str) -> None:
    """Raises a ConfigError that names the extra if a module of it is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"{module} is not installed; {_EXTRA}")


def existing_directory(results_dir: Path) -> Path:
    """The directory of results, with the user's home in place of `~`.

    Raises:
        ConfigError: it does not exist, or is a file.
    """
    folder = results_dir.expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(
            f"{str(results_dir)!r} is a file. Allowed: the directory of a run, or of experiments"
        )
    raise ConfigError(f"results directory does not exist; got {str(results_dir)!r}")


def _check_port(port: int) -> None:
    """Raises a ConfigError if a server cannot listen on a port of the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is taken by another program" if taken else f"cannot be used: {error.strerror}"
            raise ConfigError(
                f"port {port} {why}. Allowed: another --port, or none for the first free one"
            ) from None


def serve(results_dir: Path, port: int | None = None, browser: bool = True) -> None:
    """Replaces this process by the server of the live page. Does not return.

    The server prints its address. It listens only on the loopback address, and its WebSocket
    answers only requests whose headers name this address. It neither imports files of the current
    directory nor reads them as its configuration. Without `port` it takes the first free port that
    is 8501 or higher.

    Args:
        results_dir: directory of Tune results.
        port: port, or None.
        browser: whether a browser is opened where there is one.

    Raises:
        ConfigError: if the directory does not exist or is a file, the port is taken, or the extra
            is not installed.
    """
    check_installed("streamlit", "plotly")
    folder = existing_directory(results_dir)
    command = [sys.executable, "-m", "streamlit", "run", str(Path(__file__).with_name("page.py"))]
    options = {
        "server.address": "127.0.0.1",
        "browser.serverAddress": "127.0.0.1",
        "browser.gatherUsageStats": "false",
        "server.showEmailPrompt": "false",
        "server.fileWatcherType": "none",
        "client.toolbarMode": "viewer",
    }
    if port is not None:
        _check_port(port)
        options["server.port"] = str(port)
    if not browser:  # without a desktop, Streamlit does not open one
        options["server.headless"] = "true"
    command += [f"--{key}={value}" for key, value in options.items()]
    command += [f"--server.allowedHosts={host}" for host in LOOPBACK_HOSTS]
    arguments = [*command, "--", str(folder.absolute())]
    # Python's `-m` imports from the current directory, and Streamlit reads `.streamlit` there. It
    # may be a directory of another user's results.
    os.chdir(sys.prefix)
    os.execv(sys.executable, arguments)
