"""The newest tested versions of dependencies, and a warning if newer versions are installed."""

from __future__ import annotations

import functools
import logging
import re
from importlib import metadata

logger = logging.getLogger("polopt")

#: For each dependency, the newest release with which `make test-newest` has passed.
NEWEST_TESTED = {"ray": "2.60", "torch": "2.15", "gymnasium": "1.4"}


@functools.cache
def warn_of_untested_versions() -> None:
    """Logs a warning if an installed version is newer than the newest tested version. Logs the
    warning at most once per process."""
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
    """Returns the major and minor number of a version: `(2, 13)` for `"2.13.0+cpu"`."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
