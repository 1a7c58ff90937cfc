"""Trained policies with observations and actions of each space, and with own networks."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
from checkpoint_helpers import SMALL
from gymnasium import Space, spaces
from torch import Tensor, nn

from polopt.trainers.trainer import PolicyOptimizerTrainer

BOX = spaces.Box(-2.0, 2.0, (4,), np.float32)
OBSERVATIONS: dict[str, Space[Any]] = {
    "box": BOX,
    "float64": spaces.Box(-np.inf, np.inf, (3, 2), np.float64),
    "scalar": spaces.Box(0.0, 1.0, (), np.float32),
    "image": spaces.Box(0, 255, (40, 38, 3), np.uint8),
    "board": spaces.Box(0, np.arange(72, dtype=np.uint8).reshape(6, 6, 2), (6, 6, 2), np.uint8),
    "discrete": spaces.Discrete(5, start=-2),
    "multi": spaces.MultiDiscrete([2, 3], start=[1, -1]),
    "dict": spaces.Dict(
        [("z", spaces.Discrete(3)), ("a", spaces.Tuple([BOX, spaces.MultiDiscrete([2, 2])]))]
    ),
}
ACTIONS: dict[str, Space[Any]] = {
    "discrete": spaces.Discrete(3, start=-1),
    "multi": spaces.MultiDiscrete([[2, 3], [4, 2]]),
    "box": spaces.Box(np.array([-1.0, -0.1]), np.array([0.5, 3.0]), dtype=np.float64),
    "float32": spaces.Box(-1.0, 1.0, (2, 1), np.float32),
    "half open": spaces.Box(
        np.array([300.0, 0.0], np.float32), np.array([500.0, np.inf], np.float32)
    ),
}
MASKED = spaces.Dict(a=BOX, action_mask=spaces.MultiBinary(3), z=spaces.Discrete(2))
SPACES = {**OBSERVATIONS, "masked": MASKED}


class Noise(gymnasium.Env[Any, Any]):
    """An environment with random observations of one space and actions of another space. Its
    episodes do not end."""

    def __init__(self, config: Any) -> None:
        self.observation_space = copy.deepcopy(SPACES[config["observations"]])
        self.action_space = copy.deepcopy(ACTIONS[config["actions"]])

    def observe(self) -> Any:
        self.seen = self.observation_space.sample()
        if self.observation_space == MASKED:
            self.seen["action_mask"][self.np_random.integers(3)] = 1  # allows at least one
        return self.seen

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        if self.observation_space == MASKED:
            assert self.seen["action_mask"][action - self.action_space.start], "not allowed"
        return self.observe(), float(np.sum(action)), False, False, {}


class Own(nn.Module):
    """A custom network for observations in `BOX`."""

    def __init__(self, observation_space: Any, action_space: Any, num_params: int) -> None:
        super().__init__()
        self.body = nn.Linear(observation_space.shape[0], 6)
        self.policy, self.value = nn.Linear(6, num_params), nn.Linear(6, 1)

    def forward(self, obs: Tensor) -> Any:
        hidden = self.body(obs).tanh()
        return self.policy(hidden), self.value(hidden)[:, 0]


class OwnMemory(Own):
    """The custom network `Own` with memory."""

    state_size = 6

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.cell = nn.GRUCell(6, 6)

    def forward(self, obs: Tensor, state: Tensor) -> Any:  # type: ignore[override]
        after = self.cell(self.body(obs), state)
        return self.policy(after), self.value(after)[:, 0], after


LSTM = {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 5}
#: Pairs of an observation space and an action space, with options.
OPTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "memory": ("dict", "discrete", {"model": LSTM}),
    "normalisation": ("dict", "box", {"normalize_observations": True}),
    "normalisation and memory": ("box", "multi", {"normalize_observations": True, "model": LSTM}),
    "masks": ("masked", "discrete", {}),
    "masks, normalisation and memory": (
        "masked",
        "discrete",
        {"normalize_observations": True, "model": LSTM},
    ),
    "own network": ("box", "float32", {"model": {"custom": Own}}),
    "own network with memory": (
        "box",
        "discrete",
        {"normalize_observations": True, "model": {"custom": OwnMemory}},
    ),
}
FROM_REPLAY = {"crossq", "dqn", "sac", "td3"}
REPLAY = {
    "optimizer": "sync_replay",
    "buffer_size": 100,
    "learning_starts": 0,
    "train_batch_size": 4,
    "training_intensity": 1.0,
}


def trained(observations: str, actions: str, **config: Any) -> PolicyOptimizerTrainer:
    small = SMALL
    if config.get("policy") in FROM_REPLAY:
        small = {key: SMALL[key] for key in SMALL if key != "num_sgd_iter"} | REPLAY
    made = PolicyOptimizerTrainer(
        {
            **small,
            "env": Noise,
            "env_config": {"observations": observations, "actions": actions},
            "num_envs_per_worker": 3,
            "rollout_fragment_length": 6,
            "min_sample_timesteps_per_iteration": 18,
            "lr": 0.05,
            **config,
        }
    )
    made.train()
    return made
