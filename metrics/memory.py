"""`memory`: the memory that the machine, a container and the limits of a process allow."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
#: Version 1 reports a number of at least this size for a group without a limit.
_NO_LIMIT = 1 << 62


class Memory(NamedTuple):
    """Sizes in bytes.

    Attributes:
        total: the memory of the machine or, if that is less, of the container.
        available: the part of `total` that processes can still use.
        own: the number of bytes that this process can still use. Less than `available` if a limit
            of the process (`ulimit -v`) is lower.
    """

    total: int
    available: int
    own: int


class _Names(NamedTuple):
    """The names of the files of one version of cgroups.

    Attributes:
        limit, used: files with the limit and the use, in bytes.
        cache: the line of `memory.stat` with the bytes of files that the kernel can drop.
    """

    limit: str
    used: str
    cache: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def memory() -> Memory:
    """Returns the memory of this machine. Takes the limits of Linux control groups (versions 1 and
    2) into account, which containers and schedulers of clusters set. `psutil` and the public part
    of Ray do not read these limits."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in _limits_of_groups():
        total, available = min(total, limit), min(available, max(0, limit - used))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return Memory(total, available, available)
    left = max(0, limit - psutil.Process().memory_info().vms)
    return Memory(total, available, min(available, left))


def _limits_of_groups() -> Iterator[tuple[int, int]]:
    """Yields the limit and the use, both in bytes, of each control group with a limit that holds
    this process. The groups are nested, so the use of a group includes this process."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (_CGROUPS / "memory", _V1) if controllers else (_CGROUPS, _V2)
        group = root / path.lstrip("/")
        # In a container, the path may be that of the host. Then only the root exists.
        for folder in (group, *group.parents):
            found = _limit_of(folder, names)
            if found is not None:
                yield found
            if folder == root:
                break


def _limit_of(folder: Path, names: _Names) -> tuple[int, int] | None:
    try:
        limit = (folder / names.limit).read_text().strip()
        if not limit.isdecimal() or int(limit) >= _NO_LIMIT:  # version 2 reports "max"
            return None
        used = int((folder / names.used).read_text())
        stat = (folder / "memory.stat").read_text().splitlines()
    except OSError:  # no such group, or the group does not limit memory
        return None
    counts = dict(line.split(" ", 1) for line in stat if " " in line)
    return int(limit), max(0, used - int(counts.get(names.cache, 0)))
