"""TD3: twin delayed deterministic policy gradients (Fujimoto et al., 2018)."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Hashable
from typing import Any

import numpy as np
import pydantic
import torch
from torch import Tensor

from polopt.common.transitions import Transitions
from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.distributions.gaussians import ClippedGaussian
from polopt.policies.learning.flat_parameters import Segment
from polopt.policies.learning.schedules import LearningRate, Schedule, ScheduleValue
from polopt.policies.networks.q_network import (
    CriticModelConfig,
    check_bounded,
    make_actor,
    make_critics,
)
from polopt.policies.replay_policy import (
    ReplayConfig,
    ReplayPolicy,
    UpdateFrequency,
    bootstrapped,
    critics_loss,
    frozen,
)

#: Replaces a standard deviation of 0, because the logarithm of 0 is not finite.
_NO_NOISE = 1e-8


class TD3Config(ReplayConfig):
    """Options of `TD3Policy`, in addition to the options of `ReplayConfig`.

    Standard deviations of noise refer to actions in [-1, 1].

    Attributes:
        lr: the learning rate of the actor and the critics.
        actor_lr: the learning rate of the actor. `None` means `lr`.
        critic_lr: the learning rate of the critics. `None` means `lr`.
        policy_delay: the number of updates of the critics for each update of the actor. This option
            and `target_network_update_freq` are both 2 by default, so the target networks move
            whenever the actor is updated.
        exploration_noise: the standard deviation of the noise that is added to sampled actions: a
            number, or a schedule like `lr`.
        target_noise: the standard deviation of the noise that is added to the actions of the target
            actor.
        target_noise_clip: the largest absolute value of the noise of the target actor. Larger
            values are clipped.
    """

    lr: LearningRate = 1e-3
    grad_clip: float | None = pydantic.Field(default=None, gt=0.0)
    tau: float = pydantic.Field(default=0.005, gt=0.0, le=1.0)
    target_network_update_freq: UpdateFrequency = 2
    random_timesteps: int = pydantic.Field(default=1000, ge=0, le=2**62)
    model: CriticModelConfig = CriticModelConfig()
    actor_lr: LearningRate | None = None
    critic_lr: LearningRate | None = None
    policy_delay: int = pydantic.Field(default=2, ge=1, le=10**9)
    exploration_noise: ScheduleValue = 0.1
    target_noise: float = pydantic.Field(default=0.2, ge=0.0, le=1e6)
    target_noise_clip: float = pydantic.Field(default=0.5, ge=0.0, le=1e6)


class TD3Policy(ReplayPolicy):
    """A deterministic actor `mu` with outputs in [-1, 1], and two critics. The losses are

        a' = clip(mu_target(s') + clip(noise, -c, c), -1, 1)
        target = r + discount * min_k Q_target_k(s', a')
        critics: sum_k of the weighted mean of (Q_k(s, a_stored) - target)^2 / 2
        actor:   mean of -Q_1(s, mu(s)), in every `policy_delay`-th update

    Here `noise` is Gaussian with standard deviation `target_noise`, `c` is `target_noise_clip`, and
    `a_stored` is the action in the buffer.

    An update computes all gradients with the weights before the update. So the actor learns with
    the critics before their step. In the paper, it learns with the critics after their step. The
    target networks move after the steps of the actor and the critics.
    """

    config_class = TD3Config
    graph_members = ("critic_loss", "actor_loss", "targets", "resting", "graph_key")
    config: TD3Config

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.target_actor: Any = self.segments["target_network"].module
        self.critics: Any = self.segments["critics"].module
        self.target_critics: Any = self.segments["target_critics"].module

    def make_distribution(self) -> ActionDistribution:
        check_bounded(self.action_space, type(self).__name__)
        return ClippedGaussian(self.action_space)  # type: ignore[arg-type]

    def make_segments(self) -> dict[str, Segment]:
        spaces: tuple[Any, Any] = (self.encoder.space, self.action_space)
        actor = make_actor(*spaces, self.dist.num_params // 2, False, self.config.model)
        critics = make_critics(*spaces, 2, self.config.model)
        return {
            "network": Segment(actor, lr="actor_lr"),
            "critics": Segment(critics, lr="critic_lr"),
            "target_network": Segment(copy.deepcopy(actor), copy_of="network"),
            "target_critics": Segment(copy.deepcopy(critics), copy_of="critics"),
        }

    # ---- acting ---------------------------------------------------------------------------------

    @property
    def log_noise(self) -> float:
        """The logarithm of the current standard deviation of the exploration noise."""
        return math.log(max(Schedule(self.config.exploration_noise)(self.env_steps), _NO_NOISE))

    def network_params(self, obs: np.ndarray) -> np.ndarray:
        mean = np.tanh(super().network_params(obs))
        return np.concatenate([mean, np.full_like(mean, self.log_noise)], axis=1)

    def params_in_torch(self, network: Any, obs: Tensor) -> Tensor:
        mean = torch.tanh(network.action_params(obs))
        return torch.cat([mean, torch.full_like(mean, self.log_noise)], dim=-1)

    # ---- learning -------------------------------------------------------------------------------

    @property
    def resting(self) -> Collection[str]:
        """The names of the segments that the next update does not change. The result is empty if
        the next update is a `policy_delay`-th update, in which the actor learns. Otherwise it is
        the actor's segment `network`."""
        return () if (self.version + 1) % self.config.policy_delay == 0 else ("network",)

    @property
    def graph_key(self) -> Hashable:
        return bool(self.resting)

    @torch.no_grad()
    def targets(self, rows: Any) -> Tensor:
        """Computes the targets `[B]` of the critics.

        Args:
            rows: `Transitions` of tensors.
        """
        actions = torch.tanh(self.target_actor.action_params(rows.next_obs))
        noise = self.normal(tuple(actions.shape)) * self.config.target_noise
        limit = self.config.target_noise_clip
        actions = (actions + noise.clamp(-limit, limit)).clamp(-1.0, 1.0)
        return bootstrapped(rows, self.target_critics(rows.next_obs, actions).amin(0))

    def critic_loss(self, rows: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Computes the loss `[]` of the K critics, their TD errors `[K, B]`, and statistics
        `[]`."""
        targets = self.targets(rows)
        values = self.critics(rows.obs, rows.actions)
        return critics_loss(rows, values, targets)

    def actor_loss(self, rows: Any) -> Tensor:
        """Computes the loss `[]` of the actor. `add_gradient` disables the gradients of the
        critics for this loss."""
        actions = torch.tanh(self.model.action_params(rows.obs))
        return -self.critics(rows.obs, actions, count=1).mean()

    def add_gradient(self, rows: Any) -> tuple[dict[str, Tensor], Tensor]:
        with self.training():
            critic_loss, errors, stats = self.critic_loss(rows)
            critic_loss.backward()
            stats["total_loss"] = critic_loss
            if not self.resting:
                with frozen(self.critics):
                    actor_loss = self.actor_loss(rows)
                    actor_loss.backward()
                stats |= {"policy_loss": actor_loss, "total_loss": critic_loss + actor_loss}
        return stats, errors.detach().abs().mean(0)

    @torch.inference_mode()
    def errors_of(self, rows: Transitions) -> np.ndarray:
        _, errors, _ = self.critic_loss(self.tensors(rows))
        return errors.abs().mean(0).cpu().numpy()
