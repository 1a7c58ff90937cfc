"""Networks of the user's by name."""

from __future__ import annotations

from polopt.common.config import ConfigError
from polopt.common.registry import Registry

NETWORKS = Registry("network", "polopt.networks", "torch.nn:Module", {})


def register_network(name: str, cls: type, override: bool = False) -> None:
    """Makes a `torch.nn.Module` class selectable as `config["model"] = {"custom": name}`. See
    `Registry.register`.

    Raises:
        ConfigError: as `Registry.register`, or the name holds a colon: `module:Class` names a class
            that is to be imported.
    """
    if ":" in name:
        raise ConfigError(
            f"register network {name!r}: 'module:Class' names a class that is to be imported. "
            "Allowed: a name without a colon"
        )
    NETWORKS.register(name, cls, override)
