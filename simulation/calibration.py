"""`calibrate`: measures on this machine what a simulation of an experiment needs.

The first half runs in this process: a worker samples, and a policy learns. The second half starts
two real workers, and measures what a call costs besides the work of its function.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.threads import limit_threads
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.rank_group import RankGroup
from polopt.policies.policy_group import GroupConfig
from polopt.rollouts.ray_session import attach_or_start, check_memory
from polopt.rollouts.seeds import kept_global_generators
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.snapshots import WEIGHTS
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.simulation.costs import Costs, Learning, MessageCosts
from polopt.simulation.engine import Link
from polopt.simulation.processes import Scene, VirtualTransport
from polopt.simulation.stand_ins import Examples, Stage, StandInWorker, StandInWorkerSet
from polopt.trainers.experiment import Experiment, RunPlan, workers_can_sample

#: Number of fragments that stand-ins return in turn.
NUM_EXAMPLES = 8
#: Calls of `ping` in one measurement.
NUM_PINGS = 200
#: Bytes of the answers of the second measurement, from which the cost of a byte follows.
LARGE_BYTES = 200_000
#: The shares of the time of a calibration.
_SAMPLING_SHARE, _LEARNING_SHARE = 0.5, 0.2
#: The largest factor that a calibration believes, see `MessageCosts.cold`.
MOST_COLD = 4.0
#: The largest factor that a calibration believes, the most workers that share a core in its
#: measurement, and the seconds for each number of workers, see `Costs.crowded`.
MOST_CROWDED, MOST_SHARING, CROWDING_S = 3.0, 8, 0.5
#: The number of references that are fetched to measure how long this takes.
NUM_FETCHES = 50
#: The pause before each measurement of a function. In a run, other work lies between two calls of
#: the function, and the caches hold other data.
PAUSE_S = 0.001
#: A batch is measured up to this number of rows.
_MOST_ROWS = 200_000


class Calibration(NamedTuple):
    """What was measured.

    Attributes:
        experiment: the experiment.
        config: the config of its workers.
        costs: the durations.
        examples: the values that stand-ins return.
    """

    experiment: Experiment
    config: WorkerConfig
    costs: Costs
    examples: Examples


def check_supported(experiment: Experiment, config: WorkerConfig | None = None) -> None:
    """Checks that an experiment can be calibrated and simulated.

    Raises:
        ConfigError: it cannot. The message has the reason.
    """
    trainer, rollout = experiment.trainer, experiment.rollout
    for key, value, why in (
        ("num_gpus", trainer.num_gpus, "the driver learns on a GPU"),
        ("num_gpus_per_worker", rollout.num_gpus_per_worker, "workers compute on a GPU"),
        ("num_workers_below", rollout.num_workers_below, "workers have workers below them"),
    ):
        if value:
            raise ConfigError(
                f"key {key!r}: got {value:g}. A simulation was never calibrated for runs in which "
                f"{why}. Allowed: 0"
            )
    if config is not None and isinstance(config.policy, GroupConfig):
        raise ConfigError(
            "key 'policies': a simulation was never calibrated for several policies. Allowed: one "
            "policy for all agents"
        )


def calibrate(
    experiment: Experiment,
    seconds: float = 60.0,
    nodes: int = 1,
    messages: Any = None,
    sharing: float = 2.0,
) -> Calibration:
    """Measures the costs of an experiment on this machine.

    Args:
        experiment: the experiment.
        seconds: about the duration of the measurement.
        nodes: with more than one, calls through Ray are also measured, because processes on other
            nodes are called in this way.
        messages: costs of an earlier calibration of this machine. Its costs of calls, all-reduces
            and starts are used again. Only if all-reduces are needed and were not measured, two
            workers start. None means that all of it is measured.
        sharing: the largest number of workers for each core that is of interest. Up to this number,
            and up to `MOST_SHARING`, workers start and share a core, to measure what this costs.

    Raises:
        ConfigError: see `check_supported`. Also raised if the environment cannot be made.
    """
    check_supported(experiment)
    plan = RunPlan(experiment)
    workers_can_sample(plan)
    config = plan.workers
    check_supported(experiment, config)
    threads = torch.get_num_threads()
    with kept_global_generators():
        worker = RolloutWorker(config, 1)
        try:
            costs, examples = _local(experiment, worker, seconds)
        finally:
            worker.stop()
            limit_threads(threads)
    if messages is None:
        costs = _with_messages(experiment, config, costs, examples, nodes, sharing)
    else:
        exchange = ("exchange_s", "exchange_wait_s", "exchange_byte_s", "shared_exchange_s")
        kept = ("message", "remote_message", *exchange, "crowded", "start_s")
        costs = dataclasses.replace(costs, **{name: getattr(messages, name) for name in kept})
        of_other = sums_gradients(experiment) and not costs.exchange_s
        if of_other and config.rollout.transport != "ray":
            costs = exchange_of_two(experiment, config, costs)
    return Calibration(experiment, config, costs, examples)


# ---- in this process -----------------------------------------------------------------------------


def cpu_s(function: Callable[[], Any], seconds: float, least: int = 3, most: int = 200) -> float:
    """Returns the median processor time of a function. Calls the function for about `seconds`, at
    least `least` and at most `most` times, after one call that does not count."""
    function()
    measured: list[float] = []
    until_s = time.monotonic() + seconds
    while len(measured) < least or (time.monotonic() < until_s and len(measured) < most):
        time.sleep(PAUSE_S)
        began_s = time.thread_time()
        function()
        measured.append(time.thread_time() - began_s)
    return statistics.median(measured)


def _local(experiment: Experiment, worker: RolloutWorker, seconds: float) -> tuple[Costs, Examples]:
    steps_cpu: list[float] = []
    steps_wait: list[float] = []
    outside: list[float] = []
    fragments: list[SampleBatch] = []
    with _traced(worker, steps_cpu, steps_wait):
        worker.next_batch()
        steps_cpu.clear()
        steps_wait.clear()
        until_s = time.monotonic() + _SAMPLING_SHARE * seconds
        while len(fragments) < 3 or time.monotonic() < until_s:
            began_s, before = time.thread_time(), sum(steps_cpu)
            fragments.append(worker.next_batch())
            outside.append(time.thread_time() - began_s - (sum(steps_cpu) - before))
            if len(fragments) > NUM_EXAMPLES:  # keeps the newest
                del fragments[0]
            if len(steps_cpu) > 100_000:
                break
    policy: Any = worker.policy
    costs = Costs(
        np.array(steps_cpu),
        np.array(steps_wait),
        fragment_s=max(0.0, statistics.median(outside)),
        spread=_spread(np.array(steps_cpu)),
    )
    budget_s = _LEARNING_SHARE * seconds
    if policy.learns_from is SampleBatch:
        return _from_fragments(policy, experiment, costs, fragments, budget_s)
    return _from_transitions(policy, experiment, costs, fragments, budget_s)


@contextmanager
def _traced(worker: RolloutWorker, cpu: list[float], wait: list[float]) -> Iterator[None]:
    """Measures each vector step of a worker: its processor time, and the rest of its duration. A
    step lasts from one answer of `goes_on` to the next question."""
    sampler: Any = worker.get_sampler()
    goes_on, began = sampler.goes_on, list[tuple[int, float, float]]()

    def traced() -> bool:
        if began:
            blocked, began_s, wall_s = began.pop()
            used_s, passed_s = time.thread_time() - began_s, time.monotonic() - wall_s
            cpu.append(used_s)
            # If the thread did not block, other programs had its core. That is not a wait of its
            # own.
            wait.append(max(0.0, passed_s - used_s) if _times_blocked() > blocked else 0.0)
        more: bool = goes_on()
        if more:
            began.append((_times_blocked(), time.thread_time(), time.monotonic()))
        return more

    sampler.goes_on = traced
    try:
        yield
    finally:
        del sampler.goes_on


def _times_blocked() -> int:
    """Returns how often this thread has given up its core by itself, for example to sleep."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _spread(values: np.ndarray, blocks: int = 8) -> float:
    """Returns the relative standard error of a mean, from the means of consecutive blocks."""
    parts = [part.mean() for part in np.array_split(values, blocks) if len(part)]
    mean = float(np.mean(parts))
    return float(np.std(parts) / mean / len(parts) ** 0.5) if mean > 0.0 else 0.0


class _Counting:
    """A reducer that counts sums, as if there were two learners with equal data."""

    world_size = 2

    def __init__(self) -> None:
        self.num, self.num_bytes = 0, 0

    def sum_(self, tensor: Any) -> None:
        self.num += 1
        self.num_bytes += tensor.numel() * tensor.element_size()
        tensor *= 2


def _from_fragments(
    policy: Any, experiment: Experiment, costs: Costs, fragments: list[SampleBatch], seconds: float
) -> tuple[Costs, Examples]:
    gradients: list[Any] = []
    if policy.gives_gradients():
        gradients = list(policy.minibatch_gradients(fragments[-1]))
        per_gradient = _gradient_times(policy, fragments[-1], len(gradients), seconds / 4)
        last = gradients[-1]
        applied = cpu_s(lambda: policy.apply_gradients(last), seconds / 8)
        costs = dataclasses.replace(costs, gradient_s=per_gradient, apply_s=applied)
    learning: list[Learning] = []
    wanted = _sizes(experiment, fragments[-1])
    stats: dict[str, float] = {}
    for count in wanted:
        parts = [fragments[i % len(fragments)] for i in range(count)]
        batch = parts[0] if count == 1 else SampleBatch.concat(parts)
        before, began_s = policy.version, time.thread_time()
        stats = policy.learn_on_batch(batch)
        updates, first_s = policy.version - before, time.thread_time() - began_s
        taken_s = cpu_s(lambda batch=batch: policy.learn_on_batch(batch), seconds / 8, least=2)  # type: ignore[misc]
        counting = _Counting()
        if sums_gradients(experiment) and count == 1:
            policy.learn_on_batch(batch, counting)
        bytes_each = counting.num_bytes / max(1, counting.num)
        learning.append(Learning(batch.agent_steps, taken_s, updates, counting.num, bytes_each))
        if first_s > seconds:
            break
    costs = dataclasses.replace(costs, learning=tuple(learning))
    return costs, Examples(policy, fragments, gradients, stats)


def _gradient_times(
    policy: Any, fragment: SampleBatch, count: int, seconds: float
) -> tuple[float, ...]:
    times: list[list[float]] = []
    until_s = time.monotonic() + seconds
    while len(times) < 3 or (time.monotonic() < until_s and len(times) < 100):
        one: list[float] = []
        time.sleep(PAUSE_S)
        began_s = time.thread_time()
        for _ in policy.minibatch_gradients(fragment):
            one.append(time.thread_time() - began_s)
            time.sleep(PAUSE_S)
            began_s = time.thread_time()
        if len(one) == count:
            times.append(one)
    return tuple(float(value) for value in np.median(np.array(times), axis=0))


def _sizes(experiment: Experiment, fragment: SampleBatch) -> list[int]:
    """Returns the numbers of fragments in the batches to measure: 1, 2, 4 and so on, and the number
    of the option `train_batch_size`."""
    rows = max(1, fragment.agent_steps)
    given = getattr(experiment.optimizer, "train_batch_size", None) or 0
    sizes = {1, 2, 4, 8, 16, 32, *([-(-given // rows)] if given else [])}
    return sorted(size for size in sizes if size * rows <= max(_MOST_ROWS, given))


def _from_transitions(
    policy: Any, experiment: Experiment, costs: Costs, fragments: list[SampleBatch], seconds: float
) -> tuple[Costs, Examples]:
    options: Any = experiment.optimizer
    if getattr(options, "sequence_length", None):
        raise ConfigError(
            f"key 'replay_unit': got {options.replay_unit!r}. A simulation was never calibrated "
            "for batches of sequences. Allowed: 'transition'"
        )
    size = options.train_batch_size
    rows_each = fragments[0].shape[0] * fragments[0].shape[1]
    small = options.model_copy(update={"buffer_size": max(10_000, 4 * size, 8 * rows_each)})
    buffer = small.make_buffer(policy, np.random.SeedSequence(0))
    count = 0
    while count < 4 or buffer.num_drawable < 2 * size:
        one = fragments[count % len(fragments)]
        place = (count, 0)
        buffer.add(dataclasses.replace(one, place=place, worker_index=1 + count % 4))
        count += 1
        if count > 100_000:
            break
    points, errors = [], []
    for rows in sorted({max(1, size // 4), size, 4 * size}):
        drawn = buffer.sample(rows)
        taken_s = cpu_s(lambda drawn=drawn: policy.learn_on_transitions(drawn), seconds / 8)  # type: ignore[misc]
        points.append((float(rows), taken_s))
    for rows in sorted({max(1, rows_each // 4), rows_each}):
        drawn = buffer.sample(rows)
        taken_s = cpu_s(lambda drawn=drawn: policy.td_errors(drawn), seconds / 8)  # type: ignore[misc]
        errors.append((float(rows), taken_s))
    stats, _ = policy.learn_on_transitions(buffer.sample(size))
    costs = dataclasses.replace(costs, transitions_s=tuple(points), errors_s=tuple(errors))
    return costs, Examples(policy, fragments, [], stats)


# ---- calls ---------------------------------------------------------------------------------------


def ping(worker: RolloutWorker, weights: Any, num_bytes: int, sleep_s: float) -> Any:
    """Runs in a worker: sets the weights, sleeps, and returns a value of a size, and the processor
    time of the process so far."""
    worker.set_weights(weights)
    if sleep_s:
        time.sleep(sleep_s)
    return np.zeros(num_bytes, np.uint8), time.process_time()


class Pings(NamedTuple):
    """The result of `measure_pings`, in seconds for each call.

    Attributes:
        driver_s: processor time of the driver.
        send_s: the part of it that sends the call.
        worker_s: processor time of the worker.
        wall_s: median duration.
    """

    driver_s: float
    send_s: float
    worker_s: float
    wall_s: float


def make_value(worker: RolloutWorker, num_bytes: int) -> Any:
    """Runs in a worker: returns a value of a size."""
    return np.zeros(num_bytes, np.uint8)


def take_value(worker: RolloutWorker, value: Any) -> None:
    """Runs in a worker, which fetches the value of a reference before."""


def measure_fetch(workers: WorkerSet, worker_s: float) -> float:
    """Measures `MessageCosts.fetch_s`: one worker makes values, and another one fetches them.

    Args:
        workers: the workers.
        worker_s: see `MessageCosts`.
    """
    calls = Calls(workers, "calibration")
    maker, taker = workers.up()[:2]

    def fetch(count: int) -> None:
        for _ in range(count):
            calls.send(maker, make_value, 1000, by_reference=True)
            calls.send(taker, take_value, calls.first().value)
            calls.first()

    def used_s() -> float:
        for handle in (maker, taker):
            calls.send(handle, ping, None, 0, 0.0)
        return float(sum(reply.value[1] for reply in calls.all()))

    fetch(5)  # the first fetch opens a connection
    before_s = used_s()
    fetch(NUM_FETCHES)
    return max(0.0, (used_s() - before_s - 2 * worker_s) / NUM_FETCHES - 2 * worker_s)


def measure_pings(
    workers: WorkerSet, num_bytes: int, sleep_s: float, count: int, num_workers: int
) -> Pings:
    """Sends calls of `ping` to the first workers, one after the other to each of them."""
    calls = Calls(workers, "calibration")
    chosen = workers.up()[:num_workers]
    for handle in chosen:
        calls.send(handle, ping, WEIGHTS, num_bytes, sleep_s)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    began_cpu_s, sending_s, walls = 0.0, 0.0, []
    for number in range(count + 20):
        if number == 20:  # the first calls warm up
            began_cpu_s, sending_s, first = time.process_time(), 0.0, dict(last)
        began_s = time.monotonic()
        reply = calls.first()
        last[reply.worker.index] = reply.value[1]
        workers.local.policy.version += 1  # so that each call carries weights
        send_s = time.thread_time()
        calls.send(reply.worker, ping, WEIGHTS, num_bytes, sleep_s)
        sending_s += time.thread_time() - send_s
        walls.append(time.monotonic() - began_s)
    driver_s, wall_s = time.process_time() - began_cpu_s, statistics.median(walls)
    calls.wait()
    calls.clear()
    used_s = sum(last[index] - first.get(index, last[index]) for index in last)
    return Pings(driver_s / count, sending_s / count, used_s / count, wall_s)


def _with_messages(
    experiment: Experiment,
    config: WorkerConfig,
    costs: Costs,
    examples: Examples,
    nodes: int,
    sharing: float,
) -> Costs:
    kinds = [config.rollout.transport]
    if nodes > 1:
        kinds.append("ray")
    measured: list[MessageCosts] = []
    for kind in kinds:
        update = {"num_workers": 2, "transport": kind, "num_cpus_per_worker": 0.1}
        two = dataclasses.replace(config, rollout=config.rollout.model_copy(update=update))
        attach_or_start(0.2, 2, log_to_driver=False)
        workers = WorkerSet(two)
        try:
            workers.up()
            started = _start_cpu_s(workers)
            measured.append(_message_costs(workers, two, examples))
            if sums_gradients(experiment) and kind != "ray":
                costs = _with_exchange(workers, experiment, costs)
            if kind == kinds[0]:
                costs = dataclasses.replace(costs, crowded=crowding(workers, sharing))
        finally:
            workers.stop()
        costs = dataclasses.replace(costs, start_s=max(costs.start_s, started))
    remote = measured[1] if nodes > 1 else None
    return dataclasses.replace(costs, message=measured[0], remote_message=remote)


def _start_cpu_s(workers: WorkerSet) -> float:
    """Returns the processor time that a worker has used until it was up."""
    calls = Calls(workers, "calibration")
    calls.send(workers.up()[0], ping, None, 0, 0.0)
    return float(calls.first().value[1])


def _message_costs(workers: WorkerSet, config: WorkerConfig, examples: Examples) -> MessageCosts:
    idle = measure_pings(workers, 1000, 0.004, NUM_PINGS // 2, 1)
    busy = measure_pings(workers, 1000, 0.0, NUM_PINGS, 2)
    large = measure_pings(workers, LARGE_BYTES, 0.0, NUM_PINGS, 2)
    own = own_code(config, examples)
    byte_s = max(0.0, (large.driver_s - busy.driver_s) / (LARGE_BYTES - 1000))
    weights_bytes = examples.policy.flat.params.nbytes
    send_s = max(0.0, busy.send_s - own.send_s - byte_s * weights_bytes)
    fixed_s = byte_s * (1000 + weights_bytes)
    latency_s = max(0.0, idle.wall_s - 0.004 - idle.driver_s - idle.worker_s)
    return MessageCosts(
        driver_s=max(0.0, busy.driver_s - own.driver_s - fixed_s - send_s),
        send_s=send_s,
        cold=min(MOST_COLD, max(1.0, idle.driver_s / busy.driver_s)),
        byte_s=byte_s,
        worker_s=idle.worker_s,
        latency_s=latency_s,
        fetch_s=measure_fetch(workers, busy.worker_s),
    )


def own_code(config: WorkerConfig, examples: Examples) -> Pings:
    """Returns the processor time of the driver's own code in one call of `ping`, and of unpickling
    its answer. A simulation measures both itself, so they must not be part of the cost of a
    message."""
    free = Costs(np.zeros(1), np.zeros(1))
    scene = Scene(free, [1e9], Link(), own_code=1.0)
    stage = Stage(scene, examples, 0, 1)
    transport = VirtualTransport(scene, lambda make, args: StandInWorker(stage, *args), lambda _: 0)
    workers = StandInWorkerSet(stage, config, transport)
    began_s = sending_s = 0.0
    calls = Calls(workers, "calibration")
    chosen = workers.up()
    scene.begin_own_time()

    def so_far_s() -> float:
        scene.note_own_time()
        scene.begin_own_time()
        return scene.driver_s["own code"] + scene.driver_s["messages"]

    for handle in chosen:
        calls.send(handle, ping, WEIGHTS, 0, 0.0)
    for number in range(220):
        if number == 20:
            began_s, sending_s = so_far_s(), 0.0
        reply = calls.first()
        workers.local.policy.version += 1
        send_s = so_far_s()
        calls.send(reply.worker, ping, WEIGHTS, 0, 0.0)
        sending_s += so_far_s() - send_s
    return Pings((so_far_s() - began_s) / 200, sending_s / 200, 0.0, 0.0)


@contextmanager
def on_one_core(core: int | None) -> Iterator[None]:
    """This thread only uses one core meanwhile. None, and systems that cannot do this, leave the
    choice to the system."""
    if core is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def sample_and_learn(worker: RolloutWorker, core: int | None, seconds: float) -> float:
    """Runs in a worker: samples fragments, and computes their gradients if the policy
    computes gradients of fragments. Returns the processor time of one fragment."""
    policy: Any = worker.policy
    learns, count = policy.learns_from is SampleBatch and policy.gives_gradients(), 0
    with on_one_core(core):
        worker.next_batch()
        began_s, until_s = time.thread_time(), time.monotonic() + seconds
        while not count or time.monotonic() < until_s:
            batch = worker.next_batch()
            if learns:
                for _ in policy.minibatch_gradients(batch):
                    pass
            count += 1
        return (time.thread_time() - began_s) / count


def crowding(workers: WorkerSet, sharing: float) -> tuple[tuple[int, float], ...]:
    """Measures `Costs.crowded`: the processor time of a fragment if 2, 4 and 8 workers share a
    core, compared with the time if one of them has the core for itself. More workers lose more,
    until no data of a worker are left in the caches when its turn comes.

    Args:
        workers: two workers. Further ones are started as needed, if there is memory for them.
        sharing: see `calibrate`.
    """
    calls = Calls(workers, "calibration")
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None

    def mean(count: int) -> float:
        for handle in workers.up()[:count]:
            calls.send(handle, sample_and_learn, core, CROWDING_S)
        return statistics.fmean(reply.value for reply in calls.all())

    counts = [2]
    while counts[-1] < min(sharing, MOST_SHARING):
        counts.append(2 * counts[-1])
    if len(counts) > 1:
        try:
            check_memory(counts[-1])
        except ConfigError:
            counts = [2]
    alone_s, factor, found = mean(1), 1.0, []
    workers.add_workers(counts[-1] - 2)
    while workers.starting:
        workers.take_started(1.0)
    for count in counts:
        factor = min(MOST_CROWDED, max(factor, mean(count) / alone_s))
        found.append((count, factor))
    return tuple(found)


def sum_many(
    worker: RolloutWorker, count: int, size: int, core: int | None = None
) -> tuple[float, float]:
    """Runs in a rank: sums a vector `count` times over all ranks. Returns the mean processor time
    and the median duration of one sum.

    Args:
        worker: the rank.
        count: number of sums.
        size: length of the vector.
        core: the only core that this rank uses. None means any core.
    """
    tensor, walls = torch.zeros(size), list[float]()
    with on_one_core(core):
        worker.state["group"].sum_(tensor)
        began_s = time.process_time()
        for _ in range(count):
            wall_s = time.monotonic()
            worker.state["group"].sum_(tensor)
            walls.append(time.monotonic() - wall_s)
        return (time.process_time() - began_s) / count, statistics.median(walls)


def sums_gradients(experiment: Experiment) -> bool:
    """Returns True if the ranks of the strategy sum their gradients by all-reduce."""
    return issubclass(experiment.optimizer_class, DecentralizedAllReduce)


def exchange_of_two(experiment: Experiment, config: WorkerConfig, costs: Costs) -> Costs:
    """Starts two workers, and measures their all-reduce."""
    update = {"num_workers": 2, "num_cpus_per_worker": 0.1}
    attach_or_start(0.2, 2, log_to_driver=False)
    workers = WorkerSet(
        dataclasses.replace(config, rollout=config.rollout.model_copy(update=update))
    )
    try:
        workers.up()
        return _with_exchange(workers, experiment, costs)
    finally:
        workers.stop()


def _with_exchange(workers: WorkerSet, experiment: Experiment, costs: Costs) -> Costs:
    """Measures the all-reduce of two ranks."""
    options: Any = experiment.optimizer
    group = RankGroup(workers, options.backend, options.allreduce_timeout_s)
    group.ensure()
    size = max(1000, round(costs.learning[0].sum_bytes / 4) if costs.learning else 0)
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None

    def mean(size: int, core: int | None = None) -> tuple[float, float]:
        values = group.call_ranks(sum_many, 200, size, core).values()
        cpu_s, wall_s = np.mean(list(values), axis=0)
        return float(cpu_s), float(wall_s)

    (small_s, wall_s), (large_s, _), (shared_s, _) = mean(16), mean(size), mean(16, core)
    return dataclasses.replace(
        costs,
        exchange_s=small_s,
        exchange_wait_s=max(0.0, wall_s - small_s),
        exchange_byte_s=max(0.0, (large_s - small_s) / (4 * size)),
        shared_exchange_s=max(small_s, shared_s),
    )
