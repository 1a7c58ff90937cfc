"""`Replacement`: a faster implementation, which is not used if what it replaces was changed."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from typing import Any


class Replacement:
    """A faster implementation of methods of one object.

    The faster implementation does not call these methods. So it must not be used if the class of
    the object, or the object itself, defines one of them in another way.

    Args:
        thing: the object whose methods are replaced.
        owner: the class of the object, or the base class whose methods the implementation replaces.
        names: names of all methods and other members of `owner` that the implementation replaces,
            directly or because only a replaced method uses them.
        compute: the faster implementation. None means that there is none.
        why_not: why the implementation cannot be used, if the caller already knows a reason.
        title: name of the implementation for users, such as `NumPy`.
    """

    def __init__(
        self,
        thing: Any,
        owner: type,
        names: tuple[str, ...],
        compute: Callable[..., Any] | None,
        why_not: str = "",
        title: str = "",
    ) -> None:
        self._thing, self._names, self._compute, self._title = thing, names, compute, title
        cls = type(thing)
        changed = [
            name
            for name in names
            if getattr_static(cls, name, None) is not getattr_static(owner, name, None)
        ]
        by_class = f"{cls.__name__} changes {', '.join(changed)}" if changed else ""
        self._why_not = by_class or why_not

    @property
    def why_not(self) -> str:
        """Why the implementation is not used. Empty if it is used, or if there is none."""
        own = vars(self._thing)
        if self._why_not or own.keys().isdisjoint(self._names):
            return self._why_not
        changed = ", ".join(name for name in self._names if name in own)
        return f"this {type(self._thing).__name__} changes {changed}"

    def active(self) -> Callable[..., Any] | None:
        """Returns the faster implementation, or None if it is not used."""
        return None if self.why_not else self._compute

    def withdraw(self, why_not: str) -> None:
        """Ends the use of the implementation for this reason."""
        self._why_not = why_not

    @property
    def described(self) -> str:
        """The title if the implementation is used, and otherwise `torch` or `torch (reason)`."""
        why_not = self.why_not
        plain = f"torch ({why_not})" if why_not else "torch"
        return plain if self.active() is None else self._title


def runs_as_written(module: Any) -> bool:
    """Whether a call of a torch module runs only the `forward` of its class: the module has no
    hooks, and no `forward` of its own."""
    hooks: tuple[Any, ...] = (module._forward_hooks, module._forward_pre_hooks)
    return not any(hooks) and "forward" not in vars(module)
