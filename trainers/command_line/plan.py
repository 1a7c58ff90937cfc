"""Reading, changing and checking an experiment before anything starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polopt.common.config import ConfigError, canonical, nearest_of
from polopt.rollouts.ray_session import check_address, check_memory
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.command_line.examples import Example, apply_changes, load_example, merge
from polopt.trainers.evaluation import evaluation_config
from polopt.trainers.experiment import Experiment, aliases_for
from polopt.trainers.presets import PRESETS
from polopt.trainers.results import check_stop_key
from polopt.trainers.saved_trainer import find_checkpoint, misfit, read_or_fall_back


@dataclass(frozen=True)
class Plan:
    """A checked experiment.

    Attributes:
        name: of the experiment's file without suffix, or of its preset.
        folder: directory of a Python file, whose modules workers import; None for other
            experiments.
        example: as read, with the changes to its `run` and `stop`.
        config: with changes, under the canonical keys.
        experiment: the parsed config.
        restore: a complete checkpoint to start from; None: train from scratch.
    """

    name: str
    folder: Path | None
    example: Example
    config: dict[str, Any]
    experiment: Experiment
    restore: Path | None


def ray_address() -> str:
    """Address of the cluster that RAY_ADDRESS names; `local` if it names none."""
    return os.environ.get("RAY_ADDRESS") or "local"


def plan(example_or_config: str, changes: Sequence[str], restore: Path | None = None) -> Plan:
    """Reads, changes and checks an experiment; starts no process.

    Raises:
        ConfigError: wrong config, stop condition or environment, `num_gpus` without a GPU, more
            workers than this machine has memory for, or no cluster at RAY_ADDRESS.
        CheckpointError: `restore` is not a complete checkpoint, or is of another network.
    """
    loaded = load_example(example_or_config)
    example, config_changes = apply_changes(loaded, changes)
    if example.run not in PRESETS:
        raise ConfigError(f"key 'run': got {example.run!r}{nearest_of(example.run, PRESETS)}")
    preset = PRESETS[example.run].preset
    aliases = aliases_for(merge(example.config, config_changes), preset)
    config = merge(canonical(example.config, aliases), canonical(config_changes, aliases))
    experiment = Experiment.parse(config, preset)
    for key in example.stop:
        check_stop_key(key)
    if ray_address() == "local":
        experiment.learner_device()
        check_memory(experiment.num_remote_workers)
    else:  # the trial may run on another machine
        check_address(ray_address())
    worker_config = experiment.make_worker_config()
    evaluation_config(experiment.trainer, worker_config)
    if restore is not None:
        restore, state = read_or_fall_back(find_checkpoint(restore))
        spaces = worker_config.observation_space, worker_config.action_space
        problem = misfit(state, experiment.policy_class(*spaces, experiment.policy))
        if problem:
            raise CheckpointError(f"checkpoint {restore} does not fit: {problem}")
        restore = restore.resolve()
    path = Path(example_or_config)
    folder = path.resolve().parent if path.suffix == ".py" else None
    return Plan(path.stem, folder, example, config, experiment, restore)
