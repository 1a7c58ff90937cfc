"""Plain data: the values that a file of polopt may hold, such as a checkpoint or a record of a run.

`encode` converts a value to JSON and tensors, and `decode` restores an equal value of the same
type. Decoding never imports a module, and calls nothing except the constructors in the tables of
this file. The files may come from an untrusted user.

- Numbers, strings, booleans, None, lists, and dicts whose keys are strings are JSON values.
- A tensor is `{"__tensor__": NAME}`, and an array whose dtype safetensors has is
  `{"__array__": NAME}`. `NAME` is the path of the value, for example `optimizer.policy.params`.
- Any other value is `{"__type__": NAME, "value": ...}`: tuples, sets, dicts with other keys, bytes,
  paths, dates, dtypes, numbers and other arrays of NumPy, and the other types in `_TYPES`.

A value of a subclass becomes an equal value of the base class. Examples are members of an
`IntEnum`, named tuples and parameters of a network. All tensors are restored on the CPU.
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
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TYPE, _VALUE, _TENSOR, _ARRAY = "__type__", "value", "__tensor__", "__array__"
#: A dict that has one of these keys is encoded as a list of pairs.
_RESERVED = {_TYPE, _TENSOR, _ARRAY}
#: Dtypes that every version of safetensors stores.
_STORED = {
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
}
#: Other dtypes of tensors. Tensors of these dtypes, and arrays of any other dtype, are stored as
#: tensors of bytes.
_AS_BYTES = {
    *("uint16", "uint32", "uint64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
}
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

#: For each base class, a function that converts a value of a subclass to the base class.
_BASES: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}
_CLASSES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, complex)}


class DecodeError(RuntimeError):
    """A value cannot be decoded. The message names its field."""


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
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "int": lambda text: int(text, 16),
    "class": lambda name: _CLASSES[name],
    "numpy.class": lambda name: read_dtype(name).type,
    "numpy.dtype": lambda described: read_dtype(described),
    "numpy.scalar": lambda parts: _scalar(*parts),
    "numpy.array": lambda parts: _array(*parts),
    "torch.dtype": lambda name: _torch_dtype(name),
    "torch.tensor": lambda parts: _tensor(*parts),
    **{kind.__name__: read for kind, (_, read) in _TYPES.items()},
}
_UNREADABLE = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError)
_SEQUENCES = {tuple: "tuple", set: "set", frozenset: "frozenset"}


def encode(value: Any, unsaved: dict[str, str] | None = None) -> tuple[Any, dict[str, Tensor]]:
    """Encodes a value.

    Args:
        value: the value.
        unsaved: a dict to which this function adds each value that is not plain data. It maps the
            path of the value to its type, for example `{"env_config.loader": "maze.Loader"}`. A
            dict omits such a value, and a list, tuple or set has None in its place.

    Returns:
        a JSON value, and the tensors that it names. The tensors are copies. They are contiguous, on
        the CPU, and have dtypes that safetensors stores.

    Raises:
        TypeError: `unsaved` is None, and the value contains a value that is not plain data. The
            message names its path.
    """
    encoder = _Encoder(unsaved)
    return encoder.encode(value, "", ()), encoder.tensors


def decode(tree: Any, tensors: dict[str, Tensor], field: str = "") -> Any:
    """Returns the value that `encode` encoded. Each tensor is removed from `tensors`. If a tree
    could name a tensor many times, and each use copies it, a small file could take all memory.

    Args:
        tree: the JSON value.
        tensors: the tensors that it names.
        field: path of the value, for error messages.

    Raises:
        DecodeError: a part of the value cannot be decoded. The message names its field.
        RecursionError: the value is nested too deeply.
    """
    if isinstance(tree, list):
        return [decode(part, tensors, f"{field}/{index}") for index, part in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    kind: Any
    for kind in (_TENSOR, _ARRAY):
        if kind in tree:
            break
    else:
        if _TYPE not in tree:
            return {key: decode(part, tensors, f"{field}/{key}") for key, part in tree.items()}
        kind, value = tree[_TYPE], decode(tree.get(_VALUE), tensors, field)
    try:
        if kind == _TENSOR:
            return tensors.pop(tree[kind])
        if kind == _ARRAY:
            return tensors.pop(tree[kind]).numpy()
        return _READ[kind](value)
    except _UNREADABLE as error:
        why = f"{type(error).__name__}: {error}"
        field = field.removeprefix("/")
        raise DecodeError(
            f"field {field!r:.200} cannot be decoded as type {kind!r:.80}: {why:.200}"
        ) from None


def plain(value: Any, unsaved: dict[str, str] | None = None) -> Any:
    """Returns a copy of a value, as `decode` would restore it. See `encode` for `unsaved`.

    Raises:
        TypeError: see `encode`.
    """
    return decode(*encode(value, unsaved))


def described(unsaved: Mapping[str, str]) -> str:
    """Returns the paths and types that `encode` added to `unsaved`, as text for a message."""
    named = [f"{path:.100} ({kind:.100})" for path, kind in unsaved.items()]
    others = len(named) - _MOST_NAMED
    return ", ".join(named[:_MOST_NAMED]) + (f" and {others} others" if others > 0 else "")


def argument_for(path: str) -> str:
    """Returns the key for a `KEY=VALUE` argument that sets the value at a path. An argument cannot
    set an element of a list, or a value under a key that is not text. In these cases, returns the
    key of the list or of the dict."""
    parts = path.replace("[", ".[").split(".")
    return ".".join(itertools.takewhile(lambda part: not part.startswith("["), parts))


class _Unsaved(Exception):
    """Raised for a value that is not plain data."""


class _Encoder:
    def __init__(self, unsaved: dict[str, str] | None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._unsaved = unsaved

    def encode(self, value: Any, path: str, within: tuple[int, ...]) -> Any:
        if value is None or type(value) in (bool, float, str):
            return value
        if type(value) is int:
            small = value.bit_length() <= _MOST_BITS
            return value if small else {_TYPE: "int", _VALUE: hex(value)}
        if isinstance(value, Mapping | list | tuple | set | frozenset):
            if id(value) not in within and len(within) < _MOST_NESTED:
                return self._container(value, path, (*within, id(value)))
        elif (leaf := self._leaf(value, path)) is not None:
            return leaf
        kind = value if isinstance(value, type) else type(value)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        if self._unsaved is None:
            if isinstance(value, np.ndarray):
                name = f"NumPy array of {value.dtype}"
            raise TypeError(f"got a {name}{f' at {path!r}' * bool(path)}, which is not plain data")
        self._unsaved[path] = name
        raise _Unsaved

    def _container(self, value: Any, path: str, within: tuple[int, ...]) -> Any:
        if isinstance(value, Mapping):
            items = {}
            for key, part in value.items():
                if type(key) is str and _PLAIN_KEY.fullmatch(key):
                    named = f"{path}.{key}" if path else key
                else:
                    named = f"{path}[{key!r:.80}]"
                with contextlib.suppress(_Unsaved):
                    items[key] = self.encode(key, named, within), self.encode(part, named, within)
            if all(type(key) is str for key in items) and not _RESERVED & items.keys():
                return dict(items.values())
            return {_TYPE: "dict", _VALUE: [list(pair) for pair in items.values()]}
        parts = []
        for index, part in enumerate(value):
            try:
                parts.append(self.encode(part, f"{path}[{index}]", within))
            except _Unsaved:
                parts.append(None)  # keeps the positions of the other elements
        for kind, name in _SEQUENCES.items():
            if isinstance(value, kind):
                return {_TYPE: name, _VALUE: parts}
        return parts

    def _leaf(self, value: Any, path: str) -> Any:
        """Returns the encoded value. Returns None if decoding would not give an equal value."""
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, np.generic):
            if not _is_plain(value.dtype):
                return None
            dtype = describe_dtype(value.dtype)
            return {_TYPE: "numpy.scalar", _VALUE: [dtype, _text_of(value.tobytes())]}
        if isinstance(value, np.dtype) and _is_plain(value):
            return {_TYPE: "numpy.dtype", _VALUE: describe_dtype(value)}
        if isinstance(value, torch.dtype):
            return {_TYPE: "torch.dtype", _VALUE: _name_of(value)}
        if isinstance(value, type):
            if value in _CLASSES.values():
                return {_TYPE: "class", _VALUE: value.__name__}
            if issubclass(value, np.generic) and _has_class(value):
                return {_TYPE: "numpy.class", _VALUE: np.dtype(value).str}
            return None
        for base, read_plain in _BASES.items():
            if isinstance(value, base):
                number_or_text = read_plain(value)
                return self.encode(number_or_text, path, ()) if number_or_text == value else None
        for kind, (write, read) in _TYPES.items():
            if isinstance(value, kind):
                written = write(value)
                with contextlib.suppress(ValueError, TypeError, OverflowError):
                    if read(written) == value:
                        return {_TYPE: kind.__name__, _VALUE: written}
                return None
        return None

    def _tensor(self, value: Tensor, path: str) -> Any:
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            return None
        value = value.detach().cpu()
        if type(value) is not Tensor:
            return None
        value = value.clone(memory_format=torch.contiguous_format)
        dtype = _name_of(value.dtype)
        if dtype in _STORED:
            return {_TENSOR: self._name(value, path)}
        if dtype not in _AS_BYTES:
            return None
        stored = {_TENSOR: self._name(value.reshape(-1).view(torch.uint8), path)}
        return {_TYPE: "torch.tensor", _VALUE: [dtype, list(value.shape), stored]}

    def _array(self, value: np.ndarray, path: str) -> Any:
        if isinstance(value, np.ma.MaskedArray) or not _is_plain(value.dtype):
            return None
        copied = np.array(value, order="C")
        if copied.dtype.isnative and copied.dtype.name in _STORED:
            return {_ARRAY: self._name(torch.from_numpy(copied), path)}
        data = torch.from_numpy(copied.reshape(-1).view(np.uint8))
        stored = {_TENSOR: self._name(data, path)}
        dtype = describe_dtype(copied.dtype)
        return {_TYPE: "numpy.array", _VALUE: [dtype, list(copied.shape), stored]}

    def _name(self, tensor: Tensor, path: str) -> str:
        name, number = path, 0
        while name in self.tensors:  # for example a list of two elements in the key of a dict
            name, number = f"{path}~{number}", number + 1
        self.tensors[name] = tensor
        return name


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Returns a dtype as JSON: its text, or a list `[name, dtype, shape]` for each field of a
    structured dtype."""
    if dtype.names is None:
        return dtype.str
    fields = [(name, dtype[name]) for name in dtype.names]
    return [[name, describe_dtype(field.base), list(field.shape)] for name, field in fields]


def read_dtype(described: Any, kinds: str = _PLAIN_KINDS) -> np.dtype[Any]:
    """Returns the dtype that `describe_dtype` described.

    Args:
        described: the description. It may come from an untrusted user.
        kinds: the kinds of NumPy dtypes that are allowed, also in a structured dtype.

    Raises:
        TypeError, ValueError: the description is not valid, or has a dtype of another kind.
        RecursionError: the description is nested too deeply.
    """
    if isinstance(described, list):
        return np.dtype(
            [(str(name), read_dtype(of, kinds), tuple(shape)) for name, of, shape in described]
        )
    dtype = np.dtype(str(described))
    if dtype.kind not in kinds or not dtype.itemsize:
        raise ValueError(f"got dtype {described!r:.80}")
    return dtype


def _is_plain(dtype: np.dtype[Any]) -> bool:
    if dtype.names is None:
        return dtype.kind in _PLAIN_KINDS and dtype.itemsize > 0
    try:  # a structured dtype may contain objects, or unused bytes between its fields
        return read_dtype(describe_dtype(dtype)) == dtype and dtype.itemsize > 0
    except (TypeError, ValueError):
        return False


def _has_class(scalar: type) -> bool:
    try:
        dtype = np.dtype(scalar)
    except TypeError:  # an abstract class
        return False
    return dtype.kind in _PLAIN_KINDS and dtype.type is scalar


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _torch_dtype(name: str) -> torch.dtype:
    found = vars(torch)[name]  # `getattr` would import what the file names
    if not isinstance(found, torch.dtype):
        raise TypeError(f"got {name!r:.80}")
    return found


def _scalar(described: Any, text: str) -> Any:
    return np.frombuffer(bytearray(_bytes_of(text)), read_dtype(described)).reshape(())[()]


def _array(described: Any, shape: Any, data: Any) -> np.ndarray:
    dtype = read_dtype(described)
    return _checked(data).numpy().view(dtype).reshape(tuple(shape))


def _tensor(name: str, shape: Any, data: Any) -> Tensor:
    if name not in _AS_BYTES:
        raise ValueError(f"got dtype {name!r:.80}")
    return _checked(data).view(_torch_dtype(name)).reshape(shape)


def _checked(data: Any) -> Tensor:
    if not isinstance(data, Tensor) or data.dtype != torch.uint8:
        raise TypeError("the numbers are not stored as a tensor of bytes")
    return data
