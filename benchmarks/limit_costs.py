"""What training is made of, and how long each part takes on this machine; for `limits.py`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
import torch.distributed as dist
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import polopt

ENVS = 8
#: Parameters of two MLPs of 64 x 64 for CartPole-v1, and one to spare for each statistic summed.
FLOATS = 9_155
BLOCK_S = 0.15


class Bare:
    """CartPoles one after another, begun anew where they end, and nothing made of what they return:
    less than this no vector environment can do. No checker, as in polopt.

    Args:
        num_envs: how many.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.envs = [self.make() for _ in range(num_envs)]

    @staticmethod
    def make() -> gymnasium.Env[Any, Any]:
        """One of them."""
        return gymnasium.make("CartPole-v1", disable_env_checker=True)

    def reset(self, seed: int) -> None:
        """Begins."""
        for number, env in enumerate(self.envs):
            env.reset(seed=seed + number)

    def step(self, actions: np.ndarray) -> None:
        """One step of each."""
        for env, action in zip(self.envs, actions, strict=True):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()


def sync_vector(num_envs: int) -> SyncVectorEnv:
    """Gymnasium's, told not to copy observations."""
    makers = [Bare.make] * num_envs
    return SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)


def stepping(env: Any) -> Callable[[], None]:
    """One step of all its environments, with actions drawn beforehand."""
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(2, size=(1000, env.num_envs))
    numbers = iter(range(10**9))

    def step() -> None:
        env.step(actions[next(numbers) % 1000])

    return step


def writing_down(policy: polopt.Policy) -> Callable[[], None]:
    """One step's action from its parameters, and six rows of a fragment of 8."""
    obs, params = np.zeros((ENVS, 4), np.float32), np.zeros((ENVS, 2), np.float32)
    noise = policy.dist.draw_noise(np.random.default_rng(0), ENVS)
    rows = [np.empty((ENVS, *shape), dtype) for shape, dtype in _COLUMNS]
    ended = np.zeros(ENVS, bool)

    def write() -> None:
        actions = policy.dist.sample(params, noise)
        for row, value in zip(rows, (obs, params, actions, 1.0, ended, ended), strict=True):
            row[...] = value

    return write


_COLUMNS: list[tuple[tuple[int, ...], Any]] = [
    ((4,), np.float32),
    ((2,), np.float32),
    ((), np.int64),
    ((), np.float32),
    ((), bool),
    ((), bool),
]


def local(preset: type[polopt.PolicyOptimizerTrainer], steps: int) -> tuple[polopt.Policy, Any]:
    """A policy, and a postprocessed fragment `[steps, 8]` sampled with it in this process."""
    trainer = preset(
        config={
            "env": "CartPole-v1",
            "num_workers": 0,
            "num_envs_per_worker": ENVS,
            "rollout_fragment_length": steps,
            "seed": 0,
        }
    )
    batch = trainer.workers.local.sample()
    trainer.stop()
    return trainer.get_policy(), batch


def learning(policy: polopt.Policy, batch: Any, rows: int) -> Callable[[], None]:
    """Forward, backward, clipping and fused Adam of one minibatch."""
    minibatch = {name: column[:rows] for name, column in policy.training_rows(batch).items()}

    def learn() -> None:
        policy.backward(minibatch)
        policy.apply_flat()

    return learn


def rollout_worker() -> Any:
    """As A3C has them, but in this process: 8 environments, fragments of 20 steps."""
    make = polopt.GradientWorkerSet.create_factory(
        "CartPole-v1",
        "a2c",
        num_workers=0,
        rollout_fragment_length=20,
        num_envs_per_worker=ENVS,
        vectorization_mode="sync",
        seed=0,
    )
    return make().local


@ray.remote
class Other:
    """The other end of calls and sums."""

    def echo(self, array: np.ndarray) -> np.ndarray:
        """Gives back what came."""
        return array

    def join(self, store: str, rank: int) -> None:
        """Becomes a rank of two, which meet in the file `store`."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)

    def gloo_sums(self, count: int) -> float:
        """Seconds for each of so many sums by gloo."""
        tensor = torch.zeros(FLOATS)
        started_s = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor)
        return (time.perf_counter() - started_s) / count

    def exchanges(self, port: int, count: int, at_once: bool) -> float:
        """Seconds for each of so many arrays that are sent to and received from who listens; if
        not `at_once`, it comes back from there."""
        with socket.create_connection(("127.0.0.1", port)) as connected:
            return exchange(connected, count, at_once, first=True)

    def listen(self) -> int:
        """The port at which it will `answer`."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        return int(self.listener.getsockname()[1])

    def answer(self, count: int, at_once: bool) -> None:
        """The other end of `exchanges`."""
        connected, _ = self.listener.accept()
        with connected:
            exchange(connected, count, at_once, first=False)


def exchange(connected: socket.socket, count: int, at_once: bool, first: bool) -> float:
    """Seconds for each of so many exchanges of `FLOATS` with the other end; if both send `at_once`,
    each adds what it got to its own."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.settimeout(60.0)
    mine, theirs = np.zeros(FLOATS, np.float32), np.zeros(FLOATS, np.float32)
    started_s = time.perf_counter()
    for _ in range(count):
        if first or at_once:
            connected.sendall(mine.data)
        missing = theirs.data.cast("B")
        while missing:
            missing = missing[connected.recv_into(missing) :]
        if at_once:
            mine += theirs
        elif not first:
            connected.sendall(mine.data)
    return (time.perf_counter() - started_s) / count


def timed(function: Callable[[], object], calls: int = 1) -> float:
    """Seconds for one of the `calls` that `function` makes, over at least `BLOCK_S`."""
    done, started_s = 0, time.perf_counter()
    while time.perf_counter() - started_s < BLOCK_S:
        function()
        done += calls
    return (time.perf_counter() - started_s) / done


def cases(folder: str) -> dict[str, Callable[[], float]]:
    """Each cost by its name: what measures it once, in seconds."""
    worker = rollout_worker()
    (a3c, rollout), (ppo, batch) = local(polopt.A2C, 20), local(polopt.SyncPPO, 64)
    obs, array = np.zeros((ENVS, 4), np.float32), np.zeros(FLOATS, np.float32)
    actors = [Other.remote(), Other.remote()]
    store = f"{folder}/store"
    ray.get([actor.join.remote(store, rank) for rank, actor in enumerate(actors)], timeout=120)
    port = ray.get(actors[1].listen.remote(), timeout=60)

    def call() -> None:
        ray.get(actors[0].echo.remote(array), timeout=60)

    def many_calls() -> None:
        ray.get([actors[0].echo.remote(array) for _ in range(32)], timeout=60)

    def exchanges(at_once: bool) -> float:
        answering = actors[1].answer.remote(500, at_once)
        seconds = ray.get(actors[0].exchanges.remote(port, 500, at_once), timeout=60)
        ray.get(answering, timeout=60)
        return float(seconds)

    def gloo() -> float:
        return max(ray.get([actor.gloo_sums.remote(200) for actor in actors], timeout=60))

    functions: dict[str, Callable[[], None]] = {
        "bare": stepping(Bare(ENVS)),
        "env": stepping(sync_vector(ENVS)),
        "own": stepping(rollout_worker().sampler.env),
        "env64": stepping(gymnasium.make_vec("CartPole-v1", 64, "vector_entry_point")),
        "act": lambda: (a3c.action_params(obs), None)[1],
        "act_torch": lambda: (a3c.torch_action_params(obs), None)[1],
        "write": writing_down(a3c),
        "gradient": lambda: (a3c.compute_gradients(rollout), None)[1],
        "round": lambda: (worker.sample_and_compute_gradients(worker.get_weights()), None)[1],
        "apply": lambda: (a3c.apply_flat(), None)[1],
        "learn128": learning(ppo, batch, 128),
        "learn256": learning(ppo, batch, 256),
        "call": call,
    }
    measured = {name: (lambda f=f: timed(f)) for name, f in functions.items()}
    return measured | {
        "pipelined": lambda: timed(many_calls, 32),
        "direct": lambda: exchanges(at_once=False),
        "sum": lambda: exchanges(at_once=True),
        "allreduce": gloo,
    }


NAMES = {
    "bare": f"one step of {ENVS} CartPoles, one after another",
    "env": "the same in Gymnasium's sync vector",
    "own": "the same as polopt steps them, guards included",
    "env64": "one step of CartPoleVectorEnv with 64",
    "act": "acting at batch 8, NumPy",
    "act_torch": "acting at batch 8, torch",
    "write": "action of parameters and noise, and one step written down, batch 8",
    "gradient": "gradient of 160 rows (A3C)",
    "round": "a whole round of an A3C worker, alone: 160 steps and their gradient",
    "apply": "clipping and fused Adam",
    "learn128": "forward, backward, clipping, fused Adam of 128 rows (PPO)",
    "learn256": "the same of 256 rows",
    "call": f"Ray round trip with an array of {FLOATS:,} floats, there and back",
    "pipelined": "the same, 32 calls at once, each",
    "direct": "the same over a TCP connection, one at a time",
    "sum": f"sum of {FLOATS:,} floats over 2 processes, over a TCP connection",
    "allreduce": "the same by gloo's all-reduce",
}
