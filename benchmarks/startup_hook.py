"""Tells of milestones of a start, from within whatever processes take part in it.

`startup.py` puts a copy of this file on the path as `sitecustomize`, which every Python process
imports first, Ray's workers included. It changes nothing but that some functions send a datagram
when they begin or end.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import socket
import sys
import time
from types import ModuleType
from typing import Any

_SOCKET = os.environ.get("STARTUP_SOCKET", "")
#: Module to what is watched in it: (class or nothing, function).
_WATCHED: dict[str, list[tuple[str, str]]] = {
    "ray": [("", "init")],
    "polopt.trainers.running": [("", "_train")],
    "polopt.rollouts.workers.rollout_worker": [("RolloutWorker", "__init__")],
    "polopt.policies.policy": [("Policy", "apply_gradients")],
}


def tell(event: str) -> None:
    """Sends `time pid event`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        try:
            out.sendto(f"{time.time()} {os.getpid()} {event}".encode(), _SOCKET)
        except OSError:
            return  # nobody listens any more: the start is over


def _watch(owner: Any, name: str) -> None:
    function = getattr(owner, name)
    told: set[str] = set()

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        # The driver's own worker, of index 0, is none of those that are waited for.
        first = name not in told and not (name == "__init__" and args[2:] == (0,))
        if first:
            told.add(name)
            tell(f"{name} begins")
        result = function(*args, **kwargs)
        if first:
            tell(f"{name} ends")
        return result

    setattr(owner, name, watched)


class _Finder:
    """Finds watched modules as others do, and watches them once they are there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WATCHED:
            return None
        watched = _WATCHED.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for owner, function in watched:
                _watch(getattr(module, owner) if owner else module, function)
            tell(f"{name} imported")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if _SOCKET:
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    tell("process begins")
