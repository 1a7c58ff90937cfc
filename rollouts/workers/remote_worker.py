"""What the driver knows of a worker in another process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from polopt.common.weights import Weights
from polopt.rollouts.envs.resolving import EnvSource
from polopt.rollouts.transport.rpc_channel import RpcChannel


@dataclass(slots=True, eq=False)
class RemoteWorker:
    """A rollout worker in a process of its own.

    Attributes:
        index: its place, from 1; a replacement takes the same.
        handle: of the Ray actor, a `RolloutWorker`.
        known_version: version of the weights last sent to it; None: none yet.
        last_answer_s: monotonic time of its last answer; None before the first.
        removed: what it still answers is of no interest.
        noticed_s: monotonic time when it was last looked at while it had not answered yet; at first
            of its start.
        channel: for calls over ZeroMQ; None: there were none yet.
    """

    index: int
    handle: Any
    known_version: int | None = None
    last_answer_s: float | None = None
    removed: bool = False
    noticed_s: float = field(default_factory=time.monotonic)
    channel: RpcChannel | None = None

    @property
    def actor(self) -> Any:
        """The handle, to call methods through Ray. The worker answers these once `serve` has
        returned, so this ends it, after the calls over ZeroMQ made so far."""
        if self.channel is not None:
            self.channel.pause()
        return self.handle

    def close_channel(self) -> None:
        """Ends the connection, if there is one."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    @property
    def up(self) -> bool:
        """Whether it has answered, and can be given work."""
        return self.last_answer_s is not None


@dataclass(frozen=True)
class WorkerSpec:
    """In what one worker differs from the others.

    Attributes:
        env: its environments; None: as the config says.
        num_envs: how many of them; None: as the config says.
        options: of its actor, over those that the config says (`num_cpus`, `num_gpus`, `memory`,
            `resources`, `runtime_env` and whatever else `ActorClass.options` takes).
    """

    env: EnvSource | None = None
    num_envs: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class WeightSnapshot(NamedTuple):
    """Weights as workers get them.

    Attributes:
        version: of the weights.
        weights: themselves, on this side.
        argument: what calls are given: the weights, or a reference to one object of them.
    """

    version: int
    weights: Weights
    argument: Any
