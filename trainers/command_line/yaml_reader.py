"""Safe YAML, in which `1e-3` is a number and a duplicate key is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from polopt.common.config import ConfigError


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# PyYAML implements YAML 1.1, in which `1e-3` is a string because it has no point.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(text: str, where: str) -> Any:
    """Returns the value of a YAML document. Tags that would construct objects are refused.

    Args:
        text: YAML.
        where: name of the document in errors.

    Raises:
        ConfigError: not YAML, or nested too deeply.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: {error.problem}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
