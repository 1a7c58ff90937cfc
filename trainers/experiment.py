"""`Experiment`: the parsed config of a trainer. Each config class validates the keys that it
owns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import gymnasium
import pydantic
import torch
from gymnasium.envs.registration import EnvSpec

from polopt.common.add_ons import add_ons, fixed_options, hint
from polopt.common.config import (
    Config,
    ConfigError,
    Problems,
    canonical,
    differ,
    nearest_of,
    shown,
    unknown_key,
    without_fixed,
)
from polopt.common.registry import Registry, load_path
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.learning.schedules import Schedule
from polopt.policies.networks.model_config import ModelConfig
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.resources import Amount
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.callbacks import resolve_callbacks
from polopt.rollouts.workers.worker_config import WorkerConfig, make_worker_config

C = TypeVar("C", bound=Config)
_NO_ENV = (
    "key 'env' is missing. Allowed: a Gymnasium id, a name registered with "
    "ray.tune.registry.register_env, or a callable that makes an environment"
)


class EvaluationConfig(Config):
    """Options of evaluation: how evaluation chooses actions, and how the environments of evaluation
    differ from the training environments. An option that is `None` has the same value as in
    training.

    Attributes:
        explore: `True` samples actions from the policy's distribution. `False` takes the mode of
            this distribution.
        env: the environment. The allowed values are the same as for the option `env` of training.
            `None` means the environment of training.
        env_config: the options of the environments. These options are merged into the `env_config`
            of training, and override options with the same key. Nested dicts are merged, too, as in
            RLlib.
        num_envs_per_worker: the number of environments in each evaluation worker. `None` means the
            value of training.
        vectorization_mode: how each evaluation worker steps its environments. `None` means the
            value of training.
        autoreset_mode: Gymnasium's autoreset mode. `None` means the value of training.
        max_frames_per_traj: the number of environment steps after which an episode is truncated.
            `None` means the value of training.
    """

    explore: bool = False
    env: Any = None
    env_config: dict[str, Any] = pydantic.Field(default_factory=dict)
    num_envs_per_worker: int | None = pydantic.Field(default=None, ge=1, le=100_000)
    vectorization_mode: Literal["sync", "async", "vector_entry_point"] | None = None
    autoreset_mode: Literal["next_step", "same_step", "disabled"] | None = None
    max_frames_per_traj: int | None = pydantic.Field(default=None, ge=1)

    advises: ClassVar[bool] = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _resolve_aliases(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or cls.model_fields.keys() >= data.keys():
            return data
        return canonical(data, cls.other_names(), "evaluation_config")

    def changes(self, training: RolloutConfig) -> dict[str, Any]:
        """Returns the options of `RolloutConfig` that evaluation overrides, with their values in
        evaluation."""
        given = {name: value for name, value in self if name in RolloutConfig.model_fields}
        given["env_config"] = merged_options(training.env_config, self.env_config)
        if not self.env_config:
            del given["env_config"]
        return {name: value for name, value in given.items() if value is not None}


class TrainerConfig(Config):
    """Options of the trainer itself.

    Attributes:
        min_sample_timesteps_per_iteration: the minimum number of environment steps in one training
            iteration. Optimizer steps are repeated until the iteration has this number of
            environment steps. A single optimizer step can take a few milliseconds, which is less
            than Tune needs to handle one result.
        min_time_s_per_iteration: the minimum duration of one training iteration, in seconds. With a
            value above 0, the number of environment steps in an iteration depends on the speed of
            the machine.
        num_cpus_for_driver: the number of Ray CPUs that the driver reserves.
        num_gpus: the number of Ray GPUs that the driver reserves. With a value above 0, the
            driver's policy is on CUDA.
        evaluation_interval: the number of training iterations between two evaluations of the
            policy. `None` means that the policy is not evaluated. RLlib: `evaluation_interval`.
        evaluation_duration: the number of whole episodes in one evaluation. These episodes are
            divided among the environments in advance. If evaluation used the first episodes that
            end, it would use too many short episodes. RLlib: `evaluation_duration`, with the unit
            `episodes`.
        evaluation_num_workers: the number of Ray actors that play the evaluation episodes while
            training continues. Each actor reserves the resources of a rollout worker except GPUs.
            With 0, the driver plays the episodes between two iterations, and training waits.
            RLlib: `evaluation_num_env_runners`.
        evaluation_config: the options for the actions and the environments of evaluation.
            RLlib: `evaluation_config`, where `explore` is True by default.
        callbacks: a subclass of `polopt.Callbacks`, or its path as `module:Class`. The workers call
            methods of this class during sampling, and the driver calls a method with each result.
            RLlib: `callbacks`.
    """

    min_sample_timesteps_per_iteration: int = pydantic.Field(default=4000, ge=0, le=2**62)
    min_time_s_per_iteration: float = pydantic.Field(default=0.0, ge=0.0, le=1e9)
    num_cpus_for_driver: Amount = 1.0
    num_gpus: Amount = 0.0
    evaluation_interval: int | None = pydantic.Field(default=None, ge=1, le=2**62)
    evaluation_duration: int = pydantic.Field(default=10, ge=1, le=1_000_000)
    evaluation_num_workers: int = pydantic.Field(default=0, ge=0, le=10_000)
    evaluation_config: EvaluationConfig = EvaluationConfig()
    callbacks: Any = None

    @pydantic.model_validator(mode="after")
    def _check_evaluation(self) -> TrainerConfig:
        workers, episodes = self.evaluation_num_workers, self.evaluation_duration
        if workers > episodes:
            raise ValueError(
                f"key 'evaluation_num_workers': got {workers} with evaluation_duration={episodes}. "
                "Allowed: at most one worker for each episode"
            )
        if workers and self.evaluation_interval is None:
            raise ValueError(
                f"key 'evaluation_num_workers': got {workers} without evaluation_interval. "
                "Allowed: 0. To evaluate the policy, also set evaluation_interval"
            )
        return self


@dataclass(frozen=True)
class Experiment:
    """The parsed config of a trainer. Each part is validated by the class that owns it."""

    trainer: TrainerConfig
    rollout: RolloutConfig
    policy_name: str
    policy_class: type[Policy]
    policy: PolicyConfig
    optimizer_name: str
    optimizer_class: type[PolicyOptimizer]
    optimizer: OptimizerConfig
    add_ons: tuple[Config, ...] = ()

    @classmethod
    def parse(cls, options: Mapping[str, Any], preset: Mapping[str, Any]) -> Experiment:
        """Parses a flat config dict. Passes each key to the config class that owns this key.

        Args:
            options: the user's flat dict. The value of `optimizer` or `policy` is a registered
                name, `module:Class`, a class, or a dict. Such a dict has the key `name` and
                options that apply only to this optimizer or policy. `options` may also have the key
                `preset`, whose value is a preset in one of these forms.
            preset: options of the preset that differ from the defaults. `options` override them,
                but may not name an optimizer or policy other than the preset's.

        Raises:
            ConfigError: keys are unknown, values are wrong, or some options cannot be combined. The
                message has one line for each wrong key.
        """
        _check_mapping(options)
        options, preset = with_preset(options, preset)
        for plugin in ("optimizer", "policy"):
            _check_not_fixed(plugin, options, preset)
        optimizer_name, optimizer_only = _plugin("optimizer", options, preset)
        policy_name, policy_only = _plugin("policy", options, preset)
        optimizer_class, policy_class = OPTIMIZERS.get(optimizer_name), POLICIES.get(policy_name)
        owners = _owners(optimizer_class, policy_class)
        aliases = _aliases(owners)
        names = {
            "optimizer": _name(optimizer_name, OPTIMIZERS),
            "policy": _name(policy_name, POLICIES),
        }
        problems, known, fixed = Problems(), _known(owners), fixed_options("config")
        with problems.collected():
            without_fixed(options, fixed, known)
        former = {key for owner in owners.values() for key in (*owner.renamed, *owner.removed)}
        for owner in owners.values():
            with problems.collected():
                owner.check_former_keys(options)
        options = {
            key: value
            for key, value in options.items()
            if key in known or key not in former | fixed.keys()
        }
        merged = canonical(preset, aliases) | canonical(options, aliases)
        parts: dict[str, dict[str, Any]] = {name: {} for name in owners}
        for key, value in merged.items():
            if key not in ("optimizer", "policy"):
                with problems.collected():
                    parts[_owner(key, owners, names, preset)][key] = value
        for plugin, only in (("optimizer", optimizer_only), ("policy", policy_only)):
            keys = _keys(owners[plugin])
            with problems.collected():
                without_fixed(only, fixed, keys)
            own = {key: value for key, value in only.items() if key in keys or key not in fixed}
            foreign = [key for key in own if key not in keys and hint("option", key)]
            problems.lines += [
                f"{plugin} {names[plugin]!r}: {unknown_key(key, keys)}" for key in foreign
            ]
            own = {key: value for key, value in own.items() if key not in foreign}
            parts[plugin] |= canonical(own, owners[plugin].other_names())
        given = {*canonical(options, aliases), *canonical(optimizer_only, aliases)}
        parts["optimizer"] = optimizer_class.config_class.fit_preset(parts["optimizer"], given)
        parsed: dict[str, Any] = {}
        for name, owner in owners.items():
            with problems.collected():
                parsed[name] = owner.parse(parts[name])
        if problems.lines and merged.get("env") is None:
            problems.lines.append(_NO_ENV)
        problems.raise_all()
        experiment = cls(
            add_ons=tuple(parsed.pop(name) for name in owners if name not in _CORE_PARTS),
            policy_name=names["policy"],
            policy_class=policy_class,
            optimizer_name=names["optimizer"],
            optimizer_class=optimizer_class,
            **parsed,
        )
        experiment._check_combinations()
        return experiment

    def to_dict(self) -> dict[str, Any]:
        """Returns a flat config dict. For a custom network, the dict holds the registered name of
        the network's class. `parse` accepts the dict. If the class is not registered, the dict
        holds the name of the class, and `parse` does not accept the dict."""
        env = self.rollout.env
        if isinstance(env, EnvSpec) and env == gymnasium.registry.get(env.id):
            env = env.id
        return {
            **self.trainer.to_dict(),
            **{key: value for part in self.add_ons for key, value in part.to_dict().items()},
            **self.rollout.to_dict(),
            "env": env,
            "policy": {
                "name": self.policy_name,
                **self.policy.to_dict(),
                "model": self.policy.model.named(),
            },
            "optimizer": {"name": self.optimizer_name, **self.optimizer.to_dict()},
        }

    def add_on(self, cls: type[C]) -> C:
        """Returns the options of an add-on. `cls` is the config class of the add-on."""
        return next(part for part in self.add_ons if isinstance(part, cls))

    def make_worker_config(self) -> WorkerConfig:
        """Returns the config of the workers. To check the config, this method makes one environment
        and one policy, and closes the environment.

        Raises:
            ConfigError: the environment is unknown or cannot be made, a space is not supported, or
                `callbacks` has a wrong value.
        """
        callbacks = resolve_callbacks(self.trainer.callbacks)
        return make_worker_config(self.rollout, self.policy_class, self.policy, callbacks=callbacks)

    @property
    def further_processes(self) -> list[dict[str, float]]:
        """The resources of each process that the optimizer starts in addition to the workers."""
        return self.optimizer_class.further_processes(self.optimizer)

    @property
    def num_remote_processes(self) -> int:
        """The number of remote processes of the run. These processes are the `num_workers` workers,
        the `num_workers_below` rollout workers of each of them, the evaluation workers, and the
        processes that the optimizer starts."""
        return self._num_remote_workers + len(self.further_processes)

    @property
    def remote_cpus(self) -> float:
        """The number of Ray CPUs that all remote processes of the run reserve."""
        further = sum(process.get("CPU", 0.0) for process in self.further_processes)
        return self._num_remote_workers * self.rollout.num_cpus_per_worker + further

    @property
    def _num_remote_workers(self) -> int:
        places = self.rollout.num_workers * (1 + self.rollout.num_workers_below)
        return places + self.trainer.evaluation_num_workers

    def learner_device(self) -> str:
        """Returns the torch device of the driver's policy.

        Raises:
            ConfigError: `num_gpus` is above 0, and torch finds no GPU.
        """
        num_gpus = self.trainer.num_gpus
        if num_gpus and not torch.cuda.is_available():
            raise ConfigError(
                f"key 'num_gpus': got {num_gpus:g}, but torch finds no GPU. Allowed: 0"
            )
        return "cuda" if num_gpus else "cpu"

    def doubtful(self) -> list[str]:
        """Returns a warning for each option that is allowed, but is probably a mistake."""
        policy, texts = self.policy, []
        rates = {
            name: getattr(policy, name)
            for name in type(policy).model_fields
            if name == "lr" or name.endswith("_lr")
        }
        further = [value for name, value in rates.items() if name != "lr"]
        if further and None not in further:
            del rates["lr"]  # no segment uses it
        for name, rate in rates.items():
            if rate is not None and Schedule(rate).is_zero:
                texts.append(
                    f"{name}={shown(rate)}: the weights with this learning rate never change"
                )
        size, rows = getattr(policy, "sgd_minibatch_size", None), self._largest_batch
        field = type(policy).model_fields.get("sgd_minibatch_size")
        if field is not None and size not in (None, field.default) and size > rows:
            texts.append(
                f"sgd_minibatch_size={size}: a batch has at most {rows} rows, so each epoch is one "
                "update with the whole batch. For more rows, raise rollout_fragment_length, "
                "num_envs_per_worker or num_workers"
            )
        return texts

    @property
    def _largest_batch(self) -> int:
        """An upper bound of the number of rows from which a learner learns at once, if it learns
        from fragments."""
        rollout = self.rollout
        rows = rollout.rollout_fragment_length * rollout.num_envs_per_worker
        rows *= max(rollout.num_workers_below, 1)
        given = getattr(self.optimizer, "train_batch_size", None)
        if given is not None:
            return int(-(-given // rows) * rows)
        return rows * (1 if self.optimizer_class.needs_gradients else max(rollout.num_workers, 1))

    def _check_combinations(self) -> None:
        if self.rollout.env is None:
            raise ConfigError(_NO_ENV)
        given = self.optimizer_class.batches_of(self.optimizer)
        _check_fit(
            self.optimizer_name, self.optimizer_class, given, self.policy_name, self.policy_class
        )
        self.optimizer_class.check_options(self.rollout, self.optimizer)
        if self.trainer.evaluation_interval is not None:
            self.optimizer.check_evaluation()


def merged_options(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options with the changes applied. If `options` and `changes` both have a dict
    under the same key, these two dicts are merged in the same way."""
    merged = dict(options)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = merged_options(old, value)
        else:
            merged[key] = value
    return merged


def with_keywords(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Merges a config dict with keyword arguments.

    Raises:
        ConfigError: a key is in `config` and in `options`, or `config` is not a dict with strings
            as keys.
    """
    _check_mapping(config)
    for key in options:
        if key in config:
            raise ConfigError(
                f"key {key!r}: got {shown(config[key])} in config and {shown(options[key])} as a "
                "keyword argument. Give only one of them"
            )
    return {**config, **options} if options else config


def plugin_names(options: Mapping[str, Any], preset: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the chosen optimizer and policy, each as a name or a class.

    Raises:
        ConfigError: the optimizer or the policy is neither a name nor a class, or the key `preset`
            is wrong. See `with_preset`.
    """
    options, preset = with_preset(options, preset)
    return _plugin("optimizer", options, preset)[0], _plugin("policy", options, preset)[0]


def with_preset(
    options: Mapping[str, Any], preset: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Resolves the key `preset` of a config. With this key, one Tune experiment can compare several
    presets.

    Returns:
        `options` without the key `preset`, and the options of the named preset that differ from
        the defaults. If the value of `preset` is a dict, the further options in this dict are added
        to `options`. If `options` has no key `preset`, both arguments are returned unchanged.

    Raises:
        ConfigError: the preset is unknown, or the trainer already has a preset.
    """
    if "preset" not in options:
        return options, preset
    chosen = options["preset"]
    rest = {key: value for key, value in options.items() if key != "preset"}
    if chosen is None:
        return rest, preset
    if preset:
        raise ConfigError(
            f"key 'preset': got {shown(chosen)}, but the class of this trainer is a preset "
            "already. Leave the key out, or use PolicyOptimizerTrainer"
        )
    name, only = chosen, {}
    if isinstance(chosen, Mapping):
        name, only = chosen.get("name"), {k: v for k, v in chosen.items() if k != "name"}
    preset = _preset_options(chosen if name is None else name)
    if only:
        aliases = aliases_for({**rest, **only}, preset)
        rest = canonical(rest, aliases) | canonical(only, aliases, "preset")
    return rest, preset


def _preset_options(name: Any) -> Mapping[str, Any]:
    """Returns the options of a preset that differ from the defaults.

    Raises:
        ConfigError: the preset is unknown.
    """
    presets = load_path(_PRESETS)
    found: Any = presets.get(name) if isinstance(name, str) else name
    problem = "."
    if isinstance(name, str) and ":" in name:
        try:
            found = load_path(name)
        except (ImportError, AttributeError) as error:
            problem = f": {error}."
    elif isinstance(name, str) and found is None:
        instead = hint("preset", name)
        problem = f". {instead}." if instead else f"{nearest_of(name, presets)}."
    if isinstance(found, type) and issubclass(found, presets["PolicyOptimizerTrainer"]):
        trainer: Any = found
        return dict(trainer.preset)
    raise ConfigError(
        f"key 'preset': got {shown(name)}{problem} Allowed: the name of a preset, its class or "
        "'module:Class', or a dict of its 'name' and options"
    )


def aliases_for(options: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, str]:
    """Returns a dict from each alias of an option to the key of this option, for the chosen
    optimizer and policy.

    Raises:
        ConfigError: the optimizer or the policy is unknown, or the key `preset` is wrong.
    """
    optimizer_name, policy_name = plugin_names(options, preset)
    return _aliases(_owners(OPTIMIZERS.get(optimizer_name), POLICIES.get(policy_name)))


def _check_fit(
    optimizer_name: str,
    optimizer_class: type[PolicyOptimizer],
    given: type,
    policy_name: str,
    policy_class: type[Policy],
) -> None:
    """Checks that the optimizer can use the policy.

    Args:
        optimizer_name: name of the optimizer, for the error message.
        optimizer_class: the class of the optimizer.
        given: the type of the batches that the optimizer gives to the policy. It may depend on the
            options of the optimizer.
        policy_name: name of the policy, for the error message.
        policy_class: the class of the policy.

    Raises:
        ConfigError: the optimizer cannot use the policy. The message names the optimizers that can
            use this policy, and the policies that this optimizer can use.
    """
    problem = _misfit(optimizer_class, policy_class, given)
    if not problem:
        return
    policies = [
        repr(name)
        for name in POLICIES.names()
        if not _misfit(optimizer_class, POLICIES.get(name), given)
    ]
    optimizers = []
    for name in OPTIMIZERS.names():
        other: type[PolicyOptimizer] = OPTIMIZERS.get(name)
        if not _misfit(other, policy_class, other.learns_from):
            optimizers.append(repr(name))
        for kind, (key, value) in other.also_learns_from.items():
            if not _misfit(other, policy_class, kind):
                optimizers.append(f"{name!r} with {key}={value!r}")
    raise ConfigError(
        f"policy {policy_name!r} with optimizer {optimizer_name!r}: {problem}. Allowed: optimizer "
        f"{', '.join(optimizers) or 'of your own'}, or policy "
        f"{', '.join(policies) or 'of your own'}"
    )


def _misfit(optimizer_class: type[PolicyOptimizer], policy_class: type[Policy], given: type) -> str:
    """Returns why the optimizer cannot use the policy, or an empty string if it can."""
    learned = policy_class.learns_from
    if given is not learned:
        return (
            f"the policy learns from {learned.__name__}, but the optimizer gives it "
            f"{given.__name__}"
        )
    if optimizer_class.needs_gradients and not policy_class.gives_gradients():
        return (
            "the optimizer applies gradients that workers compute, but the policy defines neither "
            "minibatch_gradients nor compute_gradients"
        )
    return ""


def _owners(
    optimizer_class: type[PolicyOptimizer], policy_class: type[Policy]
) -> dict[str, type[Config]]:
    core = (TrainerConfig, RolloutConfig, policy_class.config_class, optimizer_class.config_class)
    further = (add_on.config_class for add_on in add_ons())
    return {
        **dict(zip(_CORE_PARTS, core, strict=True)),
        **{cls.__name__: cls for cls in further if cls is not None},
    }


def _aliases(owners: Mapping[str, type[Config]]) -> dict[str, str]:
    return {alias: key for owner in owners.values() for alias, key in owner.other_names().items()}


def _check_mapping(options: Any) -> None:
    if isinstance(options, str) or callable(options):
        environment = f"If this is the environment, pass it as env={shown(options)}"
        raise ConfigError(
            f"config: got {shown(options)}. Allowed: a dict of keys to values, or keyword "
            f"arguments. {hint('policy', options) or environment}"
        )
    if not isinstance(options, Mapping):
        raise ConfigError(f"config: got {shown(options)}. Allowed: a dict of keys to values")
    for key in options:
        if not isinstance(key, str):
            raise ConfigError(f"config: got key {shown(key)}. Allowed: strings")


def _check_not_fixed(plugin: str, options: Mapping[str, Any], preset: Mapping[str, Any]) -> None:
    given, fixed = options.get(plugin), preset.get(plugin)
    name = given.get("name", fixed) if isinstance(given, Mapping) else given
    if name is not None and fixed is not None and differ(name, fixed):
        other = "To choose another, use PolicyOptimizerTrainer"
        raise ConfigError(
            f"key {plugin!r}: got {shown(name)}, but this preset always uses {fixed!r}. "
            f"{hint(plugin, name) or other}"
        )


def _plugin(
    key: str, options: Mapping[str, Any], preset: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """Returns the name or class of the optimizer or policy, and the options that apply only to this
    optimizer or policy. `key` is `optimizer` or `policy`."""
    fixed = preset.get(key)
    chosen = options.get(key, fixed or _DEFAULT_PLUGINS[key])
    name, only = chosen, {}
    if isinstance(chosen, Mapping):
        name, only = chosen.get("name", fixed), {k: v for k, v in chosen.items() if k != "name"}
    if not isinstance(name, str | type):
        raise ConfigError(
            f"key {key!r}: got {shown(chosen)}. Allowed: a class, 'module:Class', a name, "
            "or a dict with a 'name'"
        )
    return (OPTIMIZERS if key == "optimizer" else POLICIES).named(name), only


def _name(plugin: Any, registry: Registry) -> str:
    """Returns the name that checkpoints store for an optimizer or policy. For a class, this is the
    registered name. If the class is not registered, it is the name of the class."""
    if isinstance(plugin, type):
        return registry.name_of(plugin) or plugin.__name__
    return str(plugin)


#: The parts of an experiment whose options the core owns. The other parts belong to add-ons.
_CORE_PARTS = ("trainer", "rollout", "policy", "optimizer")
#: Where the presets are defined. They are loaded at the first use, because their module imports
#: this module.
_PRESETS = "polopt.trainers.presets:PRESETS"
#: The default optimizer and policy of `PolicyOptimizerTrainer`.
_DEFAULT_PLUGINS = {"optimizer": "sync_samples", "policy": "ppo"}


def _owner(
    key: str,
    owners: Mapping[str, type[Config]],
    names: Mapping[str, str],
    preset: Mapping[str, Any],
) -> str:
    for name, owner in owners.items():
        if key in owner.keys():  # noqa: SIM118 - a classmethod of Config, not of a dict
            return name
    for plugin, registry in (("optimizer", OPTIMIZERS), ("policy", POLICIES)):
        others = [n for n in registry.names() if key in _keys(registry.get(n).config_class)]
        if others:
            trainer = " with PolicyOptimizerTrainer" if preset.get(plugin) else ""
            raise ConfigError(
                f"key {key!r} is an option of {plugin} {', '.join(map(repr, others))}. The "
                f"{plugin} of this config is {names[plugin]!r}. Leave the key out, or choose "
                f'another {plugin}{trainer}, for example {plugin}={{"name": "{others[-1]}", '
                f'"{key}": ...}}'
            )
    if key in _keys(ModelConfig):
        raise ConfigError(
            f"key {key!r} is an option of the network. Set it with model={{{key!r}: ...}}"
        )
    listed = "" if hint("option", key) else " (`polopt list PRESET` lists all keys)"
    raise ConfigError(f"{unknown_key(key, _known(owners))}{listed}")


def _known(owners: Mapping[str, type[Config]]) -> list[str]:
    return [key for owner in owners.values() for key in _keys(owner)] + [
        "optimizer",
        "policy",
        "preset",
    ]


def _keys(owner: type[Config]) -> list[str]:
    return [*owner.keys(), *owner.other_names()]
