"""The result dict of one training iteration, under the keys RLlib 2.60 and Tune users filter on."""

from __future__ import annotations

from typing import Any

from polopt.optimizers.base import PolicyOptimizer


def make_result(
    optimizer: PolicyOptimizer, sampled_before: int, iteration_s: float, steps: int
) -> dict[str, Any]:
    """Everything that is reported; every key is there from the first result on, because Tune's
    CSV logger fixes its columns then.

    Args:
        optimizer: whose iteration it was.
        sampled_before: its `num_env_steps_sampled` when the iteration began.
        iteration_s: seconds the iteration took.
        steps: optimizer steps within it.
    """
    sampled, trained = optimizer.num_env_steps_sampled, optimizer.num_env_steps_trained
    block = optimizer.stats()
    learner = optimizer.learner.report()
    return {
        "env_runners": {
            **optimizer.episodes.report(),
            "num_env_steps_sampled": sampled - sampled_before,
            "num_env_steps_sampled_lifetime": sampled,
        },
        "num_env_steps_sampled_lifetime": sampled,
        "num_env_steps_trained_lifetime": trained,
        "num_env_steps_sampled_per_second": (sampled - sampled_before) / max(iteration_s, 1e-9),
        "timesteps_this_iter": sampled - sampled_before,
        "learners": {
            "default_policy": learner,
            "__all_modules__": {"num_env_steps_trained_lifetime": trained},
        },
        "info": {"learner": {"default_policy": learner}},
        "timers": {
            "training_iteration": iteration_s,
            "training_step": iteration_s / max(steps, 1),
            **{f"{phase}_s": timer.mean_ms / 1000 for phase, timer in optimizer.timers.items()},
        },
        "fault_tolerance": optimizer.workers.stats(),
        "optimizer": block,
    }
