"""Converts RLlib's `RLModule`s to policies and back: `load_rl_module` and `to_rl_module`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import nn

from polopt.common.config import ConfigError
from polopt.policies.networks.actor_critics import CNNNetwork, MLPNetwork
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES
from polopt.rllib.cnn_modules import cnns_of, copy_cnns, filters_of

#: Options of RLlib's `DefaultModelConfig` that the networks of polopt have under the same names.
_OPTIONS = (
    "fcnet_hiddens",
    "fcnet_activation",
    "vf_share_layers",
    "free_log_std",
    "use_lstm",
    "lstm_cell_size",
)
#: Options that must have these values. Modules with other values cannot be converted.
_PLAIN: dict[str, Any] = {
    "head_fcnet_hiddens": [],
    "fcnet_use_layernorm": False,
    "lstm_use_prev_action": False,
    "lstm_use_prev_reward": False,
}


def load_rl_module(path: str | Path, policy: str = "ppo") -> Policy:
    """Returns a policy of polopt with the network and the weights of a saved `RLModule`.

    RLlib's checkpoints contain pickles. Loading such a checkpoint executes any code that its author
    has put into it. Load only checkpoints that you trust.

    Args:
        path: a checkpoint of an `RLModule`. `module.save_to_path(path)` writes such a checkpoint.
            In a checkpoint of an algorithm, it is the directory
            `learner_group/learner/rl_module/default_policy`.
        policy: name of the policy, for example `ppo`, `a2c`, `impala` or `appo`.

    Raises:
        ConfigError: the extra `polopt[rllib]` is not installed, or the module is not supported. A
            supported module is a default module of RLlib for observations of floats. It consists of
            linear layers, of linear layers and an LSTM after them, or of convolutions.
    """
    from_checkpoint = _rllib("ray.rllib.core.rl_module.rl_module", "RLModule").from_checkpoint
    return policy_of(from_checkpoint(str(Path(path).resolve())), policy)


def policy_of(module: Any, policy: str = "ppo") -> Policy:
    """Returns a policy of polopt with the network and a copy of the weights of an `RLModule`.

    Raises:
        ConfigError: see `load_rl_module`.
    """
    config = _config_of(module)
    cls = POLICIES.get(policy)
    model: dict[str, Any] = {name: config[name] for name in _OPTIONS if name in config}
    cnns = cnns_of(module)
    if cnns:
        kept: dict[str, Any] = {
            name: model[name] for name in ("free_log_std", "vf_share_layers") if name in model
        }
        filters = filters_of(cnns["policy"])
        model = {**kept, "conv_filters": filters, "post_fcnet_hiddens": []}
    made: Policy = cls(
        module.observation_space, module.action_space, cls.config_class.parse({"model": model})
    )
    network = _network(made)
    if cnns and isinstance(network, CNNNetwork):
        copy_cnns(module, cnns, network)
        return made
    if not isinstance(_network(made), MLPNetwork):
        raise ConfigError(
            f"the network of the module does not fit the observations {module.observation_space}"
        )
    _copy(module.state_dict(), _network(made), to_rllib=False)
    return made


def to_rl_module(policy: Policy) -> Any:
    """Returns RLlib's default `RLModule` with the network and a copy of the weights of a policy.

    For B observations and an action distribution with P parameters,
    `module.forward_inference({"obs": obs})` returns `action_dist_inputs` `[B, P]`. They are the
    same as the return value of `policy.action_params(obs)`.

    Raises:
        ConfigError: the extra `polopt[rllib]` is not installed, or the network is not supported. A
            supported network has linear layers without layer normalisation, with or without an
            LSTM. An LSTM with Box actions needs `free_log_std=False`. The observations are floats
            that the policy does not normalise. Networks with convolutions are not supported,
            because RLlib has no layers between the convolutions and the heads, and uses the padding
            of TensorFlow.
    """
    network = _network(policy)
    config: Any = getattr(policy.config, "model", None)
    # In RLlib 2.60, the forward pass of an LSTM with `free_log_std` raises an error.
    free_memory = policy.state_size and getattr(network, "log_std", None) is not None
    normalizer = getattr(policy, "normalizer", None)
    unsupported = normalizer or free_memory or getattr(config, "layer_norm", False)
    if not isinstance(network, MLPNetwork) or network.image or unsupported:
        raise ConfigError(
            f"{type(policy).__name__} with {type(network).__name__} cannot be converted to a "
            "default module of RLlib. Allowed: linear layers without layer_norm, for observations "
            "of floats without normalisation. An LSTM with Box actions needs free_log_std=False. "
            "Networks with convolutions can only be loaded from RLlib, because RLlib has no layers "
            "between the convolutions and the heads, and uses other paddings"
        )
    make = _rllib(
        "ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module", "DefaultPPOTorchRLModule"
    )
    catalog = _rllib("ray.rllib.algorithms.ppo.ppo_catalog", "PPOCatalog")
    defaults = _rllib("ray.rllib.core.rl_module.default_model_config", "DefaultModelConfig")
    options = {name: getattr(config, name) for name in _OPTIONS}
    options["fcnet_hiddens"] = list(options["fcnet_hiddens"])
    options["vf_share_layers"] = network.shared
    options["free_log_std"] = network.log_std is not None
    module = make(
        observation_space=policy.encoder.space,
        action_space=policy.action_space,
        model_config=vars(defaults(**options)),
        catalog_class=catalog,
    )
    state = module.state_dict()
    _copy(state, network, to_rllib=True)
    module.load_state_dict(state)
    return module


def _network(policy: Policy) -> nn.Module:
    network: nn.Module = policy.model
    return network


def _config_of(module: Any) -> Mapping[str, Any]:
    """Returns the options of a module's network.

    Raises:
        ConfigError: polopt has no such network.
    """
    config = module.model_config
    config = dict(config) if isinstance(config, Mapping) else vars(config)
    for name, plain in _PLAIN.items():
        if name in config and (config[name] or plain) != plain:
            raise ConfigError(
                f"the module has {name}={config[name]!r}. Allowed: {plain!r}. For another network, "
                "define a custom network in polopt, and copy the weights yourself"
            )
    space = module.observation_space
    if not isinstance(space, Box) or not np.issubdtype(space.dtype, np.floating):
        raise ConfigError(f"the module has observations {space}. Allowed: a Box of floats")
    if config.get("fcnet_activation") == "linear":
        raise ConfigError("the module has fcnet_activation='linear'. Allowed: an activation")
    return config


def _copy(state: Mapping[str, Any], network: MLPNetwork | Any, to_rllib: bool) -> None:
    """Copies the tensors of a module to a network, or the tensors of a network to a module.

    Args:
        state: state dict of the module.
        network: network of the policy.
        to_rllib: True copies from `network` to `state`. False copies from `state` to `network`.

    Raises:
        ConfigError: the network does not have a tensor of the module, or this tensor has another
            shape.
    """
    own = dict(network.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, place in _pairs(state, network):
            theirs, ours = state[name], own.get(place)
            if ours is None or ours.shape != theirs.shape:
                shape = None if ours is None else tuple(ours.shape)
                raise ConfigError(
                    f"the module's {name} {tuple(theirs.shape)} corresponds to {place} in polopt, "
                    f"which has the shape {shape}"
                )
            target, source = (theirs, ours) if to_rllib else (ours, theirs)
            target.copy_(source)


#: Names of tensors in RLlib's module, and the names of the same tensors in the network of polopt.
#: `{side}` is `policy` or `value`.
_PLACES = (
    (r"encoder\.(\w+)\.(?:tokenizer\.)?net\.mlp\.(\d+)\.(\w+)", "{side}_trunk.{1}.{2}"),
    (r"encoder\.(\w+)\.lstm\.(\w+)", "{side}_memory.cells.{1}"),
    (r"(pi|vf)\.net\.mlp\.0\.(\w+)", "{side}_head.{1}"),
    (r"(pi)\.(log_std)", "log_std"),
)
_SIDES = {"encoder": "policy", "actor_encoder": "policy", "critic_encoder": "value"}
_SIDES |= {"pi": "policy", "vf": "value"}


def _pairs(state: Mapping[str, Any], network: Any) -> Iterator[tuple[str, str]]:
    """Yields the name of each tensor in RLlib's module, and its name in the network of polopt."""
    for name in state:
        if name.endswith("log_std_clip_param_const"):
            continue
        for pattern, place in _PLACES:
            if found := re.fullmatch(pattern, name):
                side, *rest = found.groups()
                yield name, place.format(None, *rest, side=_SIDES[side])
                break
        else:
            raise ConfigError(f"the module has the tensor {name}, which polopt does not know")


def _rllib(module: str, name: str) -> Any:
    """Returns an object from a Python module of RLlib.

    Raises:
        ConfigError: RLlib is not installed.
    """
    import importlib

    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"RLlib is required, but cannot be imported ({error}): pip install 'polopt[rllib]'"
        ) from None
