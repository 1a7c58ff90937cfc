"""DQN (Mnih et al., 2015) with double Q-learning and a dueling network."""

from __future__ import annotations

import copy
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polopt.common.action_mask import MASKED_LOGIT
from polopt.common.transitions import Transitions
from polopt.policies.epsilon_greedy_policy import EpsilonGreedyConfig, EpsilonGreedyPolicy
from polopt.policies.learning.flat_parameters import Segment
from polopt.policies.learning.reducer import value_stats
from polopt.policies.learning.schedules import LearningRate
from polopt.policies.networks.q_network import QModelConfig
from polopt.policies.replay_policy import (
    ReplayConfig,
    ReplayPolicy,
    UpdateFrequency,
    bootstrapped,
)


class DQNConfig(EpsilonGreedyConfig, ReplayConfig):
    """Options of `DQNPolicy`, in addition to the options of `ReplayConfig` and
    `EpsilonGreedyConfig`.

    Attributes:
        double_q: whether to use double Q-learning (van Hasselt et al., 2016). With True, the
            trained network chooses the best next action, and the target network evaluates this
            action. With False, the target network does both.
        dueling: whether the network computes a state value and advantages (Wang et al., 2016). The
            Q-value of an action is the state value plus the advantage, minus the mean advantage.
        td_error_loss_fn: the loss of a TD error, `huber` or `mse`. Both losses are half the squared
            error, but beyond an absolute error of 1, the Huber loss grows only linearly.
    """

    lr: LearningRate = 5e-4
    target_network_update_freq: UpdateFrequency = 250
    model: QModelConfig = QModelConfig()
    double_q: bool = True
    dueling: bool = True
    td_error_loss_fn: Literal["huber", "mse"] = "huber"

    fixed = (*ReplayConfig.fixed, "dueling")


class DQNPolicy(EpsilonGreedyPolicy, ReplayPolicy):
    """Q-learning with a target network. With the default options, the loss is the weighted mean of

        huber(Q(s, a) - (r + discount * Q_target(s', argmax_a' Q(s', a'))))

    With an action mask, the maximum is over the allowed actions. If the mask of an observation
    allows no action, the value of the observation is 0.
    """

    config_class = DQNConfig
    graph_members = ("loss", "targets")
    config: DQNConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.target: Any = self.segments["target"].module

    def make_segments(self) -> dict[str, Segment]:
        network = self.make_q_network(self.config.dueling)
        target = Segment(copy.deepcopy(network), copy_of="network")
        return {"network": Segment(network), "target": target}

    # ---- learning -------------------------------------------------------------------------------

    def loss(self, rows: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Computes the weighted mean loss `[]`, the TD errors `[B]` and statistics `[]`.

        Args:
            rows: `Transitions` of tensors.
        """
        q = self.model.action_params(rows.obs)
        values = q.gather(-1, rows.actions[:, None])[:, 0]
        targets = self.targets(rows)
        loss_fn = F.smooth_l1_loss if self.config.td_error_loss_fn == "huber" else _half_square
        loss = (rows.weights * loss_fn(values, targets, reduction="none")).mean()
        stats = {"vf_loss": loss, "total_loss": loss, **value_stats(values, targets)}
        return loss, values - targets, stats

    @torch.no_grad()
    def targets(self, rows: Any) -> Tensor:
        """Computes the targets `[B]`. These are the rewards, plus the discounted Q-values that the
        target network gives to the best actions in the next observations.

        Args:
            rows: `Transitions` of tensors.
        """
        q = self.target.action_params(rows.next_obs)
        chooser = q
        if self.config.double_q:
            chooser = self.model.action_params(rows.next_obs)
        best = q.gather(-1, chooser.argmax(-1, keepdim=True))[:, 0]
        return bootstrapped(rows, torch.where(best > 0.5 * MASKED_LOGIT, best, 0.0))

    def add_gradient(self, rows: Any) -> tuple[dict[str, Tensor], Tensor]:
        with self.training():
            loss, errors, stats = self.loss(rows)
            loss.backward()
        return stats, errors.detach().abs()

    @torch.inference_mode()
    def errors_of(self, rows: Transitions) -> np.ndarray:
        _, errors, _ = self.loss(self.tensors(rows))
        return errors.abs().cpu().numpy()


def _half_square(values: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return 0.5 * F.mse_loss(values, targets, reduction=reduction)
