"""`Config`: the base class of all config classes. `ConfigError`: the error for a wrong config."""

from __future__ import annotations

import difflib
import itertools
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import pydantic

from polopt.common import add_ons

C = TypeVar("C", bound="Config")
#: If there are many allowed names, an error message lists at most this number of names.
_MOST_SHOWN = 6
#: If there are many allowed names, only names with at least this similarity (0 to 1) are listed.
_SIMILAR = 0.6
#: An error message quotes at most this number of characters of a value.
_MOST_QUOTED = 200


_short = reprlib.Repr()
_short.maxother = _short.maxstring = 60

#: The type of an option with the default None, which means that polopt chooses the value. The value
#: 0 has the same meaning as None.
Automatic = Annotated[int | None, pydantic.AfterValidator(lambda value: value or None)]


class ConfigError(ValueError):
    """Raised when the config is wrong, usually before any actor starts.

    For a wrong value, the message names the key, the given value and the allowed values.
    """


class Problems:
    """Collects the messages of several ConfigErrors, so that one error can name all wrong keys.

    problems = Problems()
    for key in options:
        with problems.collected():
            check(key)                       # raises a ConfigError
    problems.raise_all()                     # one error, with one line for each problem
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """A context that ends at a ConfigError and keeps its message."""
        try:
            yield
        except ConfigError as error:
            self.lines += [line for line in str(error).splitlines() if line not in self.lines]

    def raise_all(self) -> None:
        """Raises a ConfigError with the collected messages. Does nothing without messages."""
        if self.lines:
            raise ConfigError("\n".join(self.lines))


def nearest(name: Any, known: Iterable[str]) -> str:
    """Returns a question such as `; did you mean 'gamma'?`, to append to an error message. Returns
    an empty string unless `name` looks like a misspelled known name.

    Callers should first ask `add_ons.hint`. A name from another library may resemble a key of
    polopt with a different meaning.
    """
    by_lower, given = {key.lower(): key for key in known}, str(name).lower()
    # With these cutoffs, names of three or four letters are found even if one letter is wrong.
    cutoff = 0.65 if len(given) < 4 else 0.75
    close = difflib.get_close_matches(given, list(by_lower), n=1, cutoff=cutoff)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def nearest_of(name: Any, known: Iterable[str], shown: Iterable[str] | None = None) -> str:
    """Returns the result of `nearest` and a list of the allowed names, to append to an error
    message. The most similar names come first. If there are many names, only similar names are
    listed: `; did you mean 'gamma'? Similar: gamma (of 56 names)`.

    Args:
        name: the given name.
        known: the names that may be suggested.
        shown: the names that are listed as allowed. `None` means all names in `known`.
    """
    given, known = str(name), list(known)
    names = set(known if shown is None else shown)
    ranked = sorted(names, key=lambda key: (-_similarity(given, key), key))
    meant = nearest(name, known) or "."
    if len(ranked) <= _MOST_SHOWN + 2:
        return f"{meant} Allowed: {', '.join(ranked)}"
    near = [key for key in ranked[:_MOST_SHOWN] if _similarity(given, key) >= _SIMILAR]
    if not near:
        return f"{meant} None of the {len(ranked)} names is similar"
    return f"{meant} Similar: {', '.join(near)} (of {len(ranked)} names)"


def _similarity(given: str, key: str) -> float:
    """Returns the similarity of two names, from 0 to 1. This is the larger of two numbers: the
    similarity of the letters, and the share of the words in `given` that `key` also contains."""
    given, key = given.lower(), key.lower()
    words, others = (set(re.findall(r"[a-z]{3,}", name)) for name in (given, key))
    shared = len(words & others) / max(len(words), 1)
    return max(difflib.SequenceMatcher(None, given, key).ratio(), shared)


def instead_of(kind: str, name: Any, known: Iterable[str]) -> str:
    """Returns what to use instead of an unknown name, to append to an error message. This is the
    hint of an add-on if there is one, and otherwise the result of `nearest_of`.

    Args:
        kind: see `AddOn.hint`.
        name: the given name.
        known: the names that may be suggested.
    """
    hint = add_ons.hint(kind, name)
    return f". {hint}" if hint else nearest_of(name, known)


def without_fixed(
    options: Mapping[str, Any],
    fixed: Mapping[str, tuple[Any, ...]],
    known: Iterable[str],
    where: str = "config",
) -> dict[str, Any]:
    """Removes options that polopt does not have, and that a config may contain anyway.

    Args:
        options: the user's options.
        fixed: the values that each of these options may have. See `AddOn.fixed_options`.
        known: the keys and aliases of polopt. These options are kept, even if `fixed` has them.
        where: the name of the dict in error messages.

    Raises:
        ConfigError: if options have values that are not allowed. The message says for each option
            what the user can do instead.
    """
    kept, known, problems = {}, set(known), Problems()
    for key, value in options.items():
        allowed = None if key in known else fixed.get(key)
        if allowed is None:
            kept[key] = value
        elif not any(type(value) is type(same) and value == same for same in allowed):
            values = f"Allowed: {' or '.join(map(repr, allowed))}" if allowed else "Leave it out"
            instead = add_ons.hint("option", key)
            said = f"{where}: key {key!r}: got {shown(value)}. {values}"
            problems.lines.append(f"{said}. {instead}" if instead else said)
    problems.raise_all()
    return kept


def shown(value: Any) -> str:
    """Returns a value as text for error messages: one line, which is cut after 200 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."


def shown_options(options: Mapping[Any, Any]) -> str:
    """Returns options as text for error messages: one line, in which each value is shortened."""
    parts = (f"{key!r}: {' '.join(_short.repr(value).split())}" for key, value in options.items())
    return f"{{{', '.join(parts)}}}"


def differ(one: Any, other: Any) -> bool:
    """Returns whether two values differ. Arrays and tensors with several elements count as
    different unless they are the same object, because `!=` compares their elements."""
    try:
        return bool(one != other)
    except (ValueError, RuntimeError):  # NumPy raises a ValueError, and torch a RuntimeError
        return one is not other


class Config(pydantic.BaseModel):
    """A frozen set of options with defaults. The options are validated when a config is made.

        class LossConfig(Config):
            gamma: float = 0.99
            aliases = {"discount": "gamma"}

        LossConfig.parse({"discount": 0.9}).gamma     # 0.9
        LossConfig.parse({"gama": 0.9})               # ConfigError: did you mean 'gamma'?

    Subclasses may set these class attributes:

    - `aliases` maps other names of keys to the keys.
    - `renamed` maps former names of keys to the current names. A former name raises an error that
      gives the current name.
    - `removed` maps keys that no longer exist to the reason. Such a key raises an error that gives
      the reason.
    """

    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        populate_by_name=True,
        validate_default=False,
    )
    #: Whether the error for an unknown key has the hint of an add-on. False for classes with few
    #: options, because their errors list all options.
    advises: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}
    removed: ClassVar[Mapping[str, str]] = {}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_bool_for_number(cls, data: Any) -> Any:
        # In Python, True equals 1, so `num_workers=True` would be accepted as one worker.
        if isinstance(data, Mapping):
            for name, field in cls.model_fields.items():
                for key in (name, field.alias):
                    numeric = field.annotation in (int, float, int | None, float | None)
                    if key in data and numeric and isinstance(data[key], bool):
                        raise ValueError(f"key {key!r}: got {data[key]}; allowed: a number")
        return data

    @classmethod
    def keys(cls) -> list[str]:
        """Returns the keys of this config. If a field has an alias, the alias is the key."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def other_names(cls) -> dict[str, str]:
        """Returns all names of keys besides the keys, `{name: key}`: `aliases`, and the names that
        add-ons know."""
        return {**add_ons.other_names(cls), **cls.aliases}

    @classmethod
    def parse(cls: type[C], options: Mapping[str, Any], where: str = "config") -> C:
        """Makes a config from a plain dict.

        Args:
            options: a dict that maps keys or aliases to values.
            where: the name of the dict in error messages.

        Raises:
            ConfigError: if `options` is not a mapping, if a key is unknown, was renamed or was
                removed, if a value has a wrong type or is out of range, or if a key has different
                values under two names. The message has one line for each wrong key. For an unknown
                key, it suggests known keys.
        """
        options, problems = canonical(options, cls.other_names(), where), Problems()
        with problems.collected():
            cls.check_former_keys(options, where)
        known = set(cls.keys()) | set(cls.model_fields)
        former = {*cls.renamed, *cls.removed}
        for key in [key for key in options if key not in known]:
            del options[key]
            if key in former:
                continue
            instead = add_ons.hint("option", key)
            if not set(cls.keys()) & set(re.findall(r"\w+", instead)):
                instead = ""  # the text names no key of this config
            meant = nearest_of(key, [*cls.keys(), *cls.other_names()], cls.keys())
            problems.lines.append(
                f"{where}: unknown key {key!r}" + (f". {instead}" if instead else meant)
            )
        try:
            made = cls(**options)
        except pydantic.ValidationError as error:
            problems.lines += [f"{where}: {problem}" for problem in _problems(cls, error)]
        problems.raise_all()
        return made

    @classmethod
    def check_former_keys(cls, options: Iterable[str], where: str = "config") -> None:
        """Checks that no key is a former key of this config.

        Raises:
            ConfigError: if keys were renamed or removed. The message gives the current name or the
                reason for each.
        """
        problems = Problems()
        for key in options:
            if key in cls.renamed:
                problems.lines.append(f"{where}: key {key!r} is now {cls.renamed[key]!r}")
            elif key in cls.removed:
                problems.lines.append(f"{where}: key {key!r} was removed: {cls.removed[key]}")
        problems.raise_all()

    def to_dict(self) -> dict[str, Any]:
        """Returns the options as a dict that `type(self).parse` accepts. Values of options with the
        type Any are not converted, because Pydantic would convert a user's dataclasses to dicts.
        """
        options = self.model_dump(by_alias=True)
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Config):
                options[field.alias or name] = value.to_dict()
            elif _is_of_any_type(field.annotation):
                options[field.alias or name] = value
        return options


def canonical(
    options: Mapping[str, Any], aliases: Mapping[str, str], where: str = "config"
) -> dict[str, Any]:
    """Replaces the aliases in `options` by their keys.

    Raises:
        ConfigError: if `options` is not a mapping, or if a key is given under two names with
            different values.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}: got {shown(options)}; allowed: a mapping of keys to values")
    result: dict[str, Any] = {}
    written_as: dict[str, str] = {}
    for given, value in options.items():
        key = aliases.get(given, given)
        if key in result and differ(result[key], value):
            raise ConfigError(
                f"{where}: {written_as[key]!r} and {given!r} are two names of {key!r}, but have "
                f"the values {shown(result[key])} and {shown(value)}. Give only one of them"
            )
        result[key] = value
        written_as[key] = given
    return result


def _is_of_any_type(annotation: Any) -> bool:
    """Returns whether a type is Any or a container of Any."""
    return annotation is Any or any(map(_is_of_any_type, get_args(annotation)))


def _problems(cls: type[Config], error: pydantic.ValidationError) -> list[str]:
    """Returns one message for each wrong key. Pydantic may have several errors for a key, one for
    each type of a union and for each part of a list. The message is of the first of them."""
    first: dict[tuple[str, ...], str] = {}
    for problem in error.errors():
        path = [part for part in problem["loc"] if not _is_type_tag(part)]
        key = tuple(map(str, itertools.takewhile(lambda part: isinstance(part, str), path)))
        first.setdefault(key, _message(cls, problem, ".".join(map(str, path))))
    return list(first.values())


def _message(cls: type[Config], problem: Any, path: str) -> str:
    if problem["type"] == "extra_forbidden":
        owner = _owner(cls, problem["loc"])
        key, advises = problem["loc"][-1], owner is None or owner.advises
        instead = add_ons.hint("option", key) if advises else ""
        siblings = "" if owner is None else nearest_of(key, owner.keys())
        return f"unknown key {path!r}" + (f". {instead}" if instead else siblings)
    kind, described = problem["type"], _description(cls, problem["loc"])
    if kind == "missing" and not described:
        return f"key {path!r} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    complete = isinstance(problem.get("ctx", {}).get("error"), ConfigError)
    if not path or complete:  # the message of a validator of the whole config names the key
        return message
    allowed = _PLAIN_WORDS.get(kind, message.removeprefix("Input should be "))
    is_whole = not any(isinstance(part, int) for part in problem["loc"])
    if described and (is_whole or kind in ("tuple_type", "missing", "too_long")):
        allowed = described
    given = problem["input"]
    if hasattr(given, "sample") or (isinstance(given, Mapping) and "grid_search" in given):
        allowed += ". Search spaces need `tune.Tuner` or a file for `polopt train`"
    return f"key {path!r}: got {shown(given)}; allowed: {allowed}"


#: Maps kinds of pydantic's errors to the allowed values in plain words.
_PLAIN_WORDS = {
    "bool_parsing": "True or False",
    "bool_type": "True or False",
    "dict_type": "a dict",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a dict of options",
    "string_type": "a string",
    "tuple_type": "a list",
}


def _description(cls: type[Config], path: tuple[int | str, ...]) -> str:
    """Returns the description of the field at a path, which says what the field allows. Returns an
    empty string if the field has no description."""
    owner: Any = cls
    for part in path:
        field = owner.model_fields.get(part)
        if field is None or not _is_config(field.annotation):
            return getattr(field, "description", None) or ""
        owner = field.annotation
    return ""


def _owner(cls: type[Config], path: tuple[int | str, ...]) -> type[Config] | None:
    """Returns the config class that contains the last key of a path. This is `cls` or a config
    class nested in `cls`. Returns None if the key belongs to a plain dict."""
    owner: Any = cls
    for part in path[:-1]:
        field = owner.model_fields.get(part) if isinstance(part, str) else None
        owner = None if field is None else field.annotation
        if not _is_config(owner):
            return None
    return owner


def _is_config(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Config)


def _is_type_tag(part: int | str) -> bool:
    """Returns whether pydantic added this part to a path. For a union, pydantic adds the name of
    the type that it tried."""
    return isinstance(part, str) and (part in {"float", "int", "str"} or "[" in part)
