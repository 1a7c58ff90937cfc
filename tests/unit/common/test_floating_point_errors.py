"""`np.seterr` of a user's program affects only the user's code. An underflow in polopt does not end
a run, and does not count as a fault of the environment."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from checkpoint_helpers import trainer
from gymnasium import spaces
from toy_envs import TwoNumbers, make_policy

from polopt.common.compression import GradientPacker, Packed, pack, unpack
from polopt.common.episodes import EpisodeStats
from polopt.common.moments import Moments
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.metrics.episode_window import EpisodeWindow
from polopt.optimizers.sync_gradients import mean_gradients
from polopt.policies.gae import standardized
from polopt.policies.impala import ImpalaPolicy
from polopt.policies.learning.reducer import LocalReducer
from polopt.policies.policy import reduce_gradient
from polopt.policies.spaces import ObservationEncoder
from polopt.policies.vtrace import with_vtrace
from polopt.rollouts.envs.env_state import merge_env_statistics
from polopt.rollouts.sampling.running_episodes import DiscountedReturns


class Tiny(gymnasium.Env[Any, Any]):
    """Returns float64 observations and rewards that underflow in float32."""

    def __init__(self, config: Any) -> None:
        self.observation_space: Any = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space: Any = spaces.Discrete(3)
        if config.get("box"):
            self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.parts = config.get("parts")
        if self.parts:
            one = self.observation_space
            self.observation_space = spaces.Dict(a=one, b=spaces.Tuple((one, spaces.Discrete(3))))
        self.as_list = config.get("as_list")
        self.time = 0
        self.errors: list[str] = []

    def observed(self) -> Any:
        self.errors.append(np.geterr()["under"])
        values = np.array([1e-310, 1e-42, self.time % 7 - 3.0])
        if self.parts:
            return {"a": values, "b": (values, 2)}
        return values.tolist() if self.as_list else values

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.start = self.time
        return self.observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        reward = 1e-60 * (-1) ** self.time
        return self.observed(), reward, self.time >= self.start + 9, False, {}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"env_config": {"box": True}},
        {"env_config": {"parts": True}},
        {"env_config": {"as_list": True}},
        {"fast_cpu": False},
        {"policy": "a2c"},
        {"normalize_observations": True, "normalize_rewards": True},
        {"model": {"use_lstm": True}},
        {"torch_optimizer": "rmsprop"},
        {"evaluation_interval": 1, "evaluation_duration": 2},
        {"autoreset_mode": "next_step"},
        {"autoreset_mode": "disabled"},
        {"vectorization_mode": "async"},
    ],
    ids=str,
)
def test_underflow_ends_no_run(options: dict[str, Any]) -> None:
    with np.errstate(all="raise"):
        made = trainer(env=Tiny, **options)
        for _ in range(3):
            result = made.train()
        assert len(made.evaluate(1).episodes) == 1
        observation = Tiny(made.config.get("env_config", {})).observed()
        assert np.isfinite(made.get_policy().predict(observation)[0]).all()
        assert np.geterr()["under"] == "raise"
    assert result["fault_tolerance"]["num_env_faults"] == 0
    if not options:  # environments run with the user's setting
        assert set(made.workers.local.sampler.env.envs[0].unwrapped.errors) == {"raise"}
    made.stop()


def test_underflow_of_an_environment_is_its_fault() -> None:
    class Underflows(Tiny):
        def step(self, action: Any) -> Any:
            if self.time == 3:
                np.float64(1e-200) * np.float64(1e-200)
            return super().step(action)

    with np.errstate(under="raise"):
        made = trainer(env=Underflows)
        result = made.train()
    made.stop()
    assert result["fault_tolerance"]["num_env_faults"] > 0


def test_underflow_in_messages_and_counts() -> None:
    tiny = np.array([3e-30, 1e-38, 3.0], dtype=np.float32)
    other = np.array([-1e-38 - 1e-42, 1e-38, 0.0], dtype=np.float32)
    parts = [Gradients(tiny, 0, rows, {}) for rows in (1, 9_999)]
    statistics = {"name": "obs_rms", "mean": np.full(2, 1e-200), "var": np.ones(2), "count": 1.0}
    chains = [[statistics], [{**statistics, "mean": np.zeros(2)}]]
    window = EpisodeWindow()
    window.add(EpisodeStats([1e-310, 3e-310, 1e-309], [1, 2, 3]))
    with np.errstate(all="raise"):
        wide = np.array([1e-38, 3e8], dtype=np.float32)
        assert unpack(pack(wide, "fp16")).tolist() == [0.0, 3e8]
        assert unpack(Packed("fp16", (1,), "<f4", (np.ones(1, np.float16),), 1e-50))[0] == 0.0
        packer = GradientPacker("topk", 0.3)
        for flat in (tiny, other):
            packer.pack(Gradients(flat, 0, 1, {}))
        assert mean_gradients(parts).flat[2] == 3.0
        both = Moments.of(np.full((2, 1), 1e-200)).merge(Moments.of(np.zeros((1, 1))))
        assert both.variance.tolist() == [0.0]
        merge_env_statistics([{"vector": [], "envs": chains}])
        window.report()


def test_overflow_of_a_gradient_is_skipped_and_raises_nothing() -> None:
    policy = make_policy("a2c", TwoNumbers())
    policy.flat.set_grads(np.full(len(policy.flat.grads), 3e38, np.float32))
    with np.errstate(all="raise"):
        reduce_gradient(policy, 10, {}, LocalReducer())
        assert policy.apply_flat().get("grad_norm") is None
    assert policy.version == 0


def test_underflow_of_sampled_numbers() -> None:
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    steps = {
        "rewards": np.full((3, 2), 1e-30, np.float32),
        "terminated": np.zeros((3, 2), bool),
        "truncated": np.zeros((3, 2), bool),
        "valid": np.ones((3, 2), bool),
    }
    batch = SampleBatch(
        all_obs=np.zeros((4, 2, 2), np.float32),
        columns=steps,
        successor_index=np.zeros(0, np.int64),
        successor_obs=np.zeros((0, 2), np.float32),
        version=0,
    )
    zeros = np.zeros((3, 2), np.float32)
    with np.errstate(all="raise"):
        assert ObservationEncoder(space).encode(np.full((4, 2), 1e-310)).tolist() == [[0, 0]] * 4
        assert ObservationEncoder(space).row(np.full(2, 1e-310)).tolist() == [0, 0]
        DiscountedReturns(2).add(steps, 1e-300)
        standardized(np.array([1e-200, 2e-200, 3e-200]), LocalReducer())
        far = with_vtrace(batch, zeros - 1000, zeros, zeros, ImpalaPolicy.config_class())
        assert far["advantages"].tolist() == zeros.tolist()
