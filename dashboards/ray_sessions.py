"""The sessions of Ray on this machine, which hold its configurations of Prometheus and Grafana."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path


def metrics_folder() -> tuple[Path, str]:
    """Returns where Ray writes its configurations of Prometheus and Grafana, and text on which
    session of Ray that is.

    `session_latest` is the session that started last, which may be another user's, one that has
    ended, or the local Ray of a run, which exports nothing.
    """
    given = os.environ.get("RAY_METRICS_OUTPUT_ROOT")
    if given is not None:
        return Path(given), ""
    on_linux = os.environ.get("TMPDIR") if sys.platform == "linux" else None  # as Ray
    root = Path(os.environ.get("RAY_TMPDIR") or on_linux or "/tmp", "ray")
    # Names end with the time of the start.
    sessions = [path.parent for path in sorted(root.glob("session_[0-9]*/metrics"), reverse=True)]
    running = [path for path in sessions if _is_own(path) and _is_running(path)]
    if not running:
        return root / "session_latest" / "metrics", ""
    newest = f"the newest of {len(running)} of yours that run"
    which = newest if len(running) > 1 else "your only one that runs"
    return running[0] / "metrics", f"{running[0].name}, {which}"


def _is_own(session: Path) -> bool:
    try:
        return session.stat().st_uid == os.getuid()
    except OSError:  # removed meanwhile
        return False


def _is_running(session: Path) -> bool:
    """Whether a raylet of the session accepts connections."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(session / "sockets" / "raylet"))
        except OSError:
            return False
    return True
