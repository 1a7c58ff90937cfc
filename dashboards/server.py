"""Starts the server of the live page, for `polopt dashboard`."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import sys
from pathlib import Path

from polopt.common.config import ConfigError

#: Names of the loopback address. The server's WebSocket refuses requests with another host name.
#: This prevents DNS rebinding, in which another site points its own host name at this machine.
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_EXTRA = "the dashboards need Streamlit and Plotly: pip install 'polopt[dashboard]'"


def check_installed(*modules: str) -> None:
    """If one of the modules is not installed, raises a ConfigError that names the extra."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"{module} is not installed; {_EXTRA}")


def existing_directory(results_dir: Path) -> Path:
    """Returns the results directory, in which `~` is replaced by the user's home directory.

    Raises:
        ConfigError: if the directory does not exist or is a file.
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
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as a server does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is taken by another program" if taken else f"cannot be used: {error.strerror}"
            raise ConfigError(
                f"port {port} {why}. Allowed: another --port, or no --port for the first free port"
            ) from None


def serve(results_dir: Path, port: int | None = None, browser: bool = True) -> None:
    """Replaces this process by the server of the live page. Does not return.

    The server prints its address. It listens only on the loopback address. Its WebSocket answers
    only requests whose headers contain a name of this address (`LOOPBACK_HOSTS`). The server does
    not import files of the current directory, and does not read Streamlit's configuration there.

    Args:
        results_dir: directory of Tune results.
        port: port of the server. `None` means the first free port that is at least 8501.
        browser: whether to open a browser, if the machine has one.

    Raises:
        ConfigError: if the directory does not exist or is a file, if the port is taken or cannot be
            used, or if the extra is not installed.
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
    # Without a desktop, Streamlit opens no browser even if `browser` is True.
    if not browser:
        options["server.headless"] = "true"
    command += [f"--{key}={value}" for key, value in options.items()]
    command += [f"--server.allowedHosts={host}" for host in LOOPBACK_HOSTS]
    arguments = [*command, "--", str(folder.absolute())]
    # The current directory may contain results of another user. Python's `-m` imports from the
    # current directory, and Streamlit reads `.streamlit` there, so the server runs elsewhere.
    os.chdir(sys.prefix)
    os.execv(sys.executable, arguments)
