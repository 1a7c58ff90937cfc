"""`predict_with`: simulates an experiment with several numbers of workers."""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from polopt.common.config import ConfigError
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.simulation.calibration import Calibration
from polopt.simulation.costs import Costs
from polopt.simulation.engine import Link
from polopt.simulation.processes import Scene, VirtualTransport
from polopt.simulation.stand_ins import Stage, StandInWorker, StandInWorkerSet

#: Each worker answers about this number of calls while a simulation is measured, and at least 3
#: calls if there are many workers.
ANSWERS_PER_WORKER = 30
#: The least number of answers of all workers together, and the number after which a simulation may
#: end although each worker has answered fewer calls than that.
LEAST_ANSWERS, MANY_ANSWERS = 1000, 4000
#: See `simulate`.
HARD_FACTOR = 8
#: A share of busy time above which a resource is the bottleneck.
BUSY = 0.85
#: A gain by twice as many workers below which a strategy is saturated.
_LEAST_GAIN = 1.25


class Machines(NamedTuple):
    """The machines of a run.

    Attributes:
        nodes: number of nodes. The driver runs on the first node.
        cores: cores of each node.
        latency_s: latency of the link of the first node, in seconds.
        bandwidth: its bytes per second.
    """

    nodes: int = 1
    cores: float = 1.0
    latency_s: float = 0.0
    bandwidth: float = math.inf


class Outcome(NamedTuple):
    """The outcome of one simulation.

    Attributes:
        env_steps_per_s: environment steps per second.
        policy_lag: mean lag of gradients and batches, in updates.
        driver_busy: share of the time in which the driver computes.
        driver_learning: share of the time in which the driver learns.
        cores_busy: share of the cores of the busiest node that are in use.
        link_busy: share of the time in which the link carries messages.
        phases: share of the workers' time by phase. `idle` is the rest.
    """

    env_steps_per_s: float
    policy_lag: float
    driver_busy: float
    driver_learning: float
    cores_busy: float
    link_busy: float
    phases: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The prediction for one number of workers. `low` and `high` are the bounds of an interval.

    Attributes:
        workers: number of workers.
        env_steps_per_s, low, high: environment steps per second.
        efficiency: the rate divided by the rate of one worker times the number of workers.
        policy_lag, lag_low, lag_high: mean lag of gradients and batches, in updates.
        phases: share of the workers' time by phase.
        driver_busy, cores_busy: shares, see `Outcome`.
        bottleneck: what limits the rate.
        start_up_s: seconds until all workers have started.
        oversubscribed: number of processes for each core of the busiest node, if it has more
            workers than cores. 0 otherwise.
    """

    workers: int
    env_steps_per_s: float
    low: float
    high: float
    efficiency: float
    policy_lag: float
    lag_low: float
    lag_high: float
    phases: dict[str, float]
    driver_busy: float
    cores_busy: float
    bottleneck: str
    start_up_s: float
    oversubscribed: float


def simulate(
    calibration: Calibration,
    workers: int,
    machines: Machines,
    seed: int = 0,
    costs: Costs | None = None,
    budget_s: float = 5.0,
    own_code: float = 1.0,
) -> Outcome:
    """Runs the real `step()` of the experiment's optimizer on a virtual clock.

    Args:
        calibration: see `calibrate`.
        workers: number of workers.
        machines: the machines of the run.
        seed: seed of all draws.
        costs: costs in place of those of the calibration.
        budget_s: processor time after which the simulation ends, once each worker has answered a
            few calls. In any case, it ends after `HARD_FACTOR` times this time.
        own_code: see `Scene`.

    Raises:
        ConfigError: the strategy refuses the number of workers.
    """
    experiment, costs = calibration.experiment, costs or calibration.costs
    rollout = experiment.rollout.model_copy(update={"num_workers": workers})
    config = dataclasses.replace(
        calibration.config,
        rollout=calibration.config.rollout.model_copy(update={"num_workers": workers}),
    )
    options: Any = experiment.optimizer
    if getattr(options, "learning_starts", None):  # the rate does not depend on it
        soon = min(options.learning_starts, 4 * options.train_batch_size)
        options = options.model_copy(update={"learning_starts": soon})
    cls: Any = experiment.optimizer_class
    cls.check_options(rollout, options)
    per_core = -(-workers // machines.nodes) / machines.cores
    if per_core > 1.0:
        own_code *= costs.crowding(per_core)
        costs = costs.on_shared_cores(per_core)
    link = Link(machines.latency_s, machines.bandwidth)
    scene = Scene(costs, [machines.cores] * machines.nodes, link, own_code)
    early = getattr(options, "fraction_workers", 1.0) < 1.0
    stage = Stage(scene, calibration.examples, seed, parts=16 if early else 2)

    def make_target(make: Any, args: tuple[Any, ...]) -> Any:
        if isinstance(make, type) and issubclass(make, RolloutWorker):
            return StandInWorker(stage, *args)
        return make(*args)

    def place(name: str) -> int:
        index = int(name.rpartition(" ")[2])
        return (index - 1) % machines.nodes if name.startswith("worker") else 0

    transport = VirtualTransport(scene, make_target, place)
    worker_set = StandInWorkerSet(stage, config, transport)
    optimizer = cls(worker_set, options)
    collecting = gc.isenabled()
    gc.disable()  # a collection would count as the driver's own code
    try:
        return _measured(optimizer, scene, workers, budget_s)
    finally:
        if collecting:
            gc.enable()
        optimizer.calls.clear()
        optimizer.stop()


def _measured(optimizer: Any, scene: Scene, workers: int, budget_s: float) -> Outcome:
    """Runs steps until the run is warm, and then measures further steps."""
    engine, metrics = scene.engine, optimizer.metrics
    wanted = min(max(ANSWERS_PER_WORKER * workers, LEAST_ANSWERS), MANY_ANSWERS)
    answers = max(3 * workers, wanted)
    hard_until_s = time.thread_time() + HARD_FACTOR * budget_s
    scene.begin_own_time()

    def run(least: int, enough: int) -> None:
        """Runs steps for `enough` answers, or for the budget and `least` answers."""
        begun, until_s = scene.answered, time.thread_time() + budget_s
        while True:
            optimizer.step()
            count, now_s = scene.answered - begun, time.thread_time()
            is_warm = metrics.num_updates > 0 and count >= least
            if (is_warm and (count >= enough or now_s > until_s)) or now_s > hard_until_s:
                break

    run(2 * workers, max(2 * workers, answers // 4))
    optimizer.stats()  # begins a new interval of the lag
    scene.note_own_time()
    began_s, steps = engine.now_s, metrics.num_env_steps_sampled
    driver, phases = dict(scene.driver_s), dict(scene.phase_s)
    busy, link_s = [node.busy_s for node in engine.nodes], scene.link.busy_s
    scene.begin_own_time()
    run(workers, answers)
    while engine.now_s <= began_s or metrics.num_env_steps_sampled <= steps:
        optimizer.step()
    scene.note_own_time()
    elapsed_s = engine.now_s - began_s
    spent = {key: (value - driver[key]) / elapsed_s for key, value in scene.driver_s.items()}
    shares = {
        phase: (seconds - phases.get(phase, 0.0)) / elapsed_s / workers
        for phase, seconds in scene.phase_s.items()
    }
    shares["idle"] = max(0.0, 1.0 - sum(shares.values()))
    used = [
        (node.busy_s - before) / elapsed_s / node.cores
        for node, before in zip(engine.nodes, busy, strict=True)
    ]
    lag = optimizer.stats()["policy_lag"]["mean"]
    return Outcome(
        (metrics.num_env_steps_sampled - steps) / elapsed_s,
        float(lag),
        sum(spent.values()),
        spent["learning"],
        max(used),
        (scene.link.busy_s - link_s) / elapsed_s,
        shares,
    )


def predict_with(
    calibration: Calibration,
    workers: Sequence[int],
    machines: Machines,
    repeats: int = 5,
    budget_s: float = 5.0,
) -> list[Prediction]:
    """Predicts the rate for several numbers of workers. Each simulation is repeated with other
    seeds and other draws of the calibration (bootstrap), from which the intervals follow. If there
    are more workers than cores, an interval also contains the rates with the costs of
    `Costs.bounds_of_crowding`.

    Args:
        calibration: see `calibrate`.
        workers: the numbers of workers.
        machines: the machines.
        repeats: number of simulations for each number of workers. With many workers, there are
            fewer, at least 2, or 1 and the two that bound the interval.
        budget_s: see `simulate`.

    Raises:
        ConfigError: a number of workers is below 1, or the strategy refuses it.
    """
    wrong = [count for count in workers if count < 1]
    if wrong:
        raise ConfigError(f"--workers: got {wrong[0]}. Allowed: numbers of 1 or more")
    counts = sorted({1, *workers})
    samples: dict[int, list[Outcome]] = {}
    bounds: dict[int, list[Outcome]] = {}
    for count in counts:
        crowded = -(-count // machines.nodes) > machines.cores and calibration.costs.crowded
        extremes = calibration.costs.bounds_of_crowding() if crowded and count in workers else ()
        number = repeats if count <= 256 else min(repeats, 3)
        if count > 1024:
            number = 1 if extremes else min(repeats, 2)
        drawn = [_drawn(calibration, repeat) for repeat in range(number)]
        try:
            samples[count] = [
                simulate(calibration, count, machines, seed, costs, budget_s)
                for seed, costs in enumerate(drawn)
            ]
            bounds[count] = [
                simulate(calibration, count, machines, 0, costs, budget_s) for costs in extremes
            ]
        except ConfigError:
            if count in workers:
                raise
    one = samples.get(1)
    smallest = min(samples)
    base = statistics.fmean(o.env_steps_per_s for o in one or samples[smallest])
    base /= 1 if one else smallest
    return [
        _prediction(calibration, n, samples[n], bounds[n], base, machines)
        for n in sorted(set(workers))
    ]


def _drawn(calibration: Calibration, repeat: int) -> Costs:
    if repeat == 0:
        return calibration.costs
    return calibration.costs.resampled(np.random.default_rng(repeat))


def interval(values: Sequence[float], bounds: Sequence[float] = ()) -> tuple[float, float, float]:
    """Returns the mean, and the bounds of an interval of two standard deviations around it. The
    interval also contains `bounds`."""
    mean = statistics.fmean(values)
    width = 2.0 * statistics.stdev(values) if len(values) > 1 else 0.0
    return mean, min([max(0.0, mean - width), *bounds]), max([mean + width, *bounds])


def _prediction(
    calibration: Calibration,
    count: int,
    outcomes: list[Outcome],
    bounds: list[Outcome],
    base: float,
    machines: Machines,
) -> Prediction:
    (rate, low, high), (lag, lag_low, lag_high) = (
        interval([getattr(one, name) for one in outcomes], [getattr(one, name) for one in bounds])
        for name in ("env_steps_per_s", "policy_lag")
    )
    keys = dict.fromkeys(key for outcome in outcomes for key in outcome.phases)
    phases = {
        key: statistics.fmean(outcome.phases.get(key, 0.0) for outcome in outcomes) for key in keys
    }
    driver, learning, cores, link = (
        statistics.fmean(getattr(outcome, name) for outcome in outcomes)
        for name in ("driver_busy", "driver_learning", "cores_busy", "link_busy")
    )
    costs = calibration.costs
    on_first = -(-count // machines.nodes)
    return Prediction(
        workers=count,
        env_steps_per_s=rate,
        low=low,
        high=high,
        efficiency=rate / (base * count),
        policy_lag=lag,
        lag_low=lag_low,
        lag_high=lag_high,
        phases=phases,
        driver_busy=driver,
        cores_busy=cores,
        bottleneck=bottleneck(count, driver, learning, cores, link, phases["idle"]),
        start_up_s=costs.start_s * max(1.0, on_first / machines.cores),
        oversubscribed=(on_first + 1) / machines.cores if on_first > machines.cores else 0.0,
    )


def bottleneck(
    workers: int, driver: float, learning: float, cores: float, link: float, idle: float
) -> str:
    """Returns what limits the rate, from the shares of an `Outcome`."""
    if cores >= BUSY and driver < BUSY:
        return "the cores"
    if driver >= BUSY:
        return "the driver, which learns" if learning > driver / 2 else "the driver's messages"
    if link >= BUSY:
        return "the link"
    if idle <= 1.0 - BUSY or workers == 1:
        return "the workers"
    if learning > idle / 2:
        return "workers wait for learning"
    return "the slowest worker"


def saturation(predictions: Sequence[Prediction], field: str = "env_steps_per_s") -> float | None:
    """Returns the number of workers at which the rate saturates: where the line of the smallest
    number of workers meets the highest rate. None if twice as many workers still gain a quarter at
    the end of the list."""
    ordered = sorted(predictions, key=lambda one: one.workers)
    if len(ordered) < 2:
        return None
    rates = [getattr(one, field) for one in ordered]
    doublings = math.log2(ordered[-1].workers / ordered[-2].workers)
    if (rates[-1] / rates[-2]) ** (1.0 / doublings) >= _LEAST_GAIN:
        return None
    return max(rates) / (rates[0] / ordered[0].workers)
