"""The defaults of RLlib's algorithms where they differ from the defaults of polopt's presets.

A name that ends in `Trainer` has the defaults of releases up to 1.13. Any other name has the
defaults of the newest release with the algorithm: Ray 2.7 or 2.60. The table of these values, with
the files of Ray in which they are written, is `tests/unit/rllib/test_rllib_defaults.py`. Options
that polopt lacks are not listed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_NETWORK = {"fcnet_hiddens": [256, 256]}
#: Options of all algorithms. RLlib steps its environments one by one, so an environment with a
#: vector implementation of its own has the same steps as any other.
_ALL: dict[str, Any] = {
    "num_envs_per_worker": 1,
    "vectorization_mode": "sync",
    "min_sample_timesteps_per_iteration": 0,
    "clip_actions": False,
    "adam_epsilon": 1e-8,
    "clip_rewards": None,
}
_PPO: dict[str, Any] = {
    **_ALL,
    "lr": 5e-5,
    "lambda": 1.0,
    "train_batch_size": 4000,
    "rollout_fragment_length": "auto",
    "num_sgd_iter": 30,
    "clip_param": 0.3,
    "vf_loss_coeff": 1.0,
    "vf_clip_param": 10.0,
    "entropy_coeff": 0.0,
    "kl_coeff": 0.2,
    "grad_clip": None,
    "model": _NETWORK,
}
_DDPPO: dict[str, Any] = {
    **{key: value for key, value in _PPO.items() if key != "train_batch_size"},
    "num_envs_per_worker": 5,
    "rollout_fragment_length": 100,
    "sgd_minibatch_size": 50,
    "num_sgd_iter": 10,
    "kl_coeff": 0.0,
}
_A3C: dict[str, Any] = {
    **_ALL,
    "lr": 1e-4,
    "rollout_fragment_length": 10,
    "min_time_s_per_iteration": 5.0,
    "model": _NETWORK,
}
_A2C: dict[str, Any] = {
    **_A3C,
    "train_batch_size": 32,
    "rollout_fragment_length": "auto",
    "min_time_s_per_iteration": 10.0,
}
_PG: dict[str, Any] = {
    **_ALL,
    "num_workers": 0,
    "lr": 4e-4,
    "train_batch_size": 200,
    "rollout_fragment_length": "auto",
    "use_critic": False,
    "entropy_coeff": 0.0,
    "grad_clip": None,
    "model": _NETWORK,
}
_IMPALA: dict[str, Any] = {
    **_ALL,
    "lr": 5e-4,
    "torch_optimizer": "adam",
    "train_batch_size": 500,
    "rollout_fragment_length": 50,
    "min_time_s_per_iteration": 10.0,
    "model": _NETWORK,
}
_APPO: dict[str, Any] = {**_IMPALA, "target_network_update_freq": 2}
_DQN: dict[str, Any] = {
    **_ALL,
    "min_sample_timesteps_per_iteration": 1000,
    "target_network_update_timesteps": 500,
    "rollout_fragment_length": "auto",
    "training_intensity": None,
    "prioritized_replay": True,
    "final_prioritized_replay_beta": 0.4,
    "model": {**_NETWORK, "fcnet_activation": "tanh"},
}
_APEX: dict[str, Any] = {
    **_DQN,
    "min_sample_timesteps_per_iteration": 25_000,
    "min_time_s_per_iteration": 30.0,
    "target_network_update_timesteps": 500_000,
    "rollout_fragment_length": 50,
    "training_intensity": 1.0,
    "buffer_size": 2_000_000,
    "learning_starts": 50_000,
}
_SAC: dict[str, Any] = {
    **_ALL,
    "min_sample_timesteps_per_iteration": 100,
    "min_time_s_per_iteration": 1.0,
    "target_network_update_timesteps": 0,
    "rollout_fragment_length": "auto",
    "training_intensity": None,
    "learning_starts": 1500,
    "random_timesteps": 0,
}
_EPSILON = {"epsilon": [(0, 1.0), (10_000, 0.02)]}


class RLlibAlgorithm(NamedTuple):
    """An algorithm of RLlib.

    Attributes:
        preset: name of the preset in polopt.
        defaults: options whose defaults differ from the preset's. They have the keys and
            units of `translation.checked`.
    """

    preset: str
    defaults: dict[str, Any]


#: The algorithms by the names of their classes.
ALGORITHMS = {
    "A2C": RLlibAlgorithm("A2C", _A2C),
    "A2CTrainer": RLlibAlgorithm(
        "A2C", {**_A2C, "train_batch_size": 200, "rollout_fragment_length": 20}
    ),
    "A3C": RLlibAlgorithm("A3C", _A3C),
    "A3CTrainer": RLlibAlgorithm("A3C", _A3C),
    "APPO": RLlibAlgorithm("APPO", _APPO),
    "APPOTrainer": RLlibAlgorithm("APPO", {**_APPO, "target_network_update_freq": 1 / 16}),
    "ApexDQN": RLlibAlgorithm("ApexDQN", _APEX),
    "ApexTrainer": RLlibAlgorithm("ApexDQN", {**_APEX, **_EPSILON}),
    "DDPPO": RLlibAlgorithm("DDPPO", _DDPPO),
    "DDPPOTrainer": RLlibAlgorithm("DDPPO", _DDPPO),
    "DQN": RLlibAlgorithm("DQN", _DQN),
    "DQNTrainer": RLlibAlgorithm(
        "DQN",
        {**_DQN, **_EPSILON, "rollout_fragment_length": 4, "min_time_s_per_iteration": 1.0},
    ),
    "IMPALA": RLlibAlgorithm("IMPALA", _IMPALA),
    "ImpalaTrainer": RLlibAlgorithm("IMPALA", _IMPALA),
    "PG": RLlibAlgorithm("A2C", _PG),
    "PGTrainer": RLlibAlgorithm("A2C", {**_PG, "rollout_fragment_length": 200}),
    "PPO": RLlibAlgorithm("SyncPPO", _PPO),
    "PPOTrainer": RLlibAlgorithm("SyncPPO", _PPO),
    "SAC": RLlibAlgorithm("SAC", _SAC),
    "SACTrainer": RLlibAlgorithm("SAC", _SAC),
}
#: The names under which RLlib registers its algorithms with Tune.
TUNE_NAMES = {"APEX": "ApexDQN", "Impala": "IMPALA"}
TUNE_NAMES |= {name: name for name in ALGORITHMS if not name.endswith("Trainer")}
