"""The rules of the diagnosis, each on runs with the problem and on runs without the problem."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_tree import ROOT

from polopt.dashboards.data import diagnosis, run_results
from polopt.dashboards.data.diagnosis import RULES, Finding, diagnose
from polopt.dashboards.data.run_results import COLUMNS, History, RunResults, read_results

Rows = list[dict[str, Any]]
DOCS = ROOT / "docs" / "dashboards.md"
COUNT = 30


def healthy(phases: tuple[str, str, str] = ("wait", "apply", "dispatch"), workers: int = 4) -> Rows:
    """Returns results of a run on 16 cores that learns for 15 s, after a start-up of 3 s."""
    first, second, third = phases
    rows = []
    for i in range(COUNT):
        startup = 6.0 / 7.0 if i == 0 else 0.0
        share = {first: 0.5, second: 0.3, third: 0.1, "report": 0.05, "other": 0.05}
        each = {"env_steps_per_sampling_s": 500.0, "env_steps_per_s": 400.0, "idle_share": 0.2}
        rows.append(
            {
                "num_env_steps_sampled_lifetime": 8000 * (i + 1),
                "config": {"num_workers": workers, "lr": 0.001},
                "env_runners": {
                    "episode_return_mean": 20.0 + 15.0 * i,
                    "episode_return_min": 9.0,
                    "episode_return_max": 40.0 + 15.0 * i,
                    "num_episodes_lifetime": 100 * (i + 1),
                },
                "learners": {
                    "default_policy": {
                        "entropy": 0.69 - 0.01 * i,
                        "vf_loss": 50.0,
                        "mean_kl_loss": 0.01,
                        "clip_fraction": 0.1,
                    }
                },
                "fault_tolerance": {
                    "num_env_faults": 0,
                    "num_non_finite": 0,
                    "num_workers_given_up": 0,
                    "num_remote_worker_restarts": 0,
                    "last_env_fault": "",
                    "last_failure": "",
                    "last_non_finite": "",
                },
                "optimizer": {
                    "name": "async_gradients",
                    "num_early_stopped": 0,
                    "interval_s": 3.5 if i == 0 else 0.5,
                    "rows_per_update": 64.0,
                    "num_updates": 125 * (i + 1),
                    "num_skipped_updates": 0,
                    "num_bytes_sent": 125 * 20_000 * (i + 1),
                    "num_gradients": 125 * (i + 1),
                    "num_gradients_stale": 0,
                    "driver": {
                        "share": {
                            "startup": startup,
                            **{phase: value * (1.0 - startup) for phase, value in share.items()},
                        }
                    },
                    "workers": {
                        "share": {"sample": 0.8, "idle": 0.2, "skew": 0.0, "allreduce": 0.0},
                        "per_worker": [{"index": n + 1, **each} for n in range(workers)],
                    },
                    "machine": {"cpu_share": 0.6, "num_cpus": 16, "load_1m": 5.0},
                },
            }
        )
    return rows


def samples() -> Rows:
    rows = healthy(("sample", "learn", "broadcast"))
    for row in rows:
        row["optimizer"]["name"] = "sync_samples"
    return rows


def replay() -> Rows:
    rows = healthy(("sample", "learn", "draw"))
    for i, row in enumerate(rows):
        blocked = {"learner_blocked_s": 0.15 * (i + 1), "samplers_blocked_s": 0.2 * (i + 1)}
        row["optimizer"] |= {"name": "sync_replay", **blocked}
    return rows


def ranks() -> Rows:
    rows = healthy(("sample", "learn", "group"))
    for row in rows:
        row["optimizer"] |= {"name": "decentralized_allreduce", "num_ranks": 4}
    return rows


def findings(rows: Rows) -> dict[str, Finding]:
    history = History()
    for row in json.loads(json.dumps(rows)):
        history.add(row)
    return {finding.rule: finding for finding in diagnose(history.results())}


def put(rows: Rows, path: str, values: Any) -> None:
    """Sets an entry in all rows to one value, or to a function of the index of the row."""
    *above, last = path.split("/")
    for number, row in enumerate(rows):
        place: Any = row
        for key in above:
            place = place[int(key)] if isinstance(place, list) else place[key]
        place[last] = values(number) if callable(values) else values


@pytest.mark.parametrize("make", [healthy, samples, replay, ranks])
def test_healthy_run_has_no_finding(make: Callable[[], Rows]) -> None:
    assert findings(make()) == {}


#: For each rule: a run without problems, changes to its results that cause the finding, and parts
#: of the finding's text.
FAULTS: list[tuple[str, Callable[[], Rows], dict[str, Any], tuple[str, ...]]] = [
    (
        "env-faults",
        healthy,
        {
            "fault_tolerance/num_env_faults": lambda i: 20 * i + 40,
            "fault_tolerance/last_env_fault": "Traceback:\n  File x\nRuntimeError: boom",
        },
        ("620 environment faults: RuntimeError: boom",),
    ),
    (
        "worker-failures",
        healthy,
        {
            "fault_tolerance/num_remote_worker_restarts": lambda i: int(i > 4),
            "fault_tolerance/last_failure": "The actor died: SIGKILL",
        },
        ("1 worker restart: The actor died: SIGKILL",),
    ),
    (
        "non-finite",
        samples,
        {
            "fault_tolerance/num_non_finite": 3,
            "optimizer/num_skipped_updates": 2,
            "fault_tolerance/last_non_finite": "rewards: NaN",
        },
        (
            "3 fragments or gradients were not finite or too large, and 2 updates were skipped: "
            "rewards: NaN",
        ),
    ),
    (
        "worker-failures",
        healthy,
        {"fault_tolerance/num_remote_worker_restarts": lambda i: int(i > 4)},
        ("1 worker restart",),
    ),
    (
        "non-finite",
        samples,
        {"optimizer/num_skipped_updates": lambda i: int(i > 4)},
        ("1 update was skipped",),
    ),
    (
        "no-reward",
        samples,
        {f"env_runners/episode_return_{which}": 0.0 for which in ("mean", "min", "max")},
        ("All returns so far are 0 (3,000 episodes)",),
    ),
    (
        "deterministic",
        samples,
        {
            "learners/default_policy/entropy": lambda i: 0.69 if i < 2 else 0.001,
            "env_runners/episode_return_mean": 9.3,
        },
        ("The policy has been deterministic since step 24,000: entropy 0.001",),
    ),
    (
        "deterministic",
        samples,
        {
            "learners/default_policy/entropy": 0.001,
            "env_runners/episode_return_mean": 9.3,
        },
        ("The policy has been deterministic since step 8,000: entropy 0.001",),
    ),
    (
        "deterministic",  # the mean returns of nearly equal episodes still differ slightly
        samples,
        {
            "learners/default_policy/entropy": 1e-18,
            "env_runners/episode_return_mean": lambda i: 9.3 + 0.02 * (i % 3) + 0.002 * i,
            "env_runners/episode_return_min": 8.0,
            "env_runners/episode_return_max": 11.0,
            "learners/default_policy/mean_kl_loss": 0.0,
        },
        ("The policy has been deterministic since step 8,000: entropy 1e-18",),
    ),
    (
        "deterministic",  # every episode ends at the limit of its steps, as in MountainCar-v0
        samples,
        {
            "learners/default_policy/entropy": 0.001,
            **{f"env_runners/episode_return_{which}": -200.0 for which in ("mean", "min", "max")},
        },
        ("The policy has been deterministic since step 8,000",),
    ),
    (
        "deterministic",  # the first result has no entropy, because it has no update
        samples,
        {
            "learners/default_policy/entropy": lambda i: 0.001 if i else math.nan,
            "env_runners/episode_return_mean": 9.3,
        },
        ("The policy has been deterministic since step 16,000: entropy 0.001",),
    ),
    (
        "value-loss",
        samples,
        {"learners/default_policy/vf_loss": 1.3e9},
        ("Value loss 1.3e+09", "scale rewards"),
    ),
    (
        "clipped-actions",
        samples,
        {"optimizer/actions": lambda i: {"mean": [9.0], "clipped": 0.3 if i < 5 else 0.92}},
        ("92% of the action values are clipped", "normalize_actions=True", "squash_actions"),
    ),
    (
        "update-size",
        samples,
        {
            "learners/default_policy/mean_kl_loss": lambda i: 60.0 if i < 5 else 0.0,
            "learners/default_policy/clip_fraction": lambda i: 0.93 if i < 5 else 0.0,
        },
        ("KL divergence up to 60, clip fraction up to 0.93",),
    ),
    (
        "update-size",
        samples,
        {
            "learners/default_policy/mean_kl_loss": 0.2,
            "learners/default_policy/clip_fraction": 0.7,
        },
        ("KL divergence up to 0.2, clip fraction up to 0.7",),
    ),
    (
        "update-size",  # the first update made the policy deterministic, and later updates are 0
        samples,
        {
            "learners/default_policy/mean_kl_loss": lambda i: 0.0 if i else 7.0,
            "learners/default_policy/clip_fraction": lambda i: 0.0 if i else 0.45,
        },
        ("KL divergence up to 7, clip fraction up to 0.45",),
    ),
    (
        "return-fell",
        healthy,
        {"env_runners/episode_return_mean": lambda i: 20.0 + 40.0 * i if i < 10 else 25.0},
        ("Return fell from 380 (after 80,000 steps) to 25",),
    ),
    (
        "no-learning",
        healthy,
        {
            "env_runners/episode_return_mean": lambda i: 21.0 + 0.5 * (i % 3),
            "env_runners/episode_return_max": 60.0,
        },
        ("No learning in 240,000 steps: return 21.5 at first, 21.5 now",),
    ),
    ("small-updates", healthy, {"optimizer/rows_per_update": 8.0}, ("8 rows per update",)),
    (
        "small-updates",
        samples,
        {"optimizer/rows_per_update": lambda i: 0.0 if i % 3 else 8.0},  # 0 means no update
        ("8 rows per update",),
    ),
    (
        "slow-worker",
        healthy,
        {"optimizer/workers/per_worker/2/env_steps_per_sampling_s": 80.6},
        ("Worker 3 is 6.2 times slower than the median",),
    ),
    (
        "slow-worker",
        samples,
        {"optimizer/workers/per_worker/2/env_steps_per_sampling_s": 50.0},
        ("Worker 3 is 10.0 times slower", "workers are idle for 20%", "fraction_workers"),
    ),
    (
        "slow-worker",
        ranks,
        {
            "optimizer/workers/per_worker/2/env_steps_per_sampling_s": 50.0,
            "optimizer/workers/share/skew": 0.35,
        },
        ("ranks wait for worker 3: waiting takes 35%", "fraction_workers"),
    ),
    (
        "machine-busy",
        samples,
        {"optimizer/machine/cpu_share": 0.99, "optimizer/machine/load_1m": 40.0},
        ("40 processes compete for 16 cores", "the workers of this run are only 5 processes"),
    ),
    (
        "small-buffer",
        replay,
        {
            "optimizer/buffer_rows": 900,
            "optimizer/buffer_fill": lambda i: 1.0 if i > 3 else 0.2 * (i + 1),
            "env_runners/episode_len_mean": lambda i: 20.0 + 15.0 * i,
        },
        ("holds 900 rows, which are 2.0 episodes of 455 steps", "raise buffer_size"),
    ),
    (
        "too-many-workers",
        healthy,
        {"optimizer/machine/num_cpus": 2, "optimizer/machine/cpu_share": 0.97},
        ("4 workers share 2 cores", "num_workers=2"),
    ),
    (
        "weights-dominate",
        healthy,
        {
            "optimizer/driver/share/dispatch": 0.45,
            "optimizer/num_bytes_sent": lambda i: 125 * 540_000 * (i + 1),
        },
        ("45% of its time in the phase dispatch, and sends 540 KB",),
    ),
    (
        "driver-busy",
        healthy,
        {"optimizer/driver/share/wait": 0.03, "optimizer/workers/share/idle": 0.6},
        ("busy for 97% of its time, and the workers are idle for 60%", "SyncSamples"),
    ),
    (
        "stale",
        healthy,
        {"optimizer/num_gradients_stale": lambda i: 50 * (i + 1)},
        ("40% of the gradients have a lag above max_policy_lag",),
    ),
    (
        "allreduce-dominates",
        ranks,
        {"optimizer/workers/share/allreduce": 0.57},
        ("57% of the ranks' time", "sgd_minibatch_size"),
    ),
    (
        "learner-waits",
        replay,
        {"optimizer/learner_blocked_s": lambda i: 0.4 * (i + 1)},
        ("The learner waits for samples for 80%", "num_workers=8"),
    ),
    (
        "learner-waits-for-shards",
        replay,
        {"optimizer/learner_blocked_by_shards_s": lambda i: 0.4 * (i + 1)},
        ("The learner waits for replay shards for 80%", "num_replay_shards"),
    ),
    (
        "samplers-wait",
        replay,
        {"optimizer/samplers_blocked_s": lambda i: 0.45 * (i + 1)},
        ("The samplers wait for the learner for 90%", "training_intensity"),
    ),
    (
        "reporting",
        samples,
        {"optimizer/driver/share/report": 0.4},
        ("40% of the driver's time", "min_time_s_per_iteration"),
    ),
    (
        "more-workers",
        healthy,
        {"optimizer/driver/share/wait": 0.8, "optimizer/machine/cpu_share": 0.3},
        ("driver waits for 80%", "num_workers=8"),
    ),
]


@pytest.mark.parametrize(
    ("rule", "make", "changes", "parts"), FAULTS, ids=[fault[0] for fault in FAULTS]
)
def test_rule_names_the_fault_and_no_other_does(
    rule: str, make: Callable[[], Rows], changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    rows = make()
    for path, values in changes.items():
        put(rows, path, values)
    found = findings(rows)
    assert set(found) == {rule}
    text = f"{found[rule].text}; {found[rule].change}"
    assert [part for part in parts if part not in text] == [], text
    assert not found[rule].text.endswith(": "), "a colon without a message after it"
    assert math.isfinite(found[rule].severity)


#: For some rules: a path in the results and two values, where the second value is worse.
WORSE: list[tuple[str, Callable[[], Rows], str, Any, Any]] = [
    (
        "env-faults", healthy, "fault_tolerance/num_env_faults",
        lambda i: i + 1, lambda i: 9 * i + 1,
    ),
    ("value-loss", samples, "learners/default_policy/vf_loss", 1e7, 1e9),
    ("small-updates", healthy, "optimizer/rows_per_update", 12.0, 8.0),
    (
        "slow-worker", healthy, "optimizer/workers/per_worker/2/env_steps_per_sampling_s",
        50.0, 20.0,
    ),
    ("reporting", samples, "optimizer/driver/share/report", 0.4, 0.5),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "make", "path", "bad", "worse"), WORSE, ids=[each[0] for each in WORSE]
)
def test_worse_numbers_are_more_severe(
    rule: str, make: Callable[[], Rows], path: str, bad: Any, worse: Any
) -> None:
    severities = []
    for values in (bad, worse):
        rows = make()
        put(rows, path, values)
        severities.append(findings(rows)[rule].severity)
    assert severities[0] < severities[1]


@pytest.mark.parametrize(
    ("optimizer", "waits", "change"),
    [
        ("async_gradients", False, "speed up its environment"),
        ("async_samples", False, "speed up its environment"),
        ("sync_gradients", True, "speed up its environment, or use async_gradients"),
        (
            "sync_samples", True,
            "speed up its environment, or use fraction_workers below 1, or async_samples",
        ),
    ],
)  # fmt: skip
def test_change_for_a_slow_worker_fits_the_optimizer(
    optimizer: str, waits: bool, change: str
) -> None:
    rows = healthy(("sample", "learn", "broadcast"))
    put(rows, "optimizer/name", optimizer)
    put(rows, "optimizer/workers/per_worker/2/env_steps_per_sampling_s", 50.0)
    finding = findings(rows)["slow-worker"]
    assert ("The other workers wait" in finding.text) == waits
    assert finding.change == change


def findings_beside(rows: Rows, other_processes: float) -> dict[str, Finding]:
    """Returns the findings of a run that is known to share its machine with other trials."""
    history = History()
    for row in rows:
        history.add(row)
    columns = history.results()._columns
    return {one.rule: one for one in diagnose(RunResults(columns, other_processes))}


def test_trials_that_share_the_cores_are_no_other_programs() -> None:
    rows = samples()
    put(rows, "optimizer/machine/cpu_share", 0.99)
    put(rows, "optimizer/machine/load_1m", 40.0)
    assert set(findings_beside(rows, 0.0)) == {"machine-busy"}
    shared = findings_beside(rows, 34.0)
    assert set(shared) == {"trials-share-cores"}
    text = shared["trials-share-cores"].text
    assert "40 processes competed for 16 cores" in text
    assert "other trials of the experiment had 34 processes at the same time" in text
    assert set(findings_beside(rows, 20.0)) == {"trials-share-cores"}
    both = findings_beside(rows, 10.0)
    assert set(both) == {"machine-busy"}
    assert "this run and of the trials beside it are only 15 processes" in both["machine-busy"].text
    put(rows, "optimizer/machine/load_1m", 16.0)  # a process for each core
    assert findings_beside(rows, 11.0) == {}


def test_every_rule_has_a_run_with_its_fault() -> None:
    beside = "trials-share-cores"  # its test is test_trials_that_share_the_cores...
    assert {rule.key for rule in RULES} == {beside, *(fault[0] for fault in FAULTS)}


#: Runs without problems whose numbers are close to a problem.
ODD: list[tuple[str, Callable[[], Rows], dict[str, Any]]] = [
    ("a solved task whose returns are all equal", samples, {
        "learners/default_policy/entropy": lambda i: 0.69 if i < 5 else 0.005,
        "env_runners/episode_return_mean": lambda i: -1.0 + 3.0 * i if i < 3 else 9.92,
        "env_runners/episode_return_max": 9.92,
        "env_runners/episode_return_min": lambda i: -1.0 if i < 5 else 9.92}),
    ("a task that is solved in the first result", samples, {
        "learners/default_policy/entropy": 0.005,
        "env_runners/episode_return_mean": lambda i: 9.92 if i else 9.91,
        "env_runners/episode_return_max": 9.92,
        "env_runners/episode_return_min": lambda i: 9.92 if i else 3.0}),
    ("a return that rises although the entropy is low, without episodes in the first results",
     samples, {
        "learners/default_policy/entropy": lambda i: 0.69 if i < 20 else 0.005,
        "env_runners/episode_return_mean":
            lambda i: math.nan if i < 3 else 20.0 if i < 23 else 125.0,
        "env_runners/episode_return_max": lambda i: math.nan if i < 3 else 1000.0,
        "env_runners/episode_return_min": lambda i: math.nan if i < 3 else 9.0}),
    ("the best policy of a game of chance", samples, {
        "learners/default_policy/entropy": lambda i: 0.69 if i < 5 else 0.005,
        "env_runners/episode_return_mean": lambda i: min(0.02 + 0.2 * i, 0.74),
        "env_runners/episode_return_max": 1.0,
        "env_runners/episode_return_min": 0.0}),
    ("a buffer of many episodes", replay, {
        "optimizer/buffer_rows": 50_000, "optimizer/buffer_fill": 1.0,
        "env_runners/episode_len_mean": 500.0}),
    ("a buffer that is not full yet", replay, {
        "optimizer/buffer_rows": 900, "optimizer/buffer_fill": 0.1,
        "env_runners/episode_len_mean": 455.0}),
    ("a solved task: low entropy and rising returns", samples, {
        "learners/default_policy/entropy": lambda i: 0.69 if i < 5 else 0.005}),
    ("a task solved within the first third", samples, {
        "env_runners/episode_return_mean": lambda i: -90.0 if i > 2 else -500.0 + 136.0 * i,
        "env_runners/episode_return_min": -160.0,
        "env_runners/episode_return_max": -63.0}),
    ("entropy of a Gaussian policy", samples, {
        "learners/default_policy/entropy": lambda i: 1.4 - 0.2 * i,
        "env_runners/episode_return_mean": lambda i: -900.0 + 20.0 * i,
        "env_runners/episode_return_min": -900.0,
        "env_runners/episode_return_max": -100.0}),
    ("a policy without entropy", samples, {"learners/default_policy/entropy": 0.0}),
    ("actions that are clipped only until the policy has learned the bounds", samples, {
        "optimizer/actions": lambda i: {"clipped": 0.95 if i < 12 else 0.6}}),
    ("one large update", samples, {
        "learners/default_policy/mean_kl_loss": lambda i: 0.9 if i == 3 else 0.01}),
    ("old rows that APPO clips", samples, {
        "learners/default_policy/mean_kl_loss": 0.001,
        "learners/default_policy/clip_fraction": 0.87}),
    ("rows that PPO clips in six action dimensions", samples, {
        "learners/default_policy/mean_kl_loss": 0.028,
        "learners/default_policy/clip_fraction": 0.53}),
    ("a return that falls and recovers", healthy, {
        "env_runners/episode_return_mean": lambda i: 20.0 + 15.0 * (i if i != 15 else 2)}),
    ("noise at the goal", healthy, {
        "env_runners/episode_return_mean": lambda i: min(20.0 + 50.0 * i, 470.0 + 20.0 * (i % 2))}),
    ("a busy driver whose workers do not wait", healthy, {
        "optimizer/driver/share/wait": 0.05, "optimizer/workers/share/idle": 0.05}),
    ("workers of unequal speed", healthy, {
        "optimizer/workers/per_worker/1/env_steps_per_sampling_s": 300.0}),
    ("a worker that has not answered", healthy, {
        "optimizer/workers/per_worker/1/env_steps_per_sampling_s": 0.0}),
    ("a learner that waits for workers while the workers are idle", replay, {
        "optimizer/learner_blocked_s": lambda i: 0.4 * (i + 1),
        "optimizer/workers/share/idle": 0.6}),
    ("a machine that only this run uses", healthy, {
        "optimizer/machine/cpu_share": 1.0, "optimizer/machine/num_cpus": 4,
        "optimizer/machine/load_1m": 5.5}),
    ("no core is free", healthy, {
        "optimizer/driver/share/wait": 0.8, "optimizer/machine/cpu_share": 0.9}),
    ("results without statistics of the machine and of episodes", healthy, {
        "optimizer/machine": {}, "env_runners": {}}),
]  # fmt: skip


@pytest.mark.parametrize(("about", "make", "changes"), ODD, ids=[odd[0] for odd in ODD])
def test_rules_find_no_problem_in_good_runs(
    about: str, make: Callable[[], Rows], changes: dict[str, Any]
) -> None:
    rows = make()
    for path, values in changes.items():
        put(rows, path, values)
    assert findings(rows) == {}


def test_workers_that_are_the_driver_are_not_compared() -> None:
    rows = samples()
    for row in rows:
        row["optimizer"]["workers"]["per_worker"] = [{"index": 0, "env_steps_per_sampling_s": 9.0}]
    assert findings(rows) == {}


@pytest.mark.parametrize(
    ("count", "seconds", "lasts"),
    [(0, 9.0, False), (1, 9.0, False), (1, 11.0, True), (2, 0.9, False), (2, 1.1, True)],
)
def test_rules_about_time_need_some_seconds_but_few_results(
    count: int, seconds: float, lasts: bool
) -> None:
    rows = healthy()[:count]
    put(rows, "optimizer/interval_s", lambda i: 7.0 * seconds if i == 0 else seconds)
    put(rows, "optimizer/workers/per_worker/2/env_steps_per_sampling_s", 25.0)
    assert set(findings(rows)) == ({"slow-worker"} if lasts else set())


def test_noise_of_an_untrained_policy_is_no_fall() -> None:
    """The returns are like those of random actions in CartPole-v1. Each mean is over 100 episodes,
    and 30 of them are new in each result."""
    for seed in range(40):
        lengths = 9.0 + np.random.default_rng(seed).exponential(13.0, 30 * COUNT)
        rows = samples()
        for number, row in enumerate(rows):
            window = lengths[: 30 * (number + 1)][-100:]
            row["env_runners"] = {
                "episode_return_mean": float(window.mean()),
                "episode_return_min": float(window.min()),
                "episode_return_max": float(window.max()),
                "num_episodes_lifetime": 30 * (number + 1),
            }
        assert "return-fell" not in findings(rows), seed


def test_start_up_does_not_count() -> None:
    rows = healthy()
    rows[0]["optimizer"]["driver"]["share"] = {"startup": 1.0, "wait": 0.0}
    assert findings(rows) == {}


def test_history_of_a_long_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_results, "_MOST_ROWS", 20)
    history, rows = History(), healthy()
    put(rows, "fault_tolerance/num_env_faults", lambda i: i + 1)
    for number in range(1000):
        row = json.loads(json.dumps(rows[number % COUNT]))
        row["fault_tolerance"]["num_env_faults"] = number + 1
        history.add(row)
    results = history.results()
    faults = results.column("num_env_faults")
    assert history.num_results == 1000
    assert 10 <= len(faults) <= 21
    assert results.rise("num_env_faults") == 1000
    assert np.all(np.diff(faults) > 0)


@pytest.mark.parametrize("count", [20, 21, 50, 1001])
def test_rates_of_a_long_run_include_the_merged_results(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(run_results, "_MOST_ROWS", 20)
    history, first, later = History(), *replay()[:2]
    for number in range(count):
        row = json.loads(json.dumps(later if number else first))
        row["optimizer"]["learner_blocked_s"] = 0.15 * (number + 1)
        row["optimizer"]["workers"]["share"]["idle"] = 0.2 * (number % 2)
        history.add(row)
    results = history.results()
    # In each result, the learner is blocked for 0.15 s of 0.5 s.
    assert results.rise("learner_blocked_s") == pytest.approx(0.15 * count)
    assert results.rise_per_s("learner_blocked_s") == pytest.approx(0.3)
    assert results.share("workers_idle") == pytest.approx(0.1, abs=0.01)


def test_result_file_is_read_line_by_line(tmp_path: Path) -> None:
    rows = healthy()
    put(rows, "optimizer/rows_per_update", 8.0)
    lines = [json.dumps(row) for row in rows]
    file = tmp_path / "result.json"
    file.write_text("\n".join([*lines[:3], "{broken", "[1]", *lines[3:], '{"half": ']))
    assert [finding.rule for finding in diagnose(read_results(file))] == ["small-updates"]


def test_each_column_is_read() -> None:
    sources = Path(diagnosis.__file__).read_text() + Path(run_results.__file__).read_text()
    unread = {name for name in COLUMNS if sources.count(f'"{name}"') < 2}
    assert unread == {"driver_broadcast"}  # a rule reads it under a name made from the phase


def test_docs_hold_the_table_of_rules() -> None:
    # `python -m polopt.dashboards.data.diagnosis` prints the table.
    assert diagnosis.markdown_table() in DOCS.read_text()
