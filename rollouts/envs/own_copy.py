"""`own_copy`: a deep copy that shares what cannot be copied."""

from __future__ import annotations

from copy import deepcopy
from typing import Any


def own_copy(value: Any) -> Any:
    """A deep copy of what a user's program or environment holds. What cannot be copied, such as a
    lock, an open file, a generator, a module or a tensor with a graph, is shared with the original.
    The dicts, lists, tuples and sets around it are new."""
    return _copied(value, {})


class OwnCopies(dict[str, Any]):
    """A dict whose `copy.deepcopy` is `own_copy`: Ray copies the config of a trainer so."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return dict(own_copy(dict(self)))


def _copied(value: Any, made: dict[int, Any]) -> Any:
    if id(value) in made:  # it contains itself
        return made[id(value)]
    try:
        return deepcopy(value)
    except Exception:  # a user's `__deepcopy__` may raise anything
        pass  # copied by parts below, where it is not the context of other exceptions
    kind = type(value)
    if kind is dict:
        result = made[id(value)] = {}
        result.update((key, _copied(one, made)) for key, one in value.items())
        return result
    if kind is list:
        parts = made[id(value)] = []
        parts.extend(_copied(one, made) for one in value)
        return parts
    if kind in (tuple, set, frozenset):
        made[id(value)] = value  # stays so where it contains itself
        copied = made[id(value)] = kind(_copied(one, made) for one in value)
        return copied
    return value
