"""Weights from RLlib's `RLModule`s and back: `load_rl_module` and `to_rl_module`."""

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
from polopt.policies.networks.cnn import CNNNetwork
from polopt.policies.networks.mlp import MLPNetwork
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES
from polopt.rllib.cnn_modules import cnns_of, copy_cnns, filters_of

#: Options of RLlib's `DefaultModelConfig` that the network of polopt has under the same names.
_OPTIONS = (
    "fcnet_hiddens",
    "fcnet_activation",
    "vf_share_layers",
    "free_log_std",
    "use_lstm",
    "lstm_cell_size",
)
#: Options that must have these values, because the network of polopt has no others.
_PLAIN: dict[str, Any] = {
    "head_fcnet_hiddens": [],
    "fcnet_use_layernorm": False,
    "lstm_use_prev_action": False,
    "lstm_use_prev_reward": False,
}


def load_rl_module(path: str | Path, policy: str = "ppo") -> Policy:
    """The policy of polopt with the network and the weights of an `RLModule` that RLlib saved.

    RLlib's checkpoints are pickled, so loading one runs any code that its author has put there.
    Load only folders that you trust.

    Args:
        path: a checkpoint of an `RLModule`: of `module.save_to_path(path)`, or below a checkpoint
            of an algorithm `learner_group/learner/rl_module/default_policy`.
        policy: name of the policy, an actor-critic one.

    Raises:
        ConfigError: the extra `polopt[rllib]` is not installed. Or the module is not a default
            module of RLlib for observations of floats, with linear layers, with an LSTM after them,
            or with convolutions.
    """
    from_checkpoint = _rllib("ray.rllib.core.rl_module.rl_module", "RLModule").from_checkpoint
    return policy_of(from_checkpoint(str(Path(path).resolve())), policy)


def policy_of(module: Any, policy: str = "ppo") -> Policy:
    """The policy of polopt with the network and a copy of the weights of an `RLModule`.

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
        raise ConfigError(f"observations {module.observation_space} need another network")
    _copy(module.state_dict(), _network(made), to_rllib=False)
    return made


def to_rl_module(policy: Policy) -> Any:
    """RLlib's default `RLModule` with the network and a copy of the weights of a policy.

    Its `forward_inference({"obs": obs})` gives the same `action_dist_inputs` `[B, P]` as
    `policy.action_params(obs)`.

    Raises:
        ConfigError: the extra `polopt[rllib]` is not installed. Or the network is not one of linear
            layers, with or without an LSTM, for observations of floats without normalisation. RLlib
            gives convolutions no layers before the heads, and pads them as TensorFlow does. So
            networks with convolutions are loaded only.
    """
    network = _network(policy)
    config: Any = getattr(policy.config, "model", None)
    # RLlib's own forward pass of an LSTM with `free_log_std` raises (2.60).
    free_memory = policy.state_size and getattr(network, "log_std", None) is not None
    normalizer = getattr(policy, "normalizer", None)
    if not isinstance(network, MLPNetwork) or network.image or normalizer or free_memory:
        raise ConfigError(
            f"{type(policy).__name__} with {type(network).__name__} has no counterpart among the "
            "default modules of RLlib. Allowed: linear layers for observations of floats without "
            "normalisation; an LSTM with Box actions needs free_log_std=False. Convolutions can be "
            "loaded from RLlib, and not the way back: RLlib has no layers between them and the "
            "heads, and other paddings"
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
    """The options of the network of a module.

    Raises:
        ConfigError: the module has another network than polopt could have.
    """
    config = module.model_config
    config = dict(config) if isinstance(config, Mapping) else vars(config)
    for name, plain in _PLAIN.items():
        if name in config and (config[name] or plain) != plain:
            raise ConfigError(
                f"the module has {name}={config[name]!r}. Allowed: {plain!r}: the weights of a "
                "network of your own are copied by a program of yours"
            )
    space = module.observation_space
    if not isinstance(space, Box) or not np.issubdtype(space.dtype, np.floating):
        raise ConfigError(f"the module has observations {space}. Allowed: a Box of floats")
    return config


def _copy(state: Mapping[str, Any], network: MLPNetwork | Any, to_rllib: bool) -> None:
    """Copies each tensor of one side to its place on the other.

    Args:
        state: of the module.
        network: of the policy.
        to_rllib: from the network into `state`.

    Raises:
        ConfigError: a tensor has no place, or another shape there.
    """
    own = dict(network.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, place in _pairs(state, network):
            theirs, ours = state[name], own.get(place)
            if ours is None or ours.shape != theirs.shape:
                shape = None if ours is None else tuple(ours.shape)
                raise ConfigError(
                    f"the module's {name} {tuple(theirs.shape)} has its place in {place}, which "
                    f"has the shape {shape}"
                )
            target, source = (theirs, ours) if to_rllib else (ours, theirs)
            target.copy_(source)


#: Names of RLlib's tensors, and of the ones in the network. `{side}` is `policy` or `value`.
_PLACES = (
    (r"encoder\.(\w+)\.(?:tokenizer\.)?net\.mlp\.(\d+)\.(\w+)", "{side}_trunk.{1}.{2}"),
    (r"encoder\.(\w+)\.lstm\.(\w+)", "{side}_memory.cells.{1}"),
    (r"(pi|vf)\.net\.mlp\.0\.(\w+)", "{side}_head.{1}"),
    (r"(pi)\.(log_std)", "log_std"),
)
_SIDES = {"encoder": "policy", "actor_encoder": "policy", "critic_encoder": "value"}
_SIDES |= {"pi": "policy", "vf": "value"}


def _pairs(state: Mapping[str, Any], network: Any) -> Iterator[tuple[str, str]]:
    """The name of each of RLlib's tensors, and of the same tensor in the network."""
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
    """What a module of RLlib has under a name.

    Raises:
        ConfigError: RLlib is not installed.
    """
    import importlib

    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(
            f"this needs RLlib, which cannot be imported ({error}): pip install 'polopt[rllib]'"
        ) from None
