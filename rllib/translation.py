"""From options of RLlib to options of a preset: what is renamed, ignored, or refused.

The names and their replacements come from `polopt.common.other_libraries`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from polopt.common.config import ConfigError, nearest, shown, without_fixed
from polopt.common.other_libraries import RLLIB, RLLIB_FIXED, RLLIB_IGNORED, fixed, instead_of
from polopt.rllib.exploration_config import of_exploration
from polopt.rllib.replay_buffer_config import of_replay_buffer
from polopt.trainers.experiment import Experiment, aliases_for
from polopt.trainers.trainer import PolicyOptimizerTrainer

logger = logging.getLogger("polopt")

#: Arguments of RLlib's methods, and the names of the same options elsewhere in RLlib or here.
_SAME = {
    "_train_batch_size_per_learner": "train_batch_size",
    "callbacks_class": "callbacks",
    "env_to_module_connector": "_env_to_module_connector",
    "framework_str": "framework",
    "horizon": "max_frames_per_traj",
    "input_": "input",
    "is_atari": "_is_atari",
    "learner_class": "_learner_class",
    "learner_connector": "_learner_connector",
    "max_requests_in_flight_per_sampler_worker": "max_requests_in_flight_per_env_runner",
    "mini_batch_size_per_learner": "sgd_minibatch_size",
    "model_config": "model",
    "model_config_dict": "model",
    "module_to_env_connector": "_module_to_env_connector",
    "num_cpus_for_local_worker": "num_cpus_for_driver",
    "num_cpus_per_learner_worker": "num_cpus_per_learner",
    "num_gpus_per_learner_worker": "num_gpus",
    "num_learner_workers": "num_learners",
    "optimizer": "torch_optimizer_options",
    "sample_timeout_s": "worker_timeout_s",
    "synchronize_filter": "synchronize_filters",
    "train_batch_size_per_learner": "train_batch_size",
}
#: SAC's learning rates in RLlib 2.7, and here.
_OPTIMIZATION = {
    "actor_learning_rate": "actor_lr",
    "critic_learning_rate": "critic_lr",
    "entropy_learning_rate": "alpha_lr",
}
#: Options that mean something only together with others. `resolved` handles them.
_TOGETHER = (
    "clip_rewards",
    "entropy_coeff_schedule",
    "evaluation_parallel_to_training",
    "lr_schedule",
    "observation_filter",
    "torch_optimizer_options",
    "train_batch_size",
    "use_kl_loss",
)
#: What a warning says of an ignored option that has no place here.
_IGNORED = "polopt has no such option"
#: RLlib's `kl_coeff`, which counts unless `use_kl_loss` is False.
_KL_COEFF = 0.2
#: Spellings of "no limit" for a number of seconds.
_NO_LIMIT_S = 1e7


_defaults: dict[type[PolicyOptimizerTrainer], Mapping[str, Any]] = {}


def defaults(preset: type[PolicyOptimizerTrainer]) -> Mapping[str, Any]:
    """The options of a preset with their defaults, as a flat dict."""
    if preset not in _defaults:
        parsed = Experiment.parse({"env": "CartPole-v1"}, preset.preset).to_dict()
        plugins = parsed.pop("policy"), parsed.pop("optimizer")
        own = {key: value for part in plugins for key, value in part.items() if key != "name"}
        _defaults[preset] = {**parsed, **own, "env": None}
    return _defaults[preset]


def _aliases(preset: type[PolicyOptimizerTrainer]) -> Mapping[str, str]:
    aliases = aliases_for({}, preset.preset)
    return {alias: key for alias, key in aliases.items() if alias not in _TOGETHER}


def key_of(name: str, preset: type[PolicyOptimizerTrainer]) -> str:
    """The key under which an option is kept: the key of polopt, where polopt has the option."""
    aliases = _aliases(preset)
    name = name if name in aliases else _SAME.get(name, name)
    return aliases.get(name, name)


def checked(
    name: str, value: Any, preset: type[PolicyOptimizerTrainer], where: str
) -> dict[str, Any]:
    """The option under the key of `key_of`. Empty, if polopt always does what it says, or if it
    changes nothing that is learned: then a warning says what to use instead.

    Args:
        name: of the option, in a spelling of any release of RLlib since 2.7, or of polopt.
        value: of the option.
        preset: the trainer.
        where: method or function that the user called, for messages.

    Raises:
        ConfigError: polopt has neither the option nor its value. Says what to use instead.
        TypeError: no release of RLlib and no part of polopt has such an option.
    """
    key = key_of(name, preset)
    if key == "replay_buffer_config" and "buffer_size" in defaults(preset):
        return of_replay_buffer(value, where, "num_replay_shards" in defaults(preset))
    if key == "exploration_config" and "epsilon" in defaults(preset):
        return of_exploration(value, where)
    if key == "optimization_config" and "actor_lr" in defaults(preset):
        return _of_optimization(value, where)
    if key in defaults(preset) or key in _TOGETHER:
        return {key: value}
    row = fixed(key, RLLIB_FIXED)
    if key in RLLIB_IGNORED:
        if row is None or not _is_accepted(value, row.allowed(key)):
            logger.warning(
                "%s: %s=%s is ignored. %s", where, name, shown(value), instead_of(key) or _IGNORED
            )
        return {}
    if row is not None:
        try:
            return without_fixed({key: value}, RLLIB_FIXED, (), where)
        except ConfigError as error:
            raise ConfigError(str(error).replace(repr(key), repr(name))) from None
    try:  # an option of another optimizer or policy: the error says of which
        Experiment.parse({"env": "CartPole-v1", key: value}, preset.preset)
    except ConfigError as error:
        if "is an option of" in str(error):
            said = str(error).replace(repr(key), repr(name))
            raise ConfigError(f"{where}: {said}") from None
    if instead := instead_of(key) or instead_of(name):
        raise ConfigError(f"{where}: option {name!r}: got {shown(value)}. {instead}")
    names = [*defaults(preset), *_aliases(preset), *_SAME, *(n for o in RLLIB for n in o.names)]
    raise TypeError(f"{where} got an unexpected keyword argument {name!r}{nearest(name, names)}")


def _of_optimization(config: Any, where: str) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: optimization_config={shown(config)}. Allowed: a dict")
    for key in config:
        if key not in _OPTIMIZATION:
            raise ConfigError(
                f"{where}: optimization_config: unknown key {key!r}"
                f"{nearest(str(key), _OPTIMIZATION)}. Allowed: {', '.join(_OPTIMIZATION)}"
            )
    return {_OPTIMIZATION[key]: value for key, value in config.items()}


def _is_accepted(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(type(value) is type(same) and value == same for same in allowed)


def resolved(
    given: Mapping[str, Any], preset: type[PolicyOptimizerTrainer], where: str
) -> dict[str, Any]:
    """The config of a preset from options of `checked`.

    - `lr_schedule` and `entropy_coeff_schedule` replace the number, as on RLlib's old API stack.
    - `use_kl_loss=False` is `kl_coeff=0`. True is `kl_coeff`, or RLlib's default of it.
    - `lr=None` of SAC is the default of the preset, for rates that have no option of their own.
    - `rollout_fragment_length="auto"` is what gives one fragment of each environment for
      `train_batch_size`. So is leaving it out, if the preset's fragments would exceed the batch.
      With a replay buffer, both are the fragments of the preset.
    - In DD-PPO, `train_batch_size` is the batch of one worker, one fragment of its environments.

    Raises:
        ConfigError: a value that polopt does not have.
    """
    options, known = dict(given), defaults(preset)
    for schedule, key in (("lr_schedule", "lr"), ("entropy_coeff_schedule", "entropy_coeff")):
        value = options.pop(schedule, None)
        if value is not None:
            options[key] = value
    use_kl_loss = options.pop("use_kl_loss", None)
    if use_kl_loss is not None and "kl_coeff" in known:
        options["kl_coeff"] = options.get("kl_coeff", _KL_COEFF) if use_kl_loss else 0.0
    elif use_kl_loss:
        raise ConfigError(f"{where}: use_kl_loss=True: the policy of this preset has no KL loss")
    observation_filter = options.pop("observation_filter", "NoFilter")
    if observation_filter in ("MeanStdFilter", "ConcurrentMeanStdFilter"):
        options["normalize_observations"] = True
    elif observation_filter not in (None, "NoFilter"):
        without_fixed({"observation_filter": observation_filter}, RLLIB_FIXED, (), where)
    if options.get("clip_rewards") in (None, False):
        options.pop("clip_rewards", None)
    elif not options.get("normalize_rewards"):
        raise ConfigError(
            f"{where}: clip_rewards={shown(options['clip_rewards'])}. RLlib clips the rewards that "
            "are learned from; here wrap the environment, for example with gymnasium.wrappers."
            "TransformReward(env, np.sign)"
        )
    if torch_options := options.pop("torch_optimizer_options", None):
        raise ConfigError(
            f"{where}: optimizer={shown(torch_options)}. For the torch optimizer: torch_optimizer, "
            "adam_epsilon, rmsprop_alpha and rmsprop_epsilon"
        )
    if isinstance(options.get("n_step"), list | tuple):
        raise ConfigError(
            f"{where}: n_step={shown(options['n_step'])}. RLlib draws a number of steps for each "
            "row. Allowed: one whole number"
        )
    if "actor_lr" in known and options.get("lr", 0.0) is None:
        del options["lr"]  # RLlib demands it where `actor_lr` and the others are given
    if options.get("vf_clip_param") == math.inf:
        options["vf_clip_param"] = None
    if options.get("evaluation_interval") == 0:
        options["evaluation_interval"] = None
    if "worker_timeout_s" in options and options["worker_timeout_s"] in (None, math.inf):
        options["worker_timeout_s"] = _NO_LIMIT_S
    if options.get("model") is not None:
        options["model"] = _model(options["model"])
    _resolve_evaluation(options, where)
    _resolve_batch(options, known, where)
    return options


def _model(given: Any) -> Any:
    """The options of a network: a dict, or RLlib's `DefaultModelConfig`, of which those options
    count that differ from its defaults."""
    if isinstance(given, Mapping):
        return dict(given)
    fields = getattr(given, "__dataclass_fields__", {})
    plain = type(given)() if fields else None
    return {
        name: getattr(given, name)
        for name in fields
        if getattr(given, name) != getattr(plain, name)
    } or given


def _resolve_evaluation(options: dict[str, Any], where: str) -> None:
    parallel = options.pop("evaluation_parallel_to_training", None)
    beside = bool(options.get("evaluation_num_workers", 0))
    if parallel is not None and parallel != beside:
        logger.warning(
            "%s: evaluation_parallel_to_training=%s is ignored: evaluation is beside training if "
            "evaluation_num_env_runners is 1 or more, and between iterations if it is 0",
            where,
            parallel,
        )
    if options.get("evaluation_duration") == "auto":
        logger.warning("%s: evaluation_duration='auto' is ignored: it is 10 episodes", where)
        del options["evaluation_duration"]
    if options.get("evaluation_interval") is None:  # RLlib ignores the others then
        options.pop("evaluation_num_workers", None)
    settings = options.get("evaluation_config")
    if settings is None:
        options.pop("evaluation_config", None)
    else:
        options["evaluation_config"] = {
            key: value for key, value in dict(settings).items() if key not in _OF_EVALUATION
        }


#: What users of RLlib turn off in evaluation and polopt's evaluation never has.
_OF_EVALUATION = ("in_evaluation", "evaluation_interval", "num_env_runners", "num_workers")


def _resolve_batch(options: dict[str, Any], known: Mapping[str, Any], where: str) -> None:
    fragment = options.get("rollout_fragment_length")
    if fragment == "auto":
        fragment = options.pop("rollout_fragment_length", None)
    if "buffer_size" in known:
        return  # an update has train_batch_size rows of the replay buffer
    batch = options.get("train_batch_size")
    if "train_batch_size" not in known and batch is not None:
        del options["train_batch_size"]
        if "keep_local_weights_in_sync" not in known:
            logger.warning(
                "%s: train_batch_size=%s is ignored: a gradient is of one fragment, "
                "rollout_fragment_length steps of each environment of a worker",
                where,
                shown(batch),
            )
            return
    if fragment not in (None, "auto") or not isinstance(batch, int) or not batch:
        return
    sizes = {
        key: options.get(key, known[key])
        for key in ("num_workers", "num_envs_per_worker", "rollout_fragment_length")
    }
    if not all(isinstance(size, int) for size in sizes.values()):
        return  # searched
    environments = sizes["num_envs_per_worker"]
    if "train_batch_size" in known:
        environments *= max(sizes["num_workers"], 1)
    one_each = max(1, math.ceil(batch / environments))
    too_long = one_each < sizes["rollout_fragment_length"]
    if fragment == "auto" or "train_batch_size" not in known or too_long:
        options["rollout_fragment_length"] = one_each
