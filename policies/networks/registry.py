"""Networks of the user's by name."""

from __future__ import annotations

from polopt.common.registry import Registry

NETWORKS = Registry("network", "polopt.networks", "torch.nn:Module", {})

#: Makes a `torch.nn.Module` class selectable as `config["model"] = {"custom": name}`; see
#: `Registry.register`.
register_network = NETWORKS.register
