"""`Engine`: a virtual clock, and nodes whose cores are shared by everything that computes on them.

The engine knows nothing of polopt. It handles events in the order of their virtual times. A `Node`
shares its cores equally (processor sharing): with n jobs on c cores, each job runs at the speed
min(1, c / n).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

Action = Callable[[], None]


class Engine:
    """The virtual clock and its events.

    Args:
        cores: number of cores of each node. The driver runs on the first node.

    Attributes:
        now_s: the virtual time in seconds.
        nodes: the nodes.
    """

    def __init__(self, cores: Sequence[float]) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()
        self.nodes = [Node(self, count) for count in cores]

    def __call__(self) -> float:
        """Returns the virtual time, so that an engine is a clock."""
        return self.now_s

    def at(self, time_s: float, action: Action) -> None:
        """Runs `action` at a virtual time."""
        heapq.heappush(self._events, (time_s, next(self._numbers), action))

    @property
    def next_s(self) -> float:
        """The time of the next event. Infinite if there is none."""
        return self._events[0][0] if self._events else float("inf")

    def run_next(self, until_s: float = float("inf")) -> bool:
        """Runs the next event, and returns True. If there is no event up to `until_s`, moves the
        clock to `until_s`, if it is finite, and returns False."""
        if self.next_s > until_s:
            if until_s < float("inf"):
                self.now_s = max(self.now_s, until_s)
            return False
        if not self._events:
            return False
        time_s, _, action = heapq.heappop(self._events)
        self.now_s = max(self.now_s, time_s)
        action()
        return True

    def spend(self, node: Node, cpu_s: float) -> None:
        """Computes for `cpu_s` seconds on a node, and returns when this is done. Other events
        happen meanwhile."""
        if cpu_s <= 0.0:
            return
        if node.has_idle_core and self.now_s + cpu_s < self.next_s:
            node.compute_alone(cpu_s)
            return
        done: list[bool] = []
        node.run(cpu_s, lambda: done.append(True))
        while not done:
            self.run_next()


class Node:
    """A machine. Its jobs share its cores equally.

    Args:
        engine: the clock.
        cores: number of cores.

    Attributes:
        busy_s: core seconds that jobs have used so far.
    """

    def __init__(self, engine: Engine, cores: float) -> None:
        self.engine = engine
        self.cores = cores
        self.busy_s = 0.0
        # Each job ends when the work that every job has received so far (`_work_s`) reaches its
        # own mark. So an arrival or an end changes no other entry of this heap.
        self._jobs: list[tuple[float, int, Action]] = []
        self._work_s = 0.0
        self._since_s = 0.0
        # The time of the earliest planned check whether the first job has ended. A job never ends
        # before it, because later jobs only slow it down.
        self._check_s = float("inf")
        self._numbers = itertools.count()

    @property
    def has_idle_core(self) -> bool:
        """Whether one more job would run at full speed."""
        return len(self._jobs) + 1 <= self.cores

    @property
    def speed(self) -> float:
        """Seconds of work that each job gets in one second."""
        return min(1.0, self.cores / len(self._jobs)) if self._jobs else 1.0

    def run(self, cpu_s: float, action: Action) -> None:
        """Begins a job that needs a core for `cpu_s` seconds, and then runs `action`."""
        self._catch_up()
        heapq.heappush(self._jobs, (self._work_s + cpu_s, next(self._numbers), action))
        self._plan()

    def compute_alone(self, cpu_s: float) -> None:
        """Moves the clock by a job that has a core of its own. No event may be due meanwhile."""
        self.busy_s += cpu_s
        self.engine.now_s += cpu_s

    def _catch_up(self) -> None:
        now_s = self.engine.now_s
        passed_s, self._since_s = now_s - self._since_s, now_s
        self._work_s += passed_s * self.speed
        self.busy_s += passed_s * min(len(self._jobs), self.cores)

    def _plan(self) -> None:
        """Plans a check at the end of the job that ends next, unless an earlier one is planned."""
        if self._jobs:
            end_s = self.engine.now_s + max(0.0, self._jobs[0][0] - self._work_s) / self.speed
            if end_s < self._check_s:
                self._check_s = end_s
                self.engine.at(end_s, self._check)

    def _check(self) -> None:
        now_s = self.engine.now_s
        if now_s < self._check_s:  # an earlier check has taken the place of this one
            return
        self._check_s = float("inf")
        self._catch_up()
        action: Action | None = None
        if self._jobs:
            mark_s = self._jobs[0][0]
            # Rounding may leave a rest that is too small to move the clock.
            if now_s + (mark_s - self._work_s) / self.speed <= now_s:
                action = heapq.heappop(self._jobs)[2]
                self._work_s = max(self._work_s, mark_s)
        self._plan()
        if action is not None:
            action()


class Link:
    """The link of the first node to all others. Messages pass one after the other.

    Args:
        latency_s: time that each message needs in addition, in seconds.
        bandwidth: bytes per second. Infinite by default.

    Attributes:
        busy_s: seconds for which the link has carried messages.
    """

    def __init__(self, latency_s: float = 0.0, bandwidth: float = float("inf")) -> None:
        self.latency_s = latency_s
        self.bandwidth = bandwidth
        self.busy_s = 0.0
        self._free_s = 0.0

    def arrival_s(self, now_s: float, num_bytes: int) -> float:
        """Returns the time at which a message arrives that is sent now."""
        duration_s = num_bytes / self.bandwidth
        self._free_s = max(self._free_s, now_s) + duration_s
        self.busy_s += duration_s
        return self._free_s + self.latency_s
