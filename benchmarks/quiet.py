"""How much of the machine other programs use while a benchmark runs (Linux; elsewhere unknown)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Other programs may use this number of cores. Beyond it, a measurement is not worth much.
QUIET_CORES = 0.15


#: Parent and processor ticks of each process, with those of its children that have ended.
Processes = dict[int, tuple[int, int]]


def _processes() -> Processes:
    found: Processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        found[int(folder.name)] = int(words[1]), sum(map(int, words[11:15]))
    return found


def ticks_elsewhere(processes: Processes, own: int) -> int:
    """Returns the processor ticks of all processes except the process `own` and those below it.

    The time of processes below `own` is not subtracted from the time of all cores, because nobody
    knows the time of Ray's workers once they have ended: Ray does not wait for them.
    """
    total = 0
    for process, (_, ticks) in processes.items():
        above = process
        while above in processes and above != own:
            above = processes[above][0]
        total += ticks if above != own else 0
    return total


class Others:
    """The cores that other programs use. `cores` is None where this cannot be measured."""

    cores: float | None = None


@contextmanager
def watching_others() -> Iterator[Others]:
    """Measures the cores that other programs use meanwhile. The result is set at the end."""
    others = Others()
    if not Path("/proc/stat").exists():
        yield others
        return

    def elsewhere_s() -> float:
        return ticks_elsewhere(_processes(), os.getpid()) / os.sysconf("SC_CLK_TCK")

    before_s, began_s = elsewhere_s(), time.monotonic()
    yield others
    elapsed_s = max(1e-3, time.monotonic() - began_s)
    others.cores = round(max(0.0, elsewhere_s() - before_s) / elapsed_s, 2)


def is_good(entry: dict[str, Any] | None) -> bool:
    """Whether there is a stored entry, and other programs left the machine alone meanwhile. Old
    entries only say whether they did (`busy`)."""
    if entry is None or entry.get("busy"):
        return False
    return (entry.get("others") or 0.0) <= QUIET_CORES


def wait_until_quiet(patience_s: float) -> None:
    """Waits until other programs use at most `QUIET_CORES`.

    Raises:
        SystemExit: they still use more after `patience_s`.
    """
    until_s = time.monotonic() + patience_s
    while True:
        with watching_others() as others:
            time.sleep(1.0)
        if others.cores is None or others.cores <= QUIET_CORES:
            return
        if time.monotonic() >= until_s:
            raise SystemExit(
                f"other programs use {others.cores:.1f} cores, so measurements would be wrong. End "
                "them and start this script again, or give --busy"
            )
