"""`register_network`: makes a user's network selectable by name."""

from __future__ import annotations

from polopt.common.config import ConfigError
from polopt.common.registry import Registry

NETWORKS = Registry("network", "polopt.networks", "torch.nn:Module", {})


def register_network(name: str, cls: type, override: bool = False) -> None:
    """Makes a `torch.nn.Module` class selectable as `config["model"] = {"custom": name}`. See
    `Registry.register`.

    Raises:
        ConfigError: the errors of `Registry.register`, or the name contains a colon. A colon is
            reserved for `module:Class`, a class to import.
    """
    if ":" in name:
        raise ConfigError(
            f"register network {name!r}: a name with a colon means a class to import, "
            "'module:Class'. Allowed: a name without a colon"
        )
    NETWORKS.register(name, cls, override)
