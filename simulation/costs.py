"""`Costs`: what a calibration has measured. A simulation draws all durations from it."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

#: The work after which a process that has waited is as fast as one that never waits.
WARM_UP_S = 0.0005
#: A fragment is put together from this number of pieces of the measured trace, or from fewer if it
#: has fewer steps. Pieces keep the steps of the trace that follow each other, such as the steps of
#: one episode.
PIECES = 16


class Curve:
    """A cost as a function of a size, such as the seconds of learning against the rows of a batch.

    Between two measured sizes, the cost is linear. Above the largest one, it continues with the
    slope of the last two. Below the smallest one, it is the cost of the smallest size, scaled down
    no further than the slope of the first two allows.

    Args:
        points: the measured `(size, cost)`.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        if not points:
            raise ValueError("a curve needs at least one point")
        self.points = sorted(points)

    def __call__(self, size: float) -> float:
        """Returns the cost of a size, at least 0."""
        points = self.points
        if len(points) == 1:
            first, cost = points[0]
            return cost * size / first if first else cost
        above = bisect.bisect_left([known for known, _ in points], size)
        place = min(max(above, 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[place - 1], points[place]
        slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
        return float(max(0.0, y0 + (size - x0) * slope))


class MessageCosts(NamedTuple):
    """The cost of one call besides the work of its function.

    Attributes:
        driver_s: processor time of the driver to take the answer, if it is busy all the time.
        send_s: processor time of the driver to send the call. A worker whose call is sent later
            begins later.
        cold: factor on the processor time of the driver after it has waited, because its caches
            then hold other data. It applies to the first `WARM_UP_S` of work.
        byte_s: processor time of the driver for each byte that it sends or receives.
        worker_s: processor time of the worker.
        latency_s: time without processor use, in seconds.
        fetch_s: processor time of fetching the value of a reference from the process that made it,
            in both processes, besides the bytes and the unpickling.
    """

    driver_s: float = 0.0
    send_s: float = 0.0
    cold: float = 1.0
    byte_s: float = 0.0
    worker_s: float = 0.0
    latency_s: float = 0.0
    fetch_s: float = 0.0

    def with_processor_time(self, factor: float) -> MessageCosts:
        """Returns the costs with all processor times multiplied by `factor`."""
        scaled = MessageCosts(*(value * factor for value in self))
        return scaled._replace(cold=self.cold, latency_s=self.latency_s)


#: The costs of calls that cost nothing.
NO_COSTS = MessageCosts()


class Learning(NamedTuple):
    """The learning from one batch in `Policy.learn_on_batch`.

    Attributes:
        rows: valid rows of the batch.
        seconds: processor time.
        updates: number of updates of the weights.
        sums: number of all-reduce sums, if several learners learn together.
        sum_bytes: mean bytes of one sum.
    """

    rows: int
    seconds: float
    updates: int
    sums: int = 0
    sum_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Costs:
    """The measured costs of one experiment on one machine. All seconds are processor time of one
    thread, unless an attribute says otherwise.

    Attributes:
        step_cpu_s: `[M]` processor time of M consecutive vector steps (all environments of a
            worker, and the policy).
        step_wait_s: `[M]` the rest of the duration of these steps, in which the worker waits.
        fragment_s: time of a fragment besides its steps.
        gradient_s: time of each gradient of a fragment. Empty if the policy gives no gradients.
        apply_s: time to apply a gradient.
        learning: learning from batches, by size. Empty for policies that learn from transitions.
        transitions_s: `(rows, seconds)` of learning from replayed rows.
        errors_s: `(rows, seconds)` of computing TD errors.
        message: the cost of a call to a process on the driver's node.
        remote_message: the cost of a call to a process on another node. None if not measured.
        exchange_s: processor time of one exchange with another rank in an all-reduce, if each rank
            has a core of its own.
        exchange_wait_s: the rest of the duration of such an exchange: the time until a rank that
            waits for its partner goes on, once the partner's value has come.
        exchange_byte_s: processor time of one exchange for each byte.
        shared_exchange_s: processor time of one exchange if ranks share cores. An exchange then
            switches a core from one process to another. 0 if it was not measured.
        crowded: `(workers that share a core, factor)`. The factor applies to the processor time of
            all work on such a node, because the caches of a core then hold the data of several
            processes.
        start_s: processor time of the start of a worker.
        spread: relative standard error of the repeated measurements of processor time.
    """

    step_cpu_s: np.ndarray  # [M]
    step_wait_s: np.ndarray  # [M]
    fragment_s: float = 0.0
    gradient_s: tuple[float, ...] = ()
    apply_s: float = 0.0
    learning: tuple[Learning, ...] = ()
    transitions_s: tuple[tuple[float, float], ...] = ()
    errors_s: tuple[tuple[float, float], ...] = ()
    message: MessageCosts = NO_COSTS
    remote_message: MessageCosts | None = None
    exchange_s: float = 0.0
    exchange_wait_s: float = 0.0
    exchange_byte_s: float = 0.0
    shared_exchange_s: float = 0.0
    crowded: tuple[tuple[int, float], ...] = ()
    start_s: float = 0.0
    spread: float = 0.0

    @functools.cached_property
    def _learning_curves(self) -> dict[str, Curve]:
        return {
            name: Curve([(float(one.rows), float(getattr(one, name))) for one in self.learning])
            for name in ("seconds", "updates", "sums")
        }

    @functools.cached_property
    def learn_transitions_s(self) -> Curve:
        """The time of learning from replayed rows."""
        return Curve(self.transitions_s)

    @functools.cached_property
    def td_errors_s(self) -> Curve:
        """The time of computing TD errors."""
        return Curve(self.errors_s)

    def pieces(
        self, rng: np.random.Generator, steps: int, count: int
    ) -> list[tuple[float, float, int]]:
        """Draws the duration of a fragment from the trace.

        Args:
            rng: draws the pieces of the trace.
            steps: number of vector steps of the fragment.
            count: the largest number of parts to return.

        Returns:
            `(processor time, waiting time, steps so far)` of each part of the fragment.
        """
        length, pieces = len(self.step_cpu_s), min(steps, PIECES)
        bounds = np.linspace(0, steps, pieces + 1).astype(int)
        starts = rng.integers(length, size=pieces)
        parts: list[tuple[float, float, int]] = []
        per_part = -(-pieces // count)
        for first in range(0, pieces, per_part):
            cpu_s = wait_s = 0.0
            last = min(first + per_part, pieces)
            for piece in range(first, last):
                places = (starts[piece] + np.arange(bounds[piece + 1] - bounds[piece])) % length
                cpu_s += float(self.step_cpu_s[places].sum())
                wait_s += float(self.step_wait_s[places].sum())
            parts.append((cpu_s, wait_s, int(bounds[last])))
        return parts

    def learning_of(self, rows: int) -> Learning:
        """Returns the learning from a batch with this number of rows."""
        curves = self._learning_curves
        nearest = min(self.learning, key=lambda one: abs(one.rows - rows))
        return Learning(
            rows,
            curves["seconds"](rows),
            max(1, round(curves["updates"](rows))),
            max(1, round(curves["sums"](rows))) if nearest.sums else 0,
            nearest.sum_bytes,
        )

    def resampled(self, rng: np.random.Generator) -> Costs:
        """Returns the costs that another calibration might have measured: the trace is drawn again
        in blocks (block bootstrap), and processor times vary by `spread`."""
        length = len(self.step_cpu_s)
        block = max(1, round(length**0.5 / 2))
        starts = rng.integers(length, size=-(-length // block))
        places = ((starts[:, None] + np.arange(block)) % length).ravel()[:length]

        def factor() -> float:
            return float(np.exp(self.spread * rng.standard_normal()))

        learn, message = factor(), factor()
        drawn = dataclasses.replace(
            self, step_cpu_s=self.step_cpu_s[places], step_wait_s=self.step_wait_s[places]
        )
        remote = self.remote_message
        return dataclasses.replace(
            drawn._with_learning(learn),
            message=self.message.with_processor_time(message),
            remote_message=remote and remote.with_processor_time(message),
        )

    def crowding(self, per_core: float) -> float:
        """Returns the factor of `crowded` for a number of workers for each core. It is 1 if each
        worker has a core, and that of the largest measured number for more workers."""
        if per_core <= 1.0:
            return 1.0
        counts, factors = zip((1, 1.0), *self.crowded, strict=True)
        return float(np.interp(per_core, counts, factors))

    def bounds_of_crowding(self) -> tuple[Costs, Costs]:
        """Returns costs with the least and the largest factor of `crowded` that work may have. The
        factor was measured for fragments and gradients. Other work may lose nothing, or may in
        addition be as slow as the driver after a wait."""
        most = tuple((count, factor * self.message.cold) for count, factor in self.crowded)
        return dataclasses.replace(self, crowded=()), dataclasses.replace(self, crowded=most)

    def on_shared_cores(self, per_core: float) -> Costs:
        """Returns the costs on nodes with more workers than cores, see `crowded`."""
        factor, remote = self.crowding(per_core), self.remote_message
        # A driver that has waited finds its caches no colder than a crowded core has them.
        cold = max(1.0, self.message.cold / factor)
        return dataclasses.replace(
            self._with_learning(factor),
            step_cpu_s=self.step_cpu_s * factor,
            fragment_s=self.fragment_s * factor,
            exchange_s=(self.shared_exchange_s or self.exchange_s) * factor,
            exchange_byte_s=self.exchange_byte_s * factor,
            message=self.message.with_processor_time(factor)._replace(cold=cold),
            remote_message=remote and remote.with_processor_time(factor),
        )

    def _with_learning(self, factor: float) -> Costs:
        """Returns the costs with all times of learning multiplied by `factor`."""
        return dataclasses.replace(
            self,
            gradient_s=tuple(seconds * factor for seconds in self.gradient_s),
            apply_s=self.apply_s * factor,
            learning=tuple(one._replace(seconds=one.seconds * factor) for one in self.learning),
            transitions_s=tuple((rows, seconds * factor) for rows, seconds in self.transitions_s),
            errors_s=tuple((rows, seconds * factor) for rows, seconds in self.errors_s),
        )
