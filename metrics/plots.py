"""Plots and metrics that tabs of several optimizers declare."""

from __future__ import annotations

import dataclasses

from polopt.metrics.prometheus import Metric
from polopt.metrics.tab import Plot

_OPT = "optimizer/"

GRADIENT_LAG = Plot(
    "gradient-lag",
    "Gradient lag",
    "Updates between the weights that a gradient was computed with and its use. The last bin holds "
    "all larger lags. Mass that moves up: more workers than the driver can serve.",
    "lag (updates)",
    {"lag": _OPT + "gradient_lag/histogram"},
    kind="heatmap",
    limit="max_policy_lag",
)
GRADIENT_COUNTS = Plot(
    "gradient-counts",
    "Accepted, stale and skipped gradients",
    "Since the start of the run. Skipped: the gradient was not finite.",
    "gradients",
    {
        "accepted": _OPT + "num_gradients_accepted",
        "stale": _OPT + "num_gradients_stale",
        "skipped": _OPT + "num_gradients_skipped",
    },
)
GRADIENT_RATE = Plot(
    "gradient-rate",
    "Gradients applied per second",
    "Of the driver, from all workers.",
    "gradients/s",
    {"gradients": _OPT + "num_gradients_accepted"},
    kind="runs",
    per="s",
)
STALE_SHARE = Plot(
    "stale-share",
    "Share of stale gradients",
    "Of the gradients that arrived: older than max_policy_lag, dropped or scaled down.",
    "share",
    {"stale": _OPT + "num_gradients_stale"},
    kind="runs",
    per=_OPT + "num_gradients",
)
PEAK_RATES = Plot(
    "rates",
    "Realised rate against peaks",
    "Peaks are the best rates of sampling and learning alone. A realised rate near the lower peak "
    "means that this side limits the run.",
    "env steps/s",
    {
        "realised": _OPT + "env_steps_per_s",
        "sampling, peak": _OPT + "sample_peak_throughput",
        "learning, peak": _OPT + "learn_peak_throughput",
    },
)
POLICY_LAG = Plot(
    "policy-lag-rollouts",
    "Policy lag in rollouts",
    "How many rollouts were learned from since the weights that acted. 0 for synchronous sampling.",
    "lag (rollouts)",
    {"lag": _OPT + "policy_lag_rollouts/histogram"},
    kind="heatmap",
)
BOUNDED_POLICY_LAG = dataclasses.replace(
    POLICY_LAG,
    title="Policy lag in batches",
    help="How many batches were learned from since the weights that acted, and the bound "
    "max_rollout_lag. Mass at the bound: workers wait for the driver.",
    unit="lag (batches)",
    limit="max_rollout_lag",
)
FRAGMENTS_WAITING = Plot(
    "fragments-waiting",
    "Fragments that wait for the driver",
    "How many had arrived when the driver began with a batch. At least a batch: the driver limits "
    "the run. 0: it waits for the workers.",
    "fragments per batch",
    {"fragments": _OPT + "num_fragments_waiting"},
    kind="runs",
    per=_OPT + "num_batches",
)
EARLY_STOPPED = Plot(
    "early-stopped",
    "Early-stopped fragments",
    "Fragments of slow workers that were ended before their full length, since the start.",
    "fragments",
    {"fragments": _OPT + "num_early_stopped"},
    kind="runs",
)
EARLY_STOPPED_PER_ROUND = Plot(
    "early-stopped",
    "Early-stopped fragments in a round",
    "Of all ranks. High values: ranks of unequal speed.",
    "fragments per round",
    {"fragments": _OPT + "num_early_stopped"},
    kind="runs",
    per=_OPT + "num_rounds",
)
ALLREDUCE_LEARN = Plot(
    "allreduce-learn",
    "All-reduce against learning",
    "Learning contains the all-reduce. Where both lines meet, communication dominates: use larger "
    "minibatches or fewer ranks.",
    "ms",
    {"learn": _OPT + "learn_time_ms", "allreduce": _OPT + "allreduce_time_ms"},
)
SKEW_SAMPLE = Plot(
    "skew-sample",
    "Skew against sampling",
    "Skew near the sampling time means that one rank samples much longer than the others; see "
    "early-stopped fragments.",
    "ms",
    {"sample": _OPT + "sample_time_ms", "skew": _OPT + "skew_time_ms"},
)
RANKS = Plot(
    "ranks",
    "Ranks",
    "Members of the group. A star marks rounds that a fault broke and that were repeated.",
    "ranks",
    {"ranks": _OPT + "num_ranks"},
    kind="runs",
    steps=True,
)
BUFFER_FILL = Plot(
    "buffer-fill",
    "Fill of the replay buffer",
    "Rows in the buffer, as a share of buffer_size. Learning begins at learning_starts rows.",
    "share",
    {"fill": _OPT + "buffer_fill"},
    kind="runs",
)
ROW_AGE = Plot(
    "row-age",
    "Age of the rows learned from",
    "Environment steps that were sampled after a row until it was drawn, in sixteenths of "
    "buffer_size. A full buffer with uniform drawing has the same number in each bin. Mass in the "
    "lower bins: prioritized replay prefers new rows.",
    "age (1/16 of the buffer)",
    {"age": _OPT + "row_age/histogram"},
    kind="heatmap",
)
INTENSITY = Plot(
    "training-intensity",
    "Training intensity",
    "Rows learned per row sampled since learning began. It equals training_intensity within one "
    "batch.",
    "rows learned per row sampled",
    {"intensity": _OPT + "training_intensity"},
    kind="runs",
)
WHO_WAITS = Plot(
    "who-waits",
    "Who waits for whom",
    "Seconds in which the learner could not go on without new rows, and in which the samplers "
    "stood still until the learner had caught up. Since the start of the process.",
    "s",
    {
        "learner": _OPT + "learner_blocked_s",
        "samplers": _OPT + "samplers_blocked_s",
    },
)
PRIORITIES = Plot(
    "priorities",
    "Priorities of the rows",
    "Mean and largest TD error to the power of alpha, by which rows are drawn. 0 where drawing is "
    "uniform. A maximum far above the mean: few rows are drawn again and again.",
    "priority",
    {"mean": _OPT + "priority_mean", "max": _OPT + "priority_max"},
)
PRIORITY_LAG = Plot(
    "priority-lag",
    "Lag of priorities",
    "Updates between the weights that the priority of a row was computed with and its use. Bin 0 "
    "is no lag, bin i is 2^(i-1) to 2^i - 1. Mass that moves up: rows are drawn by priorities that "
    "say little about the present network.",
    "log2 of updates",
    {"lag": _OPT + "priority_lag/histogram"},
    kind="heatmap",
)
SHARDS = Plot(
    "shards",
    "Replay shards",
    "Shards that are up, of all runs. A shard that is replaced begins without rows.",
    "shards",
    {"shards": _OPT + "num_replay_shards_up"},
    kind="runs",
    steps=True,
)

GRADIENTS_METRIC = Metric(
    "counter",
    "polopt_gradients",
    "gradients",
    _OPT + "num_gradients_*",
    "of workers, by what became of them",
    "outcome",
)
PEAK_METRIC = Metric(
    "gauge",
    "polopt_peak_env_steps_per_s",
    "environment steps/s",
    _OPT + "*_peak_throughput",
    "fastest single phase so far; near the realised rate, it limits the run",
    "phase",
)
EARLY_STOPPED_METRIC = Metric(
    "gauge",
    "polopt_early_stopped",
    "fragments",
    _OPT + "num_early_stopped",
    "ended early because enough workers had finished, so far",
)
FRAGMENTS_METRIC = Metric(
    "gauge",
    "polopt_fragments_waiting",
    "fragments",
    _OPT + "num_fragments_waiting",
    "that had arrived when the driver began with a batch, summed over batches so far",
)
RANKS_METRIC = Metric("gauge", "polopt_ranks", "ranks", _OPT + "num_ranks", "members of the group")
BROKEN_ROUNDS_METRIC = Metric(
    "gauge",
    "polopt_broken_rounds",
    "rounds",
    _OPT + "num_broken_rounds",
    "lost with a rank, so far",
)
FILL_METRIC = Metric(
    "gauge", "polopt_buffer_fill", "share", _OPT + "buffer_fill", "of the replay buffer, in use"
)
ROW_AGE_METRIC = Metric(
    "gauge",
    "polopt_row_age",
    "environment steps",
    _OPT + "row_age/mean",
    "sampled after a row until it was drawn, mean",
)
INTENSITY_METRIC = Metric(
    "gauge",
    "polopt_training_intensity",
    "rows/row",
    _OPT + "training_intensity",
    "rows learned per row sampled since learning began",
)
BLOCKED_METRIC = Metric(
    "gauge",
    "polopt_blocked_s",
    "s",
    _OPT + "*_blocked_s",
    "in which the learner waited for rows, or the samplers for the learner, so far",
    "who",
)
PRIORITY_METRIC = Metric(
    "gauge",
    "polopt_priority",
    "",
    _OPT + "priority_*",
    "of the rows in the replay buffer: mean and maximum",
    "over",
)
SHARDS_METRIC = Metric(
    "gauge", "polopt_replay_shards", "shards", _OPT + "num_replay_shards_up", "that are up"
)
#: Of all optimizers with a replay buffer.
REPLAY = (INTENSITY, WHO_WAITS, BUFFER_FILL, ROW_AGE, PRIORITIES, POLICY_LAG)
REPLAY_METRICS = (INTENSITY_METRIC, BLOCKED_METRIC, FILL_METRIC, ROW_AGE_METRIC, PRIORITY_METRIC)
