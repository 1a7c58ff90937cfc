"""`sb3_defaults`: hyperparameters of Stable-Baselines3 as options of polopt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polopt.common.config import ConfigError, nearest, shown
from polopt.rllib.other_libraries import instead_of

#: For each algorithm, the defaults of Stable-Baselines3 2.9 under its own names.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "PPO": {
        "learning_rate": 3e-4,
        "n_steps": 2048,
        "batch_size": 64,
        "n_epochs": 10,
        "gae_lambda": 0.95,
        "clip_range": 0.2,
        "clip_range_vf": None,
        "normalize_advantage": True,
        "target_kl": None,
    },
    "A2C": {
        "learning_rate": 7e-4,
        "n_steps": 5,
        "gae_lambda": 1.0,
        "rms_prop_eps": 1e-5,
        "use_rms_prop": True,
        "normalize_advantage": False,
    },
    "DQN": {
        "learning_rate": 1e-4,
        "batch_size": 32,
        "tau": 1.0,
        "train_freq": 4,
        "target_update_interval": 10_000,
        "exploration_fraction": 0.1,
        "exploration_initial_eps": 1.0,
        "exploration_final_eps": 0.05,
        "max_grad_norm": 10.0,
    },
    "SAC": {
        "learning_rate": 3e-4,
        "batch_size": 256,
        "tau": 0.005,
        "train_freq": 1,
        "ent_coef": "auto",
        "target_update_interval": 1,
        "target_entropy": "auto",
    },
    "TD3": {
        "learning_rate": 1e-3,
        "batch_size": 256,
        "tau": 0.005,
        "train_freq": 1,
        "policy_delay": 2,
        "target_policy_noise": 0.2,
        "target_noise_clip": 0.5,
    },
}
_ON_POLICY = {"gamma": 0.99, "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5}
_OFF_POLICY = {"buffer_size": 1_000_000, "learning_starts": 100, "gamma": 0.99, "gradient_steps": 1}
_HIDDENS = {"SAC": [256, 256], "TD3": [400, 300], "DDPG": [400, 300]}
_RENAMED = {
    "gae_lambda": "lambda",
    "n_epochs": "num_sgd_iter",
    "clip_range": "clip_param",
    "clip_range_vf": "vf_clip_range",
    "max_grad_norm": "grad_clip",
    "normalize_advantage": "standardize_advantages",
    "target_kl": "kl_stop",
    "target_policy_noise": "target_noise",
}
_SAME = (
    *("gamma", "buffer_size", "learning_starts", "tau", "policy_delay", "target_noise_clip"),
    *("target_entropy", "seed"),
)


def sb3_defaults(
    algorithm: str, *, n_envs: int = 1, total_timesteps: int | None = None, **options: Any
) -> dict[str, Any]:
    """Returns the hyperparameters of an algorithm of Stable-Baselines3 as options of polopt.

        trainer = polopt.SyncPPO(env="CartPole-v1", **polopt.sb3_defaults("PPO", n_steps=512))

    The presets for PPO, A2C, DQN, SAC, TD3 and DDPG are `SyncPPO`, `A2C`, `DQN`, `SAC`, `TD3` and
    `TD3`. The environments run in the driver's process, and one `train()` is one step of the
    optimizer, such as one rollout of PPO. For DDPG, the result is TD3 without its delay and its
    noise, but with two critics.

    Args:
        algorithm: the name of the algorithm in Stable-Baselines3.
        n_envs: the number of environments.
        total_timesteps: the number of environment steps of the run, which `learn` gets. Needed for
            the exploration of DQN, and for a learning rate that is a function.
        options: arguments of the algorithm in Stable-Baselines3 that differ from its defaults.

    Raises:
        ConfigError: the algorithm or an option is not known, or polopt cannot do what the option
            says. The message says what to use instead.
    """
    base = "TD3" if algorithm == "DDPG" else algorithm
    if base not in _DEFAULTS:
        known = [*_DEFAULTS, "DDPG"]
        raise ConfigError(
            f"sb3_defaults({algorithm!r}){nearest(algorithm, known)}. Allowed: {', '.join(known)}"
        )
    is_on_policy = base in ("PPO", "A2C")
    values: dict[str, Any] = {**(_ON_POLICY if is_on_policy else _OFF_POLICY), **_DEFAULTS[base]}
    if algorithm == "DDPG":
        values |= {"policy_delay": 1, "target_policy_noise": 0.0}
    extra = ("policy_kwargs", "seed", "action_noise", "device", "verbose", "tensorboard_log")
    for name in options:
        if name not in values and name not in extra:
            instead = instead_of(name) or f"Allowed: {', '.join([*values, *extra])}"
            raise ConfigError(f"sb3_defaults({algorithm!r}): option {name!r}. {instead}")
    values |= options
    made: dict[str, Any] = {"num_workers": 0, "num_envs_per_worker": n_envs}
    made["min_sample_timesteps_per_iteration"] = 0
    made |= {key: values[key] for key in _SAME if key in values}
    made |= {ours: values[theirs] for theirs, ours in _RENAMED.items() if theirs in values}
    made["lr"] = _rate(values["learning_rate"], total_timesteps)
    made["model"] = _model(values.get("policy_kwargs") or {}, base)
    if is_on_policy:
        # In A2C of polopt, the coefficient multiplies half the squared error.
        factor = 2.0 if base == "A2C" else 1.0
        made |= {
            "rollout_fragment_length": values["n_steps"],
            "entropy_coeff": values["ent_coef"],
            "vf_loss_coeff": factor * values["vf_coef"],
            "normalize_actions": False,
        }
    if base == "PPO":
        made |= {"sgd_minibatch_size": values["batch_size"], "adam_epsilon": 1e-5}
        if values["target_kl"] is not None:
            made["kl_stop"] = 1.5 * values["target_kl"]
    elif base == "A2C":
        rms = {"torch_optimizer": "rmsprop", "rmsprop_epsilon": values["rms_prop_eps"]}
        made |= rms if values["use_rms_prop"] else {"adam_epsilon": 1e-5}
    else:
        made |= _replay(base, values, total_timesteps, n_envs)
    return made


def _replay(
    base: str, values: Mapping[str, Any], total_timesteps: int | None, n_envs: int
) -> dict[str, Any]:
    """Returns the options of replay, exploration and targets."""
    batch, frequency, updates = (
        values[key] for key in ("batch_size", "train_freq", "gradient_steps")
    )
    if not isinstance(frequency, int):
        raise ConfigError(
            f"sb3_defaults: train_freq={shown(frequency)}. Allowed: a number of steps"
        )
    updates = frequency * n_envs if updates == -1 else updates
    made = {
        "rollout_fragment_length": frequency,
        "train_batch_size": batch,
        "training_intensity": updates * batch / (frequency * n_envs),
        "prioritized_replay": False,
        "random_timesteps": values["learning_starts"],
    }
    if base == "DQN":
        if total_timesteps is None:
            raise ConfigError(
                "sb3_defaults('DQN') needs total_timesteps, because DQN of Stable-Baselines3 "
                "explores in a share of all steps"
            )
        last = max(1, round(values["exploration_fraction"] * total_timesteps))
        first_value, last_value = (
            values[f"exploration_{name}_eps"] for name in ("initial", "final")
        )
        return made | {
            "epsilon": [[0, first_value], [last, last_value]],
            "double_q": False,
            "dueling": False,
            "target_network_update_timesteps": values["target_update_interval"],
        }
    if base == "SAC":
        made["target_network_update_freq"] = values["target_update_interval"]
        coefficient = str(values["ent_coef"])
        if coefficient.startswith("auto"):
            made["initial_alpha"] = float(coefficient.partition("_")[2] or 1.0)
        else:
            made |= {"initial_alpha": float(coefficient), "target_entropy": None}
        return made
    noise = values.get("action_noise")
    made["exploration_noise"] = 0.0 if noise is None else _deviation(noise)
    return made


def _deviation(noise: Any) -> float:
    """Returns the standard deviation of a `NormalActionNoise`."""
    sigma = getattr(noise, "_sigma", None)
    numbers = set() if sigma is None else {float(one) for one in list(sigma)}
    if type(noise).__name__ != "NormalActionNoise" or len(numbers) != 1:
        raise ConfigError(
            f"sb3_defaults: action_noise={shown(noise)}. Allowed: a NormalActionNoise with one "
            "standard deviation for all actions"
        )
    return numbers.pop()


def _rate(rate: Any, total_timesteps: int | None) -> Any:
    """Returns a learning rate, or the schedule of a function of the remaining share of the run."""
    if not callable(rate):
        return rate
    if total_timesteps is None:
        raise ConfigError(
            "sb3_defaults: learning_rate is a function of the remaining share of the run, so "
            "total_timesteps is needed"
        )
    shares = [number / 20 for number in range(21)]
    return [[round(share * total_timesteps), float(rate(1.0 - share))] for share in shares]


def _model(policy_kwargs: Mapping[str, Any], base: str) -> dict[str, Any]:
    hiddens: Any = _HIDDENS.get(base, [64, 64])
    model: dict[str, Any] = {"fcnet_activation": "tanh" if base in ("PPO", "A2C") else "relu"}
    names = {"log_std_init": "initial_log_std", "squash_output": "squash_actions"}
    for name, value in policy_kwargs.items():
        if name == "net_arch":
            hiddens = value
        elif name == "activation_fn":
            model["fcnet_activation"] = getattr(value, "__name__", str(value)).lower()
        elif name in names:
            model[names[name]] = value
        elif name != "ortho_init":
            raise ConfigError(
                f"sb3_defaults: policy_kwargs: {name!r}. {instead_of(name) or 'Use model'}"
            )
    if isinstance(hiddens, Mapping):
        different = list(hiddens.values())
        if any(list(one) != list(different[0]) for one in different):
            raise ConfigError(
                f"sb3_defaults: net_arch={shown(hiddens)}. Allowed: the same layers for "
                f"{' and '.join(hiddens)}. For others, write a network: model={{'custom': ...}}"
            )
        hiddens = different[0]
    model["fcnet_hiddens"] = list(hiddens)
    return model
