"""Environments, policies and helpers for the tests of Collectors."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
import torch
from fakes import CheckedWorker, FakeTransport, FakeWorkerSet, worker_config
from gymnasium import spaces
from simulated_channel import Script, oldest_first
from torch import nn
from toy_envs import Drift

from polopt.collectors.collector import Collector
from polopt.rollouts.transport.control_page import ControlPage


class NotesStops(CheckedWorker):
    """A fake worker that records the early stops that it receives, but does not stop."""

    def __init__(self, *args: Any, control: ControlPage, **options: Any) -> None:
        super().__init__(*args, control=control, **options)
        self.stops: list[int] = []
        control.request_stop = lambda request: self.stops.append(request.keep_steps)


class FailsAfterSteps(Drift):
    """A `Drift` that ends its process, or raises, after a number of steps.

    Args:
        config: `dies_after` or `raises_after` is the number of steps. `worker` is the index of the
            worker in which this happens.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.left = 10**9
        if config.get("worker", config.worker_index) == config.worker_index:
            self.left = config.get("dies_after", config.get("raises_after", 10**9))

    def step(self, action: int) -> Any:
        self.left -= 1
        if self.left < 0:
            if "dies_after" in self.context:
                os._exit(1)
            raise ValueError("step limit of the test")
        return super().step(action)


class Reach(gymnasium.Env[np.ndarray, np.ndarray]):
    """An environment with a Box action space that is not symmetric. The reward is the first
    component of the action."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def __init__(self, low: float = -1.0, high: float = 3.0) -> None:
        self.action_space = spaces.Box(low, high, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return self.np_random.normal(size=2).astype(np.float32), float(action[0]), False, False, {}


def logits_for(space: Any = None, favourite: int = 0) -> nn.Module:
    """Returns a linear module over observations of `Drift`. It almost always chooses the category
    `favourite`, counted from 0."""
    module = nn.Linear(3, 3)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
        module.bias[favourite] = 30.0
    return module


def pushing_right(obs: np.ndarray) -> np.ndarray:
    """A policy for `Drift`. It chooses the action 1 in each of N environments."""
    return np.ones(len(obs), dtype=np.int64)


def local_collector(env: Any = Drift, policy: Any = None, **options: Any) -> Collector:
    """Returns a Collector that samples in this process."""
    defaults = {"num_collectors": 0, "frames_per_batch": 12, "num_envs": 2, "seed": 1}
    return Collector(env, policy, **{**defaults, **options})


def fake_collector(
    num_workers: int = 2,
    rollout: dict[str, Any] | None = None,
    script: Script = oldest_first,
    up: bool = True,
    **options: Any,
) -> Any:
    """Returns a Collector over fake remote workers. Each worker has two environments and samples
    fragments of five steps."""
    config = worker_config(rollout={"num_workers": num_workers, **(rollout or {})})
    fake = FakeTransport()
    fake.script = script
    return Collector.over(FakeWorkerSet(config, fake, NotesStops, up), **options)


def update(collector: Collector) -> None:
    """Applies a constant gradient, which increases the version of the weights by 1."""
    policy = collector.policy
    policy.flat.grads.fill_(0.1)
    policy.apply_flat()
