"""Evaluation while training: whole episodes with a copy of the policy, in the driver between
iterations or in workers beside training. As a strategy, it has a half in the worker and one in the
driver."""

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
from polopt.common.weights import Weights
from polopt.metrics.custom_metrics import CustomMetrics
from polopt.metrics.episode_window import EpisodeWindow
from polopt.rollouts.envs.env_api import same_encoding
from polopt.rollouts.envs.env_sources import EnvSource, env_name, resolve_env
from polopt.rollouts.envs.env_state import set_evaluation_statistics
from polopt.rollouts.envs.random_state import kept_global_generators, seed_global_generators
from polopt.rollouts.envs.vector_env import ENV_KEYS, probe_spaces
from polopt.rollouts.sampling.seeds import Seeds, evaluation_seeds
from polopt.rollouts.sampling.whole_episodes import WholeEpisodes, shares
from polopt.rollouts.workers.calls import WEIGHTS, Calls, Reply
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.experiment import TrainerConfig
from polopt.trainers.results import custom_block

logger = logging.getLogger("polopt")

#: A call in the driver's process ends after this time, so that a request to stop is seen.
_CALL_HERE_S = 0.25
#: A call of a worker ends after this share of `worker_timeout_s`: many long episodes do not count
#: as hanging.
_CALL_SHARE = 0.25
#: Evaluations that take longer are logged.
_LONG_S = 60.0
#: Keys of `EpisodeWindow.report` that `evaluation/env_runners/` has.
EPISODE_KEYS = (
    "episode_return_mean",
    "episode_return_min",
    "episode_return_max",
    "episode_len_mean",
    "num_episodes",
)


class Part(NamedTuple):
    """What one worker plays of an evaluation.

    Attributes:
        serial: of the evaluation in this process. Tells a worker whether it has begun with it.
        num_episodes: of this worker.
        explore: see `EvaluationConfig`.
        seeds: of its environments and actions.
        statistics: running statistics of the wrappers of training's environments.
        call_s: seconds after which a call ends, done or not.
    """

    serial: int
    num_episodes: int
    explore: bool
    seeds: Seeds
    statistics: list[dict[str, Any]]
    call_s: float


def play(worker: RolloutWorker, weights: Weights | None, part: Part) -> EpisodeStats | None:
    """Runs in a worker: goes on with its part of an evaluation, or begins with it.

    Returns:
        its episodes. None: it needs further calls.
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
            if faults.non_finite:
                worker.not_finite("fragments", faults)
            else:
                worker.record.fault(faults)
                worker.not_finite("fragments", faults, count=0)
            if playing.done or worker.clock() >= ends_s:
                break
    if not playing.done:
        return None
    worker.end_episodes(playing.episodes)
    returns = [episode.episode_return for episode in playing.episodes]
    return EpisodeStats(returns, [episode.episode_len for episode in playing.episodes])


@dataclass
class _Running:
    """The evaluation under way.

    Attributes:
        weights: that are evaluated.
        state: of the trainer when they were taken. Saved if they turn out to be the best.
        num_parts: workers that play.
        played: by worker index.
        called_s: seconds of the calls that have ended, by worker index.
        is_long: it was logged that it takes long.
    """

    weights: Weights
    state: dict[str, Any]
    num_parts: int
    played: dict[int, EpisodeStats] = field(default_factory=dict)
    called_s: dict[int, float] = field(default_factory=dict)
    is_long: bool = False

    @property
    def duration_s(self) -> float:
        """See `Evaluated`. The driver takes replies between iterations of training: its clock would
        add the rest of an iteration."""
        return max(self.called_s.values(), default=0.0)


@dataclass(frozen=True)
class Evaluated:
    """An evaluation that has ended.

    Attributes:
        policy_version: of the weights.
        policy_env_steps: environment steps that training had sampled when they were taken.
        episodes: in order of workers.
        duration_s: of the calls of the worker whose calls took longest in sum.
        state: see `_Running`.
    """

    policy_version: int
    policy_env_steps: int
    episodes: EpisodeStats
    duration_s: float
    state: dict[str, Any]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.episodes.returns))


def evaluation_config(config: TrainerConfig, worker_config: WorkerConfig) -> WorkerConfig | None:
    """The config of evaluation's workers. None without `evaluation_interval`. Where it has other
    environments than training, one of them is made and closed.

    Args:
        config: of the trainer: its keys `evaluation_*`.
        worker_config: of training's workers.

    Raises:
        ConfigError: environments of `evaluation_config` that cannot be made, or that have other
            spaces than the environments of training.
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
            "record_arrivals": False,  # training does not depend on when it ends
            "min_workers": None,
            "num_gpus_per_worker": 0.0,
        }
    )
    # The worker in the driver's process has the index 0.
    offset = training.last_worker_index + (config.evaluation_num_workers == 0)
    env = worker_config.env
    if changes:
        env = env if options.env is None else resolve_env(options.env)
        env_key, config_key, num_key = (f"evaluation_config.{key}" for key in ENV_KEYS)
        with kept_global_generators():  # the environment may draw from them
            spaces = probe_spaces(
                env, rollout, (env_key, config_key, num_key), training.last_worker_index + 1, True
            )
        _check_spaces(spaces, (worker_config.observation_space, worker_config.action_space), env)
    return dataclasses.replace(
        worker_config,
        env=env,
        rollout=rollout.model_copy(update={"env": None}),
        device="cpu",
        in_evaluation=True,
        env_index_offset=offset,
    )


def _check_spaces(spaces: tuple[Any, Any], trained: tuple[Any, Any], env: EnvSource) -> None:
    for name, one, other in zip(("observation", "action"), spaces, trained, strict=True):
        if not (same_encoding(one, other) if name == "observation" else one == other):
            raise ConfigError(
                f"key 'evaluation_config': {env_name(env)!r} has the {name} space {one!s:.200}. "
                f"Allowed: the one of training, {other!s:.200}"
            )


class Evaluation:
    """Plays whole episodes with copies of the policy, one evaluation at a time.

    A worker that dies or hangs is replaced, and its replacement plays its part again from the same
    seeds. Environments, actions and the global generators of the process have seeds of their own,
    so that a run is the same with evaluation and without it.

    Args:
        config: of the trainer: its keys `evaluation_*`.
        workers: of `evaluation_config`. Stopped at the end.

    Attributes:
        due: an evaluation is to begin once none is under way.
        last: the evaluation that ended last. None: none yet.
        num_begun: evaluations that have begun, also before a restore.
        num_evaluations: evaluations that have ended.
        workers: their local worker's policy is the copy that is evaluated.
    """

    def __init__(self, config: TrainerConfig, workers: WorkerSet) -> None:
        self._config = config
        self.workers = workers
        self._calls = Calls(workers, "evaluation", count=self._count)
        self._custom_metrics = CustomMetrics()
        self._serials = itertools.count()
        self._running: _Running | None = None
        self._num_reported = 0
        self.due = False
        self.last: Evaluated | None = None
        self.num_begun = self.num_evaluations = 0

    @property
    def in_driver(self) -> bool:
        """Whether it runs between iterations in the driver's process."""
        return self._config.evaluation_num_workers == 0

    def is_due(self, iteration: int) -> bool:
        """Whether an evaluation is to begin after an iteration. One that falls due while another is
        under way begins after it.

        Args:
            iteration: its number, from 1.
        """
        interval = self._config.evaluation_interval
        self.due |= interval is not None and iteration % interval == 0
        return self.due and self._running is None

    def begin(
        self, weights: Weights, state: dict[str, Any], statistics: list[dict[str, Any]]
    ) -> None:
        """Begins an evaluation. Does not wait.

        Args:
            weights: to evaluate.
            state: see `_Running`.
            statistics: see `Part`.
        """
        workers, config = self.workers, self._config
        indices = [worker.index for worker in workers.remote] or [0]
        parts = dict(zip(indices, shares(config.evaluation_duration, len(indices)), strict=True))
        workers.local.set_weights(weights)
        if workers.remote:  # after a restore, other weights may have this version
            workers.weights.take(force=True)
        timeout_s = workers.config.rollout.worker_timeout_s
        serial = next(self._serials)
        for worker in workers.remote or [workers.here]:
            part = Part(
                serial,
                parts[worker.index],
                config.evaluation_config.explore,
                evaluation_seeds(
                    workers.config.seed,
                    self.num_begun,
                    worker.index,
                    workers.config.rollout.num_envs_per_worker,
                ),
                statistics,
                _CALL_HERE_S if self.in_driver else _CALL_SHARE * timeout_s,
            )
            self._calls.send(worker, play, WEIGHTS, part, tag=part)
        self.num_begun += 1
        self.due = False
        self._running = _Running(weights, state, len(parts))

    def run(self, stopped: Callable[[], bool]) -> bool:
        """Plays the evaluation that was begun in this process.

        Args:
            stopped: asked several times a second. True drops the evaluation.

        Returns:
            whether it has ended.
        """
        with kept_global_generators():
            while not stopped():
                self._calls.receive()
                if self._take():
                    return True
        self.drop()
        return False

    def finish(self) -> None:
        """Waits for the evaluation that is under way."""
        self.run(lambda: False)

    def poll(self) -> bool:
        """Whether an evaluation in workers has ended since the last call. Does not wait. Replaces
        workers that have died or hang.

        Raises:
            WorkersFailedError, NonFiniteError, EnvironmentAPIError, FunctionError: see `Calls`.
        """
        if self._running is None:
            return False
        self._calls.receive_ended()
        return self._take()

    def _take(self) -> bool:
        """Takes the replies that have arrived. Whether they complete the evaluation."""
        running = self._running
        assert running is not None
        while self._calls.kept:
            reply = self._calls.first()
            if reply.value is None:
                self._calls.send(reply.worker, play, WEIGHTS, reply.tag, tag=reply.tag)
            else:
                running.played[reply.worker.index] = reply.value
        if len(running.played) < running.num_parts:
            if running.duration_s >= _LONG_S and not running.is_long:
                running.is_long = True
                logger.warning(
                    "the evaluation of policy version %d has taken %.0f s so far; "
                    "max_frames_per_traj bounds the length of episodes",
                    running.weights.version,
                    running.duration_s,
                )
            return False
        episodes = EpisodeStats.concat(running.played[index] for index in sorted(running.played))
        weights = running.weights
        self.last = Evaluated(
            weights.version, weights.env_steps, episodes, running.duration_s, running.state
        )
        self.num_evaluations += 1
        self._running = None
        return True

    def _count(self, reply: Reply) -> None:
        self._custom_metrics.add(reply.counts.custom_metrics)
        assert self._running is not None
        called_s, index = self._running.called_s, reply.worker.index
        called_s[index] = called_s.get(index, 0.0) + sum(reply.counts.seconds.values())

    def drop(self) -> None:
        """Drops the evaluation that is under way."""
        self._calls.clear()
        self._custom_metrics.report()  # of workers that had done their part
        self._running = None

    def report(self) -> dict[str, Any]:
        """The block `evaluation/` of a result. `env_runners/` is of the evaluation that has ended
        since the last report, and NaN if none has."""
        last = self.last
        window, custom = EpisodeWindow(self._config.evaluation_duration), {}
        if last is not None and self.num_evaluations > self._num_reported:
            window.add(last.episodes)
            custom = custom_block(self._custom_metrics)
        self._num_reported = self.num_evaluations
        episodes = window.report()
        return {
            "env_runners": {key: episodes[key] for key in EPISODE_KEYS} | custom,
            "policy_version": 0 if last is None else last.policy_version,
            "policy_env_steps": 0 if last is None else last.policy_env_steps,
            "duration_s": math.nan if last is None else last.duration_s,
            "num_evaluations": self.num_evaluations,
            "fault_tolerance": self.workers.stats(),
        }

    def get_state(self) -> dict[str, Any]:
        """Counts, for checkpoints. The evaluation under way is not saved, and is due again."""
        return {
            "num_begun": self.num_begun - (self._running is not None),
            "num_evaluations": self.num_evaluations,
            "due": self.due or self._running is not None,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores what `get_state` returned. Drops the evaluation that is under way."""
        self.drop()
        self.num_begun = int(state.get("num_begun", 0))
        self.num_evaluations = self._num_reported = int(state.get("num_evaluations", 0))
        self.due = bool(state.get("due", False))

    def stop(self) -> None:
        """Drops what is pending, and stops the workers."""
        self.drop()
        self.workers.stop()
