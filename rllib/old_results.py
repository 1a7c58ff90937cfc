"""Adds the result keys of older releases of RLlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Result keys of RLlib up to 2.7, and the current keys of the same values.
OLD_KEYS = {
    "episode_reward_mean": "env_runners/episode_return_mean",
    "episode_reward_min": "env_runners/episode_return_min",
    "episode_reward_max": "env_runners/episode_return_max",
    "episode_len_mean": "env_runners/episode_len_mean",
    "episodes_this_iter": "env_runners/num_episodes",
    "episodes_total": "env_runners/num_episodes_lifetime",
    "num_env_steps_sampled": "num_env_steps_sampled_lifetime",
    "num_env_steps_trained": "num_env_steps_trained_lifetime",
    "num_agent_steps_sampled": "num_agent_steps_sampled_lifetime",
    "num_agent_steps_trained": "num_env_steps_trained_lifetime",
    "agent_timesteps_total": "num_agent_steps_sampled_lifetime",
    "num_healthy_workers": "fault_tolerance/num_healthy_workers",
    "num_env_steps_sampled_throughput_per_sec": "num_env_steps_sampled_per_second",
}
#: The keys of `OLD_KEYS` that are also in the blocks of results with these names.
EPISODE_KEYS = tuple(name for name in OLD_KEYS if name.startswith("episode"))
BLOCKS = ("env_runners", "sampler_results")
#: Statistics of learning, and the current names of the same values.
_LEARNER_STATS = {
    "cur_lr": "default_optimizer_learning_rate",
    "kl": "mean_kl_loss",
    "mean_q": "vf_predicted_mean",
    "grad_gnorm": "grad_norm",
    "var_gnorm": "grad_norm",
    "cur_kl_coeff": "kl_coeff",
}
_COUNTERS = {name: key for name, key in OLD_KEYS.items() if name.endswith(("_sampled", "_trained"))}


def add_old_keys(
    result: dict[str, Any], returns: Sequence[float] = (), lengths: Sequence[int] = ()
) -> None:
    """Adds the keys of older releases to a result, if it has the current keys of the same values.

    Args:
        result: a result, or the block `evaluation` of a result.
        returns: the returns of the last episodes.
        lengths: the lengths of the same episodes.
    """
    for old, path in OLD_KEYS.items():
        value: Any = result
        for part in path.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            result.setdefault(old, value)
    block = result.get("env_runners", {})
    custom = block.setdefault("custom_metrics", {})
    of_episodes = {key: result[key] for key in EPISODE_KEYS if key in result}
    of_episodes |= {
        "custom_metrics": custom,
        "hist_stats": {"episode_reward": list(returns), "episode_lengths": list(lengths)},
        "sampler_perf": {},
    }
    of_episodes["policy_reward_mean"] = block.get("policy_reward_mean", {})
    result |= {key: value for key, value in of_episodes.items() if key not in result}
    result["sampler_results"] = of_episodes
    result["env_runners"] = {**of_episodes, **block}


class OldResults:
    """Adds the keys of older releases to each result of an algorithm, before callbacks see it.

    Args:
        trainer: the algorithm.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before: dict[str, int] | None = None

    def extend(self, result: dict[str, Any]) -> None:
        """Adds the keys. `info/learner` has the statistics of each policy, also below
        `learner_stats`."""
        window = self._trainer.optimizer.metrics.episodes.get_state()
        block = result["env_runners"]
        if returns := block.get("module_episode_returns_mean"):
            block.setdefault("policy_reward_mean", returns)
        add_old_keys(result, window["returns"], window["lengths"])
        counters = {name: result[key] for name, key in _COUNTERS.items()}
        before, self._before = self._before, counters
        for name, count in counters.items():
            # After a restore, the counts of the first iteration are those that this process knows.
            result[f"{name}_this_iter"] = count - (before or {}).get(name, 0)
        if before is None:
            result["num_env_steps_sampled_this_iter"] = result["timesteps_this_iter"]
        result["counters"] = counters
        result["info"] = {
            **result["info"],
            **counters,
            "num_steps_sampled": counters["num_env_steps_sampled"],
            "num_steps_trained": counters["num_env_steps_trained"],
            "learner": {
                name: _with_learner_stats(stats)
                for name, stats in result["info"]["learner"].items()
            },
        }
        timers = result["timers"]
        for old, phase in (("sample_time_ms", "sample_s"), ("learn_time_ms", "learn_s")):
            if phase in timers:
                timers[old] = 1000.0 * timers[phase]
        timers["training_iteration_time_ms"] = 1000.0 * timers["training_iteration"]
        if "evaluation" in result:
            add_old_keys(result["evaluation"])


def _with_learner_stats(stats: Mapping[str, Any]) -> dict[str, Any]:
    own = {**stats}
    for old, current in _LEARNER_STATS.items():
        if current in stats:
            own.setdefault(old, stats[current])
    td_error = {} if "mean_td_error" not in stats else {"mean_td_error": stats["mean_td_error"]}
    return {**own, **td_error, "learner_stats": dict(own)}
