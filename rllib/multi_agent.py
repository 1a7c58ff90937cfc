"""Translates RLlib's options of several agents: policies, their modules, and the mapping from
agents to policies."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from polopt.common.config import ConfigError, nearest, shown
from polopt.policies.policy import Policy
from polopt.rllib.accepted_options import warn
from polopt.rllib.translation import changes, checked, defaults, network_options, resolved
from polopt.trainers.trainer import PolicyOptimizerTrainer

logger = logging.getLogger("polopt")

#: RLlib's options of several agents. `of_agents` translates them.
AGENT_OPTIONS = (
    "_rl_module_spec",
    "algorithm_config_overrides_per_module",
    "multiagent",
    "policies",
    "policies_to_train",
    "policy_mapping_fn",
    "rl_module_spec",
)
#: Options of single policies that `with_agents` adds to `policies`.
_MODULES, _OVERRIDES = "rl_module_spec", "algorithm_config_overrides_per_module"
#: The `policy` of a policy that acts at random. `with_agents` replaces it.
_RANDOM = "random"
#: RLlib's classes that act at random.
_RANDOM_CLASSES = ("RandomPolicy", "RandomRLModule")
#: How the names of RLlib's policy classes begin, and the names of the same policies in polopt.
_BUILT_IN = {"A2C": "a2c", "A3C": "a3c", "APPO": "appo", "DQN": "dqn", "IMPALA": "impala"}
_BUILT_IN |= {"Apex": "dqn", "DDPPO": "ppo", "Impala": "impala", "PG": "a2c", "PPO": "ppo"}
_BUILT_IN |= {"SAC": "sac"}
#: Names of functions that draw random numbers, in `random` and in `numpy.random`.
_DRAWS = {"choice", "choices", "integers", "permutation", "rand", "randint", "random", "randrange"}


class PolicySpec(NamedTuple):
    """One policy of `multi_agent(policies=...)`, as RLlib's `PolicySpec`.

    Attributes:
        policy_class: the class or name of a policy. None means the policy of the preset.
        observation_space: has no effect, because polopt takes the spaces from the environment.
        action_space: has no effect.
        config: options of this policy, under their names in RLlib or polopt.
    """

    policy_class: Any = None
    observation_space: Any = None
    action_space: Any = None
    config: Any = None


@dataclass
class RLModuleSpec:
    """The network of one policy, as RLlib's `RLModuleSpec`.

    Attributes:
        module_class: must be None, or a default module of RLlib.
        observation_space: has no effect, because polopt takes the spaces from the environment.
        action_space: has no effect.
        model_config: options of the network, a dict or a `DefaultModelConfig`.
        load_state_path: must be None.
        model_config_dict: the name of `model_config` in older releases of RLlib.
        catalog_class: has no effect.
        inference_only, learner_only: have no effect.
    """

    module_class: Any = None
    observation_space: Any = None
    action_space: Any = None
    model_config: Any = None
    load_state_path: Any = None
    model_config_dict: Any = None
    catalog_class: Any = None
    inference_only: bool = False
    learner_only: bool = False

    def __post_init__(self) -> None:
        if self.model_config is None:
            self.model_config = self.model_config_dict


@dataclass
class MultiRLModuleSpec:
    """The networks of several policies, as RLlib's `MultiRLModuleSpec`.

    Attributes:
        rl_module_specs: the network of each policy, by the name of the policy.
        multi_rl_module_class: must be None.
        load_state_path: must be None.
    """

    rl_module_specs: Mapping[str, Any]
    multi_rl_module_class: Any = None
    load_state_path: Any = None


def of_agents(
    name: str, value: Any, preset: type[PolicyOptimizerTrainer], where: str
) -> dict[str, Any]:
    """Translates one of `AGENT_OPTIONS`. `with_agents` translates the result further.

    Args:
        name: name of the option in RLlib.
        value: value of the option.
        preset: the trainer.
        where: name of the method or function that the user called, for messages.

    Raises:
        ConfigError: polopt does not have such a policy, mapping or network.
    """
    if name == "multiagent":
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: multiagent={shown(value)}. Allowed: a dict")
        found: dict[str, Any] = {}
        for key, inner in value.items():
            if key == "policies" and not inner:
                continue  # RLlib's default, an empty dict
            inside = f"{where}: multiagent"
            of_one = of_agents if key in AGENT_OPTIONS else checked
            found |= of_one(key, inner, preset, inside)
        return found
    if name == "policies":
        return {name: _policies(value, preset, where)}
    if name == "policy_mapping_fn":
        return {name: as_mapping(value, where)}
    if name == "policies_to_train":
        return {name: _trained(value, where)}
    if name == _OVERRIDES:
        return {name: _overrides(value, preset, where)}
    return _modules(value, where)


def with_agents(
    options: Mapping[str, Any], preset: type[PolicyOptimizerTrainer], where: str
) -> dict[str, Any]:
    """Returns the config of a preset, from options that `translation.resolved` and `of_agents`
    returned.

    - The networks of `rl_module_spec` and the options of `algorithm_config_overrides_per_module`
      become options of the policies with the same names.
    - The `model` of a policy has the options of the run's `model` that it does not change.
    - A policy that acts at random becomes an untrained network.

    Raises:
        ConfigError: a network or an override is for a policy that does not exist, or a policy that
            acts at random is to be trained.
    """
    found = dict(options)
    modules, overrides = found.pop(_MODULES, {}), found.pop(_OVERRIDES, {})
    policies = found.get("policies")
    if policies is None and modules:
        policies = {name: {} for name in modules}
    if not isinstance(policies, Mapping):
        if overrides:
            raise ConfigError(f"{where}: {_OVERRIDES} needs the names of the policies in policies")
        return found
    for option, of_policies in ((_MODULES, modules), (_OVERRIDES, overrides)):
        for name in of_policies:
            if name not in policies:
                raise ConfigError(
                    f"{where}: {option}: unknown policy {name!r}{nearest(str(name), policies)}. "
                    f"Allowed: {', '.join(map(repr, policies))}"
                )
    trained = found.get("policies_to_train")
    found["policies"] = {}
    for name, own in policies.items():
        joined = {**own, **modules.get(name, {}), **overrides.get(name, {})}
        if joined.get("model") is not None and name not in modules:
            model = network_options(joined["model"])
            joined["model"] = {**(found.get("model") or {}), **model}
        joined = resolved(joined, preset, f"{where}: policy {name!r}")
        if joined.get("policy") == _RANDOM:
            joined = _random(name, joined, preset, trained is None or name in trained, where)
        found["policies"][name] = joined
    return found


def as_mapping(given: Any, where: str) -> Any:
    """Returns a mapping from agents to policies with the arguments that polopt passes. Returns
    anything but a function with RLlib's argument `episode` or `worker` unchanged, also a mapping
    that this function has returned.

    RLlib passes the episode as the second argument, whatever its name is. A mapping that draws
    random numbers, such as `lambda agent_id: random.choice(names)`, is asked in each episode.

    Raises:
        ConfigError: the function requires another argument.
    """
    if not callable(given) or hasattr(given, "of_polopt"):
        return given
    try:
        _, *others = inspect.signature(given).parameters.values()
    except (TypeError, ValueError):  # no signature, or no argument
        return given
    passed: dict[str, str] = {}  # the names of arguments, and what polopt passes
    positional: list[str] = []
    for one in others:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            continue
        is_second = one is others[0] and one.kind is not one.KEYWORD_ONLY
        what = one.name if one.name in ("episode", "worker", "rng") else ""
        if not what and is_second and one.default is one.empty:
            what = "episode"
        if what and one.kind is one.POSITIONAL_ONLY:
            positional.append(what)
        elif what:
            passed[one.name] = what
        elif one.default is one.empty:
            raise ConfigError(
                f"{where}: policy_mapping_fn={shown(given)} requires the argument {one.name!r}. "
                "Allowed: (agent_id, episode, worker, **kwargs), or fewer arguments"
            )
    draws = _DRAWS.intersection(getattr(getattr(given, "__code__", None), "co_names", ()))
    return _mapping(given, positional, passed) if positional or passed or draws else given


def _mapping(
    given: Callable[..., Any], positional: list[str], passed: Mapping[str, str]
) -> Callable[..., Any]:
    def policy_mapping_fn(agent_id: Any, episode: Any, worker: int, rng: Any) -> Any:
        values = {
            "episode": _EpisodeOfRLlib(episode),
            "worker": SimpleNamespace(worker_index=worker),
            "rng": rng,
        }
        further = {name: values[what] for name, what in passed.items()}
        return given(agent_id, *(values[what] for what in positional), **further)

    policy_mapping_fn.of_polopt = True  # type: ignore[attr-defined]  # see `as_mapping`
    return policy_mapping_fn


class _EpisodeOfRLlib:
    """The episode that a mapping of RLlib gets.

    Attributes:
        id_: the number of episodes that the worker has begun before. `hash` returns this number.
        episode_id: the same.
        env_id: the index of the environment in its worker.
    """

    def __init__(self, episode: Any) -> None:
        self.id_ = self.episode_id = episode.number
        self.env_id = episode.env_index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # called by copy or pickle
            raise AttributeError(name)
        raise AttributeError(
            f"policy_mapping_fn: the episode has no {name!r} in polopt. It has id_, episode_id and "
            "env_id"
        )


def _trained(value: Any, where: str) -> Any:
    if callable(value):
        raise ConfigError(
            f"{where}: policies_to_train={shown(value)}. polopt cannot choose for each batch which "
            "policies learn. Allowed: a list of names, or None for all policies"
        )
    return _sorted(value) if isinstance(value, set | frozenset | tuple) else value


def _sorted(names: Collection[Any]) -> list[Any]:
    """A list of names. The order of a set differs from process to process, so it is sorted."""
    return list(names) if isinstance(names, tuple) else sorted(names)


def _policies(value: Any, preset: type[PolicyOptimizerTrainer], where: str) -> Any:
    if value is None:
        return None
    if isinstance(value, list | tuple | set | frozenset):
        names = value if isinstance(value, list) else _sorted(value)
        return {name: {} for name in names}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where}: policies={shown(value)}. Allowed: names, or a dict from names to None, "
            "PolicySpec, dicts of options, or (policy_class, observation_space, action_space, "
            "config)"
        )
    return {name: _policy(name, spec, preset, where) for name, spec in value.items()}


def _policy(
    name: Any, spec: Any, preset: type[PolicyOptimizerTrainer], where: str
) -> dict[str, Any]:
    inside = f"{where}: policy {name!r}"
    if spec is None:
        return {}
    if isinstance(spec, Mapping):
        spec = PolicySpec(
            spec.get("policy"), config={k: v for k, v in spec.items() if k != "policy"}
        )
    elif isinstance(spec, list | tuple) and len(spec) == 4:
        spec = PolicySpec(*spec)
    elif not hasattr(spec, "policy_class") or not hasattr(spec, "config"):
        raise ConfigError(
            f"{inside}: got {shown(spec)}. Allowed: None, PolicySpec, a dict of options, or "
            "(policy_class, observation_space, action_space, config)"
        )
    options = _options(spec.config, preset, inside)
    policy = _policy_name(spec.policy_class, preset, inside)
    return options if policy is None else {"policy": policy, **options}


def _options(config: Any, preset: type[PolicyOptimizerTrainer], where: str) -> dict[str, Any]:
    """Translates the options of one policy, from a dict, a builder, or a config of RLlib."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        given = getattr(config, "given", None)
        config = given if isinstance(given, dict) else changes(config)
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= checked(key, value, preset, where)
    return found


def policy_class(name: str) -> str:
    """Returns polopt's name of the policy for the name of a class of RLlib, such as
    `PPOTorchPolicy`."""
    if "TF" in name:
        warn("%s: the policy learns with PyTorch, because polopt has no TensorFlow", name)
    return next(_BUILT_IN[stem] for stem in _BUILT_IN if name.startswith(stem))


def _policy_name(policy: Any, preset: type[PolicyOptimizerTrainer], where: str) -> Any:
    """Returns the class or name of a policy. Returns None for the policy of the preset."""
    own = preset.preset.get("policy")
    if isinstance(policy, str) or (isinstance(policy, type) and issubclass(policy, Policy)):
        return None if policy == own else policy
    if policy is None:
        return None
    name = getattr(policy, "__name__", "")
    if str(getattr(policy, "__module__", "")).startswith("ray."):
        if name in _RANDOM_CLASSES:
            return _RANDOM
        if found := re.match("|".join(_BUILT_IN), name):
            return None if _BUILT_IN[found[0]] == own else _BUILT_IN[found[0]]
    raise ConfigError(
        f"{where}: got the policy class {shown(policy)}. Allowed: None, or the name or class of a "
        "policy of polopt. For a policy of your own, derive its class from a policy of polopt"
    )


def _random(
    name: str,
    options: Mapping[str, Any],
    preset: type[PolicyOptimizerTrainer],
    learns: bool,
    where: str,
) -> dict[str, Any]:
    """Returns the options of a policy that acts at random. The output layer of an untrained policy
    has small weights, so its actions are almost uniform. DQN explores always."""
    if learns:
        raise ConfigError(
            f"{where}: policy {name!r} acts at random and cannot learn. List the other policies in "
            "policies_to_train"
        )
    logger.info("policy %r acts at random: its network is not trained", name)
    kept = {key: value for key, value in options.items() if key != "policy"}
    return {**kept, "epsilon": 1.0} if "epsilon" in defaults(preset) else kept


def _overrides(
    value: Any, preset: type[PolicyOptimizerTrainer], where: str
) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {_OVERRIDES}={shown(value)}. Allowed: a dict")
    return {
        name: _options(config, preset, f"{where}: policy {name!r}")
        for name, config in value.items()
    }


def _modules(spec: Any, where: str) -> dict[str, Any]:
    """Translates the networks of RLlib's `RLModuleSpec` or `MultiRLModuleSpec`."""
    if spec is None:
        return {_MODULES: {}}
    if isinstance(spec, Mapping):  # this function has returned it
        return {_MODULES: dict(spec)}
    specs = getattr(spec, "rl_module_specs", None)
    if specs is None:
        return _module(spec, where)
    cls = getattr(spec, "multi_rl_module_class", None)
    if cls is not None and not _is_default(cls, "MultiRLModule"):
        raise ConfigError(
            f"{where}: rl_module_spec has the class {shown(cls)}. polopt has no networks that "
            "policies share. Allowed: None, so that each policy has its own network"
        )
    if getattr(spec, "load_state_path", None):
        _refuse_state(spec.load_state_path, where)
    if not isinstance(specs, Mapping):
        return _module(specs, where)
    return {
        _MODULES: {name: _module(one, f"{where}: policy {name!r}") for name, one in specs.items()}
    }


def _module(spec: Any, where: str) -> dict[str, Any]:
    cls = getattr(spec, "module_class", None)
    if getattr(spec, "load_state_path", None):
        _refuse_state(spec.load_state_path, where)
    found: dict[str, Any] = {}
    if getattr(cls, "__name__", "") in _RANDOM_CLASSES:
        found["policy"] = _RANDOM
    elif cls is not None and not _is_default(cls, "Default"):
        raise ConfigError(
            f"{where}: rl_module_spec has the class {shown(cls)}. polopt has no RLModules. To "
            'change the network, use model={"custom": MyModule}, any torch.nn.Module. To change '
            "the loss or how the policy acts, write a policy of your own"
        )
    if getattr(spec, "model_config", None) is not None:
        found["model"] = network_options(spec.model_config)
    return found


def _is_default(cls: Any, start: str) -> bool:
    """Whether a class is a default class of RLlib."""
    name, module = getattr(cls, "__name__", ""), str(getattr(cls, "__module__", ""))
    return module.startswith("ray.rllib.") and ".examples." not in module and name.startswith(start)


def _refuse_state(path: Any, where: str) -> None:
    raise ConfigError(
        f"{where}: load_state_path={shown(path)}. Use polopt.rllib.load_rl_module(path) after "
        "build_algo(), and copy the weights: "
        "algo.get_policy(name).set_weights(loaded.get_weights())"
    )
