"""`Config`: what every configuration class of polopt is. It stands here, in the lowest layer that
has options, so that each owner can keep its own class beside itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import pydantic

C = TypeVar("C", bound="Config")
#: Of the names that a key could have been.
_MOST_SHOWN = 6
_MOST_QUOTED = 200  # characters


class ConfigError(ValueError):
    """The one error for bad configuration. Its message names the key, what was given and what is
    allowed; it is raised before any actor starts."""


def nearest(name: Any, known: Iterable[str]) -> str:
    """`"; did you mean 'gamma'?"` or an empty string if nothing known is close to `name`."""
    by_lower = {key.lower(): key for key in known}
    close = difflib.get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def nearest_of(name: Any, known: Iterable[str], shown: Iterable[str] | None = None) -> str:
    """`nearest`, and a handful of what is allowed, the most similar first:
    `"; did you mean 'gamma'? Allowed: gamma, lambda, lr, seed, env and 50 others"`.

    Args:
        name: what was given.
        known: what may have been meant.
        shown: what is listed as allowed, if not all of that.
    """
    given = str(name).lower()

    def unlike(key: str) -> tuple[float, str]:
        return -difflib.SequenceMatcher(None, given, key.lower()).ratio(), key

    known = list(known)
    ranked = sorted(set(known if shown is None else shown), key=unlike)
    others = len(ranked) - _MOST_SHOWN
    more = f" and {others} others" if others > 0 else ""
    return f"{nearest(name, known) or '.'} Allowed: {', '.join(ranked[:_MOST_SHOWN])}{more}"


def shown(value: Any) -> str:
    """What was given, as errors quote it: on one line, and not all of what is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."


def differ(one: Any, other: Any) -> bool:
    """Whether two values are not the same, whatever they are (arrays do not say so in one word)."""
    try:
        return bool(one != other)
    except ValueError:
        return one is not other


class Config(pydantic.BaseModel):
    """A frozen set of options with their defaults, checked when it is made.

    Class attribute `aliases` maps other names of a key (RLlib's of today) to the key.
    """

    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        populate_by_name=True,
        validate_default=False,
    )
    aliases: ClassVar[Mapping[str, str]] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, data: Any) -> Any:
        # Python counts True as 1, so `num_workers=True` would quietly become one worker.
        if isinstance(data, Mapping):
            for name, field in cls.model_fields.items():
                for key in (name, field.alias):
                    numeric = field.annotation in (int, float, int | None, float | None)
                    if key in data and numeric and isinstance(data[key], bool):
                        raise ValueError(f"key {key!r}: got {data[key]}; allowed: a number")
        return data

    @classmethod
    def keys(cls) -> list[str]:
        """The keys of this config as users write them."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def parse(cls: type[C], options: Mapping[str, Any], where: str = "config") -> C:
        """Makes a config from a plain dict.

        Args:
            options: keys and values; aliases are understood.
            where: what to call the dict in errors.

        Raises:
            ConfigError: unknown key (with the nearest known one), wrong type, out of range, or a
                key given under two names.
        """
        options = canonical(options, cls.aliases, where)
        known = set(cls.keys()) | set(cls.model_fields)
        for key in options:
            if key not in known:
                meant = nearest_of(key, [*cls.keys(), *cls.aliases], cls.keys())
                raise ConfigError(f"{where}: unknown key {key!r}{meant}")
        try:
            return cls(**options)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{where}: {_first_problem(cls, error)}") from None

    def to_dict(self) -> dict[str, Any]:
        """The options under the keys users write; `type(self).parse` takes it back."""
        return self.model_dump(by_alias=True)


def canonical(
    options: Mapping[str, Any], aliases: Mapping[str, str], where: str = "config"
) -> dict[str, Any]:
    """`options` with aliases replaced by the keys they stand for.

    Raises:
        ConfigError: if a key is given under two names with different values.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}: got {shown(options)}; allowed: a mapping of keys to values")
    result: dict[str, Any] = {}
    written_as: dict[str, str] = {}
    for given, value in options.items():
        key = aliases.get(given, given)
        if key in result and differ(result[key], value):
            raise ConfigError(
                f"{where}: {written_as[key]!r} and {given!r} are two names of {key!r}, with "
                f"values {shown(result[key])} and {shown(value)}; give one of them"
            )
        result[key] = value
        written_as[key] = given
    return result


def _first_problem(cls: type[Config], error: pydantic.ValidationError) -> str:
    problem = error.errors()[0]
    path = ".".join(str(part) for part in problem["loc"] if not _is_type_tag(part))
    if problem["type"] == "extra_forbidden":
        return f"unknown key {path!r}{_nearest_sibling(cls, problem['loc'])}"
    message = problem["msg"].removeprefix("Value error, ")
    if not path:  # a validator of the whole model, which names its keys itself
        return message
    message = message.removeprefix("Input should be ")
    return f"key {path!r}: got {shown(problem['input'])}; allowed: {message}"


def _nearest_sibling(cls: type[Config], path: tuple[int | str, ...]) -> str:
    """What an unknown key of a config within `cls` may have been meant to be, and what could be."""
    owner: Any = cls
    for part in path[:-1]:
        field = owner.model_fields.get(part) if isinstance(part, str) else None
        owner = None if field is None else field.annotation
        if not (isinstance(owner, type) and issubclass(owner, Config)):
            return ""
    return nearest_of(path[-1], owner.keys())


def _is_type_tag(part: int | str) -> bool:
    """True for the parts pydantic adds to a path to say which member of a union it tried."""
    return isinstance(part, str) and (part in {"float", "int", "str"} or "[" in part)
