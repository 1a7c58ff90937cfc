"""Finds the problems of a run with rules that read the results of the run.

A finding states a number, the cause, and what to change. The dashboard page, the report,
`polopt trace` and `polopt train` (at its end) show the findings of `diagnose`.
`python -m polopt.dashboards.data.diagnosis` prints the table of the rules for `docs/dashboards.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from polopt.dashboards.data.run_results import Array, RunResults
from polopt.metrics.number_text import number_text

#: The change of the config that avoids waiting for the slowest worker, by name of the optimizer.
#: `_slow_worker` handles `decentralized_allreduce` separately.
_WITHOUT_SLOW = {
    "sync_samples": "fraction_workers below 1, or async_samples",
    "sync_gradients": "async_gradients",
}


@dataclass(frozen=True)
class Finding:
    """One problem of a run.

    Attributes:
        rule: key of the rule that found the problem.
        text: the numbers that show the problem, and the cause of the problem.
        change: what the user should change, as config keys where possible.
        severity: a number that compares the findings of one rule in several runs. Larger numbers
            are worse.
    """

    rule: str
    text: str
    change: str
    severity: float


#: Text, change and severity of a rule's finding. None if the rule finds no problem.
Found = tuple[str, str, float] | None


@dataclass(frozen=True)
class Rule:
    """A rule that looks for one kind of problem.

    Attributes:
        key: name of the rule.
        when: the condition for a finding in words, for the docs.
        check: looks for the problem in the results of a run.
        unless: names of rules that explain the same numbers better. If one of these rules has a
            finding, `diagnose` omits the finding of this rule.
    """

    key: str
    when: str
    check: Callable[[RunResults], Found]
    unless: tuple[str, ...] = ()


RULES: list[Rule] = []


def _rule(
    key: str, when: str, unless: tuple[str, ...] = ()
) -> Callable[[Callable[[RunResults], Found]], None]:
    """Decorates a function, which becomes the `check` of a new rule."""
    return lambda check: RULES.append(Rule(key, when, check, unless))


def diagnose(run: RunResults) -> list[Finding]:
    """Returns the problems of a run, in the order of the rules: faults, learning, time."""
    found = {rule: told for rule in RULES if (told := rule.check(run)) is not None}
    keys = {rule.key for rule in found}
    return [Finding(rule.key, *told) for rule, told in found.items() if not keys & set(rule.unless)]


# ---- faults -----------------------------------------------------------------------------------


@_rule("env-faults", "an environment raised an exception")
def _env_faults(run: RunResults) -> Found:
    count = run.rise("num_env_faults")
    if count < 1:
        return None
    return (
        f"{count:,.0f} environment {_plural('fault', count)}" + _reason(run, "last_env_fault"),
        "fix the environment; a fault interrupts the episode, and the statistics omit this episode",
        count,
    )


@_rule("worker-failures", "a worker died, hung or raised an exception")
def _worker_failures(run: RunResults) -> Found:
    restarts = run.rise("num_restarts")
    given_up = run.rise("num_given_up")
    if restarts + given_up < 1:
        return None
    gone = f", and polopt has given up {given_up:,.0f} of the workers" if given_up else ""
    return (
        f"{restarts:,.0f} worker {_plural('restart', restarts)}{gone}"
        + _reason(run, "last_failure"),
        "see the Faults tab of polopt dashboard for the tracebacks; a killed worker may have run "
        "out of memory" + _in_a_rerun(run),
        restarts + given_up,
    )


@_rule("non-finite", "data or gradients were not finite, or too large")
def _non_finite(run: RunResults) -> Found:
    # A gradient that the driver skips counts in both counters.
    discarded = run.rise("num_non_finite")
    skipped = run.rise("num_skipped_updates")
    if discarded + skipped < 1:
        return None
    told = []
    if discarded:
        noun = "fragment or gradient was" if discarded == 1 else "fragments or gradients were"
        told.append(f"{discarded:,.0f} {noun} not finite or too large")
    if skipped:
        told.append(f"{skipped:,.0f} {'update was' if skipped == 1 else 'updates were'} skipped")
    return (
        ", and ".join(told) + _reason(run, "last_non_finite"),
        "look for NaN in rewards and observations; lower lr or set grad_clip",
        discarded + skipped,
    )


# ---- learning ---------------------------------------------------------------------------------


@_rule("no-reward", "at least 20 episodes have ended, and all returns in the results are 0")
def _no_reward(run: RunResults) -> Found:
    episodes = run.last("num_episodes")
    low = run.column("return_min")
    high = run.column("return_max")
    if not episodes >= 20 or not len(low) or np.any(low != 0.0) or np.any(high != 0.0):
        return None
    return (
        f"All returns so far are 0 ({episodes:,.0f} episodes)",
        "check the environment's reward; a sparse reward needs more exploration (entropy_coeff)",
        episodes,
    )


@_rule(
    "deterministic",
    "during at least the last fifth of the steps, the entropy of a policy with discrete actions is"
    " below 0.015 or below 2 percent of its highest value, the return has not risen since then, and"
    " the mean return is below 60 percent of the way from the lowest to the highest return of an "
    "episode in the run",
)
def _deterministic(run: RunResults) -> Found:
    entropy, steps = run.together("entropy", "steps")
    returns = run.together("entropy", "return")[1]
    if len(entropy) < 5 or entropy.min() < 0.0:
        return None
    if not entropy.any():  # the policy does not compute an entropy
        return None
    # A policy may have become deterministic before the first result.
    above = np.flatnonzero(entropy > max(0.02 * entropy.max(), 0.015))
    begin = int(above[-1]) + 1 if len(above) else 0
    if begin >= len(steps) or steps[begin] > 0.8 * steps[-1]:
        return None
    if len(returns):
        now = np.median(returns[-3:])
        # A policy that has learned its task may be deterministic. More entropy would harm it.
        lowest = run.column("return_min").min(initial=math.inf)
        highest = run.column("return_max").max(initial=-math.inf)
        if lowest < highest and now >= lowest + 0.6 * (highest - lowest):
            return None
        # The first results may have no returns, because no episode has ended.
        since = max(0, begin - (len(steps) - len(returns)))
        then = np.median(returns[since : since + 3])
        # By chance, two means of 100 episodes differ by a few hundredths of the range of returns.
        noise = 0.05 * (run.last("return_max") - run.last("return_min"))
        if now > then + max(noise if math.isfinite(noise) else 0.0, 1e-9):
            return None
    return (
        f"The policy has been deterministic since step {steps[begin]:,.0f}: entropy "
        f"{entropy[-1]:.2g}",
        "lower lr or raise entropy_coeff",
        1.0 - float(steps[begin] / steps[-1]),
    )


@_rule("value-loss", "the median value loss of the last two thirds of the results is above 1e6")
def _value_loss(run: RunResults) -> Found:
    loss = _late(run.column("vf_loss"))
    if not len(loss) or np.median(loss) < 1e6:
        return None
    return (
        f"Value loss {np.median(loss):.1e}: the rewards are too large for the value function",
        "scale rewards such that returns are between 1 and 1000",
        float(np.median(loss)),
    )


@_rule(
    "clipped-actions",
    "in most of the last two thirds of the results, more than 80 percent of the action values of a "
    "Box are outside the bounds of the Box",
)
def _clipped_actions(run: RunResults) -> Found:
    clipped = _late(run.column("actions_clipped"))
    if len(clipped) < 3 or np.median(clipped) <= 0.8:
        return None
    share = float(np.median(clipped))
    return (
        f"{share:.0%} of the action values are clipped: the environment receives the bound instead "
        "of the sampled value",
        "set normalize_actions=True, set finite bounds of the action space that fit the task, or "
        'set model={"squash_actions": True}',
        share,
    )


@_rule(
    "update-size",
    "at least a tenth of the results in which the policy changed have a KL divergence above 0.5, or"
    " a clip fraction above 0.5 together with a KL divergence above 0.05 (a clip fraction above "
    "0.5 is enough if the policy reports no KL divergence)",
)
def _update_size(run: RunResults) -> Found:
    kl, clip = run.column("mean_kl_loss"), run.column("clip_fraction")
    if not kl.any() or len(kl) != len(clip):  # the policy reports only one of the two
        too_large = [kl > 0.5, clip > 0.5]
    else:
        # A high clip fraction does not prove large updates: Gaussian policies and old samples, as
        # in APPO, have high clip fractions with small updates. After a policy has become
        # deterministic, KL and clip fraction are 0, so only results with a changed policy count.
        changes = kl > 1e-6
        too_large = [(kl > 0.5)[changes], ((clip > 0.5) & (kl > 0.05))[changes]]
    if max(len(kl), len(clip)) < 3 or not any(len(x) and np.mean(x) >= 0.1 for x in too_large):
        return None
    named = {"KL divergence": kl, "clip fraction": clip}
    told = [f"{name} up to {values.max():.2g}" for name, values in named.items() if values.any()]
    return (
        f"{', '.join(told)}: updates are too large",
        "lower lr or num_sgd_iter, or raise sgd_minibatch_size",
        float(max(kl.max(initial=0.0), clip.max(initial=0.0))),
    )


@_rule(
    "return-fell",
    "the highest mean return came after at least 100 episodes, and since then the mean return has "
    "fallen by at least half of the difference between its highest and lowest value, and by at "
    "least a fifth of the range of returns of 100 episodes",
)
def _return_fell(run: RunResults) -> Found:
    returns, steps = run.column("return"), run.column("steps")
    if len(returns) < 5 or len(steps) < len(returns):
        return None
    best = int(np.argmax(returns))
    low, high, last = returns.min(), returns[best], float(np.median(returns[-3:]))
    spread = high - min(low, last)
    if high - last < 0.5 * spread or spread < 0.2 * max(abs(high), abs(low), 1e-9):
        return None
    episodes = run.column("num_episodes")[-len(returns) :]
    # With fewer than 100 episodes, the best mean may be chance.
    if best >= len(returns) - 3 or len(episodes) < len(returns) or episodes[best] < 100:
        return None
    # The mean returns of a policy that does not change differ by up to a tenth of this range.
    low_of, high_of = run.column("return_min"), run.column("return_max")
    if len(low_of) == len(high_of) == len(returns):
        widest = float((high_of - low_of)[best:].max())
        if high - last < 0.2 * widest:
            return None
    at = steps[len(steps) - len(returns) + best]
    return (
        f"Return fell from {number_text(high)} (after {at:,.0f} steps) to {number_text(last)}",
        "lower lr, use a learning rate schedule, or set grad_clip" + _in_a_rerun(run),
        float((high - last) / spread),
    )


@_rule(
    "no-learning",
    "over at least 100,000 steps, the mean return has changed by less than a tenth of the range of "
    "returns of the last 100 episodes, and was never lower than now by more than a fifth of this "
    "range (compared as medians over several results)",
    unless=(
        *("no-reward", "deterministic", "value-loss", "clipped-actions", "update-size"),
        "return-fell",
    ),
)
def _no_learning(run: RunResults) -> Found:
    returns, steps = run.column("return"), run.column("steps")
    if len(returns) < 6 or len(steps) < len(returns) or steps[-1] - steps[-len(returns)] < 1e5:
        return None
    third = len(returns) // 3
    first, last = float(np.median(returns[:third])), float(np.median(returns[-third:]))
    low = run.last("return_min")
    high = run.last("return_max")
    if low == high == 0.0 or not abs(last - first) < 0.1 * (high - low):
        return None
    # If returns were lower at the beginning, the run has learned, even if only at the beginning.
    # The comparison uses medians of three results, because a mean over few episodes is noisy.
    medians = np.median(np.lib.stride_tricks.sliding_window_view(returns, 3), axis=1)
    if last - medians.min() > 0.2 * (high - low):
        return None
    return (
        f"No learning in {steps[-1]:,.0f} steps: return {number_text(first)} at first, "
        f"{number_text(last)} now",
        "raise or lower lr; check that rewards depend on actions",
        float(steps[-1]),
    )


@_rule(
    "small-updates", "after at least 100 updates, the median number of rows per update is below 16"
)
def _small_updates(run: RunResults) -> Found:
    rows = run.column("rows_per_update")
    rows = rows[rows > 0.0]  # 0 means that the interval had no update
    typical = float(np.median(rows)) if len(rows) else math.inf
    if typical >= 16.0 or run.rise("num_updates") < 100:
        return None
    return (
        f"{typical:.0f} rows per update: gradients over so few rows are noisy",
        "raise sgd_minibatch_size or train_batch_size; if workers compute the gradients, raise "
        "rollout_fragment_length or num_envs_per_worker",
        -typical,
    )


@_rule(
    "small-buffer",
    "the replay buffer is full and holds fewer rows than five episodes of mean length",
)
def _small_buffer(run: RunResults) -> Found:
    rows, length = run.last("buffer_rows"), run.last("episode_len")
    if not run.last("buffer_fill") >= 0.95 or not rows < 5.0 * length:
        return None
    return (
        f"The replay buffer holds {rows:,.0f} rows, which are {rows / length:.1f} episodes of "
        f"{length:,.0f} steps: the policy forgets what it saw before",
        "raise buffer_size",
        length / rows,
    )


# ---- time -------------------------------------------------------------------------------------


@_rule(
    "slow-worker",
    "while it samples, a worker makes less than half as many steps per second as the median of the "
    "other workers (less than two sevenths as many if all cores are busy)",
)
def _slow_worker(run: RunResults) -> Found:
    if not run.lasts:
        return None
    rates = {}
    for index, rate in run.sampling_rates().items():
        known = _late(rate)[_late(rate) > 0.0]
        if len(known):
            rates[index] = float(np.median(known))
    if len(rates) < 2:
        return None
    slow = min(rates, key=lambda index: rates[index])
    median = float(np.median([rate for index, rate in rates.items() if index != slow]))
    # If processes share cores, the rates of equal workers differ, too.
    limit = 3.5 if run.mean("cpu_share") > 0.9 else 2.0
    if median < limit * rates[slow]:
        return None
    skew, idle = run.share("workers_skew"), run.share("workers_idle")
    allreduce = run.has("num_ranks")
    otherwise = _WITHOUT_SLOW.get(run.text("optimizer"))
    text = (
        f"Worker {slow} is {median / rates[slow]:.1f} times slower than the median: "
        f"{rates[slow]:,.0f} steps/s while it samples. Its environment or its machine is slow"
    )
    if allreduce and skew >= 0.1:
        text += f". The other ranks wait for worker {slow}: waiting takes {skew:.0%} of their time"
    elif otherwise and idle >= 0.1:
        text += f". The other workers wait for it: workers are idle for {idle:.0%} of their time"
    change = "speed up its environment"
    if allreduce:
        change += ", or use fraction_workers below 1"
    elif otherwise:
        change += f", or use {otherwise}"
    return text, change, median / rates[slow]


@_rule(
    "machine-busy",
    "all cores are busy, and the number of processes that run or wait for a core is well above both"
    " the number of cores and the number of processes of this run and of trials at the same time",
)
def _machine_busy(run: RunResults) -> Found:
    own = len(run.sampling_rates()) + 1
    # Each trial also keeps processes of Ray and Tune busy.
    if not _are_cores_short(run, own + 1.5 * run.other_processes):
        return None
    cpus, load = run.last("num_cpus"), run.mean("load_1m")
    of = "this run and of the trials beside it" if run.other_processes else "this run"
    return (
        f"Other processes keep the cores busy: {load:.0f} processes compete for {cpus:.0f} cores, "
        f"but the driver and the workers of {of} are only {own + run.other_processes:.0f} "
        "processes",
        "end other programs and other runs, or measure again later; rates and shares of time are "
        "distorted",
        load / cpus,
    )


@_rule(
    "trials-share-cores",
    "all cores are busy, and the number of processes that run or wait for a core is well above both"
    " the number of cores and the number of processes of this run, but not above this number "
    "together with the processes of other trials of the experiment at the same time",
    unless=("machine-busy",),
)
def _trials_share_cores(run: RunResults) -> Found:
    own = len(run.sampling_rates()) + 1
    if not run.other_processes or not _are_cores_short(run, own):
        return None
    cpus, load = run.last("num_cpus"), run.mean("load_1m")
    return (
        f"Trials shared the cores: {load:.0f} processes competed for {cpus:.0f} cores, and other "
        f"trials of the experiment had {run.other_processes:.0f} processes at the same time. A "
        "comparison of throughputs then also compares which trials ran side by side",
        "to compare throughputs or times, run fewer trials at once: raise num_cpus_for_driver and "
        "num_cpus_per_worker",
        load / cpus,
    )


def _are_cores_short(run: RunResults, known: float) -> bool:
    """Returns whether all cores are busy, and far more processes than the number `known` compete
    for them."""
    cpus, load = run.last("num_cpus"), run.mean("load_1m")
    is_loaded = load >= max(known + 0.5 * cpus, 1.5 * cpus)
    return run.lasts and is_loaded and run.mean("cpu_share") >= 0.9


@_rule(
    "too-many-workers",
    "the run has at least twice as many workers as cores, and the cores are busy",
)
def _too_many_workers(run: RunResults) -> Found:
    workers, cpus = len(run.sampling_rates()), run.last("num_cpus")
    if not run.lasts or not workers >= 2.0 * cpus or run.mean("cpu_share") < 0.8:
        return None
    return (
        f"{workers} workers share {cpus:.0f} cores",
        f"set num_workers={cpus:.0f}, and raise num_envs_per_worker for more samples",
        workers / cpus,
    )


@_rule(
    "weights-dominate",
    "the driver spends at least 30 percent of its time in the phase that sends weights (`dispatch` "
    "or `broadcast`), and sends at least 100 KB of weights per update",
)
def _weights_dominate(run: RunResults) -> Found:
    phase = "dispatch" if run.has("driver_dispatch") else "broadcast"
    share = run.share(f"driver_{phase}")
    updates = max(run.rise("num_updates"), 1.0)
    sent = run.rise("num_bytes_sent") / updates
    if not run.lasts or share < 0.3 or sent < 100_000:
        return None
    return (
        f"Sending weights takes too long: the driver spends {share:.0%} of its time in the phase "
        f"{phase}, and sends {sent / 1e3:,.0f} KB of weights per update",
        "use longer fragments (rollout_fragment_length), a smaller network, or "
        "DecentralizedAllReduce, which keeps the weights in the workers",
        share,
    )


@_rule(
    "driver-busy",
    "the driver of an optimizer with the phase `wait` spends less than 15 percent of its time in"
    " this phase, and the workers are idle for at least 20 percent of their time",
    unless=("weights-dominate",),
)
def _driver_busy(run: RunResults) -> Found:
    wait = run.mean("driver_wait")
    idle = run.share("workers_idle")
    if not run.lasts or not wait < 0.15 or idle < 0.2:
        return None
    return (
        f"The driver is busy for {1.0 - wait:.0%} of its time, and the workers are idle for "
        f"{idle:.0%}: the driver limits the run, so more workers would only raise the policy lag",
        "use longer fragments (rollout_fragment_length), fewer workers, or SyncSamples",
        idle,
    )


@_rule("stale", "at least 30 percent of the gradients have a lag above `max_policy_lag`")
def _stale(run: RunResults) -> Found:
    arrived, stale = run.rise("num_gradients"), run.rise("num_gradients_stale")
    if arrived < 100 or stale < 0.3 * arrived:
        return None
    return (
        f"{stale / arrived:.0%} of the gradients have a lag above max_policy_lag, and are dropped "
        "or scaled down",
        "use fewer workers, longer fragments, or a larger max_policy_lag",
        stale / arrived,
    )


@_rule(
    "learner-waits",
    "with a replay buffer, the learner waits for new rows for at least half of its time, although "
    "the workers are busy",
)
def _learner_waits(run: RunResults) -> Found:
    waits = run.rise_per_s("learner_blocked_s")
    workers = len(run.sampling_rates())
    if not run.lasts or not workers or waits < 0.5 or run.share("workers_idle") > 0.3:
        return None
    return (
        f"The learner waits for samples for {waits:.0%} of its time, and the workers are busy",
        f"set num_workers={2 * workers} if cores are free, or raise training_intensity",
        waits,
    )


@_rule(
    "learner-waits-for-shards",
    "the learner waits for batches from replay shards for at least half of its time",
)
def _learner_waits_for_shards(run: RunResults) -> Found:
    waits = run.rise_per_s("learner_blocked_by_shards_s")
    if not run.lasts or waits < 0.5:
        return None
    return (
        f"The learner waits for replay shards for {waits:.0%} of its time",
        "raise num_replay_shards if cores are free, or raise train_batch_size or prefetch_batches",
        waits,
    )


@_rule(
    "samplers-wait",
    "with a replay buffer, the samplers wait for the learner to catch up for at least half of their"
    " time",
)
def _samplers_wait(run: RunResults) -> Found:
    waits = run.rise_per_s("samplers_blocked_s")
    workers = len(run.sampling_rates())
    if not run.lasts or not workers or waits < 0.5:
        return None
    return (
        f"The samplers wait for the learner for {waits:.0%} of their time",
        "use fewer workers, raise train_batch_size (fewer updates at the same intensity), or lower "
        "training_intensity",
        waits,
    )


@_rule("allreduce-dominates", "the all-reduce takes at least half of the ranks' time")
def _allreduce_dominates(run: RunResults) -> Found:
    share = run.share("workers_allreduce")
    if not run.lasts or share < 0.5:
        return None
    return (
        f"The all-reduce takes {share:.0%} of the ranks' time",
        "raise sgd_minibatch_size, lower num_sgd_iter, or use fewer workers",
        share,
    )


@_rule(
    "reporting",
    "Tune, its loggers and checkpoints take at least 30 percent of the driver's time",
)
def _reporting(run: RunResults) -> Found:
    share = run.share("driver_report")
    if not run.lasts or share < 0.3:
        return None
    return (
        f"Tune, its loggers and checkpoints take {share:.0%} of the driver's time",
        "raise min_time_s_per_iteration",
        share,
    )


@_rule(
    "more-workers",
    "the driver waits for workers for at least 60 percent of its time, the workers are busy, and at"
    " least half of the cores are free",
    unless=("learner-waits",),
)
def _more_workers(run: RunResults) -> Found:
    wait = max(run.share("driver_wait"), run.share("driver_sample"))
    cpus, busy = run.last("num_cpus"), run.mean("cpu_share")
    workers = len(run.sampling_rates())
    if not run.lasts or wait < 0.6 or run.share("workers_idle") > 0.3 or not busy <= 0.5:
        return None
    if not workers or workers + 1 >= 0.5 * cpus or run.has("num_ranks"):
        return None
    return (
        f"The driver waits for {wait:.0%} of its time, the workers are busy, and only {busy:.0%} of"
        f" {cpus:.0f} cores are in use",
        f"use more workers: num_workers={min(2 * workers, int(cpus) - 1)}",
        wait,
    )


def _late(values: Array) -> Array:
    """Returns the last two thirds of a column."""
    return values[len(values) // 3 :]


def _in_a_rerun(run: RunResults) -> str:
    """Returns the advice to repeat the run with `polopt rerun`, or "" without a recording."""
    recorded = run.rise("num_events_recorded") > 0.0
    return "; to examine this run, repeat it with polopt rerun TRIAL" if recorded else ""


def _reason(run: RunResults, key: str, most: int = 120) -> str:
    """Returns a colon and the last line of the text in the column `key`, cut off after `most`
    characters. Returns "" without a text."""
    lines = run.text(key).strip().splitlines()
    return f": {lines[-1][:most]}" if lines else ""


def _plural(word: str, count: float) -> str:
    return word if count == 1 else f"{word}s"


def markdown_table() -> str:
    """Returns the table of the rules for the docs."""
    lines = ["| rule | reports a problem if |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{rule.key}` | {rule.when} |" for rule in RULES)])


if __name__ == "__main__":
    print(markdown_table())
