"""Plots and metrics of the built-in optimizers, and `TABS`, the tab of each of them."""

from __future__ import annotations

import dataclasses

from polopt.dashboards.data.prometheus import Metric
from polopt.dashboards.data.tab import Plot, Tab

_OPT = "optimizer/"

GRADIENT_LAG = Plot(
    "gradient-lag",
    "Gradient lag",
    "The lag of a gradient is the number of updates since its weights were current. The last bin "
    "counts all larger lags. A distribution that moves up means that the driver cannot keep up "
    "with the number of workers.",
    "lag (updates)",
    {"lag": _OPT + "gradient_lag/histogram"},
    kind="heatmap",
    limit="max_policy_lag",
)
GRADIENT_COUNTS = Plot(
    "gradient-counts",
    "Accepted, stale and skipped gradients",
    "Numbers since the start of the process. Stale gradients have a lag above max_policy_lag. "
    "Skipped gradients were not finite or too large.",
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
    "The number of gradients from all workers that the driver applies per second.",
    "gradients/s",
    {"gradients": _OPT + "num_gradients_accepted"},
    kind="runs",
    per="s",
)
STALE_SHARE = Plot(
    "stale-share",
    "Share of stale gradients",
    "The share of gradients with a lag above max_policy_lag, which are dropped or scaled down.",
    "share",
    {"stale": _OPT + "num_gradients_stale"},
    kind="runs",
    per=_OPT + "num_gradients",
)
PEAK_RATES = Plot(
    "rates",
    "Realised rate against peaks",
    "The peaks are the highest rates of sampling alone and of learning alone. If the realised rate "
    "is close to the lower peak, the phase with this peak limits the run.",
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
    "The number of rollouts that the learner has finished since the weights that chose the actions "
    "were current. The lag is 0 for synchronous sampling. With async_replay, the lag is the number "
    "of fragments that have arrived since then.",
    "lag (rollouts)",
    {"lag": _OPT + "policy_lag_rollouts/histogram"},
    kind="heatmap",
)
BOUNDED_POLICY_LAG = dataclasses.replace(
    POLICY_LAG,
    title="Policy lag in batches",
    help="The number of batches that the learner has finished since the weights that chose the "
    "actions were current. If the config sets max_rollout_lag, a line marks this limit. Many "
    "batches at this limit mean that workers wait for the driver.",
    unit="lag (batches)",
    limit="max_rollout_lag",
)
FRAGMENTS_WAITING = Plot(
    "fragments-waiting",
    "Fragments that wait for the driver",
    "The number of fragments that had arrived when the driver began to gather a batch. If these "
    "fragments fill a batch, the driver limits the run. If the number is 0, the driver waits for "
    "the workers.",
    "fragments per batch",
    {"fragments": _OPT + "num_fragments_waiting"},
    kind="runs",
    per=_OPT + "num_batches",
)
EARLY_STOPPED = Plot(
    "early-stopped",
    "Early-stopped fragments",
    "The number of fragments of slow workers that ended before their full length, since the start "
    "of the process.",
    "fragments",
    {"fragments": _OPT + "num_early_stopped"},
    kind="runs",
)
EARLY_STOPPED_PER_ROUND = Plot(
    "early-stopped",
    "Early-stopped fragments per round",
    "The number of early-stopped fragments of all ranks in a round of sampling and learning. High "
    "values mean that the ranks have unequal speed.",
    "fragments per round",
    {"fragments": _OPT + "num_early_stopped"},
    kind="runs",
    per=_OPT + "num_rounds",
)
ALLREDUCE_LEARN = Plot(
    "allreduce-learn",
    "All-reduce against learning",
    "The time of learning includes the time of the all-reduce. If both times are almost equal, "
    "communication dominates. Use larger minibatches or fewer ranks then.",
    "ms",
    {"learn": _OPT + "learn_time_ms", "allreduce": _OPT + "allreduce_time_ms"},
)
SKEW_SAMPLE = Plot(
    "skew-sample",
    "Skew against sampling",
    "Skew is the time in which the fastest rank waits for the slowest rank. Skew close to the "
    "sampling time means that one rank samples much longer than the other ranks. fraction_workers "
    "below 1 ends the fragments of slow ranks early.",
    "ms",
    {"sample": _OPT + "sample_time_ms", "skew": _OPT + "skew_time_ms"},
)
RANKS = Plot(
    "ranks",
    "Ranks",
    "The number of ranks in the group. A star marks a broken round, which a fault interrupted.",
    "ranks",
    {"ranks": _OPT + "num_ranks"},
    kind="runs",
    steps=True,
)
BUFFER_FILL = Plot(
    "buffer-fill",
    "Fill of the replay buffer",
    "The number of rows in the buffer as a share of buffer_size. Learning begins when the buffer "
    "has learning_starts rows.",
    "share",
    {"fill": _OPT + "buffer_fill"},
    kind="runs",
)
ROW_AGE = Plot(
    "row-age",
    "Age of the replayed rows",
    "The age of a row is the number of environment steps between its sampling and its draw from "
    "the buffer. The unit is a sixteenth of buffer_size. With uniform draws from a full buffer, "
    "all bins are about equal. If the lower bins are larger, prioritized replay prefers new rows.",
    "age (1/16 of the buffer)",
    {"age": _OPT + "row_age/histogram"},
    kind="heatmap",
)
INTENSITY = Plot(
    "training-intensity",
    "Training intensity",
    "The number of rows learned per row sampled, since learning began. It should be close to the "
    "option training_intensity.",
    "rows learned per row sampled",
    {"intensity": _OPT + "training_intensity"},
    kind="runs",
)
WHO_WAITS = Plot(
    "who-waits",
    "Waiting times of learner and samplers",
    "Seconds in which the learner waited for new rows, and seconds in which the samplers waited "
    "for the learner to catch up. Both count since the start of the process.",
    "s",
    {
        "learner": _OPT + "learner_blocked_s",
        "samplers": _OPT + "samplers_blocked_s",
    },
)
PRIORITIES = Plot(
    "priorities",
    "Priorities of the rows",
    "Mean and maximum of the absolute TD errors that became priorities since the last result. Both "
    "are missing if draws are uniform. If the maximum is far above the mean, the same few rows are "
    "drawn again and again.",
    "priority",
    {"mean": _OPT + "priority_mean", "max": _OPT + "priority_max"},
)
PRIORITY_LAG = Plot(
    "priority-lag",
    "Lag of priorities",
    "The lag of a row's priority is the number of updates between the computation of the priority "
    "and the update that learns from the row. Bin 0 counts lag 0, and bin i counts lags from "
    "2^(i-1) to 2^i - 1. A distribution that moves up means that the priorities say little about "
    "the current network.",
    "log2 of updates",
    {"lag": _OPT + "priority_lag/histogram"},
    kind="heatmap",
)
SHARDS = Plot(
    "shards",
    "Replay shards",
    "The number of shards that are up in each run. A replacement of a shard begins without rows.",
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
    "gradients from workers that were accepted, stale or skipped, so far",
    "outcome",
)
PEAK_METRIC = Metric(
    "gauge",
    "polopt_peak_env_steps_per_s",
    "environment steps/s",
    _OPT + "*_peak_throughput",
    "highest rate of a phase so far; the phase limits the run if the realised rate is almost as "
    "high",
    "phase",
)
EARLY_STOPPED_METRIC = Metric(
    "gauge",
    "polopt_early_stopped",
    "fragments",
    _OPT + "num_early_stopped",
    "fragments that ended early because enough workers had finished, so far",
)
FRAGMENTS_METRIC = Metric(
    "gauge",
    "polopt_fragments_waiting",
    "fragments",
    _OPT + "num_fragments_waiting",
    "fragments that had arrived when the driver began to gather a batch, summed over batches",
)
RANKS_METRIC = Metric("gauge", "polopt_ranks", "ranks", _OPT + "num_ranks", "ranks in the group")
BROKEN_ROUNDS_METRIC = Metric(
    "gauge",
    "polopt_broken_rounds",
    "rounds",
    _OPT + "num_broken_rounds",
    "rounds of sampling and learning that a fault interrupted, so far",
)
FILL_METRIC = Metric(
    "gauge", "polopt_buffer_fill", "share", _OPT + "buffer_fill", "share of the buffer in use"
)
ROW_AGE_METRIC = Metric(
    "gauge",
    "polopt_row_age",
    "environment steps",
    _OPT + "row_age/mean",
    "mean number of steps between the sampling of a row and its draw from the buffer",
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
    "seconds in which the learner waited for rows, or the samplers waited for the learner, so far",
    "who",
)
PRIORITY_METRIC = Metric(
    "gauge",
    "polopt_priority",
    "",
    _OPT + "priority_*",
    "mean and maximum of the absolute TD errors that became priorities since the last result",
    "over",
)
SHARDS_METRIC = Metric(
    "gauge", "polopt_replay_shards", "shards", _OPT + "num_replay_shards_up", "shards that are up"
)
#: Plots and metrics of all optimizers with a replay buffer.
REPLAY = (INTENSITY, WHO_WAITS, BUFFER_FILL, ROW_AGE, PRIORITIES, POLICY_LAG)
REPLAY_METRICS = (INTENSITY_METRIC, BLOCKED_METRIC, FILL_METRIC, ROW_AGE_METRIC, PRIORITY_METRIC)

#: The tab of each built-in optimizer, by the optimizer's name.
TABS = {
    "async_gradients": Tab(
        "Wait: the driver waits for gradients. If this share is near 0, the driver is the "
        "bottleneck. More workers then do not help: gradients queue and become stale.",
        (GRADIENT_LAG, GRADIENT_COUNTS, GRADIENT_RATE, STALE_SHARE),
        (GRADIENTS_METRIC,),
    ),
    "async_replay": Tab(
        "Wait: the driver has no batch, or the training intensity does not allow another update. "
        "Fetch: the driver copies a batch from the memory of its shard.",
        (*REPLAY, PRIORITY_LAG, SHARDS),
        (*REPLAY_METRICS, SHARDS_METRIC),
    ),
    "async_samples": Tab(
        "Sample: the driver waits for fragments. If this share is near 0, the driver is the "
        "bottleneck: fragments queue, and their lag grows. If the lag reaches its bound, workers "
        "wait.",
        (PEAK_RATES, FRAGMENTS_WAITING, BOUNDED_POLICY_LAG),
        (PEAK_METRIC, FRAGMENTS_METRIC),
    ),
    "decentralized_allreduce": Tab(
        "Group: the driver forms the group and starts the round. Sample and learn: the driver "
        "waits for the ranks.",
        (
            ALLREDUCE_LEARN,
            SKEW_SAMPLE,
            RANKS,
            EARLY_STOPPED_PER_ROUND,
        ),
        (RANKS_METRIC, BROKEN_ROUNDS_METRIC, EARLY_STOPPED_METRIC),
    ),
    "sync_gradients": Tab(
        "Wait: the driver and all faster workers are idle, because they wait for the slowest "
        "worker.",
        (GRADIENT_LAG, GRADIENT_COUNTS, GRADIENT_RATE),
        (GRADIENTS_METRIC,),
    ),
    "sync_replay": Tab(
        "Workers are idle while the driver learns, unless collection is overlapped. If learning "
        "takes most of the time, more workers do not help at this training intensity.",
        REPLAY,
        REPLAY_METRICS,
    ),
    "sync_samples": Tab(
        "Workers are idle while the driver learns, unless collection is overlapped. The driver is "
        "idle while workers sample. Speed up the phase with the larger share.",
        (PEAK_RATES, EARLY_STOPPED, POLICY_LAG),
        (PEAK_METRIC, EARLY_STOPPED_METRIC),
    ),
}
