"""Episodes with the policy of a trainer, between two iterations, in the driver's process."""

from __future__ import annotations

from polopt.optimizers.base import PolicyOptimizer
from polopt.policies.policy import Policy
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.envs.env_state import set_evaluation_statistics
from polopt.rollouts.envs.random_state import kept_global_generators
from polopt.trainers.experiment import Experiment
from polopt.trainers.play_episodes import EvaluationResult, check_episodes, environment, play


def evaluate_now(
    experiment: Experiment,
    policy: Policy,
    optimizer: PolicyOptimizer,
    episodes: int | None,
    stochastic: bool | None,
    seed: int | None,
) -> EvaluationResult:
    """Plays episodes in an environment of evaluation. It gets the running statistics of the
    environments of training. The global generators of the process are put back at the end.

    Args:
        experiment: of the trainer.
        policy: that plays.
        optimizer: of the trainer, for the statistics.
        episodes: see `PolicyOptimizerTrainer.evaluate`.
        stochastic: see `PolicyOptimizerTrainer.evaluate`.
        seed: see `PolicyOptimizerTrainer.evaluate`.

    Raises:
        ConfigError: `episodes` is wrong, or the environment cannot be made or evaluated.
    """
    training, config = experiment.rollout, experiment.trainer
    if episodes is None:
        episodes = config.evaluation_duration
    if stochastic is None:
        stochastic = config.evaluation_config.explore
    check_episodes(episodes)
    changes = config.evaluation_config.changes(training)
    rollout = training.model_copy(update=changes)
    rollout = rollout.model_copy(update={"env": resolve_env(rollout.env)})
    workers = optimizer.get_driver_state()["workers"].values()
    statistics = [one["statistics"] for one in workers if one.get("statistics")]
    with kept_global_generators(), environment(rollout) as env:
        if statistics:
            set_evaluation_statistics(env, statistics)
        return EvaluationResult(play(policy, env, episodes, stochastic, seed))
