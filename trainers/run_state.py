"""`RunState`: saves a run in a checkpoint, and makes a run continue from a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from pathlib import Path
from typing import Any

from polopt.common.plain_data import described, plain
from polopt.policies.policy_group import GroupConfig
from polopt.policies.policy_registry import POLICIES
from polopt.replay.buffer_files import BufferFiles
from polopt.trainers.checkpoints import REPLAY, CheckpointError, write_checkpoint
from polopt.trainers.experiment import Experiment
from polopt.trainers.run import Run
from polopt.trainers.saved_policy import misfit, restore_state
from polopt.trainers.saved_spaces import describe_space

logger = logging.getLogger("polopt")

#: Options whose values may be code.
_CODE = ("env", "evaluation_config.env", "callbacks")
#: The largest number of earlier runs that a checkpoint lists.
_MOST_EARLIER_RUNS = 100


class RunState:
    """Saves and restores a run, and knows from which earlier runs it continues.

    Attributes:
        iterations_before: iterations of the earlier runs.
        seconds_before: training time of the earlier runs.
    """

    def __init__(self) -> None:
        #: Identifiers of the earlier runs from which this run was restored, and of this run itself.
        #: The identifier of this run is the last one.
        self._runs = [secrets.token_hex(8)]
        self._has_warned = False
        self.iterations_before = 0
        self.seconds_before = 0.0

    def state(
        self,
        run: Run,
        optimizer_state: dict[str, Any],
        trainer: str,
        iterations: int,
        seconds: float,
    ) -> dict[str, Any]:
        """Returns the state for a checkpoint, without the state of evaluation.

        Args:
            run: the run.
            optimizer_state: the state of the optimizer.
            trainer: name of the trainer's class.
            iterations: number of iterations so far, including the earlier runs.
            seconds: training time so far, including the earlier runs.
        """
        # `update_algorithm_parameter` may have changed the policy's options.
        experiment = with_present_options(run.experiment, run.policy.config)
        # If the config has no seed, the checkpoint holds the seed that the workers drew.
        workers = run.workers.config
        unsaved: dict[str, str] = {}
        config = plain(experiment.to_dict() | {"seed": workers.seed}, unsaved)
        self._warn_unsaved(unsaved)
        return {
            "trainer": trainer,
            "config": config,
            "unsaved": unsaved,
            "spaces": {  # for `polopt.load`, which does not make an environment
                "observation": describe_space(workers.observation_space),
                "action": describe_space(workers.action_space),
            },
            "training_iteration": iterations,
            "time_total_s": seconds,
            "runs": self._runs,
            "optimizer": optimizer_state,
        }

    def _warn_unsaved(self, unsaved: dict[str, str]) -> None:
        """Warns once about values of the config that cannot be saved. Does not warn about
        environments and callbacks that the user gave as code. Checkpoints never contain code, and
        the error of `polopt evaluate` asks for the environment."""
        named = {path: kind for path, kind in unsaved.items() if path not in _CODE}
        if named and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "checkpoints of this run do not contain %s, because values of these types cannot "
                "be saved. Give them to `polopt evaluate` or `from_checkpoint` if an error asks "
                "for them",
                described(named),
            )

    def write(self, run: Run, state: dict[str, Any], directory: str) -> None:
        """Writes the state, the state of evaluation and the rows of a replay buffer to a
        checkpoint. Raises the errors of `write_checkpoint`."""
        if run.evaluation is not None:
            state |= {"evaluation": run.evaluation.get_state()}
        state["optimizer"]["files"] = {}
        files: BufferFiles | None = run.optimizer.buffer_files

        def add_files(directory: Path) -> dict[str, str]:
            if files is None:
                return {}
            state["optimizer"]["files"], checksums = files.write(directory)
            return checksums

        write_checkpoint(directory, state, add_files)

    def restore(
        self, run: Run, state: dict[str, Any], found: Path, iterations: int, seconds: float
    ) -> None:
        """Makes a run continue from a checkpoint.

        Args:
            run: the run.
            state: the state of the checkpoint.
            found: directory of the checkpoint.
            iterations: number of iterations that Tune has counted in this process.
            seconds: training time that Tune has counted in this process.

        Raises:
            CheckpointError: the checkpoint does not fit the policy or the replay buffer.
            CallbackError, WorkersFailedError, NonFiniteError, EnvironmentAPIError, FunctionError: a
                call to a worker has failed.
        """
        problem = misfit(state, run.policy)
        if not problem:
            # Errors of pending calls are raised here. Otherwise, they would look like a misfit.
            with run.own_generators():
                run.optimizer.drain()

            def restore_rest() -> None:
                run.optimizer.set_state(state["optimizer"])
                files: BufferFiles | None = run.optimizer.buffer_files
                if files is not None:
                    files.read(found / REPLAY, state["optimizer"].get("files") or {})

            with run.own_generators():
                problem = restore_state(state, run.policy, restore_rest)
        if problem:
            raise CheckpointError(f"checkpoint {found} does not fit: {problem}")
        own = self._runs[-1]
        earlier = [one for one in state.get("runs", []) if one != own]
        self._runs = [*earlier[-_MOST_EARLIER_RUNS:], own]
        if run.evaluation is not None:
            run.evaluation.set_state(state.get("evaluation", {}))
        # Some checkpoints have neither `training_iteration` nor `time_total_s`.
        self.iterations_before = int(state.get("training_iteration", iterations)) - iterations
        self.seconds_before = float(state.get("time_total_s", seconds)) - seconds


def with_present_options(experiment: Experiment, present: Any) -> Experiment:
    """Returns an experiment with the present options of its policy. With several policies,
    `policies` has the options of each policy that differ from the options of the run.

    Args:
        experiment: the experiment.
        present: the options of the policy, or the `GroupConfig` of several policies.
    """
    if not isinstance(present, GroupConfig):
        return dataclasses.replace(experiment, policy=present)
    if experiment.rollout.policies is None:
        return experiment
    of_run = {**experiment.policy.to_dict(), "model": experiment.policy.model.named()}
    policies: dict[str, Any] = {}
    for name, member in present.members.items():
        own = {**member.config.to_dict(), "model": member.config.model.named()}
        policies[name] = {key: value for key, value in own.items() if of_run.get(key) != value}
        if member.policy_class is not experiment.policy_class:
            policies[name] = {"policy": POLICIES.saved_name(member.policy_class), **own}
    rollout = experiment.rollout.model_copy(update={"policies": policies})
    return dataclasses.replace(experiment, rollout=rollout)
