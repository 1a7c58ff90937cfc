"""Translates options of RLlib to options of a preset: renames options, ignores them, or raises an
error.

The names and their replacements come from `polopt.rllib.other_libraries`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from polopt.common.config import ConfigError, differ, nearest, shown, without_fixed
from polopt.rllib.accepted_options import (
    accepted_model,
    accepted_option,
    resolve_accepted,
    warn,
)
from polopt.rllib.exploration_config import of_exploration
from polopt.rllib.other_libraries import FIXED, RLLIB, RLLIB_IGNORED, RLLIB_SILENT, instead_of
from polopt.rllib.replay_buffer_config import of_replay_buffer
from polopt.rllib.user_callbacks import reaches_environments
from polopt.trainers.experiment import Experiment
from polopt.trainers.flat_config import aliases_for
from polopt.trainers.trainer import PolicyOptimizerTrainer

#: Maps names of options in RLlib, for example names of arguments, to other names of the same
#: options in RLlib or polopt.
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
#: Names of SAC's learning rates in RLlib 2.7 and in polopt.
_OPTIMIZATION = {
    "actor_learning_rate": "actor_lr",
    "critic_learning_rate": "critic_lr",
    "entropy_learning_rate": "alpha_lr",
}
#: polopt's options for the moves of target networks. In RLlib, `target_network_update_freq` is a
#: number of environment steps for algorithms with a replay buffer.
_UPDATES, _TIMESTEPS = "target_network_update_freq", "target_network_update_timesteps"
#: Number of updates with a whole batch in the unit of `target_network_update_freq` of RLlib's APPO.
#: RLlib multiplies its two defaults: 8 batches in its circular buffer, and 2 iterations per batch.
_APPO_UNIT = 16
#: Options whose meaning depends on other options. `resolved` translates them.
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
#: Attributes of RLlib's configs, and the arguments of RLlib's methods that set them.
_TAKEN_BY = {"_model_config": "model_config", "_rl_module_spec": "rl_module_spec"}
#: Attributes that RLlib itself derives from the user's options.
_DERIVED = ("_is_frozen", "algo_class", "enable_rl_module_and_learner", "_prior_exploration_config")
#: Text of the warning about an ignored option without a counterpart in polopt.
_IGNORED = "polopt has no such option"
#: RLlib's default of `kl_coeff`. RLlib uses `kl_coeff` unless `use_kl_loss` is False.
_KL_COEFF = 0.2
#: The number of seconds that replaces `None` and infinity, which mean "no limit" in RLlib.
_NO_LIMIT_S = 1e7


_Function = TypeVar("_Function", bound=Callable[..., Any])


def by_class(function: _Function) -> _Function:
    """Makes a function of a class remember its values."""
    return cast(_Function, functools.cache(function))


@by_class
def defaults_of_preset(preset: type[PolicyOptimizerTrainer]) -> Mapping[str, Any]:
    """Returns the options of a preset and their defaults in polopt as a flat dict."""
    parsed = Experiment.parse({"env": "CartPole-v1"}, preset.preset).to_dict()
    plugins = parsed.pop("policy"), parsed.pop("optimizer")
    own = {key: value for part in plugins for key, value in part.items() if key != "name"}
    return {**parsed, **own, "env": None}


@by_class
def defaults(preset: type[PolicyOptimizerTrainer]) -> Mapping[str, Any]:
    """Returns the options of a preset and their defaults as a flat dict. An algorithm of RLlib has
    RLlib's defaults."""
    known, changes = defaults_of_preset(preset), getattr(preset, "rllib_defaults", {})
    merged = {**known, **changes}
    if "model" in changes:
        merged["model"] = {**known["model"], **changes["model"]}
    return merged


def _aliases(preset: type[PolicyOptimizerTrainer]) -> Mapping[str, str]:
    aliases = aliases_for({}, preset.preset)
    return {alias: key for alias, key in aliases.items() if alias not in _TOGETHER}


def key_of(name: str, preset: type[PolicyOptimizerTrainer]) -> str:
    """Returns the key under which builders keep an option. If polopt has the option, this is the
    key in polopt."""
    aliases = _aliases(preset)
    name = name if name in aliases else _SAME.get(name, name)
    key = aliases.get(name, name)
    # RLlib's algorithms with a replay buffer count environment steps, and polopt counts updates.
    timed = key == _UPDATES and _TIMESTEPS in defaults(preset)
    return _TIMESTEPS if timed else key


def checked(
    name: str, value: Any, preset: type[PolicyOptimizerTrainer], where: str
) -> dict[str, Any]:
    """Returns a dict with the option under the key that `key_of` returns.

    The dict is empty if polopt always behaves as the option says. It is also empty for the options
    in `RLLIB_IGNORED`, which do not affect learning. In the second case, this function logs a
    warning, unless the value agrees with polopt. An option with a dict as its value, such as
    `replay_buffer_config`, may become several options of polopt.

    Args:
        name: name of the option in polopt, or in any release of RLlib since 2.7.
        value: value of the option.
        preset: the trainer.
        where: name of the method or function that the user called, for messages.

    Raises:
        ConfigError: polopt does not have the option, or does not allow the value. The message says
            what to use instead.
        TypeError: neither RLlib nor polopt has such an option.
    """
    key = key_of(name, preset)
    if key == "replay_buffer_config" and "buffer_size" in defaults(preset):
        return of_replay_buffer(value, where, "num_replay_shards" in defaults(preset))
    if key == "exploration_config" and "epsilon" in defaults(preset):
        return of_exploration(value, where)
    if key in ("optimization_config", "optimization") and "actor_lr" in defaults(preset):
        return _of_optimization(value, where)
    if (found := accepted_option(key, value, defaults(preset), where)) is not None:
        return found
    if key == "hiddens" and "dueling" in defaults(preset):
        return {key: value}
    if key in defaults(preset) or key in _TOGETHER:
        return {key: value}
    if key == "_env_to_module_connector" and _only_flattens(value):
        return {}
    accepted = FIXED.get(key)
    if key in RLLIB_SILENT:
        return {}
    if key in RLLIB_IGNORED:
        if accepted is None or not _is_accepted(value, accepted):
            instead = instead_of(key) or _IGNORED
            if key == "num_learners" and isinstance(value, int) and value > 1:
                instead += (
                    ". For the batches of RLlib, multiply train_batch_size_per_learner and "
                    f"minibatch_size by {value}"
                )
            warn("%s: %s=%s is ignored. %s", where, name, shown(value), instead)
        return {}
    if accepted is not None:
        try:
            return without_fixed({key: value}, FIXED, (), where)
        except ConfigError as error:
            raise ConfigError(str(error).replace(repr(key), repr(name))) from None
    try:  # raises an error with the owner if the option belongs to another optimizer or policy
        Experiment.parse({"env": "CartPole-v1", key: value}, preset.preset)
    except ConfigError as error:
        if "is an option of" in str(error):
            said = str(error).replace(repr(key), repr(name))
            raise ConfigError(f"{where}: {said}") from None
    if instead := instead_of(key) or instead_of(name):
        raise ConfigError(f"{where}: option {name!r}: got {shown(value)}. {instead}")
    names = [*defaults(preset), *_aliases(preset), *_SAME, *(n for o in RLLIB for n in o.names)]
    raise TypeError(f"{where} got an unexpected keyword argument {name!r}{nearest(name, names)}")


def _only_flattens(connector: Any) -> bool:
    """Whether a function that makes connectors uses only RLlib's `FlattenObservations`. polopt
    flattens all observations anyway."""
    code = getattr(connector, "__code__", None)
    return code is not None and code.co_names == ("FlattenObservations",)


def changes(algorithm_config: Any) -> dict[str, Any]:
    """Returns the options of a config of RLlib that differ from the defaults of its class, under
    RLlib's names."""
    given, plain = algorithm_config.to_dict(), type(algorithm_config)().to_dict()
    found = {}
    for name, value in given.items():
        if name in _DERIVED or not differ(value, plain.get(name)):
            continue
        if name == "model" and isinstance(value, Mapping):
            value = {key: v for key, v in value.items() if differ(v, plain["model"].get(key))}
        found[_TAKEN_BY.get(name, name)] = value
    return found


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
    """Returns the config of a preset from options that `checked` returned.

    - `lr_schedule` and `entropy_coeff_schedule` replace `lr` and `entropy_coeff`, as on RLlib's old
      API stack.
    - `use_kl_loss=False` becomes `kl_coeff=0`. `use_kl_loss=True` keeps a given `kl_coeff`, or sets
      `kl_coeff` to RLlib's default.
    - `observation_filter="MeanStdFilter"` becomes `normalize_observations=True`.
    - `use_gae=False` sets `lambda` to 1, whatever its value.
    - `clip_rewards` without `normalize_rewards` becomes `clip_raw_rewards`.
    - `lr=None` of SAC becomes the preset's default of `lr`. SAC uses `lr` only for learning rates
      that are not set by another option.
    - `max_seq_len` of `model` is dropped without an LSTM, because it then has no effect in RLlib.
    - Callbacks that use single environments, as `base_env.get_sub_environments()` does, have
      `vectorization_mode="sync"`, as in RLlib.
    - A `custom_model` that is written for RLlib becomes `custom` with all other options of `model`
      as its `model_config`. `hiddens` of DQN become further layers of the network.
    - `min_time_s_per_iteration` and `min_sample_timesteps_per_iteration` of None become 0.
    - `vf_clip_param` of infinity and `evaluation_interval` of 0 become None. `sample_timeout_s` of
      None or infinity becomes 1e7 seconds.
    - If `train_batch_size` is given, `rollout_fragment_length="auto"` becomes the length for which
      one fragment of each environment fills the batch. A missing `rollout_fragment_length` becomes
      the same length if the preset's fragments would exceed the batch. The preset's default is used
      in both cases for A3C, and if `train_batch_size` is not given. With a replay buffer, "auto" is
      `n_step`.
    - `training_intensity=None` becomes the intensity with one batch for each round, in which every
      environment samples one fragment.
    - `target_network_update_timesteps` of 0 means that targets move with every update.
    - `target_network_update_freq` of APPO becomes the number of updates that RLlib makes in this
      number of its units.
    - In DD-PPO, `train_batch_size` is the batch of one worker. The batch consists of one fragment
      of each environment of the worker. With a number for `rollout_fragment_length`,
      `train_batch_size` has no effect.

    Raises:
        ConfigError: polopt does not allow a value.
    """
    options, known = dict(given), defaults_of_preset(preset)
    for schedule, key in (("lr_schedule", "lr"), ("entropy_coeff_schedule", "entropy_coeff")):
        value = options.pop(schedule, None)
        if value is not None:
            options[key] = value
    use_kl_loss = options.pop("use_kl_loss", None)
    if use_kl_loss is not None and "kl_coeff" in known:
        plain = 1.0 if _UPDATES in known else _KL_COEFF  # APPO has another default
        options["kl_coeff"] = options.get("kl_coeff", plain) if use_kl_loss else 0.0
    elif use_kl_loss:
        raise ConfigError(
            f"{where}: got use_kl_loss=True, but the policy of this preset has no KL loss"
        )
    observation_filter = options.pop("observation_filter", "NoFilter")
    if observation_filter in ("MeanStdFilter", "ConcurrentMeanStdFilter"):
        options["normalize_observations"] = True
    elif observation_filter not in (None, "NoFilter"):
        without_fixed({"observation_filter": observation_filter}, FIXED, (), where)
    if options.get("clip_rewards") in (None, False):
        options.pop("clip_rewards", None)
    elif not options.get("normalize_rewards"):  # else the bound of normalised rewards
        limit = options.pop("clip_rewards")
        options["clip_raw_rewards"] = "sign" if limit is True else limit
    if torch_options := options.pop("torch_optimizer_options", None):
        raise ConfigError(
            f"{where}: optimizer={shown(torch_options)}. Set the options of the torch optimizer "
            "with torch_optimizer, adam_epsilon, rmsprop_alpha and rmsprop_epsilon"
        )
    if "actor_lr" in known and options.get("lr", 0.0) is None:
        del options["lr"]  # RLlib requires `lr=None` together with `actor_lr`
    if options.get("vf_clip_param") == math.inf:
        options["vf_clip_param"] = None
    for limit in ("min_time_s_per_iteration", "min_sample_timesteps_per_iteration"):
        if options.get(limit, 0) is None:
            options[limit] = 0
    if options.get("evaluation_interval") == 0:
        options["evaluation_interval"] = None
    if "worker_timeout_s" in options and options["worker_timeout_s"] in (None, math.inf):
        options["worker_timeout_s"] = _NO_LIMIT_S
    resolve_accepted(options, known, where)
    if reaches_environments(options.get("callbacks")):
        options.setdefault("vectorization_mode", "sync")
    if options.get("model") is not None:
        model = options["model"] = network_options(options["model"])
        if isinstance(model, dict) and not model.get("use_lstm"):
            model.pop("max_seq_len", None)
        if isinstance(model, dict) and "grid_search" not in model:
            model = options["model"] = accepted_model(model, where)
        if isinstance(model, dict) and model.keys() & {"custom", "custom_model"}:
            from polopt.rllib.custom_models import with_custom_model  # torch is slow to import

            has_q, has_critics = "dueling" in known, "actor_lr" in known
            model = with_custom_model(model, options.get("hiddens"), has_q, has_critics, where)
            options["model"] = model
            if "q_hiddens" in model.get("custom_options", {}):
                options.pop("hiddens", None)
    if options.get("hiddens") is not None:
        options["model"] = _with_hiddens(options["hiddens"], options.get("model"), where)
    options.pop("hiddens", None)
    _resolve_evaluation(options, where)
    _resolve_batch(options, known, where)
    _resolve_intensity(options, known, where)
    if _TIMESTEPS in known and type(options.get(_TIMESTEPS)) is int and not options[_TIMESTEPS]:
        options |= {_UPDATES: 1, _TIMESTEPS: None}
    if _UPDATES in options and _TIMESTEPS not in known:
        options[_UPDATES] = _updates_of_appo(options, known, where)
    return options


def _with_hiddens(hiddens: Any, model: Any, where: str) -> Any:
    """Appends RLlib's layers of DQN's value and advantages to the hidden layers of the network."""
    model = model or {}
    if not isinstance(hiddens, list | tuple) or not isinstance(model, Mapping):
        raise ConfigError(f"{where}: hiddens={shown(hiddens)}. Allowed: a list of widths")
    layers = model.get("fcnet_hiddens", [256, 256])
    if not isinstance(layers, list | tuple) or model.keys() & {"custom", "custom_model"}:
        raise ConfigError(
            f"{where}: hiddens={shown(hiddens)}. Instead, list all layers in fcnet_hiddens of model"
        )
    return {**model, "fcnet_hiddens": [*layers, *hiddens]}


def _resolve_intensity(options: dict[str, Any], known: Mapping[str, Any], where: str) -> None:
    if options.get("training_intensity", 1.0) is not None:
        return
    keys = ("train_batch_size", "rollout_fragment_length", "num_envs_per_worker", "num_workers")
    batch, *sizes = [options.get(key, known[key]) for key in keys]
    if "num_replay_shards" in known or not all(isinstance(size, int) for size in (batch, *sizes)):
        raise ConfigError(
            f"{where}: training_intensity=None. polopt needs the number of rows learned per row "
            "sampled, because the learner does not take turns with the samplers, or Tune chooses a "
            f"size. The preset has training_intensity={known['training_intensity']:g}"
        )
    options["training_intensity"] = batch / math.prod(max(size, 1) for size in sizes)


def _updates_of_appo(options: Mapping[str, Any], known: Mapping[str, Any], where: str) -> Any:
    """Returns the number of updates between two moves of APPO's target network. In RLlib, `freq`
    counts units of 16 updates, each with a whole batch. polopt makes one update for each
    minibatch."""
    freq = options[_UPDATES]
    batch, minibatch = (
        options.get(key, known[key]) for key in ("train_batch_size", "sgd_minibatch_size")
    )
    if isinstance(freq, bool) or not isinstance(freq, int | float):
        return freq  # Tune chooses it, or the preset refuses it
    if not 0.0 < freq < math.inf or not isinstance(minibatch, int | None):
        raise ConfigError(
            f"{where}: {_UPDATES}={shown(freq)}. Allowed: a number above 0, in units of "
            f"{_APPO_UNIT} batches, if the size of minibatches is also a number"
        )
    minibatches = math.ceil(batch / minibatch) if minibatch else 1
    return max(1, round(freq * _APPO_UNIT * minibatches))


def network_options(given: Any) -> Any:
    """Returns the options of a network from a dict or from RLlib's `DefaultModelConfig`. From a
    `DefaultModelConfig`, takes only the options that differ from its defaults."""
    if isinstance(given, Mapping):
        return dict(given)
    fields = getattr(given, "__dataclass_fields__", None)
    if fields is None:
        return given
    plain = type(given)()
    return {
        name: getattr(given, name)
        for name in fields
        if getattr(given, name) != getattr(plain, name)
    }


def _resolve_evaluation(options: dict[str, Any], where: str) -> None:
    parallel = options.pop("evaluation_parallel_to_training", None)
    beside = bool(options.get("evaluation_num_workers", 0))
    if parallel is not None and parallel != beside:
        warn(
            "%s: evaluation_parallel_to_training=%s is ignored. Evaluation runs during training if "
            "evaluation_num_env_runners is 1 or more, and between iterations if it is 0",
            where,
            parallel,
        )
    if options.get("evaluation_duration") == "auto":
        warn("%s: evaluation_duration='auto' is ignored. The default of 10 episodes is used", where)
        del options["evaluation_duration"]
    if options.get("evaluation_interval") is None:  # RLlib then ignores the number of workers
        options.pop("evaluation_num_workers", None)
    settings = options.get("evaluation_config")
    if settings is None:
        options.pop("evaluation_config", None)
    else:
        options["evaluation_config"] = {
            key: value for key, value in dict(settings).items() if not _is_of_evaluation(key)
        }


def _is_of_evaluation(key: str) -> bool:
    return key in _OF_EVALUATION or (key in RLLIB_IGNORED and key != "explore")


#: Keys of RLlib's `evaluation_config` that are ignored, because they do not change how polopt plays
#: evaluation episodes.
_OF_EVALUATION = ("in_evaluation", "evaluation_interval", "num_env_runners", "num_workers")


def _resolve_batch(options: dict[str, Any], known: Mapping[str, Any], where: str) -> None:
    fragment = options.get("rollout_fragment_length")
    if fragment == "auto":
        fragment = options.pop("rollout_fragment_length", None)
    if "buffer_size" in known:  # `train_batch_size` is the number of rows that an update draws
        n_step = options.get("n_step", known["n_step"])
        if fragment == "auto":
            longest = n_step if isinstance(n_step, int) else n_step[-1]
            options["rollout_fragment_length"] = longest
        return
    batch = options.get("train_batch_size")
    if "train_batch_size" not in known and batch is not None:
        del options["train_batch_size"]
        if "keep_local_weights_in_sync" not in known:
            warn(
                "%s: train_batch_size=%s is ignored. A gradient is computed from one fragment, "
                "which has rollout_fragment_length steps of each environment of a worker",
                where,
                shown(batch),
            )
            return
        environments = options.get("num_envs_per_worker", known["num_envs_per_worker"])
        sizes_known = all(isinstance(size, int) for size in (fragment, environments, batch))
        if sizes_known and fragment * environments != batch:
            warn(
                "%s: train_batch_size=%s is ignored, because rollout_fragment_length=%s is given. "
                "Each worker learns from one fragment of each of its environments",
                where,
                shown(batch),
                shown(fragment),
            )
    if fragment not in (None, "auto") or not isinstance(batch, int) or not batch:
        return
    sizes = {
        key: options.get(key, known[key])
        for key in ("num_workers", "num_envs_per_worker", "rollout_fragment_length")
    }
    if not all(isinstance(size, int) for size in sizes.values()):
        return  # Tune will choose a size
    environments = sizes["num_envs_per_worker"]
    if "train_batch_size" in known:
        environments *= max(sizes["num_workers"], 1)
    one_each = max(1, math.ceil(batch / environments))
    too_long = one_each < sizes["rollout_fragment_length"]
    if fragment == "auto" or "train_batch_size" not in known or too_long:
        options["rollout_fragment_length"] = one_each
