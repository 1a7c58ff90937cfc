"""`WorkerSet`: the local worker in the driver and the remote workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polopt.metrics.number import declare
from polopt.metrics.record import Record
from polopt.rollouts.envs.env_sources import EnvSource, env_name
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import Transport
from polopt.rollouts.transport.local_channel import LocalChannel
from polopt.rollouts.transport.socket_channel import open_transport
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.process_group import ProcessGroup
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.snapshots import WeightSnapshots
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_handle import ProcessState, WorkerHandle

#: Options of the processes themselves. A change of one of these options needs new processes.
_PROCESS_KEYS = (
    "num_workers",
    "min_workers",
    "num_workers_below",
    "transport",
    "num_cpus_per_worker",
    "num_gpus_per_worker",
    "custom_resources_per_worker",
    "memory_per_worker",
)

#: The numbers of `WorkerSet.message_stats`.
NUMBERS = declare("""
    transport (text): the transport of calls to workers: `socket`, `ray`, or both
    num_bytes_sent (bytes, counter, metric=bytes{direction=sent}): weights that were sent with calls
        to workers, before the transport encodes them. 0 if the weights stay in the workers
    num_events_recorded (events, counter, metric=): events that the transport has numbered so far.
        0 if it does not number what it sends and receives
""")


@dataclass(frozen=True)
class WorkerSpec:
    """The settings in which one worker differs from the config of all workers.

        workers.add_workers([WorkerSpec(num_envs=8), WorkerSpec(options={"num_cpus": 2})])

    Attributes:
        env: the environments of the worker. None means the environments of the config.
        num_envs: number of environments of the worker. None means the number in the config.
        options: options of the worker's actor, which override the options of the config. They are
            arguments of Ray's `ActorClass.options`, such as `num_cpus`, `num_gpus`, `memory`,
            `resources` and `runtime_env`.
    """

    env: EnvSource | None = None
    num_envs: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class WorkerSet(ProcessGroup):
    """The local worker in the driver's process, and the remote workers.

        workers = WorkerSet(config)
        calls = Calls(workers, "my strategy")
        for worker in workers.up():                  # waits until the run can begin
            calls.send(worker, sample, WEIGHTS)
        workers.add_workers(2)                       # does not wait for the new workers
        workers.stop()

    If the driver learns, it trains the policy of the local worker.

    Args:
        config: the config of all workers.
        learner_device: device of the local worker's policy.
        specs: the settings in which the first workers differ from `config`, in order of index. The
            local worker also gets the first spec.
        local: an existing local worker, which the set does not stop. None means that the set makes
            the local worker.
        transport: starts the processes. None means that the set opens the transport that `config`
            names (with `num_workers=0`, always `ray`), and closes this transport in `stop`.
        meanwhile: see `StartUp`.

    Attributes:
        config: the config of the workers that the set makes next.
        local: the local worker.
        here: handle of the local worker, with index 0.
        owns_local: True if this set has made the local worker. `stop` then also stops the local
            worker.
        weights: makes the copies of the weights that calls carry. See `WeightSnapshots`.
        env_statistics: the last running statistics of the environments of each remote worker, by
            worker index. They come from replies of the worker, or from a checkpoint.
    """

    #: Class of the remote workers.
    worker_class: ClassVar[type[RolloutWorker]] = RolloutWorker

    def __init__(
        self,
        config: WorkerConfig,
        learner_device: str = "cpu",
        specs: Sequence[WorkerSpec] = (),
        local: RolloutWorker | None = None,
        transport: Transport | None = None,
        meanwhile: str = "",
    ) -> None:
        rollout = config.rollout
        self._opened_transport = transport is None
        if transport is None:
            kind = rollout.transport if rollout.num_workers else "ray"
            transport = open_transport(kind, rollout.worker_timeout_s)
        if config.wrap_transport is not None:
            transport = config.wrap_transport(transport, rollout)
        super().__init__(transport, rollout, config.who, meanwhile)
        self.config = config
        self._specs = dict(enumerate(specs, start=1))
        self.owns_local = local is None
        self.local = local or self._make_local(learner_device)
        self.here = self._handle_of_local()
        self.weights = WeightSnapshots(lambda: self.local.policy, lambda v: self.transport.put(v))
        self.env_statistics: dict[int, dict[str, Any]] = {}
        for _ in range(config.rollout.num_workers):
            self._add_process()

    def _make_local(self, device: str) -> RolloutWorker:
        own = dataclasses.replace(self.config_of(1), device=device)
        return RolloutWorker(own, 0, clock=self.clock)

    def _handle_of_local(self) -> WorkerHandle:
        channel = LocalChannel(self.local, self.transport)
        here = WorkerHandle(0, channel, shares_weights=True, who=self.who)
        here.last_answer_s = self.clock()
        here.to(ProcessState.UP)
        return here

    def config_of(self, index: int) -> WorkerConfig:
        """Returns the config for a worker with this index, including its `WorkerSpec`."""
        spec = self._specs.get(index, WorkerSpec())
        rollout = self.config.rollout
        if spec.num_envs is not None:
            rollout = rollout.model_copy(update={"num_envs_per_worker": spec.num_envs})
        return dataclasses.replace(
            self.config,
            rollout=rollout,
            env=self.config.env if spec.env is None else spec.env,
            restart_count=self.restart_counts.get(index, 0),
        )

    def num_envs_of(self, index: int) -> int:
        """Returns the number of environments of the worker with this index. 0 is the local
        worker."""
        return self.config_of(index or 1).rollout.num_envs_per_worker

    def _start_process(self, index: int) -> WorkerHandle:
        own = self.config_of(index)
        options = actor_options(own.rollout, index)
        options.update(self._specs.get(index, WorkerSpec()).options)
        name = f"{self.who} {index}"
        channel = self.transport.start(self.worker_class, (own, index), options, name)
        handle = WorkerHandle(index, channel, self.clock())
        statistics = self.env_statistics.get(index)
        if statistics:  # the replaced worker reported these statistics, or a checkpoint had them
            handle.set_up.append((call_method, ("set_statistics", statistics)))
        return handle

    # ---- members --------------------------------------------------------------------------------

    @property
    def members(self) -> list[WorkerHandle]:
        """The local worker and the remote workers, in order of index."""
        return [self.here, *self.remote]

    def up(self) -> list[WorkerHandle]:
        """Returns the workers that can run calls, in order of index. With `num_workers=0`, this is
        the local worker.

        With remote workers, waits until enough of them are up, as `ProcessGroup.up` does.

        Raises:
            WorkersFailedError: workers keep failing, or too few workers remain.
            TransportError: see `Channel.send`.
        """
        if not self.remote:
            if self.options.num_workers == 0:
                return [self.here]
            raise WorkersFailedError(
                "no workers remain. Start new workers with WorkerSet.add_workers"
            )
        return super().up()

    def note_answer(self, handle: WorkerHandle, record: Record) -> None:
        """Keeps the running statistics of a worker's environments for its replacement."""
        if record.env_statistics and handle is not self.here:
            self.env_statistics[handle.index] = record.env_statistics

    def place_of(self, handle: WorkerHandle) -> str:
        """Returns the worker, its policy and its environment as text, for error messages."""
        policy = getattr(self.config.policy, "actor", None) or self.config.policy_class
        policy_name = getattr(policy, "__name__", type(policy).__name__)
        return (
            f"{self.who} {handle.index} (policy {policy_name!r}, environment "
            f"{env_name(self.config_of(handle.index or 1).env)!r})"
        )

    def describe_hang(self, handle: WorkerHandle) -> str:
        """Returns the time limit, and the size of a fragment of a worker, as text for messages
        about hangs."""
        options = self.options
        envs = self.num_envs_of(handle.index)
        return (
            f"worker_timeout_s={options.worker_timeout_s:g}, the longest time without progress, "
            "such as a step of an environment. A fragment has "
            f"{options.rollout_fragment_length} steps of {envs} environment{'s' * (envs != 1)}"
        )

    def add_workers(self, more: int | Iterable[WorkerSpec]) -> list[WorkerHandle]:
        """Starts more workers. Does not wait for them: optimizers use the new workers once they are
        up. May be called during a run.

        Args:
            more: the number of workers, or one `WorkerSpec` for each worker.

        Raises:
            ValueError: `more` is negative.
        """
        if isinstance(more, int):
            if more < 0:
                raise ValueError(f"number of workers to add: got {more}. Allowed: 0 or more")
            more = [WorkerSpec()] * more
        added = []
        for spec in list(more):
            self._specs[self._last_index + 1] = spec
            added.append(self._add_process())
        return added

    def remove_workers(self, which: int | Iterable[int]) -> list[int]:
        """Stops workers permanently. May be called during a run. `Calls` drops or reassigns the
        pending calls of these workers. To keep the results of these calls, first drain the
        optimizer.

        Args:
            which: the indices of the workers, or a number of workers. A number removes the workers
                with the highest indices.

        Returns:
            the indices of the removed workers.

        Raises:
            KeyError: an index does not exist.
            ValueError: `which` is negative, or there are fewer workers than `which`.
        """
        leaving = select(self.remote, which)
        self._stop_processes(leaving)
        for handle in leaving:
            self._leave(handle)
        return [handle.index for handle in leaving]

    def _leave(self, handle: WorkerHandle) -> None:
        super()._leave(handle)
        self._specs.pop(handle.index, None)
        self.env_statistics.pop(handle.index, None)

    # ---- configuration ------------------------------------------------------------

    def message_stats(self) -> dict[str, Any]:
        """Returns statistics for results. See `NUMBERS`. The transport is the text that
        `Transport.paths` returns, such as `socket`, or `socket, ray` if workers use different
        transports."""
        event = self.transport.event
        return {
            "transport": self.transport.paths([handle.channel for handle in self.remote]),
            "num_bytes_sent": self.weights.num_bytes_sent,
            "num_events_recorded": 0 if event is None else event + 1,
        }

    def reconfigure(
        self,
        config: WorkerConfig,
        learner_device: str = "cpu",
        local: RolloutWorker | None = None,
    ) -> bool:
        """Makes new workers from a new config inside the running processes. Replaces processes
        that are still starting. Does not wait until the new workers are up.

        Args:
            config: the new config of all workers.
            learner_device: device of the local worker's policy.
            local: the new local worker. None means that this set makes the local worker.

        Returns:
            True if the set has begun to make the new workers. False if the running processes do not
            suit the new config, for example because the number of workers or their resources
            differ. In this case, nothing has changed.

        Raises:
            WorkersFailedError: workers that were starting with the old config keep failing.
        """
        new = config.rollout
        fits = all(getattr(self.options, key) == getattr(new, key) for key in _PROCESS_KEYS)
        if len(self.remote) != new.num_workers or not fits:
            return False
        self.take_started(0.0)
        self.config, self.options = config, new
        self.env_statistics.clear()
        self.restart_counts.clear()
        self._specs.clear()
        self.faults = self._new_faults()
        if self.owns_local:
            self.local.stop()
        self.local = local or self._make_local(learner_device)
        self.here = self._handle_of_local()
        self.weights.last, self.weights.num_bytes_sent = None, 0
        for handle in list(self.leaving):
            self.let_go(handle, kill=True)
        for handle in list(self.remote):
            if handle.state is ProcessState.STARTING:
                self._to(handle, ProcessState.DOWN)
                self.transport.kill(handle.channel)
                self._to(handle, ProcessState.REPLACED)
                self._start_in_place_of(handle)
                continue
            self._to(handle, ProcessState.STARTING)
            handle.sent_snapshot = None
            handle.began_s = handle.started_s = self.clock()
            arguments = self.config_of(handle.index), handle.index
            self.starting[self.transport.remake(handle.channel, arguments)] = handle
        self.started = False
        return True

    def __repr__(self) -> str:
        """Shows the number of remote workers, and how many of them are up."""
        up = sum(handle.up for handle in self.remote)
        return f"WorkerSet({up} of {len(self.remote)} remote workers up)"

    def stop(self) -> None:
        """Stops all remote workers. Also stops the local worker if this set made it, and closes the
        transport if this set opened it. Before this call, stop all other groups that share the
        transport."""
        super().stop()
        if self._opened_transport:
            self.transport.close()
        if self.owns_local:
            self.local.stop()


def call_method(worker: RolloutWorker, method: str, *args: Any) -> Any:
    """Calls a method of the worker. This function is for `Calls.send`, and runs in the worker's
    process."""
    return getattr(worker, method)(*args)


def select(handles: Sequence[WorkerHandle], which: int | Iterable[int]) -> list[WorkerHandle]:
    """Returns the workers that the argument of `WorkerSet.remove_workers` selects.

    Args:
        handles: the workers, in order of index.
        which: the indices of the workers, or a number of workers. A number selects the workers with
            the highest indices.

    Raises:
        KeyError: an index does not exist.
        ValueError: `which` is negative, or there are fewer workers than `which`.
    """
    by_index = {handle.index: handle for handle in handles}
    if not isinstance(which, int):
        return [by_index[index] for index in dict.fromkeys(which)]
    if not 0 <= which <= len(handles):
        raise ValueError(f"number of workers to remove: got {which}. Allowed: 0 to {len(handles)}")
    return list(handles[len(handles) - which :])


def actor_options(rollout: RolloutConfig, index: int) -> dict[str, Any]:
    """Returns Ray's options for the actor of worker `index`.

    A Tune trial reserves resources for the workers that a run needs to begin. Ray schedules further
    workers outside of this reservation.
    """
    options: dict[str, Any] = {
        "num_cpus": rollout.num_cpus_per_worker,
        "num_gpus": rollout.num_gpus_per_worker,
        "resources": rollout.custom_resources_per_worker or None,
    }
    if rollout.memory_per_worker:
        options["memory"] = rollout.memory_per_worker
    if index > rollout.workers_needed:
        options["scheduling_strategy"] = "DEFAULT"
    return options
