"""Encodes the config of a checkpoint as JSON and tensors, and decodes it again.

A value of a type that JSON does not have is written as `{"__type__": NAME, "value": ...}`. Decoding
such a value never imports a module or executes code from the checkpoint. `NAME` is only looked up
in the tables of this file. Values that cannot be encoded are left out, and `encode_config` returns
their paths.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import decimal
import fractions
import itertools
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polopt.policies.networks.model_config import ModelConfig
from polopt.trainers.checkpoints import CheckpointError

_TYPE, _VALUE = "__type__", "value"
#: Keys with a special meaning in the JSON of a checkpoint. A user's dict that has one of these keys
#: is encoded as a list of pairs. See `polopt.trainers.checkpoints`.
_RESERVED = {_TYPE, "__tensor__", "__array__"}
#: Kinds of NumPy dtypes whose values can be restored from their bytes alone.
_PLAIN_KINDS = "biufcSUmM"
#: The largest number of values that a message names.
_MOST_NAMED = 6
#: The deepest nesting of containers. JSON's reader has a limit of about 1,000.
_MOST_NESTED = 100
#: Keys that need no quotation marks in a path of keys.
_PLAIN_KEY = re.compile(r"[^\s.\[\]=]+")
#: Integers of more bits are written as hexadecimal text, because Python refuses to read thousands
#: of decimal digits.
_MOST_BITS = 4096


def plugin_places() -> Iterator[tuple[str, ...]]:
    """Yields the places of a config that name a preset, an optimizer, a policy or a network, as
    paths of keys."""
    for plugin in ("optimizer", "policy", "preset"):
        yield from ((plugin,), (plugin, "name"))
    other_names = (name for name, key in ModelConfig.other_names().items() if key == "custom")
    for name in ("custom", *other_names):
        yield from (("model", name), ("policy", "model", name))


#: For each base class, a function that converts a value of a subclass to the base class.
_BASES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}
_CLASSES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, complex)}


def _bytes_of(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _text_of(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _path_of(kind: type[PurePath]) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    return str, kind


#: Types that are not containers. The first function converts a value to JSON, and the second
#: function converts the JSON back to a value.
_TYPES: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: (_text_of, _bytes_of),
    bytearray: (_text_of, lambda text: bytearray(_bytes_of(text))),
    complex: (lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    range: (lambda r: [r.start, r.stop, r.step], lambda ends: range(*ends)),
    slice: (lambda s: [s.start, s.stop, s.step], lambda ends: slice(*ends)),
    Path: _path_of(Path),
    PurePosixPath: _path_of(PurePosixPath),
    PureWindowsPath: _path_of(PureWindowsPath),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (lambda f: [f.numerator, f.denominator], lambda p: fractions.Fraction(*p)),
    uuid.UUID: (str, uuid.UUID),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    datetime.timedelta: (
        lambda d: [d.days, d.seconds, d.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
}
_READ: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "class": lambda name: _CLASSES[name],
    "numpy.class": lambda name: _dtype(name).type,
    "numpy.dtype": lambda name: _dtype(name),
    "numpy.scalar": lambda parts: _array(parts[0], (), _bytes_of(parts[1]))[()],
    "numpy.array": lambda parts: _array(parts[0], parts[1], _stored(parts[2])),
    "torch.dtype": lambda name: _torch_dtype(name),
    **{kind.__name__: read for kind, (_, read) in _TYPES.items()},
}
_UNREADABLE = (KeyError, IndexError, ValueError, TypeError, AttributeError, ArithmeticError)
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode_config(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Encodes a config as JSON values and tensors for `write_checkpoint`.

    A value of a subclass is encoded as a value of the base class if both values are equal. Examples
    are members of an `IntEnum` and named tuples.

    Args:
        options: the flat config.

    Returns:
        the encoded options, and a dict with the values that are left out. This dict maps the path
        of each value to its type, for example `{"env_config.loader": "maze.Loader"}`.
    """
    unsaved: dict[str, str] = {}
    encoded = {}
    for key, value in options.items():
        with contextlib.suppress(_Unsaved):
            encoded[key] = _encode(value, key, unsaved, ())
    return encoded, unsaved


class _Unsaved(Exception):
    """Raised for a value that cannot be encoded. A dict omits the value. A list, tuple or set has
    None in its place."""


def _encode(value: Any, path: str, unsaved: dict[str, str], within: tuple[int, ...]) -> Any:
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        small = value.bit_length() <= _MOST_BITS
        return value if small else {_TYPE: "int", _VALUE: hex(value)}
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if id(value) not in within and len(within) < _MOST_NESTED:
            return _encode_container(value, path, unsaved, (*within, id(value)))
    elif (leaf := _encode_leaf(value)) is not None:
        return leaf
    kind = value if isinstance(value, type) else type(value)
    unsaved[path] = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    raise _Unsaved


def _encode_container(
    value: Any, path: str, unsaved: dict[str, str], within: tuple[int, ...]
) -> Any:
    if isinstance(value, Mapping):
        items = {}
        for key, part in value.items():
            plain = type(key) is str and _PLAIN_KEY.fullmatch(key)
            named = f"{path}.{key}" if plain else f"{path}[{key!r:.80}]"
            with contextlib.suppress(_Unsaved):
                items[key] = (
                    _encode(key, named, unsaved, within),
                    _encode(part, named, unsaved, within),
                )
        if all(type(key) is str for key in items) and not _RESERVED & items.keys():
            return dict(items.values())
        return {_TYPE: "dict", _VALUE: [list(pair) for pair in items.values()]}
    parts = []
    for index, part in enumerate(value):
        try:
            parts.append(_encode(part, f"{path}[{index}]", unsaved, within))
        except _Unsaved:
            parts.append(None)  # keeps the positions of the other elements
    kind = next((name for name, base in _SEQUENCES.items() if isinstance(value, base)), "list")  # type: ignore[arg-type]
    return parts if kind == "list" else {_TYPE: kind, _VALUE: parts}


def _encode_leaf(value: Any) -> Any:
    """Returns the value as JSON or a tensor. Returns None if decoding would not give an equal
    value."""
    if isinstance(value, Tensor):
        plain = type(value) is Tensor and value.layout == torch.strided
        return value if plain and value.device.type == "cpu" and not value.is_quantized else None
    if isinstance(value, np.generic) or type(value) is np.ndarray:
        if value.dtype.kind not in _PLAIN_KINDS or not value.dtype.itemsize:
            return None
        data, dtype = value.tobytes(), value.dtype.str
        if isinstance(value, np.generic):
            return {_TYPE: "numpy.scalar", _VALUE: [dtype, _text_of(data)]}
        # The tensor holds bytes, because torch supports neither text nor dates nor a foreign byte
        # order.
        stored = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
        return {_TYPE: "numpy.array", _VALUE: [dtype, list(value.shape), stored]}
    if isinstance(value, np.dtype) and value.kind in _PLAIN_KINDS:
        return {_TYPE: "numpy.dtype", _VALUE: value.str}
    if isinstance(value, torch.dtype):
        return {_TYPE: "torch.dtype", _VALUE: str(value).removeprefix("torch.")}
    if isinstance(value, type):
        if value in _CLASSES.values():
            return {_TYPE: "class", _VALUE: value.__name__}
        if issubclass(value, np.generic) and _has_class(value):
            return {_TYPE: "numpy.class", _VALUE: np.dtype(value).str}
        return None
    for base, read_plain in _BASES.items():
        if isinstance(value, base):
            number_or_text = read_plain(value)
            return _encode(number_or_text, "", {}, ()) if number_or_text == value else None
    for kind, (write, read) in _TYPES.items():
        if isinstance(value, kind):
            written = write(value)
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                if read(written) == value:
                    return {_TYPE: kind.__name__, _VALUE: written}
            return None
    return None


def _has_class(scalar: type) -> bool:
    try:
        dtype = np.dtype(scalar)
    except TypeError:  # an abstract class
        return False
    return dtype.kind in _PLAIN_KINDS and dtype.type is scalar


def decode_config(tree: Any, field: str) -> Any:
    """Decodes a config that `encode_config` encoded. A config of an earlier version has only JSON
    values, which are not changed.

    Args:
        tree: the encoded config, or a part of it. It may come from an untrusted user.
        field: start of an error message. It ends with the quoted path of the field, without the
            closing quotation mark.

    Raises:
        CheckpointError: a value cannot be decoded. The message names the field.
    """
    if isinstance(tree, list):
        return [decode_config(part, f"{field}/{index}") for index, part in enumerate(tree)]
    if not isinstance(tree, Mapping):
        return tree
    if _TYPE not in tree:
        return {key: decode_config(part, f"{field}/{key}") for key, part in tree.items()}
    kind, value = tree[_TYPE], tree.get(_VALUE)
    try:
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](decode_config(value, field))
        if kind == "dict":
            return dict(decode_config(value, field))
        return _READ[kind](value)
    except _UNREADABLE as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{field}' cannot be decoded as type {kind!r:.80}: {why:.200}"
        ) from None


def _dtype(name: Any) -> np.dtype[Any]:
    dtype = np.dtype(str(name))
    if dtype.kind not in _PLAIN_KINDS or not dtype.itemsize:
        raise ValueError(f"got dtype {name!r:.80}")
    return dtype


def _torch_dtype(name: str) -> torch.dtype:
    found = vars(torch)[name]  # `getattr` would import what the file names
    if not isinstance(found, torch.dtype):
        raise TypeError(f"got {name!r:.80}")
    return found


def _stored(tensor: Any) -> bytes:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.uint8:
        raise TypeError("the array is not stored as a tensor of bytes")
    return tensor.numpy().tobytes()


def _array(name: Any, shape: Any, data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), _dtype(name)).reshape(tuple(shape))


def unsaved_in(state: Mapping[str, Any], *keys: str) -> dict[str, str]:
    """Returns which values of some options are missing in the checkpoint. The result maps the path
    of each missing value to its type.

    Args:
        state: the state of the checkpoint.
        keys: keys of the options in the config.
    """
    unsaved = state.get("unsaved", {})  # checkpoints of earlier versions lack this key
    return {path: kind for path, kind in unsaved.items() if _parts(path)[0] in keys}


def described(unsaved: Mapping[str, str]) -> str:
    """Returns the paths and types as text for a message."""
    named = [f"{path:.100} ({kind:.100})" for path, kind in unsaved.items()]
    others = len(named) - _MOST_NAMED
    return ", ".join(named[:_MOST_NAMED]) + (f" and {others} others" if others > 0 else "")


def argument_for(path: str) -> str:
    """Returns the key for a `KEY=VALUE` argument that sets the value at a path. An argument cannot
    set an element of a list, or a value under a key that is not text. In these cases, returns the
    key of the list or of the dict."""
    return ".".join(itertools.takewhile(lambda part: not part.startswith("["), _parts(path)))


def _parts(path: str) -> list[str]:
    return path.replace("[", ".[").split(".")
