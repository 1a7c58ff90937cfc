"""`RayTransport`: processes are Ray actors, and calls are actor calls."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polopt.common.ray_names import draining_nodes, waiting_demands
from polopt.rollouts.transport.channel import (
    AnswerTimeoutError,
    Channel,
    LostProcessError,
    LostReferenceError,
    Message,
    Started,
    Ticket,
    Transport,
    UndecodableAnswerError,
    UnsendableError,
    is_of_signal,
)
from polopt.rollouts.transport.control_page import (
    ControlAgent,
    ControlPage,
    EarlyStopRequest,
)
from polopt.rollouts.transport.local_channel import run_here
from polopt.rollouts.transport.process_actor import ProcessActor
from polopt.rollouts.transport.socket_server import Endpoint

logger = logging.getLogger("polopt")

#: If an argument of `start` or `remake` is larger than this, the driver puts it into Ray's object
#: store. Processes that get the same argument one after another share this object.
MAX_ARGUMENT_BYTES = 100_000
#: The longest time to wait for the object of a reference.
GET_TIMEOUT_S = 60.0
#: The longest time to wait for the answer of a `ControlAgent` on another node.
AGENT_TIMEOUT_S = 5.0
#: The longest time that the driver waits for an answer of Ray's control service.
ANSWER_TIMEOUT_S = 5.0
#: The time between two questions to Ray's control service which nodes are draining.
DRAIN_CHECK_S = 1.0
#: Pairs of a resource and its amount. The resources have Ray's names.
Request = frozenset[tuple[str, float]]


class RayTicket(Ticket):
    """The ticket of one actor call.

    Args:
        ref: see the attribute.
        starts: True if the call makes the object of the process, so its failure is a failure to
            start.

    Attributes:
        ref: the `ray.ObjectRef` of the call.
        future: the future of the call, if a transport watches the call. See `Wakeup`.
    """

    __slots__ = ("_starts", "future", "ref")

    def __init__(self, ref: ray.ObjectRef[Any], starts: bool = False) -> None:
        self.ref = ref
        self.future: Future[Any] | None = None
        self._starts = starts

    def ended(self) -> bool:
        return bool(ray.wait([self.ref], timeout=0, fetch_local=False)[0])

    def result(self, timeout_s: float) -> Any:
        try:
            return ray.get(self.ref, timeout=timeout_s)
        except GetTimeoutError as error:
            raise AnswerTimeoutError("the result of a call could not be fetched in time") from error
        # In a start, this error is the exception of `make` or `remake`. In a call, the answer holds
        # the exception of the function. So in a call, this error is about a value that cannot be
        # pickled, an argument that cannot be unpickled, or an argument that is lost.
        except RayTaskError as error:
            if self._starts:
                raise LostProcessError(str(error), at_start=True) from error
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, ObjectLostError):
                raise LostReferenceError(f"an argument is lost: {cause}") from error
            raise UnsendableError(
                f"its arguments cannot be unpickled, or its value cannot be pickled: {cause!r}"
            ) from error
        except RaySystemError as error:
            raise UndecodableAnswerError(str(error)) from error
        except RayError as error:
            at_start = isinstance(error, ActorDiedError) and error.actor_init_failed
            message = str(error).strip() or type(error).__name__
            preempted = isinstance(error, RayActorError) and error.preempted
            raise LostProcessError(message, at_start, preempted) from error
        except BaseException as error:  # unpickling an answer can raise anything
            if is_of_signal(error):
                raise
            raise UndecodableAnswerError(f"{type(error).__name__}: {error}") from error


class RayChannel(Channel):
    """A channel to one actor.

    Args:
        actor: handle of a `ProcessActor`.
        name: see `Channel`.
        request: the resources that the actor requests from the cluster. None if a placement group
            has reserved them.
        transport: the transport that started the actor.
        make: the arguments of `ProcessActor.make`.
    """

    def __init__(
        self,
        actor: Any,
        name: str,
        request: Request | None,
        transport: RayTransport,
        make: Sequence[Any],
    ) -> None:
        self.request = request
        self.actor = actor
        self.name = name
        self._booted = RayTicket(actor.booted.remote())
        self.start = RayTicket(actor.make.remote(*make), starts=True)
        self._transport = transport
        self._control: ControlPage | _RemotePage | None = None

    def has_process(self) -> bool:
        """Returns True if Ray has started the process of the actor. The process may still be making
        its target."""
        return self._booted.ended()

    def note_started(self, started: Started) -> None:
        super().note_started(started)
        if self._control is None and started.control:
            self._control = self._transport.open_control(started)

    def send(self, message: Message) -> Ticket:
        number, _, function, args, by_reference, _ = message
        # Ray replaces a reference by its object only if the reference itself is an argument of the
        # actor call. So the arguments must then not be encoded together.
        apart = args if any(isinstance(arg, ray.ObjectRef) for arg in args) else ()
        call = cloudpickle.dumps((number, function, () if apart else args, by_reference))
        return RayTicket(self.actor.run.remote(call, *apart))

    def stop_early(self, number: int, keep_steps: int) -> None:
        control = self._control
        if control is not None:
            control.request_stop(EarlyStopRequest(number, keep_steps))

    def silent_s(self) -> float | None:
        control = self._control
        return None if control is None else control.silent_s()

    def close(self) -> None:
        """Closes the control page of a process that ends."""
        control, self._control = self._control, None
        if isinstance(control, _RemotePage):
            control.forget()
            self._transport.close_page(self.started.node)


class RayTransport(Transport):
    """A transport that starts Ray actors, and calls them through Ray."""

    name = "ray"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._agents: dict[str, Any] = {}  # the `ControlAgent` actors, by node
        self._pages: Counter[str] = Counter()  # the numbers of open pages on other nodes
        self._draining: DrainingNodes | None = None
        # The digest of the last large argument, and the reference to this argument.
        self._stored: tuple[bytes, Any] = (b"", None)
        self._unmet = UnmetRequests()

    def start(
        self,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        name: str,
        endpoint: Endpoint | None = None,
    ) -> RayChannel:
        """See `Transport.start`. With `endpoint`, the process connects to this endpoint."""
        small = [self._argument(arg) for arg in args]
        actor = _actor_class(ProcessActor).options(**options).remote()
        return RayChannel(actor, name, cluster_request(options), self, (endpoint, make, *small))

    def remake(self, channel: Channel, args: tuple[Any, ...]) -> Ticket:
        assert isinstance(channel, RayChannel)
        call = channel.actor.remake.remote(*map(self._argument, args))
        channel.start = RayTicket(call, starts=True)
        return channel.start

    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> list[Ticket]:
        ready = run_here(tickets)
        if ready or not tickets:
            return ready
        if self._draining is not None:
            timeout_s = min(timeout_s, DRAIN_CHECK_S)
        by_ref = {ticket.ref: ticket for ticket in tickets if isinstance(ticket, RayTicket)}
        refs = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)[0]
        return [by_ref[ref] for ref in refs]

    def waiting(self, channels: Sequence[Channel]) -> tuple[list[Channel], int]:
        """See `Transport.waiting`. Ray reports the resources of each request that it cannot meet,
        but not the actor that made the request. So this method returns all actors that request the
        same resources as an unmet request, and whose process has not started. Some of these actors
        may already have their resources, and only start slowly. Returns no actors while Ray's
        control service does not answer."""
        requesting = [c for c in channels if isinstance(c, RayChannel) and c.request is not None]
        unmet = self._unmet.count() if requesting else Counter()
        waiting: list[Channel] = []
        requests: Counter[Request] = Counter()
        for channel in requesting:
            if channel.request and unmet[channel.request] and not channel.has_process():
                waiting.append(channel)
                requests[channel.request] += 1
        return waiting, sum((requests & unmet).values())

    def leaving(self, channels: Iterable[Channel]) -> list[Channel]:
        """See `Transport.leaving`. Notices within a few seconds that Ray drains another node. If
        Ray drains the driver's own node, the whole run ends with it."""
        nodes = () if self._draining is None else self._draining.nodes
        return [channel for channel in channels if channel.started.node in nodes] if nodes else []

    def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        return ray.cluster_resources(), ray.available_resources()

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def get(self, value: Any) -> Any:
        if not isinstance(value, ray.ObjectRef):
            return value
        try:
            return ray.get(value, timeout=GET_TIMEOUT_S)
        except ObjectLostError as error:
            raise LostReferenceError(f"an argument is lost: {error}") from error
        except GetTimeoutError as error:
            raise AnswerTimeoutError("an argument could not be fetched in time") from error

    def kill(self, channel: Channel) -> None:
        assert isinstance(channel, RayChannel)
        channel.close()
        ray.kill(channel.actor, no_restart=True)

    def stop(self, channels: Sequence[Channel], timeout_s: float) -> None:
        actors = [channel.actor for channel in channels if isinstance(channel, RayChannel)]
        stopping = [actor.stop.remote() for actor in actors]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=timeout_s)
        for channel in channels:
            self.kill(channel)

    def close(self) -> None:
        if self._draining is not None:
            self._draining.close()
        for agent in self._agents.values():
            ray.kill(agent, no_restart=True)
        self._agents.clear()

    def _argument(self, value: Any) -> Any:
        """Returns an argument for `make`: a small value itself, or a reference to a large value.
        Successive calls with the same large value return the same reference. The driver owns the
        object of the reference, so the object survives the death of other processes."""
        encoded = cloudpickle.dumps(value)
        if len(encoded) <= MAX_ARGUMENT_BYTES:
            return value
        digest = hashlib.sha256(encoded).digest()
        if digest != self._stored[0]:
            self._stored = digest, ray.put(value)
        return self._stored[1]

    def open_control(self, started: Started) -> ControlPage | _RemotePage | None:
        """Opens the control page of a process that has started. For a process on another node, an
        agent on that node opens the page. Returns None if the page cannot be opened on this
        node."""
        if started.node != ray.get_runtime_context().get_node_id():
            self._pages[started.node] += 1
            self._draining = self._draining or DrainingNodes()
            return _RemotePage(self._agent(started.node), started.control)
        try:
            return ControlPage.open(started.control)
        except (OSError, ValueError) as error:
            logger.warning(
                "cannot open the shared memory of process %d (%s). Its calls cannot be ended "
                "early, and every call that takes longer than worker_timeout_s counts as hanging",
                started.pid,
                error,
            )
            return None

    def close_page(self, node: str) -> None:
        """Notes that a page on another node was closed. Once no page is open on a node that Ray
        drains, its agent ends, because Ray waits for all actors before it gives the node back."""
        self._pages[node] -= 1
        if self._pages[node] == 0 and self._draining and node in self._draining.nodes:
            self._agents.pop(node).__ray_terminate__.remote()

    def _agent(self, node: str) -> Any:
        if node not in self._agents:
            place = NodeAffinitySchedulingStrategy(node, soft=False)
            # Each method may run twice, so Ray may repeat a call that it has lost with the agent.
            again = {"max_restarts": -1, "max_task_retries": -1}
            options = {"num_cpus": 0, "scheduling_strategy": place, **again}
            self._agents[node] = _actor_class(ControlAgent).options(**options).remote()
        return self._agents[node]


class _RemotePage:
    """The control page of a process on another node. If the agent dies, Ray restarts it, and it
    opens the page again."""

    def __init__(self, agent: Any, path: str) -> None:
        self._agent, self._path = agent, path

    def silent_s(self) -> float | None:
        """See `ControlPage.silent_s`. Returns None if the agent does not answer, or cannot open
        the page."""
        with contextlib.suppress(RayError):
            silent_s: float = ray.get(
                self._agent.silent_s.remote(self._path), timeout=AGENT_TIMEOUT_S
            )
            return silent_s
        return None

    def request_stop(self, request: EarlyStopRequest) -> None:
        self._agent.request_stop.remote(self._path, request)

    def forget(self) -> None:
        self._agent.forget.remote(self._path)


_CLASSES: dict[type, Any] = {}


def _actor_class(of: type) -> Any:
    """Returns the actor class of a class. Makes the actor class only once in each process, because
    Ray exports each new actor class to its control service, and waits for the export without a time
    limit.

    Without `enable_task_events=False`, Ray's control service keeps events of each call, and its
    memory grows by tens of MB a minute with Ape-X."""
    if of not in _CLASSES:
        options: dict[str, Any] = {"enable_task_events": False}  # Ray's types lack this option
        _CLASSES[of] = ray.remote(**options)(of)
    return _CLASSES[of]


# ---- resources ---------------------------------------------------------------------------------


def cluster_request(options: Mapping[str, Any]) -> Request | None:
    """Returns the resources that an actor with these options requests from the cluster. None if the
    placement group of this process, for example of a Tune trial, has reserved the resources."""
    if options.get("scheduling_strategy") is None and ray.util.get_current_placement_group():
        return None
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    amounts = {name: options.get(option) for name, option in names.items()}
    return _request({**amounts, **(options.get("resources") or {})})


def _request(amounts: Mapping[str, float | None]) -> Request:
    # Ray rounds amounts to 1e-4.
    return frozenset((name, round(amount, 4)) for name, amount in amounts.items() if amount)


class UnmetRequests:
    """Asks Ray's control service which requests are unmet.

    While the control service does not answer, processes can still run calls, so the driver must not
    wait for it. Ray waits 30 s, whatever its time limit says. So a thread asks, and the driver
    waits for the thread for at most `ANSWER_TIMEOUT_S`.
    """

    def __init__(self) -> None:
        self._answer: Future[Counter[Request]] | None = None

    def count(self) -> Counter[Request]:
        """Counts the tasks and actors in the cluster that wait for resources. The keys of the
        counter are the requests of these tasks and actors. If the control service does not answer,
        logs a warning and returns an empty counter. The next calls then return an empty counter at
        once, until the thread has an answer or an error."""
        if self._answer is not None and not self._answer.done():
            return Counter()
        self._answer = answer = Future[Counter[Request]]()
        threading.Thread(target=_ask, args=(answer,), name="polopt-unmet", daemon=True).start()
        try:
            return answer.result(ANSWER_TIMEOUT_S)
        except (FutureTimeoutError, RayError) as error:
            logger.warning(
                "Ray's control service does not answer (%s), so it is not known which processes "
                "wait for resources",
                error if answer.done() else f"no answer within {ANSWER_TIMEOUT_S:g} s",
            )
            return Counter()


def _ask(answer: Future[Counter[Request]]) -> None:
    try:
        answer.set_result(_unmet_requests())
    except Exception as error:  # `count` raises the error
        answer.set_exception(error)


def _unmet_requests() -> Counter[Request]:
    unmet: Counter[Request] = Counter()
    for amounts, count in waiting_demands(ray.get_runtime_context().gcs_address):
        unmet[_request(amounts)] += count
    return unmet


# ---- draining nodes ----------------------------------------------------------------------------


class DrainingNodes:
    """Asks Ray's control service once per `DRAIN_CHECK_S` which nodes are draining.

    Ray drains a node that will end soon: a cloud provider takes the node back, `ray start --block`
    has got SIGTERM, or an autoscaler removes the node. Ray places nothing new on this node, and
    gives the node back as soon as no actor runs on it. A thread asks, because the control service
    may not answer for a long time.

    Attributes:
        nodes: the ids of the nodes that are draining.
    """

    def __init__(self) -> None:
        self.nodes: frozenset[str] = frozenset()
        self._address = ray.get_runtime_context().gcs_address
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="polopt-draining", daemon=True).start()

    def _watch(self) -> None:
        known = True
        while not self._closed.wait(DRAIN_CHECK_S):
            try:
                self.nodes = draining_nodes(self._address)
                known = True
            except Exception as error:  # Ray raises different errors if the service does not answer
                if known and not self._closed.is_set():
                    logger.warning("it is not known which nodes Ray drains: %s", error)
                known = False

    def close(self) -> None:
        """Ends the thread. Does not wait for it."""
        self._closed.set()
