"""Reads, changes and checks an experiment before any process starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polopt.command_line.examples import Example, apply_changes, load_example, merge
from polopt.command_line.sweep import (
    configs_to_check,
    is_search,
    with_searches,
    with_seeds,
)
from polopt.common.config import ConfigError, canonical, differ, instead_of, shown
from polopt.metrics.optimizer_stats import OptimizerStats
from polopt.rollouts.envs.env_errors import close_env
from polopt.rollouts.envs.env_sources import env_name
from polopt.rollouts.envs.env_state import (
    merge_env_statistics,
    saved_statistics,
    set_env_statistics,
)
from polopt.rollouts.envs.vector_env import make_vector_env
from polopt.rollouts.ray_session import check_address, check_memory
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.experiment import (
    Experiment,
    RunPlan,
    evaluation_can_play,
    gpu_exists,
    workers_can_sample,
)
from polopt.trainers.find_checkpoint import find_checkpoint, read_or_fall_back
from polopt.trainers.flat_config import aliases_for
from polopt.trainers.presets import PRESETS
from polopt.trainers.results import check_stop_key
from polopt.trainers.saved_experiment import config_of
from polopt.trainers.saved_policy import misfit, restore_state
from polopt.trainers.trainer import PolicyOptimizerTrainer


@dataclass(frozen=True)
class Plan:
    """A checked experiment.

    Attributes:
        name: name of the experiment's file without its suffix, or name of the preset.
        folder: directory of the Python file that describes the experiment. Workers can import
            modules from this directory. It is None if the experiment is not described by a Python
            file.
        example: the example from the file, with the changes to `run` and `stop`.
        preset: the class to train.
        config: the config with the changes. Its keys are the keys of polopt, and not their aliases.
            In a sweep, the config contains the grids and distributions.
        experiments: the parsed configs of the trials that were checked. A sweep may have several.
        restore: the complete checkpoint from which training starts. `None` means that training
            starts from scratch.
    """

    name: str
    folder: Path | None
    example: Example
    preset: type[PolicyOptimizerTrainer]
    config: dict[str, Any]
    experiments: Sequence[Experiment]
    restore: Path | None

    @property
    def experiment(self) -> Experiment:
        """The parsed config of the first trial."""
        return self.experiments[0]

    @property
    def is_sweep(self) -> bool:
        """Whether the experiment has a grid or a distribution, or `num_samples` above 1."""
        return self.example.num_samples > 1 or is_search(self.config)


def ray_address() -> str:
    """Returns the address of the cluster in RAY_ADDRESS, or `local` if this variable is not set."""
    return os.environ.get("RAY_ADDRESS") or "local"


def plan(
    example_or_config: str | None,
    changes: Sequence[str],
    restore: Path | None = None,
    num_samples: int | None = None,
    seeds: int | None = None,
) -> Plan:
    """Reads, changes and checks an experiment. Starts no process.

    Args:
        example_or_config: see `load_example`. `None` means that the run continues with the config
            of the checkpoint `restore`.
        changes: `key=value` arguments.
        restore: a checkpoint to start from, or a directory that contains checkpoints.
        num_samples: see `Example`. `None` means the value in the experiment.
        seeds: see `Example`. `None` means the value in the experiment.

    Raises:
        ConfigError: the config, a stop condition or the environment is wrong. Also raised if torch
            finds no GPU for `num_gpus`, if this machine has too little memory for the workers, or
            if no cluster answers at RAY_ADDRESS.
        CheckpointError: `restore` is not a complete checkpoint, or does not fit. It does not fit if
            the network, the torch optimizer, the normalisation or the wrappers of the environments
            differ between the checkpoint and the config.
    """
    if example_or_config is None:
        if restore is None:
            raise ConfigError(
                "nothing to train. Give a tuned example, a preset, a file, or a checkpoint with "
                "--restore"
            )
        example, config_changes = apply_changes(Example(run=""), changes)
        return plan_of_checkpoint(restore, _repeated(example, num_samples, seeds), config_changes)
    example, config_changes = apply_changes(load_example(example_or_config), changes)
    example = _repeated(example, num_samples, seeds)
    path = Path(example_or_config)
    folder = path.resolve().parent if path.suffix == ".py" else None
    return plan_of(path.stem, example, config_changes, restore, folder=folder)


def _repeated(example: Example, num_samples: int | None, seeds: int | None) -> Example:
    given = {"num_samples": num_samples, "seeds": seeds}
    changes = {key: value for key, value in given.items() if value is not None}
    return Example.parse({**vars(example), **changes}, "arguments") if changes else example


def plan_of_checkpoint(restore: Path, example: Example, config_changes: Mapping[str, Any]) -> Plan:
    """Returns the plan of a run that continues with the config of a checkpoint.

    Args:
        restore: a checkpoint, or a directory that contains checkpoints.
        example: an example with the `stop` limits. If another preset continues the run, `run` is
            the name of this preset. Otherwise, `run` is empty.
        config_changes: options that replace saved options.

    Raises:
        ConfigError, CheckpointError: see `plan`.
    """
    found, state = read_or_fall_back(find_checkpoint(restore))
    saved = str(state.get("trainer"))
    name = example.run or (saved if saved in PRESETS else PolicyOptimizerTrainer.__name__)
    config = config_of(state, f"checkpoint {found}", config_changes, preset_named(name).preset)
    described = Example.parse({**vars(example), "run": name, "config": config}, "arguments")
    return plan_of(name, described, {}, found)


def preset_named(name: str) -> type[PolicyOptimizerTrainer]:
    """Returns the preset with a name.

    Raises:
        ConfigError: no preset has this name.
    """
    if not isinstance(name, str) or name not in PRESETS:
        instead = instead_of("preset", name, PRESETS)
        raise ConfigError(f"key 'run': got {shown(name)}{instead}")
    return PRESETS[name]


def plan_of(
    name: str,
    example: Example,
    config_changes: Mapping[str, Any],
    restore: Path | None = None,
    *,
    preset: type[PolicyOptimizerTrainer] | None = None,
    folder: Path | None = None,
) -> Plan:
    """Changes and checks an experiment that was already read. Starts no process.

    Args:
        name: see `Plan`.
        example: the experiment.
        config_changes: options that replace options of the example.
        restore: a checkpoint, or a directory that contains checkpoints.
        preset: the class to train. `None` means the preset that the example names.
        folder: see `Plan`.

    Raises:
        ConfigError, CheckpointError: see `plan`.
    """
    config_of_example, run = with_searches(example.config), with_searches(example.run, "run")
    if preset is None and not isinstance(run, str):  # several presets
        preset, config_of_example["preset"] = PolicyOptimizerTrainer, run
    trained = preset or preset_named(run)
    config_changes = with_searches(config_changes)
    # The aliases depend on the optimizer and the policy, which are taken from the first trial.
    _, first = next(configs_to_check(merge(config_of_example, config_changes)))
    aliases = aliases_for(first, trained.preset)
    config = merge(canonical(config_of_example, aliases), canonical(config_changes, aliases))
    config = with_seeds(config, example.seeds)
    for key in example.stop:
        check_stop_key(key)
    experiments: list[Experiment] = []
    # For each checked trial, the options that affect its environments and its policy.
    seen: list[dict[str, Any]] = []
    if restore is not None:
        restore, state = read_or_fall_back(find_checkpoint(restore))
    for searched, options in configs_to_check(config):
        try:
            experiment = Experiment.parse(options, trained.preset)
            experiments.append(experiment)
            made_of = _without_rates(experiment.to_dict()) | {"seed": None}
            if any(not differ(made_of, other) for other in seen):
                continue
            seen.append(made_of)
            worker_config = _checked(experiment)
        except ConfigError as error:
            raise ConfigError(f"trial with {searched}: {error}" if searched else error) from None
        if restore is not None and (problem := _misfit(state, worker_config)):
            raise CheckpointError(f"checkpoint {restore} does not fit: {problem}")
    if ray_address() != "local":
        check_address(ray_address())
    restore = None if restore is None else restore.resolve()
    return Plan(name, folder, example, trained, config, experiments, restore)


def _without_rates(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options whose values are not floats. Floats, such as learning rates and
    discounts, do not affect how environments and networks are made, or whether a checkpoint
    fits."""
    own = {key: _without_rates(options[key]) for key in ("optimizer", "policy") if key in options}
    return {key: v for key, v in options.items() if not isinstance(v, float)} | own


def _checked(experiment: Experiment) -> WorkerConfig:
    plan = RunPlan(experiment)
    if ray_address() == "local":  # in a cluster, the trial may run on another machine
        gpu_exists(plan)
        check_memory(experiment.num_remote_processes)
    workers_can_sample(plan)
    evaluation_can_play(plan)
    return plan.workers


def _misfit(state: Mapping[str, Any], config: WorkerConfig) -> str:
    """Returns why a checkpoint cannot be restored. Returns an empty string if the checkpoint fits.

    To find out, this function restores the checkpoint in a temporary policy, temporary counters and
    temporary environments of this process.
    """
    spaces = config.observation_space, config.action_space
    policy = config.policy_class(*spaces, config.policy)
    optimizer = state["optimizer"]

    def restore_rest() -> None:
        OptimizerStats().set_state(optimizer)
        int(optimizer["restore_count"])
        statistics = saved_statistics(optimizer.get("workers", {}).values())
        # With `vectorization_mode="async"`, environments run in separate processes, and their
        # statistics are not restored.
        if statistics and config.rollout.vectorization_mode != "async":
            env = make_vector_env(config.env, config.rollout)
            try:
                set_env_statistics(env, merge_env_statistics(statistics))
            finally:
                close_env(env, f"environment {env_name(config.env)!r}")

    return misfit(state, policy) or restore_state(state, policy, restore_rest)
