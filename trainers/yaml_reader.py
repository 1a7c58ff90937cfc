"""YAML as people write it: safe, with `1e-3` a number and no key twice."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from polopt.common.config import ConfigError


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, where it differs from what a reader of the file would expect."""

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


# YAML 1.1, which PyYAML reads, takes `1e-3` for a string because it has no point.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(text: str, where: str) -> Any:
    """What `text` says; tags that would build objects are refused.

    Args:
        text: YAML.
        where: what to call it in errors.

    Raises:
        ConfigError: if it is no YAML.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: {error.problem}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
