"""`Config`: base class of all configuration classes, and `ConfigError`."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic

C = TypeVar("C", bound="Config")
#: Number of allowed names that an error message lists.
_MOST_SHOWN = 6
#: Characters of a value that an error message quotes.
_MOST_QUOTED = 200


_short = reprlib.Repr()
_short.maxother = _short.maxstring = 60

#: Type of an option whose default, None, stands for an automatic value. 0 is accepted for it.
Automatic = Annotated[int | None, pydantic.AfterValidator(lambda value: value or None)]


class ConfigError(ValueError):
    """Error for bad configuration, raised before any actor starts.

    The message has the key, the given value and what is allowed.
    """


def nearest(name: Any, known: Iterable[str]) -> str:
    """`"; did you mean 'gamma'?"`, or an empty string if no known name is similar to `name`."""
    by_lower = {key.lower(): key for key in known}
    close = difflib.get_close_matches(str(name).lower(), list(by_lower), n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def nearest_of(name: Any, known: Iterable[str], shown: Iterable[str] | None = None) -> str:
    """`nearest` and some allowed names, the most similar first:
    `"; did you mean 'gamma'? Allowed: gamma, lambda, lr, seed, env and 50 others"`.

    Args:
        name: the given name.
        known: names that may be suggested.
        shown: names that are listed as allowed; by default those of `known`.
    """
    given = str(name).lower()

    def dissimilarity(key: str) -> tuple[float, str]:
        return -difflib.SequenceMatcher(None, given, key.lower()).ratio(), key

    known = list(known)
    ranked = sorted(set(known if shown is None else shown), key=dissimilarity)
    others = len(ranked) - _MOST_SHOWN
    more = f" and {others} others" if others > 0 else ""
    return f"{nearest(name, known) or '.'} Allowed: {', '.join(ranked[:_MOST_SHOWN])}{more}"


def shown(value: Any) -> str:
    """`value` as error messages quote it: on one line, at most 200 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."


def shown_options(options: Mapping[Any, Any]) -> str:
    """Options as error messages quote them: on one line, each value shortened."""
    parts = (f"{key!r}: {' '.join(_short.repr(value).split())}" for key, value in options.items())
    return f"{{{', '.join(parts)}}}"


def differ(one: Any, other: Any) -> bool:
    """Whether two values of any type differ. Arrays, which compare by element, differ unless they
    are the same object."""
    try:
        return bool(one != other)
    except ValueError:
        return one is not other


class Config(pydantic.BaseModel):
    """A frozen set of options with defaults, validated on construction.

    The class attribute `aliases` maps alternative names of keys (those of current RLlib) to keys.
    `renamed` maps former names, which are refused with an error that says the present one, and
    `removed` keys that are gone to the reason, which the error gives.
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
    renamed: ClassVar[Mapping[str, str]] = {}
    removed: ClassVar[Mapping[str, str]] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, data: Any) -> Any:
        # In Python, True equals 1: `num_workers=True` would be accepted as one worker.
        if isinstance(data, Mapping):
            for name, field in cls.model_fields.items():
                for key in (name, field.alias):
                    numeric = field.annotation in (int, float, int | None, float | None)
                    if key in data and numeric and isinstance(data[key], bool):
                        raise ValueError(f"key {key!r}: got {data[key]}; allowed: a number")
        return data

    @classmethod
    def keys(cls) -> list[str]:
        """The keys of this config (aliases of pydantic fields, if any)."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def parse(cls: type[C], options: Mapping[str, Any], where: str = "config") -> C:
        """Makes a config from a plain dict.

        Args:
            options: keys or aliases, and values.
            where: name of the dict in error messages.

        Raises:
            ConfigError: for an unknown key (the message has the nearest known one), a wrong type, a
                value out of range, or a key given under two names.
        """
        options = canonical(options, cls.aliases, where)
        cls.check_former_keys(options, where)
        known = set(cls.keys()) | set(cls.model_fields)
        for key in options:
            if key not in known:
                meant = nearest_of(key, [*cls.keys(), *cls.aliases], cls.keys())
                raise ConfigError(f"{where}: unknown key {key!r}{meant}")
        try:
            return cls(**options)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{where}: {_first_problem(cls, error)}") from None

    @classmethod
    def check_former_keys(cls, options: Iterable[str], where: str = "config") -> None:
        """Refuses keys that this config had once.

        Raises:
            ConfigError: for the first, with its present name or the reason.
        """
        for key in options:
            if key in cls.renamed:
                raise ConfigError(f"{where}: key {key!r} is now {cls.renamed[key]!r}")
            if key in cls.removed:
                raise ConfigError(f"{where}: key {key!r} is gone: {cls.removed[key]}")

    def to_dict(self) -> dict[str, Any]:
        """The options by key; `type(self).parse` accepts the result."""
        return self.model_dump(by_alias=True)


def canonical(
    options: Mapping[str, Any], aliases: Mapping[str, str], where: str = "config"
) -> dict[str, Any]:
    """`options` with aliases replaced by their keys.

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
    if problem["type"] == "missing":
        return f"key {path!r} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    if not path:  # a validator of the whole model; its message names the keys
        return message
    message = message.removeprefix("Input should be ")
    return f"key {path!r}: got {shown(problem['input'])}; allowed: {message}"


def _nearest_sibling(cls: type[Config], path: tuple[int | str, ...]) -> str:
    """Suggestion and allowed keys for an unknown key of a config nested in `cls`."""
    owner: Any = cls
    for part in path[:-1]:
        field = owner.model_fields.get(part) if isinstance(part, str) else None
        owner = None if field is None else field.annotation
        if not (isinstance(owner, type) and issubclass(owner, Config)):
            return ""
    return nearest_of(path[-1], owner.keys())


def _is_type_tag(part: int | str) -> bool:
    """True for parts of a path that pydantic adds to name the member of a union that it tried."""
    return isinstance(part, str) and (part in {"float", "int", "str"} or "[" in part)
