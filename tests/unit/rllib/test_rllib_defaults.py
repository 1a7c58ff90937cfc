"""The defaults of RLlib's algorithms, as they are written in Ray's releases.

`TABLE` was read from these files. Where a class serves several releases with different defaults,
the table has the value of the newest release that has the algorithm, and docs/migration-rllib.md
lists the others.
- names that end in `Trainer`: Ray 1.13.0, `DEFAULT_CONFIG` of `rllib/agents/ppo/ppo.py`,
  `ppo/ddppo.py`, `ppo/appo.py`, `impala/impala.py`, `dqn/simple_q.py`, `dqn/dqn.py`,
  `dqn/apex.py`, `pg/pg.py`, `sac/sac.py`, `a3c/a3c.py`, `a3c/a2c.py` and `trainer_config.py`
- A2C, A3C, ApexDQN, DDPPO, PG: Ray 2.7.0, `rllib/algorithms/NAME/NAME.py`
- APPO, DQN, IMPALA, PPO, SAC: Ray 2.40.0 and 2.60.0, `rllib/algorithms/NAME/NAME.py`
"""

from __future__ import annotations

from typing import Any

import pytest

from polopt.common.config import differ
from polopt.rllib.algorithm import algorithm_of
from polopt.rllib.rllib_defaults import ALGORITHMS
from polopt.rllib.rllib_options import default_options, flat_config

_ALL = {
    "gamma": 0.99,
    "num_envs_per_worker": 1,
    "clip_actions": False,
    "batch_mode": "truncate_episodes",
}
_PPO = {
    "lr": 5e-5, "lambda": 1.0, "train_batch_size": 4000, "sgd_minibatch_size": 128,
    "num_sgd_iter": 30, "clip_param": 0.3, "vf_clip_param": 10.0, "vf_loss_coeff": 1.0,
    "entropy_coeff": 0.0, "kl_coeff": 0.2, "kl_target": 0.01, "grad_clip": None, "num_workers": 2,
    "use_gae": True, "rollout_fragment_length": "auto",
}  # fmt: skip
_DDPPO = {
    "lr": 5e-5, "lambda": 1.0, "rollout_fragment_length": 100, "num_envs_per_worker": 5,
    "sgd_minibatch_size": 50, "num_sgd_iter": 10, "kl_coeff": 0.0, "clip_param": 0.3,
    "vf_clip_param": 10.0, "keep_local_weights_in_sync": True, "num_workers": 2,
}  # fmt: skip
_IMPALA = {
    "lr": 5e-4, "train_batch_size": 500, "rollout_fragment_length": 50, "grad_clip": 40.0,
    "vf_loss_coeff": 0.5, "entropy_coeff": 0.01, "min_time_s_per_iteration": 10, "num_sgd_iter": 1,
    "vtrace_clip_rho_threshold": 1.0, "vtrace_clip_pg_rho_threshold": 1.0, "num_workers": 2,
    "torch_optimizer": "adam", "broadcast_interval": 1,
}  # fmt: skip
_APPO = {"clip_param": 0.4, "lambda": 1.0, "kl_target": 0.01, "target_network_update_freq": 2}
_DQN = {
    "lr": 5e-4, "train_batch_size": 32, "rollout_fragment_length": "auto", "n_step": 1,
    "target_network_update_freq": 500, "grad_clip": 40.0, "adam_epsilon": 1e-8, "num_workers": 0,
    "dueling": True, "double_q": True, "training_intensity": None, "buffer_size": 50_000,
    "learning_starts": 1000, "prioritized_replay_alpha": 0.6, "prioritized_replay_beta": 0.4,
    "prioritized_replay_eps": 1e-6, "min_sample_timesteps_per_iteration": 1000,
    "min_time_s_per_iteration": 0.0, "epsilon": [(0, 1.0), (10_000, 0.05)],
}  # fmt: skip
_OLD_DQN = {
    "rollout_fragment_length": 4, "min_time_s_per_iteration": 1.0,
    "epsilon": [(0, 1.0), (10_000, 0.02)],
}  # fmt: skip
_APEX = {
    "n_step": 3, "buffer_size": 2_000_000, "learning_starts": 50_000, "train_batch_size": 512,
    "rollout_fragment_length": 50, "target_network_update_freq": 500_000,
    "min_sample_timesteps_per_iteration": 25_000, "min_time_s_per_iteration": 30,
    "training_intensity": 1.0, "num_workers": 4,  # RLlib: 32
}  # fmt: skip
_SAC = {
    "lr": 3e-4, "tau": 5e-3, "initial_alpha": 1.0, "target_entropy": "auto", "n_step": 1,
    "train_batch_size": 256, "rollout_fragment_length": "auto", "target_network_update_freq": 0,
    "buffer_size": 1_000_000, "learning_starts": 1500, "grad_clip": None, "num_workers": 0,
    "training_intensity": None, "min_sample_timesteps_per_iteration": 100,
    "min_time_s_per_iteration": 1.0,
}  # fmt: skip
_A3C = {
    "lr": 1e-4, "lambda": 1.0, "grad_clip": 40.0, "vf_loss_coeff": 0.5, "entropy_coeff": 0.01,
    "rollout_fragment_length": 10, "min_time_s_per_iteration": 5, "num_workers": 2,
}  # fmt: skip
_A2C = {"rollout_fragment_length": "auto", "train_batch_size": 32, "min_time_s_per_iteration": 10}
_PG = {
    "lr": 4e-4, "train_batch_size": 200, "rollout_fragment_length": "auto", "use_critic": False,
    "lambda": 1.0, "entropy_coeff": 0.0, "grad_clip": None, "num_workers": 0,
    "min_time_s_per_iteration": 0.0, "min_sample_timesteps_per_iteration": 0,
}  # fmt: skip
_OLD_A2C = {"rollout_fragment_length": 20, "train_batch_size": 200}
TABLE: dict[str, dict[str, Any]] = {
    "A2C": _A3C | _A2C,
    "A2CTrainer": _A3C | _A2C | _OLD_A2C,
    "A3C": _A3C,
    "A3CTrainer": _A3C,
    "APPO": _IMPALA | _APPO,
    "APPOTrainer": _IMPALA | _APPO | {"target_network_update_freq": 1 / 16},  # every batch
    "ApexDQN": _DQN | _APEX,
    "ApexTrainer": _DQN | _OLD_DQN | _APEX,
    "DDPPO": _DDPPO,
    "DDPPOTrainer": _DDPPO,
    "DQN": _DQN,
    "DQNTrainer": _DQN | _OLD_DQN,
    "IMPALA": _IMPALA,
    "ImpalaTrainer": _IMPALA,
    "PG": _PG,
    "PGTrainer": _PG | {"rollout_fragment_length": 200},
    "PPO": _PPO,
    "PPOTrainer": _PPO,
    "SAC": _SAC,
    "SACTrainer": _SAC,
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_defaults_are_those_of_the_release(name: str) -> None:
    found = default_options(algorithm_of(name))
    expected = _ALL | TABLE[name]
    wrong = {key: found.get(key) for key in expected if differ(found.get(key), expected[key])}
    assert not wrong, f"expected { ({key: expected[key] for key in wrong}) }"
    assert list(found["model"]["fcnet_hiddens"]) == [256, 256]
    assert found["model"]["fcnet_activation"] == ("relu" if name.startswith("SAC") else "tanh")


@pytest.mark.parametrize(
    ("name", "given", "fragment", "intensity"),
    [
        ("DQN", {}, 1, 32.0),  # one batch of 32 rows for each step
        ("DQN", {"n_step": 3}, 3, 32 / 3),
        ("DQN", {"n_step": (1, 5)}, 5, 32 / 5),
        ("DQN", {"rollout_fragment_length": 4}, 4, 8.0),
        ("DQNTrainer", {}, 4, 8.0),
        ("SAC", {}, 1, 256.0),
    ],
)
def test_fragment_of_replay_is_as_long_as_a_row(
    name: str, given: dict[str, Any], fragment: int, intensity: float
) -> None:
    """RLlib since 2.0: `get_rollout_fragment_length` returns `n_step` for "auto"."""
    config = flat_config(given, algorithm_of(name), name)
    assert (config["rollout_fragment_length"], config["training_intensity"]) == (
        fragment,
        pytest.approx(intensity),
    )


def test_each_shard_of_apex_has_a_worker() -> None:
    """In RLlib, a script may lower `num_workers` alone."""
    for workers, shards in ((1, 1), (4, None), (50, None)):
        config = flat_config({"num_workers": workers}, algorithm_of("ApexTrainer"), "Apex")
        assert config.get("num_replay_shards") == shards
    given = {"num_workers": 1, "num_replay_shards": 3}
    assert flat_config(given, algorithm_of("ApexTrainer"), "Apex")["num_replay_shards"] == 3


def test_coefficient_of_the_kl_loss() -> None:
    for name, value in (("PPO", 0.2), ("APPO", 1.0)):
        assert flat_config({"use_kl_loss": True}, algorithm_of(name), name)["kl_coeff"] == value


def test_defaults_of_one_algorithm_start_another() -> None:
    """Scripts for A2C began with `a3c.DEFAULT_CONFIG`."""
    a3c, a2c = algorithm_of("A3CTrainer"), algorithm_of("A2CTrainer")
    config = a3c.DEFAULT_CONFIG.copy()
    config["lr"], config["grads_per_step"] = 0.1, 7
    found = config.without_defaults_that(a2c)
    assert found["lr"] == 0.1
    assert found["rollout_fragment_length"] == 10, "as in RLlib"
    assert "stale_gradients" not in found
    assert found["grads_per_step"] == 7, "A2CTrainer refuses it, because the user has set it"
