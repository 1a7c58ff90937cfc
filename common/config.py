"""`Config`: base class of all configuration classes, and `ConfigError`."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import pydantic

from polopt.common.other_libraries import Fixed, fixed, instead_of

C = TypeVar("C", bound="Config")
#: An error message lists at most so many allowed names if there are many.
_MOST_SHOWN = 6
#: If there are many names, those with at least this similarity are listed, from 0 to 1.
_SIMILAR = 0.6
#: An error message quotes at most so many characters of a value.
_MOST_QUOTED = 200


_short = reprlib.Repr()
_short.maxother = _short.maxstring = 60

#: Type of an option whose default, None, means that the value is chosen automatically. 0 means the
#: same.
Automatic = Annotated[int | None, pydantic.AfterValidator(lambda value: value or None)]


class ConfigError(ValueError):
    """The configuration is wrong. Raised before any actor starts.

    The message names the key, the value that it got, and the values that are allowed.
    """


def nearest(name: Any, known: Iterable[str]) -> str:
    """A question such as `did you mean 'gamma'?`, to append to an error message. An empty string
    unless `name` looks like a misspelled known name.

    Look into `polopt.common.other_libraries` first: names of other libraries may resemble keys that
    mean something else.
    """
    by_lower, given = {key.lower(): key for key in known}, str(name).lower()
    # One wrong letter in a name of three or four letters is still found.
    cutoff = 0.65 if len(given) < 4 else 0.75
    close = difflib.get_close_matches(given, list(by_lower), n=1, cutoff=cutoff)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def nearest_of(name: Any, known: Iterable[str], shown: Iterable[str] | None = None) -> str:
    """Appends the allowed names to `nearest`, the most similar first. If there are many names, only
    similar ones are listed, as in `did you mean 'gamma'? Similar: gamma (of 56 names)`.

    Args:
        name: the given name.
        known: names that may be suggested.
        shown: names that are listed as allowed. By default all of `known`.
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
    """How similar two names are, from 0 to 1: by their letters or by the words that they share,
    whichever is larger."""
    given, key = given.lower(), key.lower()
    words, others = (set(re.findall(r"[a-z]{3,}", name)) for name in (given, key))
    shared = len(words & others) / max(len(words), 1)
    return max(difflib.SequenceMatcher(None, given, key).ratio(), shared)


def unknown_key(name: Any, known: Iterable[str], shown: Iterable[str] | None = None) -> str:
    """The error message for an unknown key. For an option of another library, it names the key that
    takes its place. For any other key, it goes on with `nearest_of`, with the same arguments.

        unknown key 'n_steps'. For 'n_steps' of Stable-Baselines3: 'rollout_fragment_length'
    """
    instead = instead_of(name)
    return f"unknown key {name!r}" + (f". {instead}" if instead else nearest_of(name, known, shown))


def without_fixed(
    options: Mapping[str, Any], rows: Sequence[Fixed], known: Iterable[str], where: str = "config"
) -> dict[str, Any]:
    """Removes options of other libraries that polopt does not have because their value is fixed.

    Args:
        options: the user's options.
        rows: the fixed options and their values.
        known: keys and aliases that polopt does have. They are kept, also if `rows` name them.
        where: name of the dict in error messages.

    Raises:
        ConfigError: an option has another value than the fixed one. The message says what to use
            instead.
    """
    kept, known = {}, set(known)
    for key, value in options.items():
        row = None if key in known else fixed(key, rows)
        if row is None:
            kept[key] = value
            continue
        allowed = row.allowed(key)
        if not any(type(value) is type(same) and value == same for same in allowed):
            values = f"Allowed: {' or '.join(map(repr, allowed))}" if allowed else "Leave it out"
            raise ConfigError(
                f"{where}: key {key!r}: got {shown(value)}. {values}. {instead_of(key)}"
            )
    return kept


def shown(value: Any) -> str:
    """The text with which error messages quote `value`: one line of at most 200 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}..."


def shown_options(options: Mapping[Any, Any]) -> str:
    """The text with which error messages quote options: one line, with each value shortened."""
    parts = (f"{key!r}: {' '.join(_short.repr(value).split())}" for key, value in options.items())
    return f"{{{', '.join(parts)}}}"


def differ(one: Any, other: Any) -> bool:
    """Whether two values of any type differ. Arrays compare by element, so two arrays differ unless
    they are the same object."""
    try:
        return bool(one != other)
    except ValueError:
        return one is not other


class Config(pydantic.BaseModel):
    """A frozen set of options with defaults, validated on construction.

        class LossConfig(Config):
            gamma: float = 0.99
            aliases = {"discount": "gamma"}

        LossConfig.parse({"discount": 0.9}).gamma     # 0.9
        LossConfig.parse({"gama": 0.9})               # ConfigError: did you mean 'gamma'?

    The class attribute `aliases` maps other names of keys, such as RLlib's, to the keys. `renamed`
    maps former names to present ones. A former name is an error that says the present name.
    `removed` maps keys that no longer exist to the reason, which the error gives.
    """

    model_config = pydantic.ConfigDict(
        frozen=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        populate_by_name=True,
        validate_default=False,
    )
    #: Whether errors name the key that takes the place of another library's option. False for
    #: classes with a few options, all of which the error lists.
    advises: ClassVar[bool] = True
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
        """The keys of this config. If a pydantic field has an alias, the key is the alias."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @classmethod
    def parse(cls: type[C], options: Mapping[str, Any], where: str = "config") -> C:
        """Makes a config from a plain dict.

        Args:
            options: values by key or alias.
            where: name of the dict in error messages.

        Raises:
            ConfigError: a key is unknown (the message names the nearest known key), a value has a
                wrong type or is out of range, or a key is given under two names.
        """
        options = canonical(options, cls.aliases, where)
        cls.check_former_keys(options, where)
        known = set(cls.keys()) | set(cls.model_fields)
        for key in options:
            if key not in known:
                instead = instead_of(key)
                if not set(cls.keys()) & set(re.findall(r"\w+", instead)):
                    instead = ""  # it names only options of another config
                meant = nearest_of(key, [*cls.keys(), *cls.aliases], cls.keys())
                raise ConfigError(
                    f"{where}: unknown key {key!r}" + (f". {instead}" if instead else meant)
                )
        try:
            return cls(**options)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{where}: {_first_problem(cls, error)}") from None

    @classmethod
    def check_former_keys(cls, options: Iterable[str], where: str = "config") -> None:
        """Checks that no key is a former key of this config.

        Raises:
            ConfigError: a key was renamed or removed. The message has the present name or the
                reason.
        """
        for key in options:
            if key in cls.renamed:
                raise ConfigError(f"{where}: key {key!r} is now {cls.renamed[key]!r}")
            if key in cls.removed:
                raise ConfigError(f"{where}: key {key!r} was removed: {cls.removed[key]}")

    def to_dict(self) -> dict[str, Any]:
        """The options by key, as a dict that `type(self).parse` accepts. Options of type Any keep
        their objects, because Pydantic would convert a user's dataclasses to dicts."""
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
        ConfigError: a key is given under two names with different values.
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
                f"values {shown(result[key])} and {shown(value)}. Give only one of them"
            )
        result[key] = value
        written_as[key] = given
    return result


def _is_of_any_type(annotation: Any) -> bool:
    """Whether a type is Any, or a container of values of any type."""
    return annotation is Any or any(map(_is_of_any_type, get_args(annotation)))


def _first_problem(cls: type[Config], error: pydantic.ValidationError) -> str:
    problem = error.errors()[0]
    path = ".".join(str(part) for part in problem["loc"] if not _is_type_tag(part))
    if problem["type"] == "extra_forbidden":
        owner = _owner(cls, problem["loc"])
        instead = instead_of(problem["loc"][-1]) if owner is None or owner.advises else ""
        siblings = "" if owner is None else nearest_of(problem["loc"][-1], owner.keys())
        return f"unknown key {path!r}" + (f". {instead}" if instead else siblings)
    kind, described = problem["type"], _description(cls, problem["loc"])
    if kind == "missing" and not described:
        return f"key {path!r} is missing"
    message = problem["msg"].removeprefix("Value error, ")
    complete = isinstance(problem.get("ctx", {}).get("error"), ConfigError)
    if not path or complete:  # the message of a validator of the whole model names the keys
        return message
    allowed = _PLAIN_WORDS.get(kind, message.removeprefix("Input should be "))
    if described and kind in ("tuple_type", "missing", "too_long"):
        allowed = described
    return f"key {path!r}: got {shown(problem['input'])}; allowed: {allowed}"


#: Allowed values in plain words, for the kinds of errors that pydantic describes in its own words.
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
    "string_type": "a text",
    "tuple_type": "a list",
}


def _description(cls: type[Config], path: tuple[int | str, ...]) -> str:
    """The description of the field at a path, which says what it allows. Empty if it has none."""
    owner: Any = cls
    for part in path:
        field = owner.model_fields.get(part)
        if field is None or not _is_config(field.annotation):
            return getattr(field, "description", None) or ""
        owner = field.annotation
    return ""


def _owner(cls: type[Config], path: tuple[int | str, ...]) -> type[Config] | None:
    """The config class that has this key: `cls`, or a class nested in it. None for a dict's key."""
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
    """Whether pydantic added this part of a path, to name the type of a union that it tried."""
    return isinstance(part, str) and (part in {"float", "int", "str"} or "[" in part)
