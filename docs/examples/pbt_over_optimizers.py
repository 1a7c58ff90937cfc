"""Population-based training that changes the policy optimizer of a run, and its learning rate.

    python docs/examples/pbt_over_optimizers.py

After each interval, the worst trials copy a checkpoint of the best trials and continue with another
optimizer or learning rate. A checkpoint of polopt can be restored under every optimizer. A restore
continues with the weights, the state of the torch optimizer and the counters of the checkpoint. The
policy and its network stay the same.
"""

from __future__ import annotations

from typing import Any

from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

import polopt

OPTIMIZERS = ["sync_samples", "async_gradients", "decentralized_allreduce"]


def make_tuner(num_trials: int = 4, iterations: int = 20, **scheduling: Any) -> tune.Tuner:
    """Makes the tuner of the example.

    Args:
        num_trials: number of trials in the population.
        iterations: number of iterations of each trial.
        scheduling: options of `PopulationBasedTraining` that replace the options of the example.
    """
    scheduler = PopulationBasedTraining(
        **{
            "time_attr": "training_iteration",
            "perturbation_interval": 5,
            "hyperparam_mutations": {
                "optimizer": OPTIMIZERS,
                "lr": tune.loguniform(1e-4, 3e-3),
            },
            **scheduling,
        }
    )
    return tune.Tuner(
        polopt.PolicyOptimizerTrainer,
        param_space={
            "env": "CartPole-v1",
            "policy": "ppo",
            "optimizer": tune.choice(OPTIMIZERS),
            "lr": tune.loguniform(1e-4, 3e-3),
            "num_workers": 1,
            "num_cpus_for_driver": 0.5,
            "num_cpus_per_worker": 0.5,
            "rollout_fragment_length": 64,
            "min_sample_timesteps_per_iteration": 2000,
        },
        tune_config=tune.TuneConfig(
            scheduler=scheduler,
            num_samples=num_trials,
            metric="episode_return_mean",
            mode="max",
        ),
        run_config=tune.RunConfig(
            name="pbt_over_optimizers",
            stop={"training_iteration": iterations},
            checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
        ),
    )


if __name__ == "__main__":
    best = make_tuner().fit().get_best_result()
    assert best.config is not None
    print(f"best: {best.config['optimizer']}, lr {best.config['lr']:.2g}")
