"""`Algorithm`: a trainer of polopt with the constructor, the methods, the defaults and the result
keys of RLlib's algorithms."""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from polopt.common.config import ConfigError, shown
from polopt.common.ray_names import storage_folder
from polopt.common.registry import load_path
from polopt.policies.policy_group import PolicyGroup
from polopt.rllib.multi_agent import as_mapping
from polopt.rllib.old_results import add_old_keys
from polopt.rllib.rllib_defaults import ALGORITHMS
from polopt.rllib.rllib_options import LOGGING, Options, default_options, flat_config
from polopt.rllib.translation import by_class
from polopt.rllib.views import (
    DEFAULT_POLICY_ID,
    UNNAMED,
    ModuleView,
    PolicyView,
    WorkersView,
    WorkerView,
    as_memory,
)
from polopt.rollouts.envs.env_sources import env_name
from polopt.trainers.experiment import Experiment
from polopt.trainers.find_checkpoint import checkpoint_path, find_checkpoint, read_or_fall_back
from polopt.trainers.presets import PRESETS
from polopt.trainers.trainer import PolicyOptimizerTrainer

#: A key of a config with the names and units of polopt instead of RLlib's. `from_checkpoint` makes
#: such configs, because checkpoints hold them.
_OF_POLOPT = "_options_of_polopt"
#: Attributes of RLlib's algorithms that a trainer does not have, and what to use instead.
_INSTEAD = {
    "add_module": "add_policy(name, copy_of=...), which copies the weights, too",
    "remove_module": "remove_policy(name)",
    "eval_env_runner_group": "`evaluation.workers`",
    "evaluation_workers": "`evaluation.workers`",
    "learner_group": "get_policy(), because polopt has no separate learner processes",
    "local_replay_buffer": "`optimizer`, which has the replay buffer",
    "export_policy_model": "`polopt export CHECKPOINT`, which writes an ONNX model",
    "from_state": "from_checkpoint(path)",
    "import_model": "polopt.rllib.load_rl_module(path), which reads the weights of an RLModule",
    "metrics": "the return value of train()",
    "training_step": "`optimizer.step()`",
}
#: The configs of checkpoints that this process has written. A checkpoint holds no code, such as the
#: class of an environment.
_configs_of_checkpoints: dict[str, Options] = {}


class SavedPath(str):
    """The directory of a checkpoint. It also has what RLlib 2.60 returns.

    Attributes:
        checkpoint: the checkpoint, a `ray.tune.Checkpoint`.
        metrics: the last result.
    """

    checkpoint: Any
    metrics: Any


class _DefaultConfig:
    """The attribute with all options of an algorithm and their defaults. All scripts of a process
    share the dict, as in RLlib."""

    def __get__(self, trainer: Any, owner: type[Algorithm]) -> Options:
        return _shared_options(owner)


@by_class
def _shared_options(algorithm: type[Algorithm]) -> Options:
    return default_options(algorithm)


class Algorithm(PolicyOptimizerTrainer):
    """A trainer with the constructor, the methods, the defaults and the result keys of RLlib's
    algorithms.

    Class attributes:
        rllib_defaults: options whose defaults differ from the defaults of the preset.
        DEFAULT_CONFIG: all options and their defaults.

    Args:
        config: a dict with the options, under their names in RLlib or polopt, or a builder.
        env: the environment. None means the environment in `config`.
        logger_creator: a function that gets the config and returns a logger of Tune. Results are
            written to the `logdir` of this logger.
        log_dir: directory of the results. None means `logdir` in the option `logger_config`, or
            else a new directory in `~/ray_results`, as in RLlib.
        others: see `PolicyOptimizerTrainer`.

    Raises:
        ConfigError: an option is wrong. This error is raised before any worker starts.
        TypeError: neither RLlib nor polopt has an option.
    """

    rllib_defaults: ClassVar[Mapping[str, Any]] = {}
    DEFAULT_CONFIG = _default_config = _DefaultConfig()

    def __init__(
        self,
        config: Any = None,
        env: Any = None,
        logger_creator: Any = None,
        *,
        log_dir: Any = None,
        **others: Any,
    ) -> None:
        tune_only = {name: others.pop(name) for name in ("storage",) if name in others}
        given = _given(config, type(self))
        repeated = [name for name in others if name in given and config is not None]
        if repeated:
            raise ConfigError(f"option {repeated[0]!r} is in config and a keyword argument")
        given = {**given, **others} if _OF_POLOPT in given else given | others
        if env is not None:
            given["env"] = env
        if _OF_POLOPT not in given:
            given = default_options(type(self)) | given
        if not tune_only.get("storage") and log_dir is None:
            log_dir = _log_dir(given, type(self), logger_creator)
        super().__init__(dict(given), log_dir=log_dir, **tune_only)

    def setup(self, config: dict[str, Any], run: Any = None) -> None:
        """Creates the workers and the optimizer. `config` becomes an `Options`, which callbacks
        already see."""
        own = dict(self.config)
        if own.pop(_OF_POLOPT, False):
            for plugin in ("policy", "optimizer"):
                own |= own.pop(plugin) if isinstance(own.get(plugin), Mapping) else {}
            self.config = default_options(type(self)) | own
        else:
            self.config = Options(own, type(self))
        super().setup(config, run)

    @classmethod
    def parse_config(cls, config: dict[str, Any]) -> Experiment:
        """Translates a config with options of RLlib, and parses it.

        Raises:
            ConfigError: an option is wrong.
            TypeError: neither RLlib nor polopt has an option.
        """
        if _OF_POLOPT in config:
            own = {key: value for key, value in config.items() if key != _OF_POLOPT}
            return Experiment.parse(own, cls.preset)
        return Experiment.parse(flat_config(config, cls, f"{cls.__name__}()"), cls.preset)

    @classmethod
    def get_default_config(cls) -> Any:
        """Returns a builder with RLlib's defaults. For a class such as `PPOTrainer`, returns a
        dict, as in RLlib 1.13."""
        name = next(one.__name__ for one in cls.__mro__ if one.__name__ in ALGORITHMS)
        if name.endswith("Trainer"):
            return default_options(cls)
        return load_path(f"polopt.rllib.builders:{name}Config")()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Rebuilds this trainer with `new_config`. See `PolicyOptimizerTrainer`."""
        return super().reset_config(dict(new_config))

    # ---- results --------------------------------------------------------------------------------

    def evaluate(self, *others: Any, **more: Any) -> dict[str, Any]:  # type: ignore[override]
        """Plays `evaluation_duration` episodes with the current policy in this process. See
        `PolicyOptimizerTrainer.evaluate`.

        Args:
            others: arguments of RLlib that have no effect here.
            more: arguments of RLlib that have no effect here.

        Returns:
            a dict with the key `env_runners`, as in RLlib 2.60. It also has the keys of older
            releases, for example `evaluation/episode_reward_mean`.
        """
        played = super().evaluate().episodes
        returns = [episode.episode_return for episode in played]
        lengths = [episode.episode_len for episode in played]
        block = {
            "episode_return_mean": sum(returns) / len(played),
            "episode_return_min": min(returns),
            "episode_return_max": max(returns),
            "episode_len_mean": sum(lengths) / len(played),
            "num_episodes": len(played),
        }
        result: dict[str, Any] = {"env_runners": block}
        add_old_keys(result, returns, lengths)
        return result | {"evaluation": dict(result)}

    # ---- policies and actions -------------------------------------------------------------------

    def get_policy(self, policy_id: str | None = None) -> Any:
        """Returns a policy, with the methods of RLlib's `Policy`.

        Args:
            policy_id: the name of the policy. The policy of a run with one policy is
                "default_policy" or "default_agent". `None` means this policy, or the `PolicyGroup`
                of all policies.

        Raises:
            ValueError: the run has no policy of this name.
        """
        policy = self._run.policy
        if isinstance(policy, PolicyGroup):
            if policy_id is None:
                return policy
            policy = super().get_policy(policy_id)
        elif policy_id is not None and policy_id not in UNNAMED:
            return super().get_policy(policy_id)  # raises
        return PolicyView(policy, self.save, bool(self.config.get("explore", True)))

    def get_module(self, module_id: str = DEFAULT_POLICY_ID) -> Any:
        """Returns a policy with the methods of RLlib's `RLModule`. `polopt.rllib.to_rl_module`
        makes an `RLModule` of RLlib itself.

        Raises:
            ValueError: the run has no policy of this name.
        """
        return ModuleView(self.get_policy(module_id))

    def get_weights(self, policies: Any = None) -> dict[str, Any]:
        """Returns the weights of policies by name.

        Args:
            policies: the names of the policies. None means all.
        """
        return {name: self.get_policy(name).get_weights() for name in self._names(policies)}

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        """Sets the weights of policies by name."""
        for name, value in weights.items():
            self.get_policy(name).set_weights(value)

    def _names(self, policies: Any = None) -> list[str]:
        policy = self._run.policy
        names = [*policy.policies] if isinstance(policy, PolicyGroup) else [DEFAULT_POLICY_ID]
        return names if policies is None else [name for name in names if name in policies]

    def add_policy(  # type: ignore[override]  # the arguments of RLlib
        self,
        policy_id: str,
        copy_of: Any = None,
        trainable: bool = False,
        policy_mapping_fn: Any = None,
        **others: Any,
    ) -> Any:
        """Adds a policy, and returns it. See `PolicyOptimizerTrainer.add_policy`.

        Args:
            policy_id: the name of the new policy.
            copy_of: the name of the policy whose weights, state and options the new policy gets.
            trainable: whether the new policy learns.
            policy_mapping_fn: see `AlgorithmConfig.multi_agent`.
            others: arguments of RLlib, which are refused.

        Raises:
            ConfigError: `copy_of` is missing, or `others` is not empty. See also
                `PolicyOptimizerTrainer.add_policy`.
        """
        if others or not isinstance(copy_of, str):
            names = ", ".join(others) or "no copy_of"
            raise ConfigError(
                f"add_policy: got {names}. Allowed: copy_of, the name of a policy whose weights "
                "and options the new policy gets, trainable, and policy_mapping_fn"
            )
        mapping = as_mapping(policy_mapping_fn, "add_policy")
        super().add_policy(policy_id, copy_of, trainable, mapping)
        return self.get_policy(policy_id)

    def remove_policy(self, policy_id: str, policy_mapping_fn: Any = None) -> None:
        """Removes a policy. See `PolicyOptimizerTrainer.remove_policy`.

        Args:
            policy_id: the name of the policy.
            policy_mapping_fn: see `AlgorithmConfig.multi_agent`.
        """
        super().remove_policy(policy_id, as_mapping(policy_mapping_fn, "remove_policy"))

    def compute_single_action(  # type: ignore[override]  # the arguments of RLlib
        self,
        observation: Any = None,
        state: Any = None,
        *others: Any,
        explore: bool | None = None,
        full_fetch: bool = False,
        **more: Any,
    ) -> Any:
        """Returns the action for one observation. `env.step` accepts the action.

        Args:
            observation: an element of the environment's observation space.
            state: state of a policy with memory: an array or RLlib's list of one array, such as
                `get_policy().get_initial_state()`.
            others: arguments of RLlib that have no effect here.
            explore: True samples the action. False takes the mode of the policy's distribution.
                None means the option `explore`, which is True by default.
            full_fetch: whether to return a tuple of the action, the next state and a dict.
            more: `policy_id`, the name of the policy, and arguments of RLlib that have no effect
                here. With several policies, `policy_id` is required.

        Returns:
            the action. With `full_fetch` or a state, a tuple of the action, the next state and an
            empty dict.

        Raises:
            ValueError: the run has no policy of this name, or the policy has memory, and `state` is
                None. See also `get_policy().predict`.
        """
        policy = self.get_policy(more.get("policy_id", DEFAULT_POLICY_ID))
        memory = as_memory(state)
        if memory is None and policy.state_size:
            raise ValueError(f"{type(policy).__name__} has memory. Give its `state`")
        action, following, _ = policy.compute_single_action(observation, memory, explore=explore)
        if state is not None and not isinstance(state, list | tuple):
            following = following[0]
        return (action, following, {}) if full_fetch or memory is not None else action

    #: The name of `compute_single_action` up to RLlib 1.2.
    compute_action = compute_single_action

    def compute_actions(
        self, observations: Any, state: Any = None, *others: Any, **more: Any
    ) -> Any:
        """Returns the actions for several observations.

        Args:
            observations: a dict of observations, for example by agent, or a list or array.
            state: the states of a policy with memory, by the same keys.
            others: arguments of RLlib that have no effect here.
            more: see `compute_single_action`.

        Returns:
            the actions by the same keys, or a list. With `full_fetch` or a state, a tuple of the
            actions, the next states and an empty dict.
        """
        keys = list(observations) if isinstance(observations, Mapping) else None
        values = [observations[key] for key in keys] if keys is not None else list(observations)
        states = [None] * len(values)
        if state is not None:
            states = [state[key] for key in keys or range(len(values))]
        wants_all = more.pop("full_fetch", False) or state is not None
        found = [
            self.compute_single_action(one, memory, *others, full_fetch=True, **more)
            for one, memory in zip(values, states, strict=True)
        ]
        actions, following = [one[0] for one in found], [one[1] for one in found]
        if keys is not None:
            by_key = [dict(zip(keys, of_all, strict=True)) for of_all in (actions, following)]
            return (*by_key, {}) if wants_all else by_key[0]
        return (actions, following, {}) if wants_all else actions

    # ---- workers --------------------------------------------------------------------------------

    @property
    def workers(self) -> Any:
        """The workers, with the methods of RLlib's `WorkerSet`."""
        workers = self._run.workers
        return None if workers is None else WorkersView(workers)

    @property
    def env_runner_group(self) -> Any:
        """The name of `workers` in RLlib 2.40."""
        return self.workers

    @property
    def env_runner(self) -> Any:
        """The worker in this process."""
        return WorkerView(self._run.workers.local)

    # ---- checkpoints ----------------------------------------------------------------------------

    def save(self, checkpoint_dir: str | None = None, *others: Any, **more: Any) -> Any:
        """Saves a checkpoint.

        Args:
            checkpoint_dir: directory of the checkpoint. `None` means a new directory in `logdir`.
            others: arguments of RLlib that have no effect here.
            more: arguments of RLlib that have no effect here.

        Returns:
            without Tune, a `SavedPath`.
        """
        saved = super().save(None if checkpoint_dir is None else str(checkpoint_dir))
        if self._storage_of_trial is not None:
            return saved
        path = SavedPath(saved.checkpoint.path)
        path.checkpoint, path.metrics = saved.checkpoint, saved.metrics
        _configs_of_checkpoints[os.path.realpath(path)] = Options(self.config, type(self))
        return path

    def export_policy_checkpoint(
        self, export_dir: str, policy_id: str = DEFAULT_POLICY_ID, **others: Any
    ) -> None:
        """Saves a checkpoint of the run, from which `Policy.from_checkpoint` reads the policy."""
        self.get_policy(policy_id).export_checkpoint(export_dir)

    def save_to_path(self, path: str | Path | None = None, **others: Any) -> str:
        """Saves a checkpoint, and returns its directory.

        Args:
            path: directory of the checkpoint. `None` means a new directory in `logdir`.
            others: arguments of RLlib that have no effect here.
        """
        return str(self.save(_plain_path(path)))

    def restore(self, checkpoint_path: Any, *others: Any) -> None:
        """Restores a checkpoint of polopt. See `PolicyOptimizerTrainer.restore`."""
        super().restore(_plain_path(checkpoint_path))

    def restore_from_path(self, path: str | Path, **others: Any) -> None:
        """Restores a checkpoint of polopt.

        Args:
            path: directory of the checkpoint.
            others: arguments of RLlib that have no effect here.
        """
        self.restore(path)

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Any = None, *others: Any, log_dir: Any = None, **changes: Any
    ) -> Any:
        """Makes the algorithm of a checkpoint with its config, and restores the checkpoint.

        A checkpoint holds no code. If this process has written the checkpoint, options such as the
        class of an environment are known. Otherwise, give them in `changes`, or register the
        environment with `register_env`.

        Args:
            checkpoint: a directory, or the return value of `save`.
            others: arguments of RLlib that have no effect here.
            log_dir: see the constructor.
            changes: options that replace the saved options.

        Raises:
            CheckpointError, ConfigError: see `PolicyOptimizerTrainer.from_checkpoint`.
        """
        checkpoint = _plain_path(changes.pop("path", checkpoint))
        found, state = read_or_fall_back(find_checkpoint(checkpoint_path(checkpoint)))
        known = _configs_of_checkpoints.get(os.path.realpath(found))
        made = cls
        if not cls.preset:
            made = _algorithm_of_state(state) if known is None else known.algorithm
        if known is not None and known.algorithm is made:
            algorithm = made(known | changes, log_dir=log_dir)
            try:
                algorithm.restore(str(found))
            except BaseException:
                algorithm.stop()
                raise
            return algorithm
        return super(Algorithm, made).from_checkpoint(
            str(found), log_dir=log_dir, **changes, **{_OF_POLOPT: True}
        )

    def __getattr__(self, name: str) -> Any:
        instead = _INSTEAD.get(name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
            + (f". Use this instead: {instead}" if instead else "")
        )


def _given(config: Any, algorithm: type[Algorithm]) -> Any:
    if config is None:
        return Options({}, algorithm)
    if not isinstance(config, Mapping) and callable(getattr(config, "to_dict", None)):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{algorithm.__name__}: config={shown(config)}. Allowed: a dict or a builder. Give the "
            "environment as env=..."
        )
    if _OF_POLOPT in config:
        return dict(config)
    if isinstance(config, Options) and config.algorithm is not algorithm:
        config = config.without_defaults_that(algorithm)
    return Options(dict(config), algorithm)


def _log_dir(given: Mapping[str, Any], algorithm: type[Algorithm], creator: Any) -> Any:
    """Returns the directory for the results of an algorithm without Tune."""
    settings = given.get(LOGGING[0]) or {}
    creator = creator or given.get(LOGGING[1])
    if creator is not None:
        return creator(dict(given)).logdir
    if isinstance(settings, Mapping) and settings.get("logdir"):
        return settings["logdir"]
    env = "".join(c if c.isalnum() or c in "-." else "_" for c in env_name(given.get("env") or ""))
    name = f"{algorithm.__name__}_{env}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    return f"{storage_folder()}/{name}_{secrets.token_hex(4)}"


def _plain_path(path: Any) -> Any:
    return str(path).removeprefix("file://") if isinstance(path, str | Path) else path


def _algorithm_of_state(state: Mapping[str, Any]) -> type[Algorithm]:
    name = state["trainer"]
    names = [key for key, known in ALGORITHMS.items() if name in (key, known.preset)]
    if not names:
        raise ConfigError(
            f"Algorithm.from_checkpoint: the checkpoint is of {name!r}. Use "
            f"polopt.{name}.from_checkpoint(path)"
        )
    return algorithm_of(name if name in names else names[0])


@functools.cache
def algorithm_of(name: str) -> type[Algorithm]:
    """Returns an algorithm of RLlib by the name of its class, for example `PPO` or `PPOTrainer`."""
    preset_name, changes = ALGORITHMS[name]
    preset = PRESETS[preset_name]
    attributes: dict[str, Any] = {
        "__doc__": preset.__doc__,
        "__module__": __name__,
        "rllib_defaults": changes,
    }
    made: type[Algorithm] = type(name, (Algorithm, preset), attributes)
    return made


def __getattr__(name: str) -> Any:
    """Returns an algorithm as an attribute of this module. Without this function, other processes
    could not unpickle the class."""
    if name in ALGORITHMS:
        return algorithm_of(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
