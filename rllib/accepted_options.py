"""Options of RLlib that become other options of polopt."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from polopt.common.config import ConfigError, shown

logger = logging.getLogger("polopt")
_said: set[str] = set()
_once = contextvars.ContextVar("_once", default=False)


@contextmanager
def said_once() -> Iterator[None]:
    """A context in which a warning of `warn` is logged only if this process has not logged the
    same warning before. A config is translated several times."""
    token = _once.set(True)
    try:
        yield
    finally:
        _once.reset(token)


def warn(text: str, *values: Any) -> None:
    """Logs a warning."""
    message = text % values
    if not (_once.get() and message in _said):
        logger.warning("%s", message)
    _said.add(message)


#: RLlib's classes that sample as polopt does.
_RUNNERS = (
    *("EnvRunner", "SingleAgentEnvRunner", "MultiAgentEnvRunner", "RolloutWorker"),
    "WorkerView",  # the name of these classes in `polopt.rllib`
)
#: Options that `resolve_accepted` translates, because their meaning depends on other options.
_OF_MODEL = ("vf_share_layers", "max_seq_len")
_OF_CRITICS = ("Q_model", "q_model_config", "policy_model", "policy_model_config")
_OF_EPSILON = {
    "exploration_initial_eps": 1.0,
    "exploration_final_eps": 0.02,
    "initial_epsilon": 1.0,
    "final_epsilon": 0.02,
    "exploration_fraction": 0.1,
    "schedule_max_timesteps": 100_000,
    "epsilon_timesteps": None,
}
#: Other names of activations.
_ACTIVATIONS = {"swish": "silu", "none": "linear"}
#: Parts of keys of `model` that set initial weights.
_INITIAL = ("_initializer", "_initializer_config", "_initializer_kwargs")


def accepted_option(
    key: str, value: Any, known: Mapping[str, Any], where: str
) -> dict[str, Any] | None:
    """Returns the options of polopt for an option of RLlib. None means that the option has none of
    the names of this module.

    Args:
        key: the name of the option in RLlib.
        value: the value.
        known: the options of the preset and their defaults.
        where: name of the method that the user called, for messages.

    Raises:
        ConfigError: polopt does not allow the value.
    """
    if key in known:
        return None
    if key in ("env_runner_cls", "worker_cls"):
        if value is None or getattr(value, "__name__", "") in _RUNNERS:
            return {}
        return None
    if key == "evaluation_num_episodes":
        return {"evaluation_duration": value}
    if key == "remote_worker_envs":
        return {"vectorization_mode": "async"} if value else {}
    if key == "use_gae" and "lambda" in known and isinstance(value, bool):
        return {key: value}
    if key == "parameter_noise" and not value:
        return {}
    if key == "exploration_config" and isinstance(value, Mapping):
        return _of_sampling(value, known)
    if key in _OF_MODEL or (key in _OF_CRITICS and "actor_lr" in known):
        return {key: value}
    return {key: value} if key in _OF_EPSILON and "epsilon" in known else None


def _of_sampling(config: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any] | None:
    """Translates RLlib's default exploration. Returns None for other kinds."""
    kind = config.get("type", "StochasticSampling")
    name = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
    steps = config.get("random_timesteps", 0)
    is_default = name == "StochasticSampling" and config.keys() <= {"type", "random_timesteps"}
    if not is_default or "epsilon" in known or (steps and "random_timesteps" not in known):
        return None
    return {"random_timesteps": steps} if "random_timesteps" in config and steps else {}


def resolve_accepted(options: dict[str, Any], known: Mapping[str, Any], where: str) -> None:
    """Translates the options that `accepted_option` has kept under RLlib's names, in place.

    Raises:
        ConfigError: the actor and the critics of SAC have different networks.
    """
    if options.pop("use_gae", True) is False:
        options["lambda"] = 1.0  # the advantage is the discounted return minus the value
    _resolve_epsilon(options, known)
    if "epsilon" in known and isinstance(options.get("model"), Mapping):
        model = dict(options["model"])  # in RLlib 2.9 to 2.30, `epsilon` of DQN is in `model`
        options |= {"epsilon": model.pop("epsilon")} if "epsilon" in model else {}
        options["model"] = model
    critics = {key: options.pop(key) for key in _OF_CRITICS if key in options}
    models = [dict(value) for value in critics.values() if value]
    if models:
        if any(one != models[0] for one in models):
            raise ConfigError(
                f"{where}: {' and '.join(critics)} differ. Allowed: the same layers, because the "
                "networks of SAC's actor and critics have the same hidden layers"
            )
        options["model"] = {**(options.get("model") or {}), **models[0]}
    for key in _OF_MODEL:
        if key in options:
            options["model"] = {key: options.pop(key), **(options.get("model") or {})}


def _resolve_epsilon(options: dict[str, Any], known: Mapping[str, Any]) -> None:
    given = {key: options.pop(key) for key in _OF_EPSILON if key in options}
    if not given or "epsilon" in options or "epsilon" not in known:
        return
    values = {**_OF_EPSILON, **given}
    first = given.get("initial_epsilon", values["exploration_initial_eps"])
    last = given.get("final_epsilon", values["exploration_final_eps"])
    steps = values["epsilon_timesteps"]
    if steps is None:
        steps = int(values["exploration_fraction"] * values["schedule_max_timesteps"])
    options["epsilon"] = [[0, first], [steps, last]]


def accepted_model(model: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the options of a network without those that change nothing or only the initial
    weights.

    Raises:
        ConfigError: `head_fcnet_hiddens` have another activation than `fcnet_hiddens`.
    """
    found = dict(model)
    for key in [key for key in found if key.endswith(_INITIAL)]:
        value = found.pop(key)
        if value:
            warn(
                "%s: model: %s=%s is ignored. The initial weights of polopt are orthogonal",
                where,
                key,
                shown(value),
            )
    if "fcnet_activation" in found:
        name = str(found["fcnet_activation"]).lower()
        if not isinstance(found["fcnet_activation"], Mapping):  # a search space of Tune
            found["fcnet_activation"] = _ACTIVATIONS.get(name, name)
    heads = found.pop("head_fcnet_hiddens", None)
    activation = found.pop("head_fcnet_activation", "relu")
    if heads:
        layers = "post_fcnet_hiddens" if found.get("conv_filters") else "fcnet_hiddens"
        expected = "relu" if found.get("conv_filters") else found.get("fcnet_activation", "tanh")
        if activation != expected:
            raise ConfigError(
                f"{where}: model: head_fcnet_hiddens={shown(heads)} with the activation "
                f"{activation!r}. Allowed: the activation of the layers before, {expected!r}"
            )
        before = found.get(layers) or ([] if found.get("conv_filters") else [256, 256])
        found[layers] = [*before, *heads]
    return found
