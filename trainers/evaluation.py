"""Evaluation during training: plays whole episodes with a copy of the policy.

The driver plays the episodes between two iterations, or evaluation workers play them while training
continues. Like the file of each policy optimizer, this file has two halves. The function
`play_part` runs in a worker. The class `Evaluation` runs in the driver.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from polopt.common.config import ConfigError
from polopt.common.episodes import EpisodeStats
from polopt.common.faults import non_finite_values
from polopt.common.weights import Weights
from polopt.metrics.custom_metrics import CustomMetrics
from polopt.metrics.episode_window import EpisodeWindow
from polopt.metrics.number import declare, unexported, within
from polopt.rollouts.envs.env_api import space_that_differs
from polopt.rollouts.envs.env_sources import env_name, resolve_env
from polopt.rollouts.envs.env_state import set_evaluation_statistics
from polopt.rollouts.envs.vector_env import ENV_KEYS, probe_env
from polopt.rollouts.seeds import (
    Seeds,
    evaluation_seeds,
    kept_global_generators,
    seed_global_generators,
)
from polopt.rollouts.workers import process_group
from polopt.rollouts.workers.call import Reply
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.snapshots import WEIGHTS
from polopt.rollouts.workers.worker_config import WorkerConfig, check_picklable
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.best_checkpoint import BestCheckpoint
from polopt.trainers.play_episodes import WholeEpisodes, shares
from polopt.trainers.results import custom_block
from polopt.trainers.trainer_config import TrainerConfig

logger = logging.getLogger("polopt")

#: Seconds after which a call in the driver's process ends. The driver can then check for a request
#: to stop.
_CALL_HERE_S = 0.25
#: Share of `worker_timeout_s` after which a call to a worker ends. A worker that plays many long
#: episodes therefore does not count as hanging.
_CALL_SHARE = 0.25
#: Seconds after which the driver logs a warning about a long evaluation.
_LONG_S = 60.0
#: Keys of `EpisodeWindow.report` that the block `evaluation/env_runners/` of a result contains.
EPISODE_KEYS = (
    "episode_return_mean",
    "episode_return_min",
    "episode_return_max",
    "episode_len_mean",
    "num_episodes",
)


#: The numbers of `Evaluation.report`.
NUMBERS = (
    *declare("""
        env_runners/episode_return_mean (return, metric=evaluation_return): mean undiscounted return
            of the evaluation that ended in this iteration
        env_runners/episode_return_min (return, metric=): smallest undiscounted return of this
            evaluation
        env_runners/episode_return_max (return, metric=): largest undiscounted return of this
            evaluation
        env_runners/episode_len_mean (environment steps, metric=): mean length of its episodes
        env_runners/num_episodes (episodes, metric=): number of its episodes
        env_runners/agent_episode_returns_mean/<agent> (return, metric=): mean return of the agent
        env_runners/module_episode_returns_mean/<policy> (return, metric=): mean return of the
            policy, which is the sum over its agents
        policy_version (updates, metric=): version of the weights of the last evaluation
        policy_env_steps (environment steps, metric=): steps that training had sampled when these
            weights were copied
        duration_s (s, metric=): time of the last evaluation in the worker that played longest
        num_evaluations (evaluations, total, metric=): evaluations since training began
    """),
    *unexported(*within("fault_tolerance", process_group.NUMBERS)),
)


class Part(NamedTuple):
    """The part of an evaluation that one worker plays.

    Attributes:
        serial: serial number of the evaluation in the driver's process. From this number, a worker
            knows whether it has already begun this evaluation.
        num_episodes: number of episodes that the worker plays.
        explore: see `EvaluationConfig`.
        seeds: seeds of the worker's environments and actions.
        statistics: running statistics of the wrappers around the training environments, with one
            dict for each training worker.
        call_s: seconds after which a call ends, even if the part is not complete.
    """

    serial: int
    num_episodes: int
    explore: bool
    seeds: Seeds
    statistics: list[dict[str, Any]]
    call_s: float


def play_part(worker: RolloutWorker, weights: Weights | None, part: Part) -> EpisodeStats | None:
    """Runs in a worker. Begins the worker's part of an evaluation, or continues it.

    Returns:
        the statistics of the part's episodes. None if the worker needs further calls to complete
        the part.
    """
    worker.set_weights(weights)
    sampler = worker.get_sampler()
    serial, playing = worker.state.get("evaluation", (None, None))
    ends_s = worker.clock() + part.call_s
    with worker.phase("sample"):
        if serial != part.serial:
            seed_global_generators(part.seeds.process)
            sampler.restart(part.seeds)
            if part.statistics:
                set_evaluation_statistics(sampler.env, part.statistics)
            playing = WholeEpisodes(sampler, part.num_episodes, part.explore)
            worker.state["evaluation"] = part.serial, playing
        while True:
            faults = playing.play()
            worker.record.add_faults(faults.values())
            worker.note_finite("fragments", non_finite_values(faults))
            if playing.done or worker.clock() >= ends_s:
                break
    if not playing.done:
        return None
    worker.end_episodes(playing.episodes)
    return EpisodeStats.of(playing.episodes)


@dataclass
class OneEvaluation:
    """One evaluation, which is running or has ended.

    Attributes:
        policy_version: version of the weights that are evaluated.
        policy_env_steps: number of environment steps that training had sampled when the trainer
            took these weights.
        state: the trainer's state at the time when it took these weights. It is saved if the
            evaluation has the best mean return so far.
        num_parts: number of workers that play.
        played: episodes of the workers that have completed their parts, by worker index.
        called_s: total seconds of the calls that have ended, by worker index.
        is_long: whether the warning about a long evaluation has been logged.
    """

    policy_version: int
    policy_env_steps: int
    state: dict[str, Any]
    num_parts: int
    played: dict[int, EpisodeStats] = field(default_factory=dict)
    called_s: dict[int, float] = field(default_factory=dict)
    is_long: bool = False

    @property
    def duration_s(self) -> float:
        """The total seconds of all calls to one worker, for the worker with the largest total. This
        value is not measured with the driver's clock, because the driver takes replies only between
        two training iterations."""
        return max(self.called_s.values(), default=0.0)

    @property
    def episodes(self) -> EpisodeStats:
        """The episodes, ordered by worker index."""
        return EpisodeStats.concat(self.played[index] for index in sorted(self.played))


def evaluation_config(config: TrainerConfig, worker_config: WorkerConfig) -> WorkerConfig | None:
    """Returns the config of the evaluation workers. Returns None if `evaluation_interval` is not
    set.

    If `evaluation_config` changes the environments, this function makes one environment to check
    its spaces, and closes the environment.

    Args:
        config: options of the trainer. The keys `evaluation_*` are used.
        worker_config: config of the training workers.

    Raises:
        ConfigError: an environment of `evaluation_config` cannot be made, its spaces differ from
            the spaces of the training environments, or a value cannot be sent to the workers.
    """
    if config.evaluation_interval is None:
        return None
    training, options = worker_config.rollout, config.evaluation_config
    changes = options.changes(training)
    rollout = training.model_copy(
        update={
            **changes,
            "num_workers": config.evaluation_num_workers,
            "transport": "ray",
            "num_workers_below": 0,
            "min_workers": None,
            "num_gpus_per_worker": 0.0,
        }
    )
    # The `EnvContext.worker_index` of evaluation environments is larger than the `worker_index` of
    # every training environment. The local worker needs an additional 1, because its own index is
    # 0, and the indices of remote workers begin at 1.
    offset = training.last_worker_index + (config.evaluation_num_workers == 0)
    env, keys = worker_config.env, ENV_KEYS
    if changes:
        env = env if options.env is None else resolve_env(options.env)
        env_key, config_key, num_key = (f"evaluation_config.{key}" for key in ENV_KEYS)
        keys = env_key, config_key, num_key
        with kept_global_generators():  # the environment may draw from the global generators
            spaces = probe_env(env, rollout, keys, training.last_worker_index + 1, True)[:2]
        trained = worker_config.observation_space, worker_config.action_space
        if name := space_that_differs(spaces, trained):
            index = name == "action"
            raise ConfigError(
                f"key 'evaluation_config': {env_name(env)!r} has the {name} space "
                f"{spaces[index]!s:.200}. Allowed: the same space as in training, "
                f"{trained[index]!s:.200}"
            )
    made = dataclasses.replace(
        worker_config,
        env=env,
        rollout=rollout.model_copy(update={"env": None}),
        device="cpu",
        in_evaluation=True,
        env_index_offset=offset,
        wrap_transport=None,  # training does not depend on when an evaluation ends
        repeatable=False,
    )
    if rollout.num_workers:
        check_picklable(made, keys)
    return made


class Evaluation:
    """Plays whole episodes with copies of the policy. Only one evaluation runs at a time.

    An evaluation worker that dies or hangs is replaced. The replacement plays the whole part of the
    lost worker from the same seeds. Each evaluation sets seeds of its own for its environments,
    actions and global random generators. In the driver's process, the global generators get their
    previous states back. Evaluation therefore does not change the results of training.

    Args:
        config: options of the trainer. The keys `evaluation_*` are used.
        workers: workers that were made from the result of `evaluation_config`. `stop` stops them.
        best: saves the trainer's state of the best evaluation.

    Attributes:
        due: whether an evaluation begins as soon as no other evaluation is running.
        last: the latest evaluation that has ended in this process. It is None if none has ended.
        num_begun: number of evaluations that have begun, including those before a restore.
        num_evaluations: number of evaluations that have ended, including those before a restore.
        workers: the evaluation workers. The policy of the local worker is the copy that is
            evaluated.
    """

    def __init__(self, config: TrainerConfig, workers: WorkerSet, best: BestCheckpoint) -> None:
        self._config = config
        self.workers = workers
        self._best = best
        self._calls = Calls(workers, "evaluation", count=self._count)
        self._custom_metrics = CustomMetrics()
        self._serials = itertools.count()
        self._running: OneEvaluation | None = None
        self._num_reported = 0
        self.due = False
        self.last: OneEvaluation | None = None
        self.num_begun = self.num_evaluations = 0

    @property
    def in_driver(self) -> bool:
        """Whether the evaluation runs in the driver's process, between two training iterations."""
        return self._config.evaluation_num_workers == 0

    def is_due(self, iteration: int) -> bool:
        """Returns whether an evaluation has to begin after an iteration. If another evaluation is
        still running, the new evaluation begins after the iteration in which the running evaluation
        ends.

        Args:
            iteration: index of the iteration. The first iteration has the index 1.
        """
        interval = self._config.evaluation_interval
        self.due |= interval is not None and iteration % interval == 0
        return self.due and self._running is None

    def begin(
        self, weights: Weights, state: dict[str, Any], statistics: list[dict[str, Any]]
    ) -> None:
        """Begins an evaluation. Returns without waiting for replies.

        Args:
            weights: the weights to evaluate.
            state: see `OneEvaluation`.
            statistics: see `Part`.
        """
        workers, config = self.workers, self._config
        indices = [handle.index for handle in workers.remote] or [0]
        parts = dict(zip(indices, shares(config.evaluation_duration, len(indices)), strict=True))
        workers.local.set_weights(weights)
        if workers.remote:  # `force`, because older weights may have the same version number
            workers.weights.take(force=True)
        timeout_s = workers.config.rollout.worker_timeout_s
        serial = next(self._serials)
        for handle in workers.remote or [workers.here]:
            part = Part(
                serial,
                parts[handle.index],
                config.evaluation_config.explore,
                evaluation_seeds(
                    workers.config.seed,
                    self.num_begun,
                    handle.index,
                    workers.config.rollout.num_envs_per_worker,
                ),
                statistics,
                _CALL_HERE_S if self.in_driver else _CALL_SHARE * timeout_s,
            )
            self._calls.send(handle, play_part, WEIGHTS, part, tag=part)
        self.num_begun += 1
        self.due = False
        self._running = OneEvaluation(weights.version, weights.env_steps, state, len(parts))

    def run(self, stopped: Callable[[], bool]) -> bool:
        """Waits until the evaluation that was begun has ended. If the evaluation runs in this
        process, this method also plays its episodes.

        Args:
            stopped: called before each wait for a reply. If the driver plays the episodes, such a
                wait takes about 0.25 s. If `stopped` returns True, the evaluation is dropped.

        Returns:
            True if the evaluation has ended, and False if it was dropped.

        Raises:
            EnvironmentFailedError: see `PolicyOptimizerTrainer.train`.
            CallbackError, WorkersFailedError, NonFiniteError, FunctionError: see `Calls`.
            CheckpointError: the checkpoint of the best evaluation cannot be written.
        """
        with kept_global_generators():
            while not stopped():
                self._calls.receive()
                if self._take():
                    return True
        self.drop()
        return False

    def finish(self) -> None:
        """Waits until the running evaluation has ended."""
        self.run(lambda: False)

    def poll(self) -> bool:
        """Returns whether an evaluation in workers has ended since the previous call. Does not
        wait. Replaces workers that have died or hang.

        Raises:
            CallbackError, WorkersFailedError, NonFiniteError, EnvironmentAPIError, FunctionError:
                see `Calls`.
            CheckpointError: the checkpoint of the best evaluation cannot be written.
        """
        if self._running is None:
            return False
        self._calls.receive_ended()
        return self._take()

    def _take(self) -> bool:
        """Takes the replies that have arrived. Returns whether these replies complete the
        evaluation."""
        running = self._running
        assert running is not None
        while self._calls.kept:
            reply = self._calls.first()
            if reply.value is None:
                self._calls.send(reply.worker, play_part, WEIGHTS, reply.tag, tag=reply.tag)
            else:
                running.played[reply.worker.index] = reply.value
        if len(running.played) < running.num_parts:
            if running.duration_s >= _LONG_S and not running.is_long:
                running.is_long = True
                logger.warning(
                    "the evaluation of policy version %d has taken %.0f s so far. "
                    "max_frames_per_traj limits the length of episodes",
                    running.policy_version,
                    running.duration_s,
                )
            return False
        self.num_evaluations += 1
        self._running, self.last = None, running
        mean = float(np.mean(running.episodes.returns))
        self._best.offer(mean, running.policy_version, running.state)
        return True

    def _count(self, reply: Reply) -> None:
        self._custom_metrics.add(reply.counts.custom_metrics)
        assert self._running is not None
        called_s, index = self._running.called_s, reply.worker.index
        called_s[index] = called_s.get(index, 0.0) + sum(reply.counts.seconds.values())

    def drop(self) -> None:
        """Drops the running evaluation."""
        self._calls.clear()
        self._custom_metrics.report()  # discards the metrics of workers that completed their parts
        self._running = None

    def report(self) -> dict[str, Any]:
        """Returns the block `evaluation/` of a result. The values in `env_runners/` describe the
        evaluation that has ended since the previous report. If no evaluation has ended since
        then, `num_episodes` is 0, and the other values are NaN."""
        last = self.last
        window, custom = EpisodeWindow(self._config.evaluation_duration), {}
        if last is not None and self.num_evaluations > self._num_reported:
            window.add(last.episodes)
            custom = custom_block(self._custom_metrics)
        self._num_reported = self.num_evaluations
        episodes = window.report()
        return {
            "env_runners": {
                **{key: episodes[key] for key in EPISODE_KEYS},
                **window.report_agents(),
                **custom,
            },
            "policy_version": 0 if last is None else last.policy_version,
            "policy_env_steps": 0 if last is None else last.policy_env_steps,
            "duration_s": math.nan if last is None else last.duration_s,
            "num_evaluations": self.num_evaluations,
            "fault_tolerance": self.workers.stats(),
            **self._best.report(),
        }

    def get_state(self) -> dict[str, Any]:
        """Returns the counters for a checkpoint. A running evaluation is not saved. It is due again
        after a restore."""
        return {
            "num_begun": self.num_begun - (self._running is not None),
            "num_evaluations": self.num_evaluations,
            "due": self.due or self._running is not None,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the counters that `get_state` returned, and the best evaluation of the files.
        Drops the running evaluation."""
        self.drop()
        self.num_begun = int(state.get("num_begun", 0))
        self.num_evaluations = self._num_reported = int(state.get("num_evaluations", 0))
        self.due = bool(state.get("due", False))
        self._best.restore()

    def stop(self) -> None:
        """Drops the running evaluation, and stops the evaluation workers."""
        self.drop()
        self.workers.stop()
