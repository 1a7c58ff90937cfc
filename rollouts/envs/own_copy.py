"""`own_copy`: a deep copy that shares what cannot be copied."""

from __future__ import annotations

from copy import deepcopy
from typing import Any


def own_copy(value: Any) -> Any:
    """Returns a deep copy of a value from a user's program or environment.

    Some objects cannot be copied: for example a lock, an open file, a generator, a module, or a
    tensor with a graph. The copy shares these objects with the original. The dicts, lists, tuples
    and sets around these objects are new. Objects of other types that hold such an object are also
    shared.
    """
    return _copied(value, {})


class OwnCopies(dict[str, Any]):
    """A dict that `copy.deepcopy` copies with `own_copy`. The config of a trainer is such a dict,
    because Ray copies it with `copy.deepcopy`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return dict(own_copy(dict(self)))


def _copied(value: Any, made: dict[int, Any]) -> Any:
    if id(value) in made:  # the value contains itself
        return made[id(value)]
    try:
        return deepcopy(value)
    except Exception:  # a user's `__deepcopy__` may raise anything
        # The value is copied part by part below, outside of this block, so that the exception does
        # not become the context of later exceptions.
        pass
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
        made[id(value)] = value  # a tuple that contains itself keeps a reference to the original
        copied = made[id(value)] = kind(_copied(one, made) for one in value)
        return copied
    return value
