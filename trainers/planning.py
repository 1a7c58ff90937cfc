"""What a command line asks for, read, changed and checked, before anything starts.

Imports neither Tune nor what shows a run: while this is checked, Ray waits to be started.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before Ray is imported, which reads them then.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # and the notice about it
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a FutureWarning for each actor

from polopt.common.config import ConfigError, canonical, nearest
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.trainers.checkpoint_fallback import read_or_fall_back
from polopt.trainers.config import Experiment, aliases_for
from polopt.trainers.evaluation import find_checkpoint
from polopt.trainers.examples import Example, apply_changes, load_example, merge
from polopt.trainers.preparation import prepare
from polopt.trainers.preset_options import PRESET_OPTIONS
from polopt.trainers.stopping import StopWhen


@dataclass(frozen=True)
class Plan:
    """A run with nothing left to be wrong about it but what only running shows.

    Attributes:
        example: as it was read, with the changes to its `run` and `stop`.
        config: as it was given, with changes, under the keys' own names.
        experiment: what it says, with defaults.
        worker_config: what workers are made from.
        stop: when it ends.
        restore: a whole checkpoint to go on from; None: from the beginning.
    """

    example: Example
    config: dict[str, Any]
    experiment: Experiment
    worker_config: WorkerConfig
    stop: StopWhen
    restore: Path | None


def plan(example_or_config: str, changes: Sequence[str], restore: Path | None = None) -> Plan:
    """Reads, changes and checks an experiment; starts nothing.

    Raises:
        ConfigError: whatever is wrong with it.
        CheckpointError: `restore` is no complete checkpoint.
    """
    loaded = load_example(example_or_config, list(PRESET_OPTIONS))
    example, config_changes = apply_changes(loaded, changes)
    if example.run not in PRESET_OPTIONS:
        raise ConfigError(
            f"key 'run': got {example.run!r}{nearest(example.run, PRESET_OPTIONS) or '.'} "
            f"Allowed: {', '.join(PRESET_OPTIONS)}"
        )
    preset = PRESET_OPTIONS[example.run]
    aliases = aliases_for(merge(example.config, config_changes), preset)
    config = merge(canonical(example.config, aliases), canonical(config_changes, aliases))
    experiment = Experiment.parse(config, preset)
    stop = StopWhen(example.stop)
    worker_config = prepare(experiment)
    if restore is not None:
        restore, _ = read_or_fall_back(find_checkpoint(restore))
    return Plan(example, config, experiment, worker_config, stop, restore)
