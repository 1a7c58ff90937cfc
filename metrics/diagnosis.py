"""What is wrong with a run: rules over its results, each with a number, the cause and a change.

The page, the report, `polopt trace` and the end of `polopt train` show what `diagnose` finds.
`python -m polopt.metrics.diagnosis` prints the table of the rules for `docs/dashboards.md`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_OPT, _FAULTS, _LEARNER = "optimizer/", "fault_tolerance/", "learners/default_policy/"
_EPISODES = "env_runners/"
_DRIVER, _WORKERS = _OPT + "driver/share/", _OPT + "workers/share/"
_MACHINE, _EACH = _OPT + "machine/", _OPT + "workers/per_worker/"
_STEPS = "num_env_steps_sampled_lifetime"
_RETURN = _EPISODES + "episode_return_mean"
_BLOCKS = (_OPT, _FAULTS, _LEARNER, _EPISODES)
_ABOVE = ("learners/",)  # of blocks
_OF_EACH = ("/index", "/env_steps_per_sampling_s")
_NAME = _OPT + "name"
#: What goes on without a slow worker, by the optimizer whose other workers wait for it.
_WITHOUT_SLOW = {
    "sync_samples": "fraction_workers below 1, or async_samples",
    "sync_gradients": "async_gradients",
}
#: Columns that rules read, besides those of each worker.
READ = frozenset(
    [
        *(_STEPS, _RETURN, _NAME, _OPT + "interval_s", _OPT + "rows_per_update"),
        *(_EPISODES + f"episode_return_{which}" for which in ("min", "max")),
        _EPISODES + "num_episodes_lifetime",
        *(_DRIVER + phase for phase in ("startup", "wait", "sample", "dispatch", "broadcast")),
        _DRIVER + "report",
        *(_WORKERS + part for part in ("idle", "skew", "allreduce")),
        *(_MACHINE + key for key in ("cpu_share", "num_cpus", "load_1m")),
        *(_OPT + f"num_{what}" for what in ("updates", "skipped_updates", "bytes_sent", "ranks")),
        *(_OPT + f"num_{what}" for what in ("gradients", "gradients_stale")),
        _OPT + "actions/clipped",
        *(_LEARNER + key for key in ("entropy", "vf_loss", "mean_kl_loss", "clip_fraction")),
        *(_FAULTS + f"num_{what}" for what in ("env_faults", "non_finite", "workers_given_up")),
        _FAULTS + "num_remote_worker_restarts",
        *(_FAULTS + f"last_{what}" for what in ("env_fault", "non_finite", "failure")),
    ]
)
#: Without so many results, and seconds of training, rules about time find nothing.
_LEAST_RESULTS, _LEAST_S = 3, 2.0
_MOST_ROWS = 2000  # that `History` keeps


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        rule: key of the rule that found it.
        text: what the numbers say, and the cause.
        change: what to change, as config keys where there are some.
        severity: orders findings of the same rule in several runs: larger is worse.
    """

    rule: str
    text: str
    change: str
    severity: float


class Results:
    """The results of one run as columns.

    Args:
        columns: arrays of shape `[R]` by path, such as `optimizer/driver/share/wait`; entries of
            lists have their index as the last part. Missing values are NaN.
        texts: the last text by path, such as `fault_tolerance/last_env_fault`.
        config: of the run, as the user wrote it.
    """

    def __init__(
        self, columns: Mapping[str, Array], texts: Mapping[str, str], config: Mapping[str, Any]
    ) -> None:
        self._columns = columns
        self._texts = texts
        self._config = config
        seconds = columns.get(_OPT + "interval_s")
        startup = columns.get(_DRIVER + "startup")
        if seconds is None or startup is None:
            self._seconds = np.zeros(0)
        else:
            self._seconds = np.nan_to_num(seconds) * (1.0 - np.nan_to_num(startup))
        # Workers start one after another, and the first updates are not like later ones.
        late = np.cumsum(self._seconds) > self._seconds.sum() / 3.0
        self._weights = np.where(late, self._seconds, 0.0)

    @property
    def lasts(self) -> bool:
        """Whether there is enough training for statements about time."""
        return len(self._seconds) >= _LEAST_RESULTS and float(self._seconds.sum()) >= _LEAST_S

    def column(self, path: str) -> Array:
        """The finite values of a column, of shape `[<= R]`."""
        assert is_read(path), path
        values = self._columns.get(path)
        return values[np.isfinite(values)] if values is not None else np.zeros(0)

    def mean(self, path: str) -> float:
        """Mean over the last two thirds of the training time, weighted by time; NaN without it."""
        assert is_read(path), path
        values = self._columns.get(path)
        if values is None or len(values) != len(self._weights):
            return math.nan
        known = np.isfinite(values) & (self._weights > 0.0)
        return (
            float(np.average(values[known], weights=self._weights[known]))
            if known.any()
            else (math.nan)
        )

    def share(self, path: str) -> float:
        """As `mean`, of the shares of the driver's time; 0 for a phase that the run lacks."""
        value = self.mean(path)
        return 0.0 if math.isnan(value) else value

    def last(self, path: str) -> float:
        """The last finite value; NaN without one."""
        values = self.column(path)
        return float(values[-1]) if len(values) else math.nan

    def rise(self, path: str) -> float:
        """How much a counter has risen over all results; 0 without it."""
        values = self.column(path)
        return float(np.diff(values, prepend=0.0).clip(0.0).sum()) if len(values) else 0.0

    def text(self, path: str) -> str:
        """The last text, empty without one."""
        assert is_read(path), path
        return self._texts.get(path, "")

    def setting(self, key: str) -> float:
        """A number of the config; NaN if the user has not written it."""
        value = self._config.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if is_number and value is not None else math.nan

    def has(self, path: str) -> bool:
        """Whether results have a column."""
        assert is_read(path), path
        return path in self._columns

    def workers(self) -> list[tuple[int, str]]:
        """Index and prefix of the columns of each remote worker."""
        found = []
        for number in range(len(self._columns)):
            prefix = f"{_EACH}{number}/"
            if prefix + "index" not in self._columns:
                break
            index = self.last(prefix + "index")
            if index > 0.0:
                found.append((int(index), prefix))
        return found


class History:
    """Keeps of results what the rules read, as they arrive. Of long runs it keeps every second
    result, then every fourth, and so on.

    Attributes:
        num_results: results added so far.
    """

    def __init__(self) -> None:
        self.num_results = 0
        self._every = 1
        self._rows: list[dict[str, float]] = []
        self._texts: dict[str, str] = {}
        self._config: Mapping[str, Any] = {}

    def add(self, result: Mapping[str, Any]) -> None:
        """Adds a result as Tune has it."""
        self.num_results += 1
        self._config = result.get("config") or self._config
        row: dict[str, float] = {}
        _flatten(result, "", row, self._texts)
        if (self.num_results - 1) % self._every == 0:
            self._rows.append(row)
        else:  # counters hold, and shares of time are those of most results
            self._rows[-1] = {**self._rows[-1], **{k: v for k, v in row.items() if _is_total(k)}}
        if len(self._rows) > _MOST_ROWS:
            self._rows = self._rows[::2]
            self._every *= 2

    def results(self) -> Results:
        """The results so far as columns."""
        names = {name for row in self._rows for name in row}
        columns = {
            name: np.array([row.get(name, math.nan) for row in self._rows]) for name in names
        }
        return Results(columns, self._texts, self._config)


def _is_total(path: str) -> bool:
    return path.rsplit("/", 1)[-1].startswith("num_") or path.endswith("training_s")


def is_read(path: str) -> bool:
    """Whether rules read a column of results."""
    return path in READ or (path.startswith(_EACH) and path.endswith(_OF_EACH))


def _flatten(
    values: Mapping[str, Any], prefix: str, row: dict[str, float], texts: dict[str, str]
) -> None:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if f"{path}/".startswith(_BLOCKS) or f"{path}/" in _ABOVE:
                _flatten(value, f"{path}/", row, texts)
        elif isinstance(value, list | tuple) and f"{path}/" == _EACH:
            _flatten({str(i): each for i, each in enumerate(value)}, _EACH, row, texts)
        elif not is_read(path):
            continue
        elif isinstance(value, str):
            if value:
                texts[path] = value
        elif isinstance(value, int | float):
            row[path] = float(value)


def read_results(file: Path) -> Results:
    """Reads what the rules need of a result file of Tune; lines that are no JSON are left out.

    Raises:
        OSError: it cannot be read.
    """
    history = History()
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                history.add(row)
    return history.results()


Check = Callable[[Results], Finding | None]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        key: its name.
        when: when it finds something, for the docs.
        check: what it finds in the results of a run, or None.
        unless: rules that explain the same numbers better; if one of them finds something, this
            one does not count.
    """

    key: str
    when: str
    check: Check
    unless: tuple[str, ...] = ()


RULES: list[Rule] = []


def _rule(
    key: str, when: str, unless: tuple[str, ...] = ()
) -> Callable[[Callable[[Results], tuple[str, str, float] | None]], Check]:
    """Adds a rule; its function returns text, change and severity of a finding, or None."""

    def add(function: Callable[[Results], tuple[str, str, float] | None]) -> Check:
        def check(run: Results) -> Finding | None:
            found = function(run)
            return None if found is None else Finding(key, *found)

        RULES.append(Rule(key, when, check, unless))
        return check

    return add


def diagnose(run: Results) -> list[Finding]:
    """What is wrong with a run, in the order of the rules: faults, learning, time."""
    found = [(rule, finding) for rule in RULES if (finding := rule.check(run)) is not None]
    keys = {rule.key for rule, _ in found}
    return [finding for rule, finding in found if not keys & set(rule.unless)]


# ---- faults -----------------------------------------------------------------------------------


@_rule("env-faults", "an environment raised")
def _env_faults(run: Results) -> tuple[str, str, float] | None:
    count = run.rise(_FAULTS + "num_env_faults")
    if count < 1:
        return None
    return (
        f"{count:,.0f} environment {_plural('fault', count)}" + _reason(run, "last_env_fault"),
        "mend the environment; each fault ends an episode that is lost",
        count,
    )


@_rule("worker-failures", "a worker died, hung or raised")
def _worker_failures(run: Results) -> tuple[str, str, float] | None:
    restarts = run.rise(_FAULTS + "num_remote_worker_restarts")
    given_up = run.rise(_FAULTS + "num_workers_given_up")
    if restarts + given_up < 1:
        return None
    gone = f", {given_up:,.0f} given up" if given_up else ""
    return (
        f"{restarts:,.0f} {_plural('worker', restarts)} restarted{gone}"
        + _reason(run, "last_failure"),
        "see the Faults tab for the tracebacks; a worker that is killed may lack memory",
        restarts + given_up,
    )


@_rule("non-finite", "data or gradients were not finite")
def _non_finite(run: Results) -> tuple[str, str, float] | None:
    fragments = run.rise(_FAULTS + "num_non_finite")
    skipped = run.rise(_OPT + "num_skipped_updates")
    if fragments + skipped < 1:
        return None
    counts = {"fragment": fragments, "update": skipped}
    named = [f"{count:,.0f} {_plural(noun, count)}" for noun, count in counts.items() if count]
    verb = "was" if fragments + skipped == 1 else "were"
    return (
        f"{' and '.join(named)} {verb} not finite" + _reason(run, "last_non_finite"),
        "look for NaN in rewards and observations; lower lr, set grad_clip",
        fragments + skipped,
    )


# ---- learning ---------------------------------------------------------------------------------


@_rule("no-reward", "at least 20 episodes ended, and all returns are 0")
def _no_reward(run: Results) -> tuple[str, str, float] | None:
    episodes = run.last(_EPISODES + "num_episodes_lifetime")
    low = run.column(_EPISODES + "episode_return_min")
    high = run.column(_EPISODES + "episode_return_max")
    if not episodes >= 20 or not len(low) or np.any(low != 0.0) or np.any(high != 0.0):
        return None
    return (
        f"No episode had a reward: {episodes:,.0f} episodes, all with return 0",
        "check the environment's reward; a sparse one needs exploration (entropy_coeff)",
        episodes,
    )


@_rule(
    "deterministic",
    "the entropy of a policy over discrete actions is below 0.015, or 2 percent of its highest, "
    "for the last fifth of the steps, without a higher return since",
)
def _deterministic(run: Results) -> tuple[str, str, float] | None:
    entropy, steps = run.column(_LEARNER + "entropy"), run.column(_STEPS)
    returns = run.column(_RETURN)
    if len(entropy) < 5 or len(entropy) != len(steps) or entropy.min() < 0.0:
        return None
    if not entropy.any():  # a policy without this statistic
        return None
    # A policy may have become deterministic before the first result.
    above = np.flatnonzero(entropy > max(0.02 * entropy.max(), 0.015))
    begin = int(above[-1]) + 1 if len(above) else 0
    if begin >= len(steps) or steps[begin] > 0.8 * steps[-1]:
        return None
    if len(returns) == len(steps):
        # Means of 100 episodes each differ by a few hundredths of their spread without a cause.
        low = run.last(_EPISODES + "episode_return_min")
        noise = 0.05 * (run.last(_EPISODES + "episode_return_max") - low)
        then, now = np.median(returns[begin : begin + 3]), np.median(returns[-3:])
        if now > then + max(noise if math.isfinite(noise) else 0.0, 1e-9):
            return None
    return (
        f"Policy deterministic since {steps[begin]:,.0f} steps: entropy {entropy[-1]:.2g}",
        "lower lr, or raise entropy_coeff",
        1.0 - float(steps[begin] / steps[-1]),
    )


@_rule("value-loss", "the value loss is above a million")
def _value_loss(run: Results) -> tuple[str, str, float] | None:
    loss = _late(run.column(_LEARNER + "vf_loss"))
    if not len(loss) or np.median(loss) < 1e6:
        return None
    return (
        f"Value loss {np.median(loss):.1e}: rewards are too large for the value function",
        "scale rewards, so that returns are about 1 to 1000",
        float(np.median(loss)),
    )


@_rule(
    "clipped-actions",
    "more than 80 percent of the actions of a Box are outside of its bounds, in most results of"
    " the last two thirds",
)
def _clipped_actions(run: Results) -> tuple[str, str, float] | None:
    clipped = _late(run.column(_OPT + "actions/clipped"))
    if len(clipped) < 3 or np.median(clipped) <= 0.8:
        return None
    share = float(np.median(clipped))
    return (
        f"{share:.0%} of the actions are clipped: the environment gets the bounds, whatever the "
        "policy samples",
        "normalize_actions=True, finite bounds of the action space that fit the task, or "
        'model={"squash_actions": True}',
        share,
    )


@_rule(
    "update-size",
    "KL divergence above 0.5, or clip fraction above 0.5 with a KL divergence above 0.05, in a "
    "tenth of the results in which the policy changed at all",
)
def _update_size(run: Results) -> tuple[str, str, float] | None:
    kl, clip = run.column(_LEARNER + "mean_kl_loss"), run.column(_LEARNER + "clip_fraction")
    if not kl.any() or len(kl) != len(clip):  # a policy without one of them
        too_large = [kl > 0.5, clip > 0.5]
    else:
        # Of Gaussian policies, and where samples are old as APPO's are, the clip fraction is high
        # without large updates. After a policy has become deterministic, both are 0.
        changes = kl > 1e-6
        too_large = [(kl > 0.5)[changes], ((clip > 0.5) & (kl > 0.05))[changes]]
    if max(len(kl), len(clip)) < 3 or not any(len(x) and np.mean(x) >= 0.1 for x in too_large):
        return None
    return (
        f"KL {kl.max(initial=0.0):.2g}, clip fraction {clip.max(initial=0.0):.2g}: updates are too "
        "large",
        "lower lr, fewer num_sgd_iter, larger sgd_minibatch_size",
        float(max(kl.max(initial=0.0), clip.max(initial=0.0))),
    )


@_rule("return-fell", "the mean return is less than half as far above its lowest as at its best")
def _return_fell(run: Results) -> tuple[str, str, float] | None:
    returns, steps = run.column(_RETURN), run.column(_STEPS)
    if len(returns) < 5 or len(steps) < len(returns):
        return None
    best = int(np.argmax(returns))
    low, high, last = returns.min(), returns[best], float(np.median(returns[-3:]))
    spread = high - min(low, last)
    if high - last < 0.5 * spread or spread < 0.2 * max(abs(high), abs(low), 1e-9):
        return None
    episodes = run.column(_EPISODES + "num_episodes_lifetime")[-len(returns) :]
    # Before that, a mean is over few episodes.
    if best >= len(returns) - 3 or len(episodes) < len(returns) or episodes[best] < 100:
        return None
    at = steps[len(steps) - len(returns) + best]
    return (
        f"Return fell from {high:,.4g} (after {at:,.0f} steps) to {last:,.4g}",
        "lower lr, or let it fall with the steps; set grad_clip",
        float((high - last) / spread),
    )


@_rule(
    "no-learning",
    "100,000 steps changed the mean return by less than a tenth of its spread within the last"
    " 100 episodes, and no three results before were lower by more than a fifth of it",
    unless=(
        *("no-reward", "deterministic", "value-loss", "clipped-actions", "update-size"),
        "return-fell",
    ),
)
def _no_learning(run: Results) -> tuple[str, str, float] | None:
    returns, steps = run.column(_RETURN), run.column(_STEPS)
    if len(returns) < 6 or len(steps) < len(returns) or steps[-1] - steps[-len(returns)] < 1e5:
        return None
    third = len(returns) // 3
    first, last = float(np.median(returns[:third])), float(np.median(returns[-third:]))
    low = run.last(_EPISODES + "episode_return_min")
    high = run.last(_EPISODES + "episode_return_max")
    if low == high == 0.0 or not abs(last - first) < 0.1 * (high - low):
        return None
    # A run that learned quickly and has changed little since was lower before. Medians of three
    # results, because a mean over few episodes varies.
    medians = np.median(np.lib.stride_tricks.sliding_window_view(returns, 3), axis=1)
    if last - medians.min() > 0.2 * (high - low):
        return None
    return (
        f"{steps[-1]:,.0f} steps changed nothing: return {first:,.4g} before, {last:,.4g} now",
        "raise or lower lr, check that rewards depend on actions",
        float(steps[-1]),
    )


@_rule("small-updates", "updates of fewer than 16 rows")
def _small_updates(run: Results) -> tuple[str, str, float] | None:
    rows = run.column(_OPT + "rows_per_update")
    rows = rows[rows > 0.0]  # 0: no update in that interval
    typical = float(np.median(rows)) if len(rows) else math.inf
    if typical >= 16.0 or run.rise(_OPT + "num_updates") < 100:
        return None
    return (
        f"{typical:.0f} rows per update: gradients are noisy, and each costs a message",
        "raise rollout_fragment_length, num_envs_per_worker or sgd_minibatch_size",
        -typical,
    )


# ---- time -------------------------------------------------------------------------------------


@_rule(
    "slow-worker",
    "a worker samples less than half as many steps a second, while it samples, as the median "
    "of the others; less than two sevenths where all cores are busy",
)
def _slow_worker(run: Results) -> tuple[str, str, float] | None:
    if not run.lasts:
        return None
    rates = {}
    for index, prefix in run.workers():
        rate = _late(run.column(prefix + "env_steps_per_sampling_s"))
        if len(rate) and np.any(rate > 0.0):
            rates[index] = float(np.median(rate[rate > 0.0]))
    if len(rates) < 2:
        return None
    slow = min(rates, key=lambda index: rates[index])
    median = float(np.median([rate for index, rate in rates.items() if index != slow]))
    # Where processes take turns, rates differ without a cause in the worker.
    limit = 3.5 if run.mean(_MACHINE + "cpu_share") > 0.9 else 2.0
    if median < limit * rates[slow]:
        return None
    skew, idle = run.share(_WORKERS + "skew"), run.share(_WORKERS + "idle")
    allreduce = run.has(_OPT + "num_ranks")
    otherwise = _WITHOUT_SLOW.get(run.text(_NAME))
    text = (
        f"Worker {slow} is {median / rates[slow]:.1f} times slower than the median (its "
        f"environment, or its machine): {rates[slow]:,.0f} steps/s while it samples"
    )
    if allreduce and skew >= 0.1:
        text += f". All ranks wait for rank {slow}: {skew:.0%} of their time"
    elif otherwise and idle >= 0.1:
        text += f". The others wait for it: workers are idle for {idle:.0%} of their time"
    change = "mend its environment"
    if allreduce:
        change += ", or fraction_workers below 1"
    elif otherwise:
        change += f", or {otherwise}"
    return text, change, median / rates[slow]


@_rule(
    "machine-busy",
    "driver and workers both wait, and more processes want a processor than there are and "
    "than this run has",
)
def _machine_busy(run: Results) -> tuple[str, str, float] | None:
    cpus, load = run.last(_MACHINE + "num_cpus"), run.mean(_MACHINE + "load_1m")
    own = len(run.workers()) + 1
    if not run.lasts or not load >= max(own + 0.5 * cpus, 1.5 * cpus):
        return None
    if run.mean(_MACHINE + "cpu_share") < 0.9:
        return None
    return (
        f"The cores are busy with other work: {load:.0f} processes want {cpus:.0f} cores, of which "
        f"at most {own} are this run's",
        "end the other work, or measure again; shares and rates are not those of a quiet machine",
        load / cpus,
    )


@_rule("too-many-workers", "at least twice as many workers as cores, which are all busy")
def _too_many_workers(run: Results) -> tuple[str, str, float] | None:
    workers, cpus = len(run.workers()), run.last(_MACHINE + "num_cpus")
    if not run.lasts or not workers >= 2.0 * cpus or run.mean(_MACHINE + "cpu_share") < 0.8:
        return None
    return (
        f"{workers} workers on {cpus:.0f} cores: they take turns",
        f"num_workers={cpus:.0f}, with a larger num_envs_per_worker for more samples",
        workers / cpus,
    )


@_rule(
    "weights-dominate",
    "the driver sends weights in more than 30 percent of its time, 100 KB or more with each "
    "request",
)
def _weights_dominate(run: Results) -> tuple[str, str, float] | None:
    phase = "dispatch" if run.has(_DRIVER + "dispatch") else "broadcast"
    share = run.share(_DRIVER + phase)
    updates = max(run.rise(_OPT + "num_updates"), 1.0)
    sent = run.rise(_OPT + "num_bytes_sent") / updates
    if not run.lasts or share < 0.3 or sent < 100_000:
        return None
    return (
        f"Weights dominate: the driver spends {share:.0%} of its time in {phase}, "
        f"{sent / 1e3:,.0f} KB for each update",
        "longer fragments (rollout_fragment_length), a smaller network, or DecentralizedAllReduce, "
        "whose weights stay in the workers",
        share,
    )


@_rule(
    "driver-busy",
    "the driver of an optimizer that applies gradients waits in less than 15 percent of its "
    "time while workers are idle for more than 20",
    unless=("weights-dominate",),
)
def _driver_busy(run: Results) -> tuple[str, str, float] | None:
    wait = run.mean(_DRIVER + "wait")
    idle = run.share(_WORKERS + "idle")
    if not run.lasts or not wait < 0.15 or idle < 0.2:
        return None
    return (
        f"Driver busy {1.0 - wait:.0%}, workers idle {idle:.0%}: more workers make gradients "
        "older, not faster",
        "larger fragments (rollout_fragment_length), fewer workers, or SyncSamples",
        idle,
    )


@_rule("stale", "more than 30 percent of the gradients are older than max_policy_lag")
def _stale(run: Results) -> tuple[str, str, float] | None:
    arrived, stale = run.rise(_OPT + "num_gradients"), run.rise(_OPT + "num_gradients_stale")
    if arrived < 100 or stale < 0.3 * arrived:
        return None
    return (
        f"{stale / arrived:.0%} of the gradients are older than max_policy_lag, and dropped or "
        "scaled down",
        "fewer workers, longer fragments, or a larger max_policy_lag",
        stale / arrived,
    )


@_rule("allreduce-dominates", "sums over the group take more than half of the ranks' time")
def _allreduce_dominates(run: Results) -> tuple[str, str, float] | None:
    share = run.share(_WORKERS + "allreduce")
    if not run.lasts or share < 0.5:
        return None
    return (
        f"Sums over the group take {share:.0%} of the ranks' time",
        "larger sgd_minibatch_size, fewer num_sgd_iter, or fewer workers",
        share,
    )


@_rule(
    "reporting",
    "results, loggers and checkpoints take more than 30 percent of the driver's time",
)
def _reporting(run: Results) -> tuple[str, str, float] | None:
    share = run.share(_DRIVER + "report")
    if not run.lasts or share < 0.3:
        return None
    return (
        f"Tune, its loggers and checkpoints take {share:.0%} of the driver's time",
        "raise min_time_s_per_iteration",
        share,
    )


@_rule(
    "more-workers",
    "the driver waits in more than 60 percent of its time for workers that are busy, and half"
    " of the cores are free",
)
def _more_workers(run: Results) -> tuple[str, str, float] | None:
    wait = max(run.share(_DRIVER + "wait"), run.share(_DRIVER + "sample"))
    cpus, busy = run.last(_MACHINE + "num_cpus"), run.mean(_MACHINE + "cpu_share")
    workers = len(run.workers())
    if not run.lasts or wait < 0.6 or run.share(_WORKERS + "idle") > 0.3 or not busy <= 0.5:
        return None
    if not workers or workers + 1 >= 0.5 * cpus or run.has(_OPT + "num_ranks"):
        return None
    return (
        f"Cores are free: the driver waits for {wait:.0%} of its time, workers are busy, and "
        f"{busy:.0%} of {cpus:.0f} cores are in use",
        f"more workers: num_workers={min(2 * workers, int(cpus) - 1)}",
        wait,
    )


def _late(values: Array) -> Array:
    """The last two thirds of a column."""
    return values[len(values) // 3 :]


def _reason(run: Results, key: str, most: int = 120) -> str:
    """The last line of a message of the fault counts, after a colon; empty without a message."""
    lines = run.text(_FAULTS + key).strip().splitlines()
    return f": {lines[-1][:most]}" if lines else ""


def _plural(word: str, count: float) -> str:
    return word if count == 1 else f"{word}s"


def markdown_table(rules: Sequence[Rule] = ()) -> str:
    """The table of the rules for the docs."""
    rows: Iterable[Rule] = rules or RULES
    lines = ["| rule | finds something if |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{rule.key}` | {rule.when} |" for rule in rows)])


if __name__ == "__main__":
    print(markdown_table())
