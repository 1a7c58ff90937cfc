"""The result dict of one training iteration, under the keys RLlib 2.60 and Tune users filter on."""

from __future__ import annotations

from typing import Any

from polopt.metrics.episodes import EpisodeWindow
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


def result_keys() -> list[str]:
    """Paths of the numbers that every result has, whatever the optimizer and the policy."""
    episodes = [f"env_runners/{key}" for key in EpisodeWindow().report()]
    return [*_TUNE_KEYS, *_COUNTS, *episodes]


def is_result_key(path: str) -> bool:
    """Whether results may have something at this path; what optimizers and policies report of
    their own is not known before they do."""
    return path in result_keys() or path.startswith(_OWN_BLOCKS)


_TUNE_KEYS = ("training_iteration", "time_total_s", "time_this_iter_s", "timesteps_total")
_COUNTS = (
    "num_env_steps_sampled_lifetime",
    "num_env_steps_trained_lifetime",
    "num_env_steps_sampled_per_second",
    "env_runners/num_env_steps_sampled",
    "env_runners/num_env_steps_sampled_lifetime",
)
_OWN_BLOCKS = ("optimizer/", "timers/", "learners/", "info/", "fault_tolerance/")
