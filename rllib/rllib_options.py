"""`Options`: the options of an algorithm of RLlib as a dict, and `flat_config`: the same options as
the config of a preset."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from polopt.common.config import ConfigError, differ, shown
from polopt.rllib.accepted_options import said_once
from polopt.rllib.exploration_config import as_exploration
from polopt.rllib.multi_agent import AGENT_OPTIONS, of_agents, with_agents
from polopt.rllib.other_libraries import FIXED, MODEL_FIXED
from polopt.rllib.replay_buffer_config import as_replay_buffer
from polopt.rllib.translation import (
    by_class,
    checked,
    defaults,
    defaults_of_preset,
    key_of,
    network_options,
    resolved,
)
from polopt.rllib.user_callbacks import as_polopt_callbacks
from polopt.trainers.trainer import PolicyOptimizerTrainer

#: Options that only decide where results are written. `Algorithm` reads them. It also reads
#: `explore`, which decides how `compute_single_action` chooses actions.
LOGGING = ("logger_config", "logger_creator")


class Options(dict[str, Any]):
    """All options of an algorithm. An option has one key, and is also found under its other names
    in RLlib and polopt.

        config = PPOConfig().to_dict()
        config["num_workers"] = 4
        config["num_env_runners"]     # 4
        config.num_rollout_workers    # 4

    Args:
        values: the options.
        algorithm: class of the algorithm.

    Attributes:
        algorithm: the same class.
    """

    def __init__(self, values: Mapping[str, Any], algorithm: type[PolicyOptimizerTrainer]) -> None:
        super().__init__(values)
        self.algorithm: Any = algorithm

    def _key(self, name: Any) -> Any:
        if super().__contains__(name) or not isinstance(name, str):
            return name
        key = key_of(name, self.algorithm)
        return key if super().__contains__(key) else name

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._key(name))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(self._key(name), value)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(self._key(name))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self._key(name))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self:
            raise AttributeError(f"the config has no option {name!r}")
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of an option, or `default` without such an option."""
        return super().get(self._key(name), default)

    def pop(self, name: str, *default: Any) -> Any:
        """Removes an option, and returns its value. The algorithm then uses its default."""
        return super().pop(self._key(name), *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Sets an option that the dict lacks, and returns the value of the option."""
        return super().setdefault(self._key(name), default)

    def update(self, *args: Any, **others: Any) -> None:
        """Sets options under any of their names."""
        for name, value in dict(*args, **others).items():
            self[name] = value

    def __ior__(self, changes: Any) -> Any:
        self.update(changes)
        return self

    def __or__(self, changes: Any) -> Any:
        other = self.copy()
        other.update(changes)
        return other

    def copy(self) -> Any:
        """Returns a shallow copy."""
        return Options(dict(self), self.algorithm)

    def to_dict(self) -> Any:
        """Returns a deep copy."""
        return copy.deepcopy(self)

    def without_defaults_that(self, lacks: type[PolicyOptimizerTrainer]) -> dict[str, Any]:
        """Returns the options without the defaults of options that another algorithm lacks. So
        `A2CTrainer(a3c.DEFAULT_CONFIG)` works, as in RLlib.

        Args:
            lacks: class of the other algorithm.
        """
        plain, known = _defaults(self.algorithm), default_options(lacks)
        return {
            name: value
            for name, value in self.items()
            if name in known or name not in plain or differ(value, plain[name])
        }

    def __reduce__(self) -> Any:
        return Options, (dict(self), self.algorithm)


def default_options(algorithm: type[PolicyOptimizerTrainer]) -> Options:
    """Returns the defaults of an algorithm of RLlib: the options of polopt, and options of RLlib
    that have one value in polopt."""
    return Options(copy.deepcopy(_defaults(algorithm)), algorithm)


@by_class
def _defaults(algorithm: type[PolicyOptimizerTrainer]) -> dict[str, Any]:
    known = dict(defaults(algorithm))
    found = {name: values[0] for name, values in FIXED.items() if values}
    found |= {"observation_filter": "NoFilter", "use_kl_loss": None, "explore": True}
    if "target_network_update_timesteps" in known:  # RLlib's unit
        del known["target_network_update_freq"]
    if "epsilon" in known:
        found["exploration_config"] = as_exploration(known["epsilon"], known["per_worker_epsilon"])
    if "buffer_size" in known:
        found["replay_buffer_config"] = as_replay_buffer(known)
    known["model"] = {**model_defaults(), **known["model"]}
    return {**found, **known}


def model_defaults() -> dict[str, Any]:
    """Returns the options of RLlib's networks that have one value in polopt."""
    found = {name: values[0] for name, values in MODEL_FIXED.items() if values}
    return {**found, "custom_model": None, "custom_model_config": {}, "max_seq_len": 20}


def checked_options(
    options: Mapping[str, Any],
    before: Mapping[str, Any],
    algorithm: type[PolicyOptimizerTrainer],
    where: str,
) -> dict[str, Any]:
    """Checks options, and returns them under the keys that `translation.checked` returns.

    Args:
        options: the options, under any of their names.
        before: options that were given before. `env_config` and `model` are merged into them.
        algorithm: class of the algorithm.
        where: name of the method or function that the user called, for messages.

    Raises:
        ConfigError, TypeError: see `checked`. One error names all wrong options.
    """
    found: dict[str, Any] = {}
    errors: list[Exception] = []
    for name, value in options.items():
        if name in LOGGING or (name == "explore" and isinstance(value, bool)):
            if name == "explore":
                checked(name, value, algorithm, where)  # warns that training explores
            found[name] = value
            continue
        if key_of(name, algorithm) == "callbacks":
            value = as_polopt_callbacks(value)
        of_one = of_agents if name in AGENT_OPTIONS else checked
        try:
            found |= of_one(name, value, algorithm, where)
        except (ConfigError, TypeError) as error:
            errors.append(error)
    if errors:
        raise type(errors[0])("\n".join(map(str, errors)))
    if "env_config" in found:  # RLlib merges the new dict into the previous dict
        found["env_config"] = {**before.get("env_config", {}), **(found["env_config"] or {})}
    if isinstance(found.get("model"), Mapping) and isinstance(before.get("model"), Mapping):
        found["model"] = {**before["model"], **found["model"]}
    return found


def flat_config(
    options: Mapping[str, Any], algorithm: type[PolicyOptimizerTrainer], where: str
) -> dict[str, Any]:
    """Returns the config of a preset from the options of an algorithm of RLlib. Missing options
    have RLlib's defaults.

    Args:
        options: the options, under any of their names. If an option has two names here, and one of
            the values is the default, the other value is used.
        algorithm: class of the algorithm.
        where: name of the algorithm, for messages.

    Raises:
        ConfigError, TypeError: see `checked_options`.
    """
    plain = _defaults(algorithm)
    given: dict[str, Any] = {}
    for name, value in options.items():
        if (
            name in LOGGING
            or name == "explore"
            or (name in plain and not differ(value, plain[name]))
        ):
            continue
        if name == "model" and isinstance(value, Mapping):
            value = {key: v for key, v in value.items() if _changes(key, v, plain["model"])}
        given[name] = value
    with said_once():
        given = checked_options(given, {}, algorithm, where)
        return _resolved(given, algorithm, where)


def _changes(key: str, value: Any, plain: Mapping[str, Any]) -> bool:
    return key not in plain or differ(value, plain[key])


def _resolved(
    given: dict[str, Any], algorithm: type[PolicyOptimizerTrainer], where: str
) -> dict[str, Any]:
    defaults_of_rllib: Mapping[str, Any] = getattr(algorithm, "rllib_defaults", {})
    options = {**defaults_of_rllib, **given}
    if "train_batch_size" in given and "train_batch_size" not in defaults_of_preset(algorithm):
        # The batch of a worker of DD-PPO is one fragment of each of its environments.
        options["rollout_fragment_length"] = given.get("rollout_fragment_length", "auto")
    workers = options.get("num_workers")
    if "num_replay_shards" not in given and isinstance(workers, int) and workers > 0:
        shards = defaults_of_preset(algorithm).get("num_replay_shards", 0)
        if shards > workers:  # each shard of polopt needs a worker of its own
            options["num_replay_shards"] = workers
    model = network_options(given.get("model")) or {}
    if not isinstance(model, Mapping):
        raise ConfigError(f"{where}: model={shown(model)}. Allowed: a dict")
    own = ("custom", "custom_model")
    if not any(model.get(key) for key in own):
        model = {**defaults_of_rllib.get("model", {}), **model}
    if model or "model" in given:
        options["model"] = model
    return copy.deepcopy(with_agents(resolved(options, algorithm, where), algorithm, where))
