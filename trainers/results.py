"""Makes the result dict of a training iteration, with the keys of RLlib 2.60 and Tune."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from polopt.common.add_ons import hint
from polopt.common.config import ConfigError, nearest_of
from polopt.metrics import episode_window
from polopt.metrics.custom_metrics import CustomMetrics
from polopt.metrics.number import declare, within
from polopt.optimizers import policy_optimizer
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.policy_group import by_policy
from polopt.rollouts.workers import process_group

_TUNE_KEYS = ("training_iteration", "time_total_s", "time_this_iter_s", "timesteps_total")
_COUNTS = (
    "episode_return_mean",
    "num_env_steps_sampled_lifetime",
    "num_agent_steps_sampled_lifetime",
    "num_env_steps_trained_lifetime",
    "num_env_steps_sampled_per_second",
    "env_runners/num_env_steps_sampled",
    "env_runners/num_env_steps_sampled_lifetime",
)
_CUSTOM = "of the values that callbacks returned since the last result. NaN if they returned none"
#: The numbers of `make_result`, except those that only one optimizer or one policy has.
NUMBERS = (
    *declare("""
        episode_return_mean (return, metric=): the same as `env_runners/episode_return_mean`, at the
            top level so that Tune's table of trials shows it. See [how schedulers handle
            NaN](train.md#schedulers-of-tune)
        num_env_steps_sampled_per_second (environment steps/s, metric=): the same as
            `optimizer/env_steps_per_s`
        num_env_steps_trained_lifetime (environment steps, counter, metric=): steps from which the
            policy learned, since training began
        num_env_steps_sampled_lifetime (environment steps, counter, metric=): steps that were
            sampled since training began
        num_agent_steps_sampled_lifetime (agent steps, counter, metric=): steps of agents that were
            sampled since training began. With one agent, these are the environment steps
        timesteps_this_iter (environment steps, metric=): steps of this iteration
    """),
    *within(
        "env_runners",
        (
            *episode_window.NUMBERS,
            *episode_window.AGENT_NUMBERS,
            *declare(f"""
                num_env_steps_sampled (environment steps, metric=): steps of this iteration
                num_env_steps_sampled_lifetime (environment steps, counter, metric=): steps that
                    were sampled since training began
                num_agent_steps_sampled_lifetime (agent steps, counter, metric=): steps of agents
                    that were sampled since training began
                custom_metrics/<name>_mean (metric=): mean {_CUSTOM}
                custom_metrics/<name>_min (metric=): smallest {_CUSTOM}
                custom_metrics/<name>_max (metric=): largest {_CUSTOM}
            """),
        ),
    ),
    *within("optimizer", policy_optimizer.NUMBERS),
    *within("fault_tolerance", process_group.NUMBERS),
    *declare("""
        learners/__all_modules__/num_env_steps_trained_lifetime (environment steps, counter,
            metric=): the same as `num_env_steps_trained_lifetime`
        learners/<policy>/<statistic> (metric=): with several policies, the statistics of each
            policy that learns, instead of `learners/default_policy/<statistic>`
        info/learner/<policy>/<statistic> (metric=): the same as `learners/<policy>/<statistic>`
        timers/training_iteration (s, metric=): time of the iteration
        timers/training_step (s, metric=): mean time of a step of the optimizer
        timers/<phase>_s (s, metric=): mean of the last 100 timings of the phase
    """),
)
#: Blocks of a result whose keys depend on the config.
_OPEN_BLOCKS = (
    "optimizer/",
    "timers/",
    "learners/",
    "info/",
    "fault_tolerance/",
    "env_runners/custom_metrics/",
    "env_runners/agent_episode_returns_mean/",
    "env_runners/module_episode_returns_mean/",
    "evaluation/",
)


def make_result(
    optimizer: PolicyOptimizer, sampled_before: int, iteration_s: float, steps: int
) -> dict[str, Any]:
    """Returns the result of one iteration.

    Tune's CSV logger takes its columns from the first result. Therefore, the first result already
    has all keys. Exceptions are custom metrics, and statistics that a policy does not declare in
    `Policy.numbers`. The order of the keys matters: Tune's table of trials shows the
    first four numbers of the top level, or the first three in a notebook. On a terminal, the
    current output of Tune has no option to choose other columns.

    Args:
        optimizer: the optimizer after the iteration.
        sampled_before: value of the optimizer's `num_env_steps_sampled` before the iteration.
        iteration_s: duration of the iteration in seconds.
        steps: number of optimizer steps in the iteration.
    """
    metrics = optimizer.metrics
    sampled, trained = metrics.num_env_steps_sampled, metrics.num_env_steps_trained
    block = optimizer.stats()
    learners = by_policy(optimizer.policy, metrics.learner.report())
    episodes = metrics.episodes.report()
    return {
        "episode_return_mean": episodes["episode_return_mean"],
        "num_env_steps_sampled_per_second": block["env_steps_per_s"],
        "num_env_steps_trained_lifetime": trained,
        "num_env_steps_sampled_lifetime": sampled,
        "num_agent_steps_sampled_lifetime": metrics.num_agent_steps_sampled,
        "env_runners": {
            **episodes,
            "num_env_steps_sampled": sampled - sampled_before,
            "num_env_steps_sampled_lifetime": sampled,
            "num_agent_steps_sampled_lifetime": metrics.num_agent_steps_sampled,
            **custom_block(metrics.custom_metrics),
        },
        "timesteps_this_iter": sampled - sampled_before,
        "learners": {
            **learners,
            "__all_modules__": {"num_env_steps_trained_lifetime": trained},
        },
        "info": {"learner": learners},
        "timers": {
            "training_iteration": iteration_s,
            "training_step": iteration_s / max(steps, 1),
            **{f"{phase}_s": timer.mean_ms / 1000 for phase, timer in optimizer.timers.items()},
        },
        "fault_tolerance": optimizer.workers.stats(),
        "optimizer": block,
    }


def custom_block(metrics: CustomMetrics) -> dict[str, dict[str, float]]:
    """Returns the block `custom_metrics` of a result, with the values since the previous call with
    the same `metrics`. Returns an empty dict before the first custom metric."""
    report = metrics.report()
    return {"custom_metrics": report} if report else {}


def result_keys() -> list[str]:
    """Returns paths of numbers that every result contains, with any optimizer. A stop condition may
    use these paths."""
    numbers = within("env_runners", episode_window.NUMBERS)
    episodes = [number.key for number in numbers if number.kind != "histogram"]
    return [*_TUNE_KEYS, *_COUNTS, *episodes]


def check_stop_key(path: str) -> None:
    """Checks that a stop key is one of `result_keys`, or is in one of the blocks `_OPEN_BLOCKS`.
    The keys in these blocks are not known before the first result.

    Raises:
        ConfigError: the key is neither. The message has the hint of an add-on, or the most similar
            known key.
    """
    if path in result_keys():
        return
    if now := hint("result key", path):
        raise ConfigError(f"stop: result key {path!r} is now {now!r}")
    if not path.startswith(_OPEN_BLOCKS):
        raise ConfigError(
            f"stop: unknown result key {path!r}{nearest_of(path, result_keys())} (all keys in "
            "optimizer/ are also allowed)"
        )


def flattened(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a result with one key for each number, as in Tune's tables: `a/b` for the key `b` of
    the dict `a`. Keys of inner dicts come after all others."""
    flat = dict(result)
    while inner := [key for key, value in flat.items() if isinstance(value, dict)]:
        flat |= {f"{key}/{name}": value for key in inner for name, value in flat[key].items()}
        for key in inner:
            del flat[key]
    return flat


def check_stop_keys(keys: Iterable[str], result: Mapping[str, Any]) -> None:
    """Checks that a result has all keys of a stop criterion. A custom metric may be missing,
    because no episode may have reported it yet.

    Args:
        keys: the stop keys, which are paths such as `env_runners/episode_return_mean`.
        result: the first result of a run.

    Raises:
        ConfigError: the result lacks a key. The message names all missing keys, and the new name of
            each, or the most similar keys.
    """
    known = flattened(result)
    problems = []
    for key in keys:
        if key not in known and "/custom_metrics/" not in f"/{key}":
            now = hint("result key", key)
            instead = f". It is now {now!r}" if now else nearest_of(key, known)
            problems.append(f"stop: results have no key {key!r}, so no run would reach it{instead}")
    if problems:
        raise ConfigError("\n".join(problems))


def look_up(result: Mapping[str, Any], path: str) -> float:
    """Returns the number at a path such as `env_runners/episode_return_mean`. Returns NaN for a
    custom metric that no episode has reported yet.

    Raises:
        ConfigError: the result does not have a number at this path.
    """
    value: Any = result
    for part in path.split("/"):
        if not isinstance(value, Mapping) or part not in value:
            if "/custom_metrics/" in path:
                return float("nan")
            raise ConfigError(f"stop: results have no key {path!r}")
        value = value[part]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"stop: result key {path!r} is {value!r}, which is not a number")
    return float(value)
