"""`overridden`: which methods a subclass changes. A faster implementation steps aside for it."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import getattr_static


def overridden(cls: type, base: type, names: Iterable[str]) -> list[str]:
    """Returns those of `names` that `cls` defines in another way than its base class `base`."""
    return [n for n in names if getattr_static(cls, n) is not getattr_static(base, n)]
