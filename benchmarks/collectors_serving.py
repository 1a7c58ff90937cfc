"""Runs one system of `collectors.py` in its own process.

Reads requests from standard input, one JSON object per line. A request with `make` makes a
collector. A request with `seconds` measures this collector for this time. TorchRL's process runs in
another virtual environment.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from importlib import metadata
from typing import Any

import gymnasium
import ray
import torch
from torch import nn

HIDDEN = 64
FOREVER = 10**12


def mlp(env: str, outputs_per_action: int) -> nn.Module:
    """Returns the network of TorchRL, and of polopt with a module."""
    made = gymnasium.make(env)
    inputs = made.observation_space.shape[0]  # type: ignore[index]
    space: Any = made.action_space
    outputs = int(space.n) if hasattr(space, "n") else outputs_per_action * space.shape[0]
    sizes = (inputs, HIDDEN, HIDDEN, outputs)
    linear = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


class Polopt:
    """Collects with polopt's Collector and a policy of polopt or a module."""

    def __init__(self, case: dict[str, Any], module: bool) -> None:
        from polopt import Collector

        own = ("a2c", {"model": {"fcnet_hiddens": [HIDDEN, HIDDEN]}})
        self._collector = Collector(
            case["env"],
            mlp(case["env"], 2) if module else own,
            num_collectors=2,
            num_envs=case["envs"],
            frames_per_batch=case["frames"],
            sync=case["sync"],
            **case.get("options", {}),
        )

    def next(self) -> int:
        """Collects the next batch. Returns its number of frames."""
        return next(self._collector).env_steps

    def stop(self) -> None:
        """Ends the collector."""
        self._collector.shutdown()


class TorchRL:
    """Collects with TorchRL's RayCollector."""

    def __init__(self, case: dict[str, Any]) -> None:
        from torchrl.collectors import Collector
        from torchrl.collectors.distributed import RayCollector
        from torchrl.envs import SerialEnv
        from torchrl.envs.libs.gym import GymEnv

        def make_one() -> Any:
            discrete = case["env"].startswith("CartPole")
            options = {"categorical_action_encoding": True} if discrete else {}
            return GymEnv(case["env"], device="cpu", **options)

        def make() -> Any:
            return make_one() if case["envs"] == 1 else SerialEnv(case["envs"], make_one)

        policy = self._policy(case["env"], make_one().action_spec)
        self._sync = case["sync"]
        self._per_collector = case["frames"] // (2 if self._sync else 1)
        self._collector = RayCollector(
            [make] * 2,
            policy,
            num_collectors=2,
            collector_class=Collector,
            frames_per_batch=case["frames"],
            total_frames=FOREVER,
            sync=self._sync,
            ray_init_config={"num_cpus": 4, "include_dashboard": False},
            remote_configs={"num_cpus": 1, "memory": 10**8},
        )
        self._collector.update_policy_weights_()
        self._batches = iter(self._collector)

    def _policy(self, env: str, spec: Any) -> Any:
        from tensordict.nn import NormalParamExtractor, TensorDictModule
        from torchrl.modules import ProbabilisticActor, TanhNormal

        net = mlp(env, 2)
        keys, kind, options = ["logits"], torch.distributions.Categorical, {}
        if not env.startswith("CartPole"):
            net = nn.Sequential(net, NormalParamExtractor())
            keys, kind = ["loc", "scale"], TanhNormal
            options = {"low": spec.space.low, "high": spec.space.high}
        return ProbabilisticActor(
            TensorDictModule(net, ["observation"], keys),
            spec=spec,
            in_keys=keys,
            distribution_class=kind,
            distribution_kwargs=options,
            return_log_prob=True,
        )

    def next(self) -> int:
        """Collects the next batch. Returns its number of frames."""
        return int(next(self._batches).numel())

    def stop(self) -> None:
        """Ends the collector. Ray keeps running."""
        self._collector.shutdown()


def measure(collecting: Polopt | TorchRL, seconds: float) -> float:
    """Returns the frames per second from the end of one batch to the end of a later batch.

    Batches that were ready before the clock started do not count.
    """
    for _ in range(2):  # a batch of each asynchronous collector may be ready
        collecting.next()
    started_s = now_s = time.perf_counter()
    frames = 0
    while now_s < started_s + seconds:
        frames += collecting.next()
        now_s = time.perf_counter()
    return frames / (now_s - started_s)


def main() -> None:
    """Answers requests until standard input ends."""
    system = sys.argv[1]
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def answer(value: Any) -> None:
        print("answer " + json.dumps(value), flush=True)

    names = ("torchrl", "tensordict") if system == "TorchRL" else ("ray",)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, address="local")
    answer({name: metadata.version(name) for name in names})
    collecting: Polopt | TorchRL | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if "make" in request:
            if collecting is not None:
                collecting.stop()
            case = request["make"]
            collecting = TorchRL(case) if system == "TorchRL" else Polopt(case, "," in system)
            collecting.next()
            answer("made")
        elif collecting is not None:
            answer(measure(collecting, request["seconds"]))
    if collecting is not None:
        collecting.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
