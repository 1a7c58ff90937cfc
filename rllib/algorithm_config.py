"""`AlgorithmConfig`: RLlib's builder for configs, for the presets of polopt."""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any, ClassVar

from polopt.common.config import ConfigError, nearest
from polopt.common.ray_names import accept_as_config
from polopt.rllib.exploration_config import as_exploration
from polopt.rllib.other_libraries import FIXED, instead_of_algorithm
from polopt.rllib.replay_buffer_config import as_replay_buffer
from polopt.rllib.rllib_options import Options, checked_options, default_options
from polopt.rllib.translation import checked, defaults, key_of
from polopt.trainers.presets import PRESETS, register_names
from polopt.trainers.trainer import PolicyOptimizerTrainer

_NOT_GIVEN: Any = object()


class AlgorithmConfig:
    """Builds the config of a preset with the methods of RLlib's `AlgorithmConfig`. A preset is a
    trainer with a policy and an optimizer, such as `polopt.DQN`.

        config = (
            PPOConfig()
            .environment("CartPole-v1")
            .env_runners(num_env_runners=2)
            .training(lr=3e-4, train_batch_size_per_learner=4096)
        )
        algo = config.build_algo()
        algo.train()

    `tune.Tuner` and `tune.run` accept the object. `to_dict` returns all options.

    Options may have their names in polopt, or in any release of RLlib from 0.8 to 2.60. Options
    that are not given have RLlib's defaults, which `rllib_defaults.py` lists. Every method
    that sets options, except `callbacks` and `checkpointing`, accepts every option, because options
    have moved from one method to another between releases of RLlib.

    If polopt does not have an option of RLlib, the method accepts the values for which polopt
    behaves like RLlib. For other values, the method raises a ConfigError that says what to use
    instead. For most options that do not affect learning, the method only logs a warning. If
    neither RLlib nor polopt has the option, the method raises a TypeError, as in RLlib.

    Class attributes:
        preset_name: name of the preset in polopt.
        algorithm_name: name of the algorithm in RLlib. `tune.Tuner` finds `algo_class` under this
            name.

    Args:
        algo_class: ignored. RLlib's constructor has this argument.

    Raises:
        ConfigError: polopt has no preset with the name `preset_name`.
    """

    preset_name: ClassVar[str] = ""
    algorithm_name: ClassVar[str] = ""

    _given: dict[str, Any]
    _is_frozen: bool

    def __init__(self, algo_class: Any = None) -> None:
        if self.preset_name not in PRESETS:
            reason = instead_of_algorithm(self.preset_name)
            reason = reason or f"polopt has no preset {self.preset_name!r}"
            raise ConfigError(f"{type(self).__name__}: {reason}")
        vars(self).update(_given={}, _is_frozen=False)
        register_names({self.algorithm_name: self.algo_class})
        accept_as_config(AlgorithmConfig)

    @property
    def algo_class(self) -> type[PolicyOptimizerTrainer]:
        """The class of the trainer that `build_algo` makes. This is the preset with the methods of
        RLlib's `Algorithm` and with the result keys of RLlib 2.7."""
        from polopt.rllib.algorithm import algorithm_of

        return algorithm_of(self.algorithm_name)

    @property
    def given(self) -> dict[str, Any]:
        """A copy of the options that were given, as they are before `to_dict` translates them. The
        copy also has dict options that a user has read from this object, because the user may have
        changed the dicts."""
        return dict(self._given)

    @property
    def _preset(self) -> type[PolicyOptimizerTrainer]:
        return self.algo_class

    def __repr__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self._given.items())
        return f"{type(self).__name__}({given})"

    # ---- setting options ------------------------------------------------------------------------

    def _set(self, method: str, options: Mapping[str, Any]) -> Any:
        where = f"{type(self).__name__}.{method}()"
        given = dict(options)
        for name, value in given.items():
            self._check_not_frozen(name)
            if name == "exploration_config" and isinstance(value, Mapping) and value:
                before = self[name]  # RLlib merges configs of the same type of exploration
                if value.get("type", before.get("type")) == before.get("type"):
                    given[name] = {**before, **value}
        self._given.update(checked_options(given, self._given, self._preset, where))
        return self

    def environment(self, env: Any = _NOT_GIVEN, **options: Any) -> Any:
        """Sets the environment and its options.

        Args:
            env: a Gymnasium id, a name that was registered with `register_env`, or a class or
                function that is called with `env_config`.
            options: for example `env_config`, `normalize_actions` and `clip_actions`.
        """
        if env is not _NOT_GIVEN:
            options["env"] = env
        return self._set("environment", options)

    def env_runners(self, **options: Any) -> Any:
        """Sets options of the workers, for example `num_env_runners`, `num_envs_per_env_runner`,
        `rollout_fragment_length`, `num_cpus_per_env_runner`, `sample_timeout_s` and
        `observation_filter`."""
        return self._set("env_runners", options)

    def rollouts(self, **options: Any) -> Any:
        """Sets options of the workers, for example `num_rollout_workers` and `num_envs_per_worker`.
        This is the name of `env_runners` in RLlib 2.7."""
        return self._set("rollouts", options)

    def exploration(self, **options: Any) -> Any:
        """Accepts `explore=True`. Sets `exploration_config` for presets with epsilon-greedy
        exploration. Raises ConfigError for values that polopt does not support."""
        return self._set("exploration", options)

    def training(self, **options: Any) -> Any:
        """Sets options of learning, for example `lr`, `gamma`, `lambda_`,
        `train_batch_size_per_learner`, `minibatch_size`, `num_epochs`, `grad_clip` and `model`. The
        options of the algorithm and of the policy optimizer are set here, too."""
        return self._set("training", options)

    def learners(self, **options: Any) -> Any:
        """Sets `num_gpus_per_learner`. The number of learners is ignored, because polopt has no
        separate learner processes."""
        return self._set("learners", options)

    def resources(self, **options: Any) -> Any:
        """Sets `num_gpus`, `num_cpus_for_main_process` and `num_cpus_per_worker`."""
        return self._set("resources", options)

    def framework(self, framework: Any = "torch", **options: Any) -> Any:
        """Accepts PyTorch, and raises a ConfigError for other frameworks."""
        return self._set("framework", {"framework": framework, **options})

    def api_stack(self, **options: Any) -> Any:
        """Accepts RLlib's options, which have no effect here."""
        return self._set("api_stack", options)

    def rl_module(self, **options: Any) -> Any:
        """Sets `model_config`, which is a dict or a `DefaultModelConfig` with the options of the
        network. With several agents, `rl_module_spec` may be a `MultiRLModuleSpec` with the
        `model_config` of each policy, and `algorithm_config_overrides_per_module` has options of
        each policy."""
        return self._set("rl_module", options)

    def evaluation(self, **options: Any) -> Any:
        """Sets `evaluation_interval`, `evaluation_duration` in episodes,
        `evaluation_num_env_runners` and `evaluation_config`. In evaluation, `explore` is False
        unless `evaluation_config` sets it."""
        return self._set("evaluation", options)

    def callbacks(self, callbacks_class: Any = _NOT_GIVEN, **functions: Any) -> Any:
        """Sets the callbacks.

        Args:
            callbacks_class: a subclass of `polopt.Callbacks` or of `polopt.rllib.RLlibCallback`.
            functions: functions that are called like the methods of `RLlibCallback` with the same
                names.
        """
        if functions:
            given = () if callbacks_class in (_NOT_GIVEN, None) else (callbacks_class,)
            methods = {name: _method(value) for name, value in functions.items() if value}
            callbacks_class = type("FunctionCallbacks", given, methods)
        if callbacks_class is _NOT_GIVEN:
            return self
        return self._set("callbacks", {"callbacks": callbacks_class})

    def debugging(self, **options: Any) -> Any:
        """Sets `seed`."""
        return self._set("debugging", options)

    def reporting(self, **options: Any) -> Any:
        """Sets `min_sample_timesteps_per_iteration` and `min_time_s_per_iteration`."""
        return self._set("reporting", options)

    def fault_tolerance(self, recreate_failed_workers: Any = _NOT_GIVEN, **options: Any) -> Any:
        """Sets `max_consecutive_failures`. RLlib's options that turn off the replacement of failed
        workers are ignored."""
        if recreate_failed_workers is not _NOT_GIVEN:
            options["recreate_failed_workers"] = recreate_failed_workers
        return self._set("fault_tolerance", options)

    def checkpointing(
        self,
        export_native_model_files: Any = False,
        checkpoint_trainable_policies_only: Any = False,
    ) -> Any:
        """Has no effect, because checkpoints always consist of tensors and JSON. Logs a warning for
        values other than RLlib's defaults."""
        options = {
            "export_native_model_files": export_native_model_files,
            "checkpoint_trainable_policies_only": checkpoint_trainable_policies_only,
        }
        return self._set("checkpointing", options)

    def multi_agent(self, **options: Any) -> Any:
        """Sets options of several agents: `policies`, `policy_mapping_fn`, `policies_to_train` and
        `count_steps_by`.

        `policies` are names, or a dict from names to None, `PolicySpec`, dicts of options, or
        tuples of four. `policy_mapping_fn` may have the arguments `(agent_id)`,
        `(agent_id, episode, **kwargs)` or `(agent_id, episode, worker, **kwargs)`. `episode` has
        `id_` and `episode_id`, which are numbers.

        Raises:
            ConfigError: polopt does not have such a policy, or `policies_to_train` is a function.
        """
        return self._set("multi_agent", options)

    def offline_data(self, **options: Any) -> Any:
        """Raises an error for options of offline data, which polopt does not support.

        Raises:
            ConfigError: an option would read or write samples.
        """
        return self._set("offline_data", options)

    def python_environment(self, **options: Any) -> Any:
        """Accepts RLlib's defaults, and raises a ConfigError for other values."""
        return self._set("python_environment", options)

    def experimental(self, **options: Any) -> Any:
        """Accepts RLlib's defaults. For other values, raises a ConfigError or logs a warning. See
        `AlgorithmConfig`."""
        return self._set("experimental", options)

    def update_from_dict(self, config_dict: Mapping[str, Any]) -> Any:
        """Sets the options in a dict, under their names in RLlib or polopt."""
        return self._set("update_from_dict", config_dict)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> Any:
        """Returns a new builder with the options in a dict."""
        return cls().update_from_dict(config_dict)

    @staticmethod
    def overrides(**options: Any) -> dict[str, Any]:
        """Returns options for `evaluation(evaluation_config=...)`."""
        return options

    # ---- building -------------------------------------------------------------------------------

    def to_dict(self) -> Options:
        """Returns all options. The algorithm accepts the dict. An option that was not given has
        RLlib's default."""
        return default_options(self._preset) | copy.deepcopy(self._given)

    def validate(self) -> None:
        """Checks all options. `build_algo` and each Tune trial make the same checks.

        Raises:
            ConfigError: a value is not allowed, or some options cannot be combined.
        """
        self._preset.parse_config(self.to_dict())

    def build_algo(self, env: Any = None, use_copy: bool = True, **ignored: Any) -> Any:
        """Makes the trainer, and starts its workers.

        Args:
            env: the environment. `None` means the environment that the method `environment` has
                set.
            use_copy: has no effect. The trainer always gets a copy of the config.
            ignored: `logger_creator` of RLlib 2.7. See `Algorithm`.

        Returns:
            an object of `algo_class`.

        Raises:
            ConfigError: an option is wrong. This error is raised before any worker starts.
            TypeError: `ignored` has a name that neither RLlib nor polopt has.
            AttributeError: `env` is given, but this object is frozen.
        """
        if env is not None:
            self.environment(env)
        creator = ignored.pop("logger_creator", None)
        for name, value in ignored.items():
            checked(name, value, self._preset, f"{type(self).__name__}.build_algo()")
        return self.algo_class(self.to_dict(), logger_creator=creator)

    #: The name of `build_algo` up to RLlib 2.40.
    build = build_algo

    # ---- copies, and the object as a dict -------------------------------------------------------

    def copy(self, copy_frozen: bool | None = None) -> Any:
        """Returns a deep copy.

        Args:
            copy_frozen: whether the copy is frozen. `None` means that the copy is frozen if this
                object is frozen.
        """
        other = copy.deepcopy(self)
        frozen = self._is_frozen if copy_frozen is None else copy_frozen
        vars(other)["_is_frozen"] = frozen
        return other

    def freeze(self) -> None:
        """Freezes this object. Setting an option then raises an AttributeError."""
        vars(self)["_is_frozen"] = True

    def _check_not_frozen(self, name: str) -> None:
        if self._is_frozen:
            raise AttributeError(
                f"Cannot set attribute ({name}) of an already frozen AlgorithmConfig!"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        self._set("__setattr__", {name: value})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_given" not in vars(self):  # called by copy or pickle
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._set("__setitem__", {name: value})

    def __getitem__(self, name: str) -> Any:
        key = key_of(name, self._preset)
        known = defaults(self._preset)
        if key in self._given:
            return self._given[key]
        if key in known:
            value = copy.deepcopy(known[key])
            if isinstance(value, dict) and not self._is_frozen:
                self._given[key] = value  # so that `config.env_config["size"] = 3` has an effect
            return value
        if key == "replay_buffer_config" and "buffer_size" in known:
            return _Live(as_replay_buffer({**known, **self._given}), self, name)
        if key == "exploration_config" and "epsilon" in known:
            value = as_exploration(self["epsilon"], self["per_worker_epsilon"])
            return _Live(value, self, name)
        if FIXED.get(key):
            value = copy.deepcopy(FIXED[key][0])
            return _Live(value, self, name) if isinstance(value, dict) else value
        raise KeyError(f"{type(self).__name__} has no option {name!r}{nearest(name, known)}")

    def __contains__(self, name: str) -> bool:
        try:
            self[name]
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterable[str]:
        return iter(self.to_dict())

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of an option, or `default` if the option does not exist."""
        try:
            return self[name]
        except KeyError:
            return default

    def pop(self, name: str, default: Any = None) -> Any:
        """Does the same as `get`. As in RLlib, the option is not removed."""
        return self.get(name, default)

    def keys(self) -> KeysView[str]:
        """The keys of `to_dict`."""
        return self.to_dict().keys()

    def values(self) -> ValuesView[Any]:
        """The values of `to_dict`."""
        return self.to_dict().values()

    def items(self) -> ItemsView[str, Any]:
        """The items of `to_dict`."""
        return self.to_dict().items()


class _Live(dict[str, Any]):
    """A dict that a builder returns as the value of an option of RLlib such as
    `replay_buffer_config`. Setting a key of this dict also changes the builder, and so do the
    methods `update` and `setdefault`. A key cannot be removed, because polopt would still have the
    option of this key."""

    def __init__(self, values: Mapping[str, Any], config: AlgorithmConfig, name: str) -> None:
        super().__init__(values)
        self._config, self._name = config, name

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, *args: Any, **others: Any) -> None:
        """Updates the dict and the builder. Raises ConfigError for options that polopt does not
        have."""
        changes = dict(*args, **others)
        self._config[self._name] = changes
        super().update(changes)

    def __ior__(self, changes: Any) -> Any:  # type: ignore[misc]
        self.update(changes)
        return self

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Sets the key in the dict and the builder, unless the dict has the key."""
        if key not in self:
            self[key] = default
        return self[key]

    def __delitem__(self, key: str) -> None:
        """Raises KeyError if the dict lacks the key, and otherwise ConfigError."""
        raise ConfigError(
            f"{self._name}[{key!r}] = {self[key]!r} cannot be removed, because polopt always has "
            f"this option. Set another value: config.{self._name}[{key!r}] = VALUE"
        )

    def pop(self, key: str, *default: Any) -> Any:
        """Returns the default if the dict lacks the key, and otherwise raises ConfigError."""
        if key in self:
            del self[key]
        return super().pop(key, *default)

    def popitem(self) -> Any:
        """Raises ConfigError, or KeyError if the dict is empty."""
        key = next(reversed(self), None)
        return super().popitem() if key is None else self.pop(key)

    def clear(self) -> None:
        """Raises ConfigError, unless the dict is empty."""
        for key in self:
            del self[key]

    def __reduce__(self) -> Any:  # a copy is a plain dict
        return dict, (dict(self),)


def _method(function: Any) -> Any:
    """Returns a method that calls `function` without the argument `self`."""

    def call(self: Any, **arguments: Any) -> Any:
        return function(**arguments)

    # `user_callbacks._taken` then sees the signature of `function`.
    call.__wrapped__ = function  # type: ignore[attr-defined]
    return call
