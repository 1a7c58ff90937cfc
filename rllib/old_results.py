"""Adds the result keys of older releases of RLlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polopt.common.add_ons import RunListener

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
#: The keys of `OLD_KEYS` that are also in `env_runners` and `sampler_results`.
_OF_EPISODES = tuple(name for name in OLD_KEYS if name.startswith("episode"))
#: Statistics of learning, and the current names of the same values.
_LEARNER_STATS = {
    "cur_lr": "default_optimizer_learning_rate",
    "kl": "mean_kl_loss",
    "mean_q": "vf_predicted_mean",
    "grad_gnorm": "grad_norm",
    "var_gnorm": "grad_norm",
    "cur_kl_coeff": "kl_coeff",
}
_COUNTERS = {
    "num_env_steps_sampled": "num_env_steps_sampled_lifetime",
    "num_env_steps_trained": "num_env_steps_trained_lifetime",
    "num_agent_steps_sampled": "num_agent_steps_sampled_lifetime",
    "num_agent_steps_trained": "num_env_steps_trained_lifetime",
}


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
    of_episodes = {key: result[key] for key in _OF_EPISODES if key in result}
    of_episodes |= {
        "custom_metrics": custom,
        "hist_stats": {"episode_reward": list(returns), "episode_lengths": list(lengths)},
        "sampler_perf": {},
    }
    for name in ("policy_reward_mean", "policy_reward_min", "policy_reward_max"):
        of_episodes[name] = block.get(name, {})
    result |= {key: value for key, value in of_episodes.items() if key not in result}
    result["sampler_results"] = of_episodes
    result["env_runners"] = {**of_episodes, **block}


class OldResults(RunListener):
    """Adds the keys of older releases to each result of an algorithm, before callbacks see it.

    Args:
        trainer: the algorithm.
        callbacks: the listener that calls callbacks of RLlib, or None.
    """

    def __init__(self, trainer: Any, callbacks: RunListener | None = None) -> None:
        self._trainer = trainer
        self._callbacks = callbacks or RunListener()
        self._before: dict[str, int] | None = None

    def extend(self, result: dict[str, Any]) -> None:
        """Adds the keys. `info/learner` has the statistics of each policy, also below
        `learner_stats`."""
        window = self._trainer.optimizer.metrics.episodes.get_state()
        block = result["env_runners"]
        block |= {**self._returns_of_policies(block), **block}
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
        self._callbacks.extend(result)

    def begin(self) -> None:
        """Passes the event to the other listener."""
        self._callbacks.begin()

    def restored(self) -> None:
        """Passes the event to the other listener."""
        self._callbacks.restored()

    def _returns_of_policies(self, block: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Returns the mean return of the agents of each policy."""
        agents = block.get("agent_episode_returns_mean", {})
        rollout = self._trainer.experiment.rollout
        if not agents:
            return {}
        mapping = rollout.policy_mapping_fn
        returns: dict[str, list[float]] = {}
        for agent, mean in agents.items():
            try:
                policy = mapping(agent) if callable(mapping) else None
            except Exception:  # a mapping that needs the episode has no fixed policy for an agent
                return {}
            if mapping is not None and not isinstance(policy, str):
                return {}
            returns.setdefault(policy or "default_policy", []).append(mean)
        return {
            f"policy_reward_{how}": {name: float(of(means)) for name, means in returns.items()}
            for how, of in (("mean", _mean), ("min", min), ("max", max))
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _with_learner_stats(stats: Mapping[str, Any]) -> dict[str, Any]:
    own = {**stats}
    for old, current in _LEARNER_STATS.items():
        if current in stats:
            own.setdefault(old, stats[current])
    td_error = {} if "mean_td_error" not in stats else {"mean_td_error": stats["mean_td_error"]}
    return {**own, **td_error, "learner_stats": dict(own)}
