"""`RecurrentQ`: Q-learning with memory on replayed sequences, and a task that needs memory."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional as F

from polopt.common.transitions import Sequences
from polopt.policies import gae
from polopt.policies.epsilon_greedy_policy import EpsilonGreedyConfig, EpsilonGreedyPolicy
from polopt.policies.learning.flat_parameters import Segment
from polopt.policies.networks.backend import as_tensor
from polopt.policies.networks.make_network import make_network
from polopt.policies.networks.q_network import QModelConfig
from polopt.policies.replay_policy import ReplayConfig, ReplayPolicy


class RecurrentQConfig(EpsilonGreedyConfig, ReplayConfig):
    """Options of `RecurrentQ`."""

    model: QModelConfig = QModelConfig(use_lstm=True, lstm_cell_size=16, fcnet_hiddens=(16,))
    target_network_update_freq: int = 25


class RecurrentQ(EpsilonGreedyPolicy, ReplayPolicy):
    """Q-learning with a target network and memory. Truncated rows do not enter the loss."""

    config_class = RecurrentQConfig
    learns_from = Sequences

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.state_size = self.model.state_size
        self.target: Any = self.segments["target"].module

    def make_segments(self) -> dict[str, Segment]:
        space, model = self.encoder.space, self.config.model
        sizes = (self.dist.num_params, False)
        network = make_network(space, self.action_space, self.mask, *sizes, model)
        target = Segment(copy.deepcopy(network), copy_of="network")
        return {"network": Segment(network), "target": target}

    def act(self, obs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            q, _, states = self.model.unroll(as_tensor(obs)[None], as_tensor(state))
        return q[0].numpy(), states[0].numpy()

    def q_values(self, network: Any, rows: Sequences) -> Tensor:
        """Returns Q-values `[L - burn_in + 1, B, n]`. The last row is for the observation after the
        last step."""
        batch, burn_in = rows.batch, rows.burn_in
        obs, state = as_tensor(batch.all_obs), as_tensor(batch.per_env["state"])
        starts = as_tensor(gae.episode_starts(batch))
        if burn_in:
            with torch.no_grad():
                _, _, states = network.unroll(obs[:burn_in], state, starts[:burn_in])
            state = states[burn_in - 1]
        q: Tensor = network.unroll(obs[burn_in:], state, starts[burn_in:])[0]
        return q

    def errors(self, rows: Sequences) -> Tensor:
        """Returns TD errors `[L - burn_in, B]`. The loss leaves out some rows, whose error is 0."""
        batch, first = rows.batch, rows.burn_in
        q = self.q_values(self.model, rows)
        with torch.no_grad():
            following = self.q_values(self.target, rows)[1:].amax(-1)
        columns = {name: as_tensor(column[first:]) for name, column in batch.columns.items()}
        following = torch.where(columns["terminated"], 0.0, following)
        targets = columns["rewards"] + self.config.gamma * following
        errors = q[:-1].gather(-1, columns["actions"][..., None])[..., 0] - targets
        return torch.where(columns["valid"] & ~columns["truncated"], errors, 0.0)

    def backward(self, rows: Sequences) -> tuple[dict[str, float], np.ndarray]:
        errors = self.errors(rows)
        losses = F.huber_loss(errors, torch.zeros_like(errors), reduction="none")
        loss = (as_tensor(rows.weights) * losses).sum() / rows.num_rows
        loss.backward()  # type: ignore[no-untyped-call]
        return {"total_loss": loss.item()}, self._of_sequences(errors, rows)

    @torch.inference_mode()
    def errors_of(self, rows: Sequences) -> np.ndarray:
        return self._of_sequences(self.errors(rows), rows)

    def _of_sequences(self, errors: Tensor, rows: Sequences) -> np.ndarray:
        return errors.detach().abs().amax(0).numpy()


class Recall(gymnasium.Env[np.ndarray, int]):
    """The first observation is -1 or 1, and the second observation is 0. The reward is 1 if the
    second action matches the first observation. Without memory, the mean return is 0.5."""

    observation_space = spaces.Box(-1.0, 2.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self._step, self._shown = 0, 0

    def _obs(self) -> np.ndarray:
        shown = 2.0 * self._shown - 1.0 if self._step == 0 else 0.0
        return np.array([shown, self._step], np.float32)

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**options)
        self._step, self._shown = 0, int(self.np_random.integers(2))
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(self._step == 1 and action == self._shown)
        self._step += 1
        return self._obs(), reward, self._step == 2, False, {}
