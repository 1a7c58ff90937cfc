"""`StartUp`: finds processes that take too long to start, and processes that wait for resources."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import Transport
from polopt.rollouts.workers.placement import describe_resources
from polopt.rollouts.workers.worker_handle import WorkerHandle

logger = logging.getLogger("polopt")

#: The least time between two checks of starting processes, unless the time limit of a start is
#: shorter. Also the first interval between warnings, which doubles with each warning, up to
#: `MAX_CHECK_INTERVAL_S`.
CHECK_INTERVAL_S = 5.0
MAX_CHECK_INTERVAL_S = 60.0


class StartUp:
    """Watches processes that are starting.

    The time limit of a process begins when the process is started. The limit begins again each time
    that this process, or a process that was started before it or at most `CHECK_INTERVAL_S` after
    it, answers its start or a set-up call (`WorkerHandle.set_up`), because processes that start at
    the same time slow each other down. Later starts do not extend the limit. Otherwise a process
    that hangs would never be found while others keep restarting. If Ray has no resources for
    a process yet, the limit applies only if the run cannot continue without this process.
    Otherwise, the limit begins when Ray has placed the process.

    Args:
        who: the noun for a process in messages.
        meanwhile: a sentence for the log that says how the run continues while no process is up.
            Empty if the run waits for processes.
        transport: provides the clock, and knows which processes wait for resources.
    """

    def __init__(self, who: str, meanwhile: str, transport: Transport) -> None:
        self._who = who
        self._meanwhile = meanwhile
        self._transport = transport
        self._clock = clock = transport.clock
        self._checked_s = self._warned_s = clock()
        self._interval_s = CHECK_INTERVAL_S
        # By index of a process: the last time at which its limit began again.
        self._since_s: dict[int, float] = {}

    def came_up(self, answered: WorkerHandle, starting: Iterable[WorkerHandle]) -> None:
        """Restarts the time limit of the processes that have started together with a process, after
        this process has answered its start or a set-up call.

        Args:
            answered: the process that has answered.
            starting: the other processes that are not up yet.
        """
        now_s = self._clock()
        for worker in (answered, *starting):
            if answered.began_s <= worker.began_s + CHECK_INTERVAL_S:
                self._since_s[worker.index] = now_s

    def overdue(
        self, starting: Sequence[WorkerHandle], options: RolloutConfig, enough_up: bool
    ) -> list[tuple[WorkerHandle, str]]:
        """Returns the processes that have taken too long to start, each with the reason. Also warns
        about processes that wait for resources. Checks at most once in five seconds, or at most
        once per time limit if this limit is shorter. Returns an empty list between checks.

        Args:
            starting: the processes that are not up yet.
            options: the options with `worker_startup_timeout_s` and the resources of one process.
            enough_up: True if the run can continue without these processes.
        """
        now_s, limit_s = self._clock(), options.worker_startup_timeout_s
        if now_s - self._checked_s < min(CHECK_INTERVAL_S, limit_s):
            return []
        self._checked_s = now_s
        waiting, number = self._transport.waiting([worker.channel for worker in starting])
        late: list[int] = []
        found = []
        for worker in starting:
            waits = worker.channel in waiting
            if waits and now_s - worker.started_s >= CHECK_INTERVAL_S:
                late.append(worker.index)
            if waits and (enough_up or self._meanwhile):
                self._since_s[worker.index] = now_s
            if now_s - max(worker.started_s, self._since_s.get(worker.index, 0.0)) >= limit_s:
                why = "the start or a set-up call has not ended"
                if waits:
                    why = f"Ray did not place the process: {self._describe(options)}"
                found.append((worker, f"no answer for {now_s - worker.started_s:.1f} s: {why}"))
        self._warn(late, number, options, enough_up)
        return found

    def _describe(self, options: RolloutConfig) -> str:
        return describe_resources(options, *self._transport.resources())

    def _warn(self, late: list[int], number: int, options: RolloutConfig, enough_up: bool) -> None:
        now_s = self._clock()
        if not late:
            self._interval_s = CHECK_INTERVAL_S
        elif now_s >= self._warned_s + self._interval_s:
            self._warned_s = now_s
            self._interval_s = min(2.0 * self._interval_s, MAX_CHECK_INTERVAL_S)
            goes_on = "The run continues without them." if enough_up else "The run waits for them."
            logger.warning(
                "Ray has no resources yet for %s%s%s %s: %s. %s",
                f"{number} of " if number < len(late) else "",
                self._who,
                "s" * (len(late) > 1),
                ", ".join(map(str, late)),
                self._describe(options),
                self._meanwhile or goes_on,
            )
