"""AsyncReplay: samplers, replay shards and the learner run at the same time (Ape-X).

The strategy follows Horgan et al., 2018. A sampler is a rollout worker. With prioritized replay, it
also computes the initial priorities of its rows. A replay shard is a process that holds a part of
the rows. Instead of a fragment, the driver sends a shard a reference, and the shard fetches the
fragment from the sampler. So fragments do not pass through the driver. Of the samples, the driver
receives only the batches from which it learns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pydantic

from polopt.common.config import Automatic, ConfigError
from polopt.common.multi_agent_batch import MultiAgentBatch
from polopt.common.sample_batch import SampleBatch
from polopt.metrics.lag import AgeHistogram, DoublingHistogram, distribution
from polopt.metrics.number import declare
from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.collection_checks import check_central_gradients
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.replay_optimizer import ReplayOptimizer, ReplayOptions
from polopt.optimizers.replay_shards import NUMBERS as SHARD_NUMBERS
from polopt.optimizers.replay_shards import (
    Batch,
    Fragment,
    ReplayShards,
    add,
    draw,
    forget,
    set_priorities,
)
from polopt.policies.policy_group import DEFAULT_POLICY, GroupConfig, PolicyGroup, learning
from polopt.replay.n_step import windows_of
from polopt.replay.policy_buffers import PolicyLimiters, PolicyRows
from polopt.replay.rate_limiter import RateLimiter
from polopt.rollouts.resources import Amount
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.sampling.worker_sampler import join_in_time
from polopt.rollouts.transport.channel import ChannelError
from polopt.rollouts.workers.call import Reply
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.snapshots import WEIGHTS
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

#: If the last batch was above this size, the next batches stay in their shards until the driver
#: fetches them. If a shard sent such a batch at once, the message might not fit into the kernel's
#: buffer. The shard would then have to wait while the driver learns.
REFERENCE_BYTES = 100_000
#: The limit of unanswered calls per process. It is too large to have an effect, because the rate
#: limiter, `prefetch_batches` and `most_fragments` limit the requests.
_MOST_CALLS = 10_000


class AsyncReplayConfig(ReplayOptions):
    """Options of `AsyncReplay`, in addition to the options of `ReplayOptions`.

    Attributes:
        num_replay_shards: number of processes (shards) that hold the rows. Each shard can hold
            `buffer_size / num_replay_shards` rows. All fragments of a worker are stored in the same
            shard, so `num_workers` must be at least the number of shards. RLlib 0.8:
            `num_replay_buffer_shards`.
        num_cpus_per_replay_shard: number of Ray CPUs of each shard.
        prefetch_batches: number of batches that the driver requests from shards in advance. These
            batches are being drawn, are on their way, or wait in the driver.
        max_requests_in_flight_per_worker: the largest number of fragments that the driver requests
            from a worker at once. With 2, a worker can sample the next fragment while the driver
            learns.
        error_buffer: the largest credit, in rows. The credit is `training_intensity` times the rows
            sampled since learning began, minus the rows learned. Workers wait at this bound. The
            learner waits while the credit is less than one batch. None means a bound that is large
            enough for all fragments that can be under way and for all prefetched batches. The bound
            then makes workers wait only if the learner is too slow.
    """

    num_replay_shards: int = pydantic.Field(default=1, ge=1, le=10_000)
    num_cpus_per_replay_shard: Amount = 1.0
    prefetch_batches: int = pydantic.Field(default=4, ge=1, le=1000)
    max_requests_in_flight_per_worker: int = pydantic.Field(default=2, ge=1, le=1000)
    error_buffer: Automatic = pydantic.Field(default=None, ge=0, le=10**12)

    def limiter(
        self, rollout: RolloutConfig, policy: Any = None, num_agents: int = 1
    ) -> RateLimiter:
        """Returns the rate limiter for a run.

        Args:
            rollout: options of sampling.
            policy: options of the policy.
            num_agents: number of possible agents of an environment.

        Raises:
            ConfigError: `error_buffer` is so small that samplers and learner would wait for each
                other forever, or `training_intensity` is so small that it is rounded to 0.
        """
        rows = self.rows_of_fragment(rollout, num_agents)
        most = self.most_fragments * rollout.num_workers * rows
        bound = self.error_buffer or (
            math.ceil(self.training_intensity * most)
            + self.prefetch_batches * self.train_batch_size
        )
        # With n-step returns, a row can be drawn at the latest when n further steps of its
        # environment are stored. `window` is n times the number of environments. With one row more,
        # at least one environment has more than n steps, so that at least one row can be drawn.
        window = rollout.num_workers * rollout.num_envs_per_worker * num_agents
        window *= getattr(policy, "most_steps", 1)
        start = max(self.learning_starts, window + 1)
        limiter = RateLimiter(self.training_intensity, start, bound)
        limiter.check(self.train_batch_size, rows)
        return limiter

    def check_limits(self, rollout: RolloutConfig, num_agents: int = 1) -> None:
        """Checks that samplers and learner cannot wait for each other forever, and that the shards
        can hold two fragments of each sampler.

        Args:
            rollout: options of sampling.
            num_agents: number of possible agents of an environment.

        Raises:
            ConfigError: `error_buffer` or `buffer_size` is too small. See also `limiter`.
        """
        self.limiter(rollout, num_agents=num_agents)
        shards = self.num_replay_shards
        rows = self.rows_of_fragment(rollout, num_agents)
        least = 2 * -(-rollout.num_workers // shards) * rows * shards
        if self.buffer_size < least:
            agents = f" and {num_agents} agents" if num_agents > 1 else ""
            raise ConfigError(
                f"key 'buffer_size': got {self.buffer_size} with num_replay_shards={shards}"
                f"{agents}. Allowed: {least} or more, so that the shards can hold two fragments of "
                "each sampler"
            )

    @staticmethod
    def rows_of_fragment(rollout: RolloutConfig, num_agents: int = 1) -> int:
        """Returns the largest number of rows of one fragment: its steps T times the environments of
        a worker, times the agents of an environment."""
        return rollout.rollout_fragment_length * rollout.num_envs_per_worker * num_agents

    @property
    def most_fragments(self) -> int:
        """The largest number of fragments of one sampler that may be under way. A fragment is under
        way from its request until its shard has stored it."""
        return 2 * self.max_requests_in_flight_per_worker


class Task(NamedTuple):
    """The tag of a call. It says what the call does.

    Attributes:
        kind: the kind of the call.
            `fragment`: a sampler samples a fragment.
            `stored`: a shard stores a fragment.
            `batch`: a shard draws a batch.
            `updated`: a shard sets new priorities, or drops its rows after a restore.
        sampler: index of the worker that samples the fragment. 0 for `batch` and `updated`.
        rows: number of rows of the fragment. Before the fragment is sampled, this is the largest
            number of rows that it can have. 0 for `batch` and `updated`.
        policy: name of the policy that learns from the batch. Empty for other kinds.
    """

    kind: str
    sampler: int = 0
    rows: int = 0
    policy: str = ""


def sample_with_priorities(worker: RolloutWorker, weights: Any, with_priorities: bool) -> Any:
    """Runs in a sampler: samples a fragment. If `with_priorities` is True, also computes the
    priorities of its rows with the same weights. See `Fragment` for the return value.

    The priority of a row depends on its window, which is the steps of the row's n-step return. The
    windows of the last `n_step - 1` rows of each environment can end in the next fragment. So the
    sampler keeps these rows, and sends their priorities with the next fragment. If the next
    fragment does not continue this fragment, the sampler never sends these priorities.
    """
    worker.set_weights(weights)
    batch: Any = worker.next_batch()
    if not isinstance(batch, MultiAgentBatch):
        return _with_priorities(worker, "", worker.policy, batch, with_priorities)
    fragments = {}
    for name, policy in learning(worker.policy).items():
        part = batch.parts[name]
        part.worker_index = batch.worker_index
        fragments[name] = _with_priorities(worker, name, policy, part, with_priorities)
    return fragments


def _with_priorities(
    worker: RolloutWorker, name: str, policy: Any, batch: SampleBatch, with_priorities: bool
) -> Fragment:
    if not with_priorities:
        return Fragment(batch, None)
    with worker.phase("prioritize"):
        options, last_steps = policy.config, worker.state.setdefault("last_steps", {})
        before = last_steps.get(name)
        joined = batch
        if before is not None and before.next_place == batch.place:
            joined = join_in_time(before, batch)
        windows = windows_of(joined, options.gamma, options.most_steps)
        priorities = np.full(joined.shape, np.nan)
        if windows.complete.any():
            priorities[windows.complete] = policy.td_errors(windows.rows)
        last_steps[name] = joined.last_rows(options.most_steps - 1)
    return Fragment(batch, priorities)


class AsyncReplay(ReplayOptimizer):
    """Samplers sample, shards store and draw rows, and the driver learns, all at the same time.
    These processes wait for each other only if the training intensity requires it, or if one of
    them cannot keep up.

        polopt.PolicyOptimizerTrainer(
            env="CartPole-v1",
            policy="dqn",
            optimizer={"name": "async_replay", "prioritized_replay": True, "num_replay_shards": 2},
            num_workers=4,                     # samplers
        )

    A step handles the first reply from any sampler or shard. Results depend on timing. If a process
    fails, its pending work is lost, and the driver requests other work in place of the lost work.
    """

    name = "async_replay"
    numbers = (
        *declare("""
            training_credit (rows): rows that the learner may learn at this moment, according to
                [`training_intensity`](replay.md#asyncreplay)
            error_buffer (rows): upper bound of `training_credit`
        """),
        *distribution(
            "priority_lag",
            "updates",
            "priority lag in the interval: the updates between the computation of a row's priority "
            "and learning from this row",
            "lag. The bins count 0, 1, 2 to 3, 4 to 7 and so on",
            ("lag_mean{kind=priority}", "lag_max{kind=priority}", ""),
        ),
        *declare("""
            learner_blocked_by_shards_s (s, total): time for which the learner waited for a batch
                that it had requested
            num_batches_waiting (batches): batches that were requested and that the learner has not
                received yet
            num_batches_lost (batches, total): batches that were lost with their shards
            num_bytes_by_reference (bytes, counter, metric=bytes{direction=by_reference}): fragments
                that went directly from samplers to shards, and not through the driver
        """),
        *SHARD_NUMBERS,
    )
    config_class = AsyncReplayConfig
    config: AsyncReplayConfig
    phases: ClassVar[tuple[str, ...]] = ("request", "wait", "fetch", "learn")
    worker_phases: ClassVar[tuple[str, ...]] = ("prioritize",)
    in_process_instead = "sync_replay"
    after_failure = "drop"

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self._begin_limiters()
        self.shards = ReplayShards(workers, self.config)
        self.calls.include(self.shards)
        self.calls.per_worker = _MOST_CALLS
        self.row_ages = AgeHistogram(self.config.buffer_size)
        self.priority_lag = DoublingHistogram()
        self.num_bytes_by_reference = 0
        self._num_draws = self._num_learned = 0  # numbers of requested and of fetched batches
        self._batch_bytes = 0  # size of the last batch
        self._priorities: list[tuple[float, float]] = []  # mean and maximum TD error of each batch
        self._num_requests = 0
        self._requested: Counter[int] = Counter()  # number of the last request, by sampler
        self._blocked_s = dict.fromkeys(("learner", "samplers", "learner_by_shards"), 0.0)
        # The share of the samplers that have no request, and the time when it was measured.
        self._idle = 0.0, workers.clock()

    def _begin_limiters(self) -> None:
        """Makes a rate limiter for each policy that learns."""
        config = self.workers.config
        self._limiters: dict[str, RateLimiter] = {
            name: self.config.limiter(config.rollout, one, config.num_agents)
            for name, one in learning(config.policy).items()
        }
        several = isinstance(config.policy, GroupConfig)
        self.limiter: Any = (
            PolicyLimiters(self._limiters) if several else self._limiters[DEFAULT_POLICY]
        )

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> None:
        check_central_gradients(rollout.model_copy(update={"collection": "async"}))
        if rollout.collection != "sync":
            raise ConfigError(
                f"key 'collection': got {rollout.collection!r} with optimizer 'async_replay', "
                "which always samples while it learns. Allowed: 'sync'"
            )
        if config.num_replay_shards > rollout.num_workers:
            raise ConfigError(
                f"key 'num_replay_shards': got {config.num_replay_shards} with num_workers="
                f"{rollout.num_workers}, but each shard needs at least one worker of its own. "
                f"Allowed: up to {rollout.num_workers}"
            )
        config.check_limits(rollout)

    @classmethod
    def check_spaces(cls, worker_config: WorkerConfig, config: Any) -> None:
        """Checks that the limits are large enough for the rows of all agents. Also checks what
        `ReplayOptimizer.check_spaces` checks."""
        config.check_limits(worker_config.rollout, worker_config.num_agents)
        super().check_spaces(worker_config, config)

    @classmethod
    def further_processes(cls, config: Any) -> list[dict[str, float]]:
        return [{"CPU": config.num_cpus_per_replay_shard}] * config.num_replay_shards

    def step(self) -> StepResult:
        before = self.metrics.counts()
        with self.timers["request"]:
            self._start_shards()
            tasks = self._tasks()
            self._request_fragments(tasks)
            drawing = self._request_batches(tasks)
        with self.timers["wait"]:
            kind, reply = self._first(drawing)  # from any sampler or shard
        if kind == "fragment":
            with self.timers["request"]:
                self._store(reply)
        elif kind == "stored" and not reply.worker.removed:
            for name, rows in reply.value.num_rows.items():
                self._limiters[name].inserted(rows)
            self.shards.note(reply.worker, reply.value.reports)
        elif kind == "updated":
            self.shards.note(reply.worker, reply.value)
        elif kind == "batch":
            with self.timers["fetch"]:
                batch = self._fetch(reply)
            if batch is not None:
                name = reply.tag.policy
                with self.timers["learn"]:
                    errors = self._learn(name, batch.rows)
                self._limiters[name].learned(batch.rows.num_rows)
                with self.timers["request"]:
                    self._send_priorities(reply.worker, name, batch.rows.indices, errors)
        return self.metrics.counts_since(before)

    # ---- requests -------------------------------------------------------------------------------

    def _start_shards(self) -> None:
        """Waits for all shards at the first call. At later calls, lowers the size of the rate
        limiter by the rows of shards that have died."""
        if not self.shards.started:
            self.shards.up()
        if self.shards.drop_lost():
            for name, limiter in self._limiters.items():
                limiter.set_size(self.shards.num_rows(name))

    def _request_fragments(self, tasks: list[Task]) -> None:
        """Requests as many fragments as the rate limiter, `max_requests_in_flight_per_worker` and
        `most_fragments` allow. Samplers with the fewest fragments under way come first. If a shard
        stores fragments too slowly, its samplers wait."""
        samplers = self.workers.up()
        config = self.workers.config
        rows = self.config.rows_of_fragment(config.rollout, config.num_agents)
        requested = Counter(task.sampler for task in tasks if task.kind == "fragment")
        under_way = requested + Counter(task.sampler for task in tasks if task.kind == "stored")
        ahead = sum(task.rows for task in tasks)  # of all policies, so at most this for each
        limiters = self._limiters.values()
        while free := [
            sampler
            for sampler in samplers
            if requested[sampler.index] < self.config.max_requests_in_flight_per_worker
            and under_way[sampler.index] < self.config.most_fragments
        ]:
            # Without the rows that are missing, the learner could never lower the credit.
            if any(ahead >= one.missing and not one.can_insert(ahead + rows) for one in limiters):
                break
            sampler = min(free, key=lambda s: (under_way[s.index], self._requested[s.index]))
            task = Task("fragment", sampler.index, rows)
            prioritized = self.config.prioritized_replay
            self.calls.send(
                sampler, sample_with_priorities, WEIGHTS, prioritized, tag=task, by_reference=True
            )
            self._num_requests += 1
            self._requested[sampler.index] = self._num_requests
            requested[sampler.index] += 1
            under_way[sampler.index] += 1
            ahead += rows
        idle = sum(requested[sampler.index] == 0 for sampler in samplers)
        self._note_idle(idle / len(samplers))

    def _request_batches(self, tasks: list[Task]) -> int:
        """Requests as many batches in advance as `prefetch_batches` and the rate limiters allow.
        Returns the number of batches that were requested and not fetched yet."""
        size = self.config.train_batch_size
        drawing = Counter(task.policy for task in tasks if task.kind == "batch")
        for name, limiter in self._limiters.items():
            while drawing[name] < self.config.prefetch_batches:
                if not limiter.can_learn((drawing[name] + 1) * size):
                    break
                shard = self.shards.next_to_draw(name)
                if shard is None:
                    break
                large = self._batch_bytes > REFERENCE_BYTES
                task = Task("batch", policy=name)
                self.calls.send(shard, draw, name, size, self.beta, tag=task, by_reference=large)
                self._num_draws += 1
                drawing[name] += 1
        return drawing.total()

    @property
    def beta(self) -> float:
        """The current exponent of the importance weights. The exponent depends on the environment
        steps of the whole run. Shards do not know this number, so the driver sends the exponent
        with each request."""
        config = self.config
        first, last = config.prioritized_replay_beta, config.final_prioritized_replay_beta
        over = config.prioritized_replay_beta_annealing_timesteps
        return first + min(1.0, self.metrics.num_env_steps_sampled / over) * (last - first)

    def _tasks(self) -> list[Task]:
        """Returns the tasks of all pending calls, and of replies that wait in the driver."""
        pending = [work.tag for work in self.calls.pending_work()]
        return pending + [reply.tag for reply in self.calls.kept]

    # ---- replies --------------------------------------------------------------------------------

    def _first(self, drawing: int) -> tuple[str, Reply]:
        """Waits for the first reply, while `drawing` batches were requested and not fetched yet.
        Returns the kind of the reply's task, or `failure`, and the reply.

        After a failure, the next step requests other work in place of the lost work. See
        `Reply.worker` for the state of the process after a failure.
        """
        began_s = self.workers.clock()
        reply = self.calls.first() if self.calls.kept else self.calls.next()
        by = "learner_by_shards" if drawing else "learner"
        self._blocked_s[by] += self.workers.clock() - began_s
        if reply.failure is not None:
            return "failure", reply
        return reply.tag.kind, reply

    def _store(self, reply: Reply) -> None:
        """Makes the sampler's shard store the fragment of a reply. The shard fetches the fragment
        from the sampler's process."""
        metrics, sampler = self.metrics, reply.worker.index
        metrics.add_lag(reply.counts.version, self.policy.version)
        metrics.rollouts.end_rollout(self.policy.version)
        task = Task("stored", sampler, reply.counts.agent_steps)
        self.calls.send(self.shards.of_sampler(sampler), add, reply.value, tag=task)

    def _fetch(self, reply: Reply) -> Batch | None:
        """Fetches the batch of a reply. Returns None if the batch was lost with its shard."""
        self._batch_bytes = reply.counts.num_bytes
        try:
            batch: Batch = self.workers.transport.get(reply.value)
        except ChannelError:  # the shard has died, and the next call to it will fail
            return None
        self._num_learned += 1
        self.shards.note(reply.worker, batch.reports)
        self.row_ages.add(batch.ages * self.config.num_replay_shards)
        if self.config.prioritized_replay:
            self.priority_lag.add(np.maximum(self.policy.version - batch.priority_versions, 0))
        return batch

    def _learn(self, name: str, rows: Any) -> np.ndarray:
        """Learns from a batch of one policy. Returns the TD errors `[B]`."""
        if not isinstance(self.policy, PolicyGroup):
            return self.learn_transitions(rows)
        errors: np.ndarray = self.learn_transitions(PolicyRows({name: rows}))[name]
        return errors

    def _send_priorities(
        self, shard: WorkerHandle, name: str, indices: np.ndarray, errors: np.ndarray
    ) -> None:
        """Sends the TD errors `[B]` of rows, as new priorities, to the shard that drew these rows.
        Does nothing without prioritized replay, or if the shard has been replaced or leaves."""
        if self.config.prioritized_replay and shard.up:
            self._priorities.append((float(errors.mean()), float(errors.max())))
            args = name, indices, errors, self.policy.version
            self.calls.send(shard, set_priorities, *args, tag=Task("updated"))

    def _note_idle(self, share: float) -> None:
        """Notes the present share of idle samplers. Adds the idle time since the last call to
        `_blocked_s`."""
        now_s = self.workers.clock()
        before, since_s = self._idle
        self._blocked_s["samplers"] += before * (now_s - since_s)
        self._idle = share, now_s

    def _count(self, reply: Reply) -> None:
        if reply.worker.who != self.shards.who:
            super()._count(reply)
            self.num_bytes_by_reference += reply.counts.num_bytes
            # The fragment stayed with its sampler, so the driver did not receive these bytes.
            self.metrics.num_bytes_received -= reply.counts.num_bytes
            return
        self.shards.count(reply)
        self.metrics.num_bytes_received += reply.counts.num_bytes

    # ---- results and state ----------------------------------------------------------------------

    def extra_stats(self) -> dict[str, Any]:
        waiting = sum(task.kind == "batch" for task in self._tasks())
        reports = self.shards.totals()
        priorities = np.array(self._priorities or [(np.nan, np.nan)])
        self._priorities.clear()
        return {
            "training_intensity": self.limiter.delivered,
            "training_credit": float(self.limiter.credit),
            "error_buffer": self.limiter.error_buffer,
            "buffer_fill": sum(r.fill for r in reports) / self.config.num_replay_shards,
            "buffer_rows": sum(report.num_rows for report in reports),
            "buffer_bytes": sum(report.buffer_bytes for report in reports),
            "row_age": self.row_ages.report(),
            "priority_lag": self.priority_lag.report(),
            "num_gaps": sum(report.num_gaps for report in reports),
            "priority_mean": float(priorities[:, 0].mean()),
            "priority_max": float(priorities[:, 1].max()),
            "priority_beta": self.beta if self.config.prioritized_replay else np.nan,
            "learner_blocked_s": self._blocked_s["learner"],
            "samplers_blocked_s": self._blocked_s["samplers"],
            "learner_blocked_by_shards_s": self._blocked_s["learner_by_shards"],
            "num_batches_waiting": waiting,
            "num_batches_lost": self._num_draws - self._num_learned - waiting,
            "num_bytes_by_reference": self.num_bytes_by_reference,
            **self.shards.extra_stats(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that `get_state` of any optimizer returned, with empty shards.
        Learning continues once the shards hold at least `learning_starts` rows again. The training
        intensity does not count the rows that are sampled until then."""
        super().set_state(state)
        self._num_draws = self._num_learned = 0
        self._begin_limiters()
        self.restore_limiter(state)
        for shard, seed in self.shards.forget_all().items():
            self.calls.send(shard, forget, seed, tag=Task("updated"))
        self.calls.wait()
        self.calls.clear()

    def stop(self) -> None:
        """Stops the shards, and drops pending calls."""
        super().stop()
        self.shards.stop()
