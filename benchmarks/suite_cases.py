"""The cases of `suite.py`, with the goal of each comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Opponent:
    """A peer, and the goal for the ratio to it.

    Attributes:
        peer: a folder of `peers`.
        cases: cases of the peer's `run.py`, for example with different numbers of environments.
            Later turns use the case that was fastest in the first turn.
        goal: minimum of polopt's rate divided by the peer's rate. For `learn`, minimum of the
            peer's seconds divided by polopt's seconds. None for a comparison without a goal.
    """

    peer: str
    cases: tuple[str, ...]
    goal: float | None


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: name, which `--only` matches.
        what: description.
        ours: case of `peers/polopt/run.py`.
        opponents: the peers in the comparison.
        kind: the measurement. `rate` means environment steps, or learned rows, per second. `learn`
            means seconds until a task is solved.
        floor: goal for polopt's own rate. None for a case without such a goal.
        limit_s: the time limit of a run of `learn`, if it is not `--learning-seconds`. A case with
            such a limit takes hours, so it runs only if `--only` names it.
    """

    name: str
    what: str
    ours: str
    opponents: tuple[Opponent, ...]
    kind: Literal["rate", "learn"] = "rate"
    floor: float | None = None
    limit_s: float | None = None


_PPO_ON_HALF_CHEETAH = (
    Opponent("sb3", ("ppo-16-halfcheetah", "ppo-16-subproc-halfcheetah"), 3.0),
    Opponent("sbx", ("ppo-16-halfcheetah", "ppo-16-subproc-halfcheetah"), None),
    Opponent("cleanrl", ("ppo-16-halfcheetah", "ppo-16-async-halfcheetah"), 3.0),
    Opponent("rllib", ("ppo-halfcheetah",), 3.0),
    Opponent("sample_factory", ("ppo-8-halfcheetah", "ppo-10-halfcheetah"), 3.0),
)
_PPO_ON_BREAKOUT = (
    Opponent("sb3", ("ppo-16-breakout", "ppo-16-subproc-breakout"), 1.8),
    Opponent("cleanrl", ("ppo-16-breakout", "ppo-16-async-breakout"), 1.8),
    Opponent("rllib", ("ppo-breakout",), 1.8),
    Opponent("sample_factory", ("ppo-8-breakout", "ppo-10-breakout"), 1.8),
)

#: The goals of whole loops beside the fastest peers, with one and with two cores.
_LOOPS = {
    "sac": ("SAC", 1.2, 1.5),
    "td3": ("TD3", 1.2, 1.5),
    "crossq": ("CrossQ", 1.2, 1.5),
    "dqn": ("DQN", 2.0, 2.0),
}
#: The rows of a batch of DQN with MinAtar's network, by the case of the whole loop.
_BREAKOUT_LOOPS = {"breakout": 32, "breakout128": 128}

CASES = (
    *(
        Case(
            f"loop-{name}-{cores}",
            f"SyncReplay, {title}, 256x256, one process with {cores.replace('-', ' ')}",
            f"loop-{name}-{cores}",
            (
                Opponent("sbx", (f"loop-{name}-{cores}",), goals[cores == "two-cores"]),
                Opponent("sb3", (f"loop-{name}-{cores}",), goals[cores == "two-cores"]),
            ),
        )
        for name, (title, *goals) in _LOOPS.items()
        for cores in ("one-core", "two-cores")
    ),
    *(
        Case(
            f"loop-{name}-{cores}",
            f"SyncReplay, DQN on MinAtar's Breakout, batches of {rows}, one process with "
            + cores.replace("-", " "),
            f"loop-{name}-{cores}",
            (Opponent("sb3", (f"loop-{name}-{cores}",), 1.5),),
        )
        for name, rows in _BREAKOUT_LOOPS.items()
        for cores in ("one-core", "two-cores")
    ),
    Case(
        "a3c",
        "AsyncGradients, 2 x 8 environments x 20 steps",
        "a3c",
        (
            Opponent("sb3", ("a2c-16x10", "a2c-8x20", "a2c-16x10-subproc"), 5.0),
            Opponent("sb3", ("a2c-16x20",), None),  # each update has twice the rows
            Opponent("sample_factory", ("appo-8", "appo-10"), 3.0),
        ),
    ),
    Case(
        "a3c-rllib085",
        "AsyncGradients beside RLlib 0.8.5, 2 x 8 x 20",
        "a3c",
        (Opponent("rllib085", ("a3c-8x20", "a3c-8x10", "a3c-1x20", "a3c-1x10"), 20.0),),
    ),
    Case(
        "a2c",
        "SyncSamples, one update a batch, 2 x 8 x 20",
        "a2c",
        (Opponent("sb3", ("a2c-16x20", "a2c-16x20-subproc"), None),),
    ),
    Case(
        "ppo",
        "SyncSamples, PPO, 2,048 rows, 4 epochs of 256",
        "ppo",
        (
            Opponent("sb3", ("ppo-16", "ppo-8", "ppo-16-subproc"), 3.0),
            Opponent("sbx", ("ppo-16", "ppo-8"), None),
            Opponent("cleanrl", ("ppo-16", "ppo-8"), 2.5),
            Opponent("rllib", ("ppo",), 5.0),
        ),
    ),
    Case(
        "wide-ppo",
        "SyncSamples, PPO with 256x256 units, 2,048 rows, 4 epochs of 256",
        "ppo-wide",
        (
            Opponent("sb3", ("ppo-16-wide",), 1.8),
            Opponent("sbx", ("ppo-16-wide",), 1.8),
            Opponent("cleanrl", ("ppo-16-wide",), 1.8),
        ),
    ),
    Case(
        "dqn",
        "SyncReplay, DQN, one update of 32 rows for 4 steps, 2 x 8",
        "dqn",
        (Opponent("sb3", ("dqn-16", "dqn-8", "dqn-1"), 3.0),),
    ),
    Case(
        "apex",
        "AsyncReplay, Ape-X, four samplers of 5 ms environments, beside the learner",
        "apex",
        (Opponent("rllib085", ("apex",), None),),
    ),
    Case(
        "apex-learned",
        "AsyncReplay, Ape-X, rows learned per second, beside four samplers of 5 ms environments",
        "apex-learned",
        (Opponent("rllib085", ("apex-learned",), None),),
    ),
    Case(
        "ddppo",
        "DecentralizedAllReduce, DD-PPO's defaults, 2 x 5 x 100",
        "ddppo",
        (Opponent("rllib085", ("ddppo",), 6.0),),
    ),
    Case(
        "worker",
        "one worker sampling, 8 environments",
        "sample",
        (Opponent("rllib", ("sample",), 8.0),),
    ),
    Case(
        "collector-sync",
        "Collector, 2 x 8 environments, synchronous",
        "collect-sync",
        (Opponent("torchrl", ("collect-sync",), 20.0),),
    ),
    Case(
        "collector-async",
        "Collector, 2 x 8 environments, asynchronous",
        "collect-async",
        (Opponent("torchrl", ("collect-async",), 20.0),),
    ),
    Case(
        "vector",
        "AsyncGradients, 2 x 64 of CartPoleVectorEnv x 20",
        "a3c-vector",
        (),
        floor=250_000.0,
    ),
    Case(
        "pendulum-a3c",
        "AsyncGradients on Pendulum-v1, 2 x 8 x 20",
        "a3c-pendulum",
        (Opponent("sb3", ("a2c-16x10-pendulum",), 3.0),),
    ),
    Case(
        "pendulum-ppo",
        "SyncSamples, PPO on Pendulum-v1, 2,048 rows",
        "ppo-pendulum",
        (
            Opponent("sb3", ("ppo-16-pendulum",), 3.0),
            Opponent("sbx", ("ppo-16-pendulum",), None),
            Opponent("rllib", ("ppo-pendulum",), 5.0),
        ),
    ),
    Case(
        "halfcheetah-ppo",
        "SyncSamples, PPO on HalfCheetah-v5, 2,048 rows",
        "ppo-halfcheetah",
        _PPO_ON_HALF_CHEETAH,
    ),
    Case(
        "halfcheetah-decoupled-ppo",
        "AsyncSamples, decoupled PPO on HalfCheetah-v5, 2,048 rows",
        "decoupled-ppo-halfcheetah",
        _PPO_ON_HALF_CHEETAH,
    ),
    Case(
        "breakout-ppo",
        "SyncSamples, PPO on MinAtar's Breakout, 2,048 rows",
        "ppo-breakout",
        _PPO_ON_BREAKOUT,
    ),
    Case(
        "breakout-decoupled-ppo",
        "AsyncSamples, decoupled PPO on MinAtar's Breakout, 2,048 rows",
        "decoupled-ppo-breakout",
        _PPO_ON_BREAKOUT,
    ),
    Case(
        "pong-a3c",
        "AsyncGradients on ALE/Pong-v5, 2 x 4 x 20",
        "pong-a3c",
        (Opponent("sample_factory", ("pong",), 1.0),),
    ),
    Case(
        "pong-ppo",
        "SyncSamples, PPO on ALE/Pong-v5, 2 x 4 x 128",
        "pong-ppo",
        (Opponent("rllib", ("pong-ppo",), 1.0),),
    ),
    Case(
        "learn",
        "seconds until CartPole-v1 returns 475",
        "learn",
        (
            Opponent("sb3", ("learn-ppo",), 3.0),
            Opponent("sb3", ("learn-a2c",), 3.0),
            Opponent("cleanrl", ("learn",), 3.0),
            Opponent("rllib", ("learn",), 3.0),
        ),
        kind="learn",
    ),
    Case(
        "impala",
        "AsyncSamples, V-trace, 512 rows, 2 x 8 x 32",
        "impala",
        (Opponent("rllib", ("impala",), 5.0),),
    ),
    Case(
        "appo",
        "AsyncSamples, APPO, 512 rows, one epoch, 2 x 8 x 32",
        "appo",
        (
            Opponent("rllib", ("appo",), 5.0),
            Opponent("sample_factory", ("appo-8", "appo-10"), None),
        ),
    ),
    Case(
        "learn-appo",
        "APPO, seconds until CartPole-v1 returns 475",
        "learn-appo",
        (
            Opponent("rllib", ("learn-appo", "learn-appo-8"), 1.0),
            Opponent("sample_factory", ("learn", "learn-vtrace"), 1.0),
        ),
        kind="learn",
    ),
    Case(
        "learn-impala",
        "IMPALA, seconds until CartPole-v1 returns 475",
        "learn-impala",
        (Opponent("rllib", ("learn-impala", "learn-impala-8"), 1.0),),
        kind="learn",
    ),
    Case(
        "learn-acrobot-appo",
        "APPO, seconds until Acrobot-v1 returns -100",
        "learn-acrobot-appo",
        (
            Opponent("rllib", ("learn-appo-acrobot", "learn-appo-acrobot-8"), 1.0),
            Opponent("sample_factory", ("learn-acrobot", "learn-vtrace-acrobot"), 1.0),
        ),
        kind="learn",
    ),
    Case(
        "learn-acrobot-impala",
        "IMPALA, seconds until Acrobot-v1 returns -100",
        "learn-acrobot-impala",
        (Opponent("rllib", ("learn-impala-acrobot", "learn-impala-acrobot-8"), 1.0),),
        kind="learn",
    ),
    Case(
        "learn-uneven",
        "AsyncSamples, decoupled PPO, CartPole-v1, one worker's steps 1 ms longer",
        "learn-decoupled-ppo-uneven",
        (Opponent("polopt", ("learn-uneven",), 1.0),),
        kind="learn",
    ),
    Case(
        "learn-appo-uneven",
        "APPO, CartPole-v1, one worker's steps 1 ms longer",
        "learn-appo-uneven",
        (Opponent("polopt", ("learn-uneven",), 1.0),),
        kind="learn",
    ),
    Case(
        "learn-sac",
        "SAC, 256x256, two cores, seconds until HalfCheetah-v5 returns 4,000",
        "learn-sac",
        (Opponent("sbx", ("learn-sac",), None), Opponent("sb3", ("learn-sac",), None)),
        kind="learn",
        limit_s=2400.0,
    ),
)
