"""Plots of several numbers of the built-in optimizers, and `TABS`, the tab of each of them."""

from __future__ import annotations

import dataclasses

from polopt.dashboards.data.tab import Plot, Tab

_OPT = "optimizer/"

GRADIENT_LAG = Plot(
    "gradient-lag",
    "Gradient lag",
    "A distribution that moves up means that the driver cannot keep up with the number of workers.",
    "",
    {"lag": _OPT + "gradient_lag/histogram"},
    kind="heatmap",
    limit="max_policy_lag",
)
GRADIENT_COUNTS = Plot(
    "gradient-counts",
    "Accepted, stale and skipped gradients",
    "Numbers since the start of the process. Stale gradients have a lag above max_policy_lag. "
    "Skipped gradients were not finite or too large.",
    "",
    {
        "accepted": _OPT + "num_gradients_accepted",
        "stale": _OPT + "num_gradients_stale",
        "skipped": _OPT + "num_gradients_skipped",
    },
)
GRADIENT_RATE = Plot(
    "gradient-rate",
    "Gradients applied per second",
    "",
    "",
    {"gradients": _OPT + "num_gradients_accepted"},
    kind="runs",
    per="s",
)
STALE_SHARE = Plot(
    "stale-share",
    "Share of stale gradients",
    "",
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
    "",
    {
        "realised": _OPT + "env_steps_per_s",
        "sampling, peak": _OPT + "sample_peak_throughput",
        "learning, peak": _OPT + "learn_peak_throughput",
    },
)
POLICY_LAG = Plot(
    "policy-lag-rollouts",
    "Policy lag in rollouts",
    "The lag is 0 for synchronous sampling. With async_replay, the lag is the number of fragments "
    "that have arrived since the weights were current.",
    "",
    {"lag": _OPT + "policy_lag_rollouts/histogram"},
    kind="heatmap",
)
BOUNDED_POLICY_LAG = dataclasses.replace(
    POLICY_LAG,
    title="Policy lag in batches",
    help="A rollout is a batch here. If the config sets max_rollout_lag, a line marks this limit. "
    "Many batches at this limit mean that workers wait for the driver.",
    unit="batches",
    limit="max_rollout_lag",
)
FRAGMENTS_WAITING = Plot(
    "fragments-waiting",
    "Fragments that wait for the driver",
    "If these fragments fill a batch, the driver limits the run. If the number is 0, the driver "
    "waits for the workers.",
    "fragments per batch",
    {"fragments": _OPT + "num_fragments_waiting"},
    kind="runs",
    per=_OPT + "num_batches",
)
EARLY_STOPPED = Plot(
    "early-stopped", "", "", "", {"fragments": _OPT + "num_early_stopped"}, kind="runs"
)
EARLY_STOPPED_PER_ROUND = dataclasses.replace(
    EARLY_STOPPED,
    title="Early-stopped fragments per round",
    help="High values mean that the ranks have unequal speed.",
    unit="fragments per round",
    per=_OPT + "num_rounds",
)
ALLREDUCE_LEARN = Plot(
    "allreduce-learn",
    "All-reduce against learning",
    "The time of learning includes the time of the all-reduce. If both times are almost equal, "
    "communication dominates. Use larger minibatches or fewer ranks then.",
    "",
    {"learn": _OPT + "learn_time_ms", "allreduce": _OPT + "allreduce_time_ms"},
)
SKEW_SAMPLE = Plot(
    "skew-sample",
    "Skew against sampling",
    "Skew is the time in which the fastest rank waits for the slowest rank. Skew close to the "
    "sampling time means that one rank samples much longer than the other ranks. fraction_workers "
    "below 1 ends the fragments of slow ranks early.",
    "",
    {"sample": _OPT + "sample_time_ms", "skew": _OPT + "skew_time_ms"},
)
RANKS = Plot(
    "ranks",
    "",
    "A star marks a broken round, which a fault interrupted.",
    "",
    {"ranks": _OPT + "num_ranks"},
    kind="runs",
    steps=True,
)
ROW_AGE = Plot(
    "row-age",
    "Age of the replayed rows",
    "With uniform draws from a full buffer, all bins are about equal. If the lower bins are "
    "larger, prioritized replay prefers new rows.",
    "age (1/16 of the buffer)",
    {"age": _OPT + "row_age/histogram"},
    kind="heatmap",
)
WHO_WAITS = Plot(
    "who-waits",
    "Waiting times of learner and samplers",
    "Seconds in which the learner waited for new rows, and seconds in which the samplers waited "
    "for the learner to catch up. Both count since the start of the process.",
    "",
    {"learner": _OPT + "learner_blocked_s", "samplers": _OPT + "samplers_blocked_s"},
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
    "A distribution that moves up means that the priorities say little about the current network.",
    "log2 of updates",
    {"lag": _OPT + "priority_lag/histogram"},
    kind="heatmap",
)
#: Plots of all optimizers with a replay buffer.
REPLAY = (WHO_WAITS, ROW_AGE, PRIORITIES, POLICY_LAG)

#: The tab of each built-in optimizer, by the optimizer's name.
TABS = {
    "async_gradients": Tab(
        "Wait: the driver waits for gradients. If this share is near 0, the driver is the "
        "bottleneck. More workers then do not help: gradients queue and become stale.",
        (GRADIENT_LAG, GRADIENT_COUNTS, GRADIENT_RATE, STALE_SHARE),
    ),
    "async_replay": Tab(
        "Wait: the driver has no batch, or the training intensity does not allow another update. "
        "Fetch: the driver copies a batch from the memory of its shard.",
        (*REPLAY, PRIORITY_LAG),
    ),
    "async_samples": Tab(
        "Sample: the driver waits for fragments. If this share is near 0, the driver is the "
        "bottleneck: fragments queue, and their lag grows. If the lag reaches its bound, workers "
        "wait.",
        (PEAK_RATES, FRAGMENTS_WAITING, BOUNDED_POLICY_LAG),
    ),
    "decentralized_allreduce": Tab(
        "Group: the driver forms the group and starts the round. Sample and learn: the driver "
        "waits for the ranks.",
        (ALLREDUCE_LEARN, SKEW_SAMPLE, RANKS, EARLY_STOPPED_PER_ROUND),
    ),
    "sync_gradients": Tab(
        "Wait: the driver and all faster workers are idle, because they wait for the slowest "
        "worker.",
        (GRADIENT_LAG, GRADIENT_COUNTS, GRADIENT_RATE),
    ),
    "sync_replay": Tab(
        "Workers are idle while the driver learns, unless collection is overlapped. If learning "
        "takes most of the time, more workers do not help at this training intensity.",
        REPLAY,
    ),
    "sync_samples": Tab(
        "Workers are idle while the driver learns, unless collection is overlapped. The driver is "
        "idle while workers sample. Speed up the phase with the larger share.",
        (PEAK_RATES, EARLY_STOPPED, POLICY_LAG),
    ),
}
