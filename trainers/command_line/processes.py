"""Processes that a run started, and that must not outlive it. Reads /proc; empty elsewhere."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

#: Process id and start time, which together identify a process.
Process = tuple[int, int]


def descendants() -> set[Process]:
    """Returns the processes that this one started, directly or not, and that have not ended."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        found = _read(int(folder.name))
        if found is not None:
            process, parent = found
            parents[process] = parent
    family, below = {os.getpid()}, set[Process]()
    grown = True
    while grown:
        more = {process for process, parent in parents.items() if parent in family} - below
        grown = bool(more)
        below |= more
        family |= {process[0] for process in more}
    return below


def kill_remaining(processes: set[Process], within_s: float) -> None:
    """Waits for processes to end, and kills those that have not after `within_s` seconds."""
    deadline_s = time.monotonic() + within_s
    while (alive := _alive(processes)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for pid, _ in alive:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _alive(processes: set[Process]) -> set[Process]:
    found = (_read(pid) for pid, _ in processes)
    return {entry[0] for entry in found if entry is not None} & processes


def _read(pid: int) -> tuple[Process, int] | None:
    """Returns a process and its parent; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] == "Z":
        return None
    return (pid, int(fields[19])), int(fields[1])
