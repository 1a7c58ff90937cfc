"""`TensorBoardLayout`: a layout of TensorBoard's custom scalars for the results of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import tune

_LEARNER = "learners/default_policy/"
#: The charts of each category. A chart has regular expressions, which TensorBoard matches against
#: the tags of scalars. Every expression matches scalars of every optimizer.
LAYOUT: dict[str, dict[str, tuple[str, ...]]] = {
    "Run": {
        "return": ("env_runners/episode_return_mean",),
        "environment steps/s": ("optimizer/env_steps_per_s",),
        "updates/s": ("optimizer/updates_per_s",),
    },
    "Time": {
        "driver's shares": ("optimizer/driver/share/.*",),
        "workers' shares": ("optimizer/workers/share/.*",),
        "driver's phases, p50 (ms)": ("optimizer/driver/p50_ms/.*",),
        "driver's phases, p99 (ms)": ("optimizer/driver/p99_ms/.*",),
        "workers' parts, p50 (ms)": ("optimizer/workers/p50_ms/.*",),
        "workers' parts, p99 (ms)": ("optimizer/workers/p99_ms/.*",),
    },
    "Lag": {
        "policy and gradient lag (updates)": ("optimizer/(policy|gradient)_lag/(mean|max)",),
        "policy lag (rollouts)": ("optimizer/policy_lag_rollouts/(mean|max)",),
        "requests in flight": ("optimizer/requests_in_flight/.*",),
    },
    "Workers": {
        "environment steps/s": ("optimizer/workers/env_steps_per_s/.*",),
        "idle share": ("optimizer/workers/idle_share/.*",),
        "faults": ("fault_tolerance/num_.*", "optimizer/num_skipped_updates"),
    },
    "Learner": {
        "losses": (_LEARNER + ".*loss",),
        "entropy": (_LEARNER + "entropy",),
        "clip fraction": (_LEARNER + "clip_fraction",),
        "gradient norm": (_LEARNER + "grad_norm",),
    },
}
#: This name sorts before the names of the files that Tune's logger writes. TensorBoard reads the
#: files of a folder in sorted order, and does not return to a file after it has read a later one.
_FILE_NAME = "events.out.tfevents.0000000000.layout"


class TensorBoardLayout(tune.Callback):
    """Writes the layout of TensorBoard's Custom Scalars tab once per trial.

    `polopt train` uses this callback. With a Tuner, pass it in
    `RunConfig(callbacks=[polopt.TensorBoardLayout()])`.
    """

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Writes the layout when a trial starts."""
        trial.init_local_path()
        path = Path(trial.local_path, _FILE_NAME)
        if not path.exists():
            write_layout(path)


def write_layout(path: Path) -> None:
    """Writes an event file that contains only the layout."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter
    from tensorboardX.summary import custom_scalars

    layout = {
        category: {
            title: ["Multiline", [f"^ray/tune/{tag}$" for tag in tags]]
            for title, tags in charts.items()
        }
        for category, charts in LAYOUT.items()
    }
    writer = RecordWriter(str(path))
    for event in (Event(file_version="brain.Event:2"), Event(summary=custom_scalars(layout))):
        writer.write(event.SerializeToString())
    writer.close()
