"""Versions of dependencies that the tests have run with, and a warning for newer ones."""

from __future__ import annotations

import functools
import logging
import re
from importlib import metadata

logger = logging.getLogger("polopt")

#: The newest release of each dependency with which `make test-newest` has passed.
NEWEST_TESTED = {"ray": "2.60", "torch": "2.15", "gymnasium": "1.4"}


@functools.cache
def warn_of_untested_versions() -> None:
    """Names installed versions that are newer than all tested ones, once in a process."""
    newer = [
        f"{name} {installed} (tested up to {tested})"
        for name, tested in NEWEST_TESTED.items()
        if _release(installed := metadata.version(name)) > _release(tested)
    ]
    if newer:
        logger.warning(
            "polopt has not been tested with %s. If something fails, install a tested version",
            ", ".join(newer),
        )


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number: `"2.13.0+cpu"` is `(2, 13)`."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
