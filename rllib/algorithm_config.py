"""`AlgorithmConfig`: the builder of RLlib, for the presets of polopt."""

from __future__ import annotations

import copy
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any, ClassVar

from ray.tune import tune

from polopt.common.config import ConfigError, nearest
from polopt.common.other_libraries import RLLIB_FIXED, fixed, instead_of_algorithm
from polopt.rllib.exploration_config import as_exploration
from polopt.rllib.replay_buffer_config import as_replay_buffer
from polopt.rllib.translation import checked, defaults, key_of, resolved
from polopt.rllib.user_callbacks import as_polopt_callbacks
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import PRESETS, register_names
from polopt.trainers.trainer import PolicyOptimizerTrainer

_NOT_GIVEN: Any = object()


class AlgorithmConfig:
    """Options of a preset, given by the methods of RLlib's `AlgorithmConfig`.

        config = (
            PPOConfig()
            .environment("CartPole-v1")
            .env_runners(num_env_runners=2)
            .training(lr=3e-4, train_batch_size_per_learner=4096)
        )
        algo = config.build_algo()
        algo.train()

    `tune.Tuner` and `tune.run` accept the object, and `to_dict` is the config of the preset. The
    names of options are RLlib's, from 2.7 to 2.60, or polopt's. Values that are not given have the
    defaults of the preset, and not RLlib's. Every method accepts every option, because RLlib moves
    options from one method to another.

    An option that polopt does not have raises a ConfigError that says what to use instead. If the
    option changes nothing that is learned, it is ignored with a warning. A name that nobody has
    raises a TypeError, as in RLlib.

    Class attributes:
        preset_name: of the preset in `polopt`.
        algorithm_name: of the algorithm in RLlib, which `tune.Tuner("PPO", ...)` finds.

    Args:
        algo_class: ignored. RLlib's constructor has it.

    Raises:
        ConfigError: this polopt has no such preset.
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
        # Tune calls `to_dict` of objects of this class, and accepts no others but dicts.
        tune._Config.register(AlgorithmConfig)

    @property
    def algo_class(self) -> type[PolicyOptimizerTrainer]:
        """The trainer that `build_algo` makes: the preset, with the methods of RLlib's
        `Algorithm` and the names that results of RLlib 2.7 had."""
        from polopt.rllib.algorithms import algorithm_of

        return algorithm_of(self.preset_name)

    @property
    def given(self) -> dict[str, Any]:
        """A copy of the options that were given, before they are put together by `to_dict`."""
        return dict(self._given)

    @property
    def _preset(self) -> type[PolicyOptimizerTrainer]:
        return PRESETS[self.preset_name]

    def __repr__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self._given.items())
        return f"{type(self).__name__}({given})"

    # ---- setting options ------------------------------------------------------------------------

    def _set(self, method: str, options: Mapping[str, Any]) -> Any:
        where = f"{type(self).__name__}.{method}()"
        found: dict[str, Any] = {}
        for name, value in options.items():
            self._check_not_frozen(name)
            if key_of(name, self._preset) == "callbacks":
                value = as_polopt_callbacks(value)
            if name == "exploration_config" and isinstance(value, Mapping) and value:
                before = self[name]  # RLlib adds to the config of the same exploration
                if value.get("type", before.get("type")) == before.get("type"):
                    value = {**before, **value}
            found |= checked(name, value, self._preset, where)
        if "env_config" in found:  # RLlib adds to what was given before
            found["env_config"] = {**self._given.get("env_config", {}), **found["env_config"]}
        if isinstance(found.get("model"), Mapping) and isinstance(
            self._given.get("model"), Mapping
        ):
            found["model"] = {**self._given["model"], **found["model"]}
        self._given.update(found)
        return self

    def environment(self, env: Any = _NOT_GIVEN, **options: Any) -> Any:
        """The environment: a Gymnasium id, a name of `register_env`, a class or a function that
        gets `env_config`. Its options `env_config`, `normalize_actions`, `clip_actions`."""
        if env is not _NOT_GIVEN:
            options["env"] = env
        return self._set("environment", options)

    def env_runners(self, **options: Any) -> Any:
        """Workers: `num_env_runners`, `num_envs_per_env_runner`, `rollout_fragment_length`,
        `num_cpus_per_env_runner`, `sample_timeout_s`, `observation_filter`."""
        return self._set("env_runners", options)

    def rollouts(self, **options: Any) -> Any:
        """`env_runners` in RLlib 2.7: `num_rollout_workers`, `num_envs_per_worker`."""
        return self._set("rollouts", options)

    def exploration(self, **options: Any) -> Any:
        """`explore` and `exploration_config` in RLlib 2.7."""
        return self._set("exploration", options)

    def training(self, **options: Any) -> Any:
        """Learning: `lr`, `gamma`, `lambda_`, `train_batch_size_per_learner`, `minibatch_size`,
        `num_epochs`, `grad_clip`, `model`, and the options of the algorithm and its optimizer."""
        return self._set("training", options)

    def learners(self, **options: Any) -> Any:
        """`num_gpus_per_learner`. The driver learns, so the number of learners is ignored."""
        return self._set("learners", options)

    def resources(self, **options: Any) -> Any:
        """`num_gpus`, `num_cpus_for_main_process`, `num_cpus_per_worker`."""
        return self._set("resources", options)

    def framework(self, framework: Any = "torch", **options: Any) -> Any:
        """PyTorch. Another framework is refused."""
        return self._set("framework", {"framework": framework, **options})

    def api_stack(self, **options: Any) -> Any:
        """Accepted, and without effect."""
        return self._set("api_stack", options)

    def rl_module(self, **options: Any) -> Any:
        """`model_config`: a dict or a `DefaultModelConfig` with the options of the network."""
        return self._set("rl_module", options)

    def evaluation(self, **options: Any) -> Any:
        """`evaluation_interval`, `evaluation_duration` in episodes, `evaluation_num_env_runners`,
        `evaluation_config`. `explore` is False in evaluation unless `evaluation_config` has it."""
        return self._set("evaluation", options)

    def callbacks(self, callbacks_class: Any = _NOT_GIVEN, **functions: Any) -> Any:
        """A subclass of `polopt.Callbacks` or of `polopt.rllib.RLlibCallback`, or functions under
        the names of the latter's methods."""
        if functions:
            given = () if callbacks_class in (_NOT_GIVEN, None) else (callbacks_class,)
            methods = {name: _method(value) for name, value in functions.items() if value}
            callbacks_class = type("FunctionCallbacks", given, methods)
        if callbacks_class is _NOT_GIVEN:
            return self
        return self._set("callbacks", {"callbacks": callbacks_class})

    def debugging(self, **options: Any) -> Any:
        """`seed`."""
        return self._set("debugging", options)

    def reporting(self, **options: Any) -> Any:
        """`min_sample_timesteps_per_iteration`, `min_time_s_per_iteration`."""
        return self._set("reporting", options)

    def fault_tolerance(self, recreate_failed_workers: Any = _NOT_GIVEN, **options: Any) -> Any:
        """`max_consecutive_failures`. Workers that fail are always replaced."""
        if recreate_failed_workers is not _NOT_GIVEN:
            options["recreate_failed_workers"] = recreate_failed_workers
        return self._set("fault_tolerance", options)

    def checkpointing(
        self,
        export_native_model_files: Any = False,
        checkpoint_trainable_policies_only: Any = False,
    ) -> Any:
        """Without effect: a checkpoint holds tensors and JSON."""
        options = {
            "export_native_model_files": export_native_model_files,
            "checkpoint_trainable_policies_only": checkpoint_trainable_policies_only,
        }
        return self._set("checkpointing", options)

    def multi_agent(self, **options: Any) -> Any:
        """Refused: polopt trains one policy in environments of one agent.

        Raises:
            ConfigError: for `policies`, `policy_mapping_fn` and other options of several agents.
        """
        return self._set("multi_agent", options)

    def offline_data(self, **options: Any) -> Any:
        """Refused: polopt has no offline data.

        Raises:
            ConfigError: for options that would read or write samples.
        """
        return self._set("offline_data", options)

    def python_environment(self, **options: Any) -> Any:
        """Refused with other values than RLlib's defaults."""
        return self._set("python_environment", options)

    def experimental(self, **options: Any) -> Any:
        """Refused with other values than RLlib's defaults."""
        return self._set("experimental", options)

    def update_from_dict(self, config_dict: Mapping[str, Any]) -> Any:
        """Sets options of a dict, in the names of RLlib or polopt."""
        return self._set("update_from_dict", config_dict)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> Any:
        """A config with these options."""
        return cls().update_from_dict(config_dict)

    @staticmethod
    def overrides(**options: Any) -> dict[str, Any]:
        """Options for `evaluation(evaluation_config=...)`."""
        return options

    # ---- building -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The config of the preset: the options that were given, under the names of polopt.

        Raises:
            ConfigError: options that do not fit together.
        """
        where = f"{type(self).__name__}.to_dict()"
        return copy.deepcopy(resolved(self._given, self._preset, where))

    def validate(self) -> None:
        """Checks all options, as `build_algo` and each trial of Tune do.

        Raises:
            ConfigError: a value that is not allowed, or options that do not fit together.
        """
        Experiment.parse(self.to_dict(), self._preset.preset)

    def build_algo(self, env: Any = None, use_copy: bool = True, **ignored: Any) -> Any:
        """Makes the trainer, and starts its workers.

        Args:
            env: the environment, instead of the one of `environment`.
            use_copy: without effect. The trainer gets a copy.
            ignored: `logger_creator` of RLlib 2.7. polopt writes logs under Tune.

        Returns:
            an object of `algo_class`.

        Raises:
            ConfigError: before any worker starts.
        """
        if env is not None:
            self.environment(env)
        for name, value in ignored.items():
            checked(name, value, self._preset, f"{type(self).__name__}.build_algo()")
        return self.algo_class(self.to_dict())

    #: The name until RLlib 2.40.
    build = build_algo

    # ---- copies, and the object as a dict -------------------------------------------------------

    def copy(self, copy_frozen: bool | None = None) -> Any:
        """A deep copy.

        Args:
            copy_frozen: whether the copy is frozen. None: if this object is.
        """
        other = copy.deepcopy(self)
        frozen = self._is_frozen if copy_frozen is None else copy_frozen
        vars(other)["_is_frozen"] = frozen
        return other

    def freeze(self) -> None:
        """From now on, setting an option raises an AttributeError."""
        vars(self)["_is_frozen"] = True

    def _check_not_frozen(self, name: str) -> None:
        if self._is_frozen:
            raise AttributeError(
                f"Cannot set attribute ({name}) of an already frozen AlgorithmConfig!"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        self._set("__setattr__", {name: value})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_given" not in vars(self):  # asked by copy and pickle
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
                self._given[key] = value  # `config.env_config["size"] = 3` has to count
            return value
        if key == "replay_buffer_config" and "buffer_size" in known:
            return _Live(as_replay_buffer({**known, **self._given}), self, name)
        if key == "exploration_config" and "epsilon" in known:
            value = as_exploration(self["epsilon"], self["per_worker_epsilon"])
            return _Live(value, self, name)
        row = fixed(key, RLLIB_FIXED)
        if row is not None and row.allowed(key):
            value = copy.deepcopy(row.allowed(key)[0])
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
        """The value of an option. `default` if the option was not given."""
        try:
            return self[name]
        except KeyError:
            return default

    def pop(self, name: str, default: Any = None) -> Any:
        """As `get`. As in RLlib, the option stays."""
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
    """A dict of RLlib that was read from a builder. A change of the dict is set in the builder."""

    def __init__(self, values: Mapping[str, Any], config: AlgorithmConfig, name: str) -> None:
        super().__init__(values)
        self._config, self._name = config, name

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, *args: Any, **others: Any) -> None:
        """As `dict.update`. Raises ConfigError for what polopt does not have."""
        changes = dict(*args, **others)
        self._config[self._name] = changes
        super().update(changes)

    def __reduce__(self) -> Any:  # a copy is a plain dict
        return dict, (dict(self),)


def _method(function: Any) -> Any:
    """A function as a method, which does not get the object."""

    def call(self: Any, **arguments: Any) -> Any:
        return function(**arguments)

    call.__wrapped__ = function  # type: ignore[attr-defined]  # its arguments count
    return call
