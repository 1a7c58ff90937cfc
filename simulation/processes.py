"""Simulated processes, and `VirtualTransport`, which starts them and carries their calls.

A function of a strategy runs for real, on a stand-in for the worker (`stand_ins.py`). It takes no
virtual time by itself. What it does on the way, such as sampling a fragment, adds a `Part` to the
program of its call. The process then runs this program on the virtual clock. The answer arrives
when the program has ended.

The driver's own code (`step`, `Calls`, replay buffers) also runs for real. The processor time that
it needs here is the time that it takes in the simulation.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from ray import cloudpickle

from polopt.metrics.record import payload_bytes
from polopt.rollouts.transport.channel import (
    Channel,
    LostProcessError,
    Message,
    Started,
    Ticket,
    Transport,
)
from polopt.rollouts.transport.local_channel import run_here
from polopt.simulation.costs import WARM_UP_S, Costs, MessageCosts
from polopt.simulation.engine import Engine, Link, Node

#: The driver's own code counts in portions of at least this time, so that reading the clock costs
#: less than the code itself.
PORTION_S = 2e-5
#: The number of answers of each function that are pickled to measure how long this takes.
NUM_ENCODED = 9


class Meeting:
    """Two ranks exchange values: each waits until the other has come.

    Args:
        engine: the clock.
        wake_s: the time after which the rank that came first goes on, because its core has to wake
            up.
    """

    def __init__(self, engine: Engine, wake_s: float) -> None:
        self._engine = engine
        self._wake_s = wake_s
        self._first: Callable[[], None] | None = None

    def come(self, go_on: Callable[[], None]) -> None:
        """A rank has come. Once both have come, they both go on."""
        if self._first is None:
            self._first = go_on
            return
        self._engine.at(self._engine.now_s + self._wake_s, self._first)
        go_on()


class Part(NamedTuple):
    """One part of the program of a call.

    Attributes:
        kind: `compute` needs a core, `wait` only takes time, `meet` waits for another rank.
        seconds: duration, with a core of its own. 0 for a meeting.
        phase: the worker's phase.
        steps: vector steps of the fragment that are complete after this part. 0 if the part does
            not sample.
        meeting: the meeting with another rank.
    """

    kind: str
    seconds: float
    phase: str
    steps: int = 0
    meeting: Meeting | None = None


class Program:
    """Collects the parts of one call. A stand-in writes to it while the function runs.

    Attributes:
        parts: the parts so far.
        limit: number of steps after which fragments of the call end early. None for whole
            fragments.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.parts: list[Part] = []
        self.limit = limit
        self._phases = ["other"]

    def spend(self, cpu_s: float, wait_s: float = 0.0, steps: int = 0) -> None:
        """Adds processor time, and then waiting time."""
        phase = self._phases[-1]
        if cpu_s > 0.0:
            self.parts.append(Part("compute", cpu_s, phase, 0 if wait_s > 0.0 else steps))
        if wait_s > 0.0:
            self.parts.append(Part("wait", wait_s, phase, steps))

    def meet(self, meeting: Meeting) -> None:
        """Adds a meeting with another rank."""
        self.parts.append(Part("meet", 0.0, self._phases[-1], 0, meeting))

    @contextmanager
    def phase(self, name: str) -> Any:
        """The parts that are added meanwhile belong to this phase."""
        self._phases.append(name)
        try:
            yield
        finally:
            self._phases.pop()


class DriverProgram:
    """Takes the place of a `Program` in the driver, which computes at once.

    Args:
        scene: the simulation.
    """

    limit = None

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def spend(self, cpu_s: float, wait_s: float = 0.0, steps: int = 0) -> None:
        """Computes and waits now."""
        self._scene.note_own_time()
        engine = self._scene.engine
        engine.spend(self._scene.driver_node, cpu_s)
        self._scene.driver_s["learning"] += cpu_s
        until_s = engine.now_s + wait_s
        while wait_s > 0.0 and engine.run_next(until_s):
            pass
        self._scene.begin_own_time()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Does nothing: the driver's record already measures its phases."""
        return nullcontext()


class Scene:
    """All that one simulation shares: the clock, the nodes, the costs, and the driver's times.

    Args:
        costs: the calibration.
        cores: cores of each node. The driver runs on the first node.
        link: connects the first node to the others.
        own_code: multiplies the real processor time of the driver's own code. 0 leaves it out, so
            that a simulation repeats exactly.

    Attributes:
        driver_s: seconds of the driver by what it did: `messages`, `learning`, `own code`.
        answered: number of answers that have arrived in the driver.
        phase_s: seconds of all workers by phase.
        cold_left_s: work until the driver is warm again after a wait.
    """

    def __init__(
        self, costs: Costs, cores: Sequence[float], link: Link, own_code: float = 1.0
    ) -> None:
        self.costs = costs
        self.engine = Engine(cores)
        self.link = link
        self.own_code = own_code
        self.driver_s = dict.fromkeys(("messages", "learning", "own code"), 0.0)
        self.answered = 0
        self.phase_s: dict[str, float] = {}
        self.cold_left_s = 0.0
        self._own_since_s: float | None = None
        self._encoding_s: dict[str, list[tuple[float, float]]] = {}

    @property
    def driver_node(self) -> Node:
        return self.engine.nodes[0]

    def begin_own_time(self) -> None:
        """From now on, the driver's own code runs."""
        self._own_since_s = time.thread_time()

    def note_own_time(self, least_s: float = 0.0) -> None:
        """Adds the processor time of the driver's own code since it began, and ends it. Does
        nothing if this is less than `least_s`."""
        if self._own_since_s is None or not self.own_code:
            return
        spent_s = (time.thread_time() - self._own_since_s) * self.own_code
        if spent_s < least_s:
            return
        self._own_since_s = None
        self.work("own code", spent_s)

    def work(self, what: str, seconds: float) -> None:
        """The driver works. It is slower if it has waited before, see `MessageCosts.cold`."""
        slow_s = min(seconds, self.cold_left_s)
        self.cold_left_s -= slow_s
        seconds += slow_s * (self.costs.message.cold - 1.0)
        self.engine.spend(self.driver_node, seconds)
        self.driver_s[what] += seconds

    def handle_message(self, seconds: float) -> None:
        """The driver sends a message, or takes one. Its own code goes on afterwards."""
        self.note_own_time()
        self.work("messages", seconds)
        self.begin_own_time()

    def clock(self) -> float:
        """The virtual time, with the driver's own code so far."""
        if self._own_since_s is not None and self.own_code:
            self.note_own_time(PORTION_S)
            if self._own_since_s is None:
                self.begin_own_time()
        return self.engine.now_s

    def encoding_s(self, name: str, answer: Any) -> tuple[float, float]:
        """Returns the processor time of pickling and of unpickling the answers of a function: the
        median of its first answers."""
        if not self.own_code:
            return 0.0, 0.0
        measured = self._encoding_s.setdefault(name, [])
        if len(measured) < NUM_ENCODED:
            buffers: list[Any] = []
            began_s = time.thread_time()
            data = cloudpickle.dumps(answer, protocol=5, buffer_callback=buffers.append)
            encoded_s = time.thread_time()
            cloudpickle.loads(data, buffers=buffers)
            measured.append((encoded_s - began_s, time.thread_time() - encoded_s))
        encode, decode = zip(*measured, strict=True)
        return (
            statistics.median(encode) * self.own_code,
            statistics.median(decode) * self.own_code,
        )

    def message_costs(self, node: int) -> MessageCosts:
        """Returns the costs of calls to processes on a node."""
        remote = self.costs.remote_message
        return self.costs.message if node == 0 or remote is None else remote


class VirtualTicket(Ticket):
    """The ticket of one call.

    Attributes:
        done: True once the answer has arrived in the driver.
        arrival: number of the answer in order of arrival.
        was_awaited: whether the driver had nothing to do when the answer arrived.
        num_bytes: bytes of the answer.
        decode_s: processor time of unpickling the answer.
        limit: number of steps after which fragments of the call end early.
    """

    def __init__(self, channel: VirtualChannel, message: Message | None) -> None:
        self.channel = channel
        self.message = message
        self.answer: Any = None
        self.error: Exception | None = None
        self.done = False
        self.limit: int | None = None
        self.num_bytes = 0
        self.decode_s = 0.0
        self.arrival = 0
        self.was_awaited = False

    def ended(self) -> bool:
        return self.done

    def result(self, timeout_s: float) -> Any:
        if self.error is not None:
            raise self.error
        if self.message is not None:
            self.channel.transport.receive(self)
        return self.answer


class Reference:
    """A reference to a value that stays in a process. A message with it carries no bytes.

    Args:
        value: the value.
        num_bytes: its bytes.
        decode_s: processor time of unpickling it.
    """

    def __init__(self, value: Any, num_bytes: int = 0, decode_s: float = 0.0) -> None:
        self.value = value
        self._num_bytes = num_bytes
        self._decode_s = decode_s

    def fetch_s(self, costs: MessageCosts) -> float:
        """Returns the processor time of fetching the value from the process that made it."""
        return costs.fetch_s + costs.byte_s * self._num_bytes + self._decode_s


class VirtualChannel(Channel):
    """The channel to a simulated process, and the process itself.

    Args:
        scene: the simulation.
        target: the object in the process: a stand-in for a worker, or any other object.
        node: index of the node of the process.
        name: see `Channel`.
    """

    def __init__(self, transport: VirtualTransport, target: Any, node: int, name: str) -> None:
        self.transport = transport
        self.scene = transport.scene
        self.target = target
        self.node = node
        self.name = name
        self.alive = True
        self.start = VirtualTicket(self, None)
        self.start.answer, self.start.done = Started(node=""), True
        self._queue: deque[VirtualTicket] = deque()
        self._running: VirtualTicket | None = None
        self._parts: list[Part] = []
        self._place = 0
        self._part_began_s = 0.0
        self._actual_s: dict[str, float] = {}

    # ---- the driver's side ----------------------------------------------------------------------

    def send(self, message: Message) -> VirtualTicket:
        assert self.alive, f"{message.name} called in {self.name}, which is dead"
        ticket = VirtualTicket(self, message)
        num_bytes = payload_bytes(message.args)
        costs = self.scene.message_costs(self.node)
        self.scene.handle_message(costs.send_s + costs.byte_s * num_bytes)
        self._travel(num_bytes, lambda: self._take(ticket))
        return ticket

    def _travel(self, num_bytes: int, arrive: Callable[[], None]) -> None:
        """Runs `arrive` when a message of this size has passed between the driver and here."""
        engine = self.scene.engine
        sent_s = engine.now_s + self.scene.message_costs(self.node).latency_s / 2.0
        if self.node:
            sent_s = self.scene.link.arrival_s(sent_s, num_bytes)
        engine.at(sent_s, arrive)

    def stop_early(self, number: int, keep_steps: int) -> None:
        for ticket in (self._running, *self._queue):
            if ticket is not None and ticket.message and ticket.message.number == number:
                ticket.limit = keep_steps

    def silent_s(self) -> float | None:
        return 0.0

    # ---- the process's side ---------------------------------------------------------------------

    def _take(self, ticket: VirtualTicket) -> None:
        self._queue.append(ticket)
        if self._running is None:
            self._begin_next()

    def _begin_next(self) -> None:
        if not self._queue or not self.alive:
            return
        self._running = self._queue.popleft()
        self._saved = self.target.save() if hasattr(self.target, "save") else None
        self._parts = self._run(self._running, self._running.limit)
        self._place, self._actual_s = 0, {}
        self._next_part()

    def _run(self, ticket: VirtualTicket, limit: int | None) -> list[Part]:
        """Runs the function of a call, and returns its program."""
        message = ticket.message
        assert message is not None
        costs, program = self.scene.message_costs(self.node), Program(limit)
        program.spend(costs.worker_s)
        # The process that made the value computes meanwhile, and this one waits for it. So the time
        # of both counts here.
        program.spend(sum(a.fetch_s(costs) for a in message.args if isinstance(a, Reference)))
        args = [arg.value if isinstance(arg, Reference) else arg for arg in message.args]
        if hasattr(self.target, "program"):
            self.target.program = program
            ticket.answer = self.target.run(message.number, message.function, *args)
        else:  # another process than a worker, such as a replay shard: its real processor time
            began_s = time.thread_time()
            ticket.answer = self.target.run(message.number, message.function, *args)
            program.spend((time.thread_time() - began_s) * self.scene.own_code)
        encode_s, ticket.decode_s = self.scene.encoding_s(message.name, ticket.answer)
        program.spend(encode_s)
        if message.by_reference and ticket.answer.error is None:
            num_bytes, decode_s = ticket.answer.record.num_bytes, ticket.decode_s
            value = Reference(ticket.answer.value, num_bytes, decode_s)
            ticket.answer, ticket.decode_s = ticket.answer._replace(value=value), 0.0
        return program.parts

    def _next_part(self) -> None:
        engine = self.scene.engine
        if self._place == len(self._parts):
            self._end()
            return
        part = self._parts[self._place]
        self._part_began_s = engine.now_s
        if part.kind == "compute":
            engine.nodes[self.node].run(part.seconds, self._part_ended)
        elif part.kind == "wait":
            engine.at(engine.now_s + part.seconds, self._part_ended)
        else:
            assert part.meeting is not None
            part.meeting.come(self._part_ended)

    def _part_ended(self) -> None:
        if not self.alive or self._running is None:
            return
        part, now_s = self._parts[self._place], self.scene.engine.now_s
        spent_s = now_s - self._part_began_s
        self._actual_s[part.phase] = self._actual_s.get(part.phase, 0.0) + spent_s
        self._place += 1
        limit = self._running.limit
        ended_early = part.steps and limit is not None and part.steps >= limit
        if ended_early and any(other.steps for other in self._parts[self._place :]):
            # The fragment ends here. The function runs again, with a shorter fragment. Its program
            # begins with the same parts.
            self.target.restore(self._saved)
            self._parts = self._run(self._running, part.steps)
        self._next_part()

    def _end(self) -> None:
        ticket, self._running = self._running, None
        assert ticket is not None
        record = ticket.answer.record
        record.seconds = {"other": 0.0, **self._actual_s}
        for phase, seconds in self._actual_s.items():
            self.scene.phase_s[phase] = self.scene.phase_s.get(phase, 0.0) + seconds
        by_reference = isinstance(ticket.answer.value, Reference)
        num_bytes = 0 if by_reference else record.num_bytes
        ticket.num_bytes = num_bytes
        self._travel(num_bytes, lambda: self.transport.arrived(ticket))
        self._begin_next()

    def lose(self) -> None:
        """Ends the process. Its pending calls fail."""
        self.alive = False
        for ticket in (self._running, *self._queue):
            if ticket is not None:
                ticket.error, ticket.done = LostProcessError("the process was stopped"), True
        self._queue.clear()
        self._running = None


class VirtualTransport(Transport):
    """A transport to simulated processes. See the module.

    Args:
        scene: the simulation.
        make_target: a function that returns the object of a process, from the arguments of `start`.
        place: a function that returns the index of the node of a process, from its name.
    """

    name = "simulated"

    def __init__(
        self,
        scene: Scene,
        make_target: Callable[[Callable[..., Any], tuple[Any, ...]], Any],
        place: Callable[[str], int],
    ) -> None:
        self.scene = scene
        self.clock = scene.clock
        self._make_target = make_target
        self._place = place
        self._num_arrived = 0
        self._news: list[VirtualTicket] = []  # what has arrived in the current wait

    def arrived(self, ticket: VirtualTicket) -> None:
        """An answer has arrived at the driver's node."""
        self._num_arrived += 1
        ticket.arrival, ticket.done = self._num_arrived, True
        self._news.append(ticket)

    def start(
        self, make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], name: str
    ) -> VirtualChannel:
        target = self._make_target(make, args)
        return VirtualChannel(self, target, self._place(name), name)

    def remake(self, channel: Channel, args: tuple[Any, ...]) -> Ticket:
        raise NotImplementedError("a simulation does not reuse processes")

    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> list[Ticket]:
        scene, engine = self.scene, self.scene.engine
        # This line looks at every ticket, as other transports do. So it counts as the driver's own
        # code.
        ready = run_here(tickets) or self._arrived(tickets)
        self._news.clear()
        scene.note_own_time()
        if not ready:
            wanted, until_s = set(tickets), engine.now_s + timeout_s
            new = self._new_of(wanted)  # what came while the driver's own code ran
            while not new and engine.run_next(until_s):
                new = self._new_of(wanted) if self._news else []
                for ticket in new:
                    ticket.was_awaited = True
            if not new and engine.next_s == float("inf") and timeout_s > 0.0:
                raise RuntimeError("the simulation waits for a call that never ends")
            ready = [*new]
        scene.begin_own_time()
        return ready

    def _new_of(self, wanted: set[Ticket]) -> list[VirtualTicket]:
        """Returns the wanted calls among the news, in order of arrival, and forgets the news."""
        found = [ticket for ticket in self._news if ticket in wanted]
        self._news.clear()
        return found

    @staticmethod
    def _arrived(tickets: Collection[Ticket]) -> list[Ticket]:
        """Returns the calls that have ended, in order of arrival."""
        found = [one for one in tickets if isinstance(one, VirtualTicket) and one.done]
        found.sort(key=lambda ticket: ticket.arrival)
        return list(found)

    def receive(self, ticket: VirtualTicket) -> None:
        """The driver takes an answer, which costs processor time."""
        scene = self.scene
        costs = scene.message_costs(ticket.channel.node)
        scene.note_own_time()
        if ticket.was_awaited:
            scene.cold_left_s = WARM_UP_S
        scene.handle_message(costs.driver_s + costs.byte_s * ticket.num_bytes + ticket.decode_s)
        scene.answered += 1

    def waiting(self, channels: Sequence[Channel]) -> tuple[list[Channel], int]:
        return [], 0

    def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        return {}, {}

    def put(self, value: Any) -> Reference:
        return Reference(value)

    def get(self, value: Any) -> Any:
        if not isinstance(value, Reference):
            return value
        self.scene.handle_message(value.fetch_s(self.scene.costs.message))
        return value.value

    def kill(self, channel: Channel) -> None:
        assert isinstance(channel, VirtualChannel)
        channel.lose()

    def stop(self, channels: Sequence[Channel], timeout_s: float) -> None:
        for channel in channels:
            self.kill(channel)

    def close(self) -> None:
        """Does nothing, because this transport opens nothing."""
