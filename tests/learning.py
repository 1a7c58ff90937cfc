"""Configs for CartPole-v1, and the training loop of the learning tests."""

from __future__ import annotations

from typing import Any

from polopt.trainers.trainer import PolicyOptimizerTrainer

#: Configs that solve CartPole within the step budget.
A3C = {
    "policy": "a3c",
    "rollout_fragment_length": 20,
    "lr": 1e-3,
    "lambda": 0.95,
    "grad_clip": 5.0,
}
PPO = {
    "policy": "ppo",
    "rollout_fragment_length": 64,
    "lr": [[0, 2e-3], [150_000, 2e-4]],
    "entropy_coeff": 0.0,
    "num_sgd_iter": 6,
    "sgd_minibatch_size": 128,
}
#: The config `PPO` for optimizers that apply each gradient separately. The learning rate is
#: smaller, and there are fewer epochs.
PPO_BY_GRADIENTS = {**PPO, "num_sgd_iter": 4, "lr": [[0, 1e-3], [300_000, 2e-4]]}


def train_cartpole(options: dict[str, Any], budget: int = 600_000, goal: float = 400.0) -> float:
    """Returns the best mean return over 100 episodes within `budget` environment steps.

    Training stops once the mean return reaches `goal`.
    """
    optimizer = options.get("optimizer")
    name = optimizer["name"] if isinstance(optimizer, dict) else optimizer
    by_gradients = PPO_BY_GRADIENTS if name == "async_gradients" else PPO
    config = {
        "env": "CartPole-v1",
        "num_envs_per_worker": 8,
        "num_cpus_per_worker": 0.5,
        "seed": 3,
        **by_gradients,
        **options,
    }
    if "num_workers" not in config:
        config["num_workers"] = 2
    trainer = PolicyOptimizerTrainer(config)
    best, sampled = 0.0, 0
    try:
        while sampled < budget and best < goal:
            result = trainer.train()
            sampled = result["num_env_steps_sampled_lifetime"]
            if result["env_runners"]["num_episodes_lifetime"] >= 100:
                best = max(best, result["env_runners"]["episode_return_mean"])
        print(f"{options}: {best:.0f} after {sampled} steps, {result['time_total_s']:.0f} s")
        return best
    finally:
        trainer.stop()


#: One worker of each kind, and short iterations.
TINY: dict[str, Any] = {
    "env": "CartPole-v1",
    "policy": "a2c",
    "num_workers": 1,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 16,
    "min_sample_timesteps_per_iteration": 64,
    "min_time_s_per_iteration": 0.05,
    "model": {"fcnet_hiddens": [8]},
    "seed": 1,
    "evaluation_interval": 1,
    "evaluation_duration": 3,
    "evaluation_num_workers": 1,
}
