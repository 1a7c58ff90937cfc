"""SAC: soft actor-critic with a tuned temperature (Haarnoja et al., 2018), for continuous actions,
and for discrete actions (Christodoulou, 2019)."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar, Literal

import numpy as np
import pydantic
import torch
from gymnasium.spaces import Discrete
from torch import Tensor, nn
from torch.nn import functional as F

from polopt.common.action_mask import MASKED_LOGIT
from polopt.common.transitions import Transitions
from polopt.metrics.number import Number
from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.distributions.categorical import Categorical
from polopt.policies.distributions.gaussians import SquashedGaussian
from polopt.policies.learning.flat_parameters import Segment
from polopt.policies.learning.schedules import LearningRate
from polopt.policies.networks.q_network import (
    CriticModelConfig,
    check_bounded,
    make_actor,
    make_critics,
    make_q_network,
)
from polopt.policies.replay_policy import (
    ReplayConfig,
    ReplayPolicy,
    bootstrapped,
    critics_loss,
    frozen,
)

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class SACConfig(ReplayConfig):
    """Options of `SACPolicy`, in addition to the options of `ReplayConfig`.

    Attributes:
        lr: the learning rate of the actor, the critics and the temperature.
        actor_lr: the learning rate of the actor. `None` means `lr`.
        critic_lr: the learning rate of the critics. `None` means `lr`.
        alpha_lr: the learning rate of the temperature. `None` means `lr`.
        initial_alpha: the initial temperature.
        target_entropy: the target of the policy's entropy, for actions in [-1, 1]. The temperature
            is tuned so that the entropy approaches this target. `auto` means minus the number of
            action dimensions, and for n discrete actions 0.98 log n. `None` keeps the temperature
            at `initial_alpha`.
    """

    lr: LearningRate = 3e-4
    grad_clip: float | None = pydantic.Field(default=None, gt=0.0)
    tau: float = pydantic.Field(default=0.005, gt=0.0, le=1.0)
    random_timesteps: int = pydantic.Field(default=1000, ge=0, le=2**62)
    model: CriticModelConfig = CriticModelConfig()
    actor_lr: LearningRate | None = None
    critic_lr: LearningRate | None = None
    alpha_lr: LearningRate | None = None
    initial_alpha: float = pydantic.Field(default=1.0, gt=0.0, le=1e6)
    target_entropy: float | Literal["auto"] | None = "auto"

    fixed = (*ReplayConfig.fixed, "initial_alpha")


class Temperature(nn.Module):
    """Holds the logarithm of the temperature alpha as a parameter."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([alpha]).log())


class SACPolicy(ReplayPolicy):
    """Soft actor-critic with two critics. The losses are

        target = r + discount * (min_k Q_target_k(s', a') - alpha log pi(a'|s'))
        critics: sum_k of the weighted mean of (Q_k(s, a_stored) - target)^2 / 2
        actor:   mean of alpha log pi(a|s) - min_k Q_k(s, a)
        alpha:   mean of -log alpha (log pi(a|s) + target_entropy)

    Here `a` and `a'` are new actions of the current policy, and `a_stored` is the action in the
    buffer. The policy computes all gradients with the same weights before it applies any gradient.

    Actions are squashed by tanh. The densities in the losses refer to actions in [-1, 1], whatever
    the bounds of the Box. Batches and replay buffers hold the actions before tanh.

    For a `Discrete` action space, this class makes a `DiscreteSACPolicy`.
    """

    config_class = SACConfig
    graph_members: ClassVar[tuple[str, ...]] = (
        *("critic_loss", "actor_loss", "alpha_loss", "add_actor_gradient"),
        *("targets", "sampled", "params_in_torch", "target_entropy", "log_std_bounds"),
    )
    config: SACConfig
    dist: SquashedGaussian
    numbers = (Number("alpha_value", "", "the temperature alpha, the weight of the entropy"),)
    #: Bounds of log standard deviations, as in the authors' code, RLlib 0.8 and Stable-Baselines3.
    log_std_bounds: ClassVar[tuple[float, float]] = (-20.0, 2.0)

    def __new__(
        cls, observation_space: Any = None, action_space: Any = None, *_: Any, **__: Any
    ) -> Any:
        is_discrete = cls is SACPolicy and isinstance(action_space, Discrete)
        return super().__new__(DiscreteSACPolicy if is_discrete else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critics: Any = self.segments["critics"].module
        targets = self.segments.get("target_critics", self.segments["critics"])
        self.target_critics: Any = targets.module
        self.log_alpha: Tensor = self.segments["temperature"].module.log_alpha  # type: ignore[assignment]

    def make_distribution(self) -> ActionDistribution:
        check_bounded(self.action_space, type(self).__name__)
        return SquashedGaussian(self.action_space)  # type: ignore[arg-type]

    def make_networks(self) -> tuple[nn.Module, Any]:
        """Makes the actor and the critics."""
        spaces: tuple[Any, Any] = (self.encoder.space, self.action_space)
        actor = make_actor(*spaces, self.dist.num_params, True, self.config.model)
        return actor, make_critics(*spaces, 2, self.config.model)

    def make_segments(self) -> dict[str, Segment]:
        actor, critics = self.make_networks()
        return {
            "network": Segment(actor, lr="actor_lr"),
            "critics": Segment(critics, lr="critic_lr"),
            "temperature": Segment(Temperature(self.config.initial_alpha), lr="alpha_lr"),
            "target_critics": Segment(copy.deepcopy(critics), copy_of="critics"),
        }

    @property
    def target_entropy(self) -> float | None:
        """The target of the entropy in the loss of the temperature. `None` means that the
        temperature is not tuned."""
        target = self.config.target_entropy
        return -float(self.dist.action_shape[0]) if target == "auto" else target

    # ---- acting ---------------------------------------------------------------------------------

    def network_params(self, obs: np.ndarray) -> np.ndarray:
        params = super().network_params(obs)
        log_std = params[:, params.shape[1] // 2 :]
        np.clip(log_std, *self.log_std_bounds, out=log_std)
        return params

    def params_in_torch(self, network: Any, obs: Tensor) -> Tensor:
        mean, log_std = network.action_params(obs).chunk(2, dim=-1)
        return torch.cat([mean, log_std.clamp(*self.log_std_bounds)], dim=-1)

    def sampled(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Samples new actions `[B, A]` in [-1, 1]. Returns the actions and their log-probabilities
        `[B]`, with gradients."""
        params = self.params_in_torch(self.model, obs)
        mean, log_std = params.chunk(2, dim=-1)
        noise = self.normal(tuple(mean.shape))
        raw = mean + log_std.exp() * noise
        # The density of the Gaussian at `raw` is computed from the noise instead of `raw - mean`.
        # If the standard deviation is small, `raw - mean` would lose all its digits to rounding.
        log_prob = -(0.5 * noise.square() + log_std + _HALF_LOG_2PI)
        # log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which does not overflow.
        log_slope = 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))
        return torch.tanh(raw), (log_prob - log_slope).sum(-1)

    # ---- learning -------------------------------------------------------------------------------

    @torch.no_grad()
    def targets(self, rows: Any) -> Tensor:
        """Computes the targets `[B]` of the critics.

        Args:
            rows: `Transitions` of tensors.
        """
        actions, log_prob = self.sampled(rows.next_obs)
        values = self.target_critics(rows.next_obs, actions).amin(0)
        return bootstrapped(rows, values - self.log_alpha.exp() * log_prob)

    def critic_loss(self, rows: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Computes the loss `[]` of the K critics, their TD errors `[K, B]`, and statistics
        `[]`."""
        targets = self.targets(rows)
        values = self.critics(rows.obs, torch.tanh(rows.actions))
        return critics_loss(rows, values, targets)

    def actor_loss(self, rows: Any) -> tuple[Tensor, Tensor]:
        """Computes the loss `[]` of the actor, and the log-probabilities `[B]` of new actions.
        `add_actor_gradient` disables the gradients of the critics for this loss."""
        actions, log_prob = self.sampled(rows.obs)
        values = self.critics(rows.obs, actions).amin(0)
        return (self.log_alpha.exp().detach() * log_prob - values).mean(), log_prob

    def alpha_loss(self, log_prob: Tensor) -> Tensor:
        """Computes the loss `[]` of the temperature. The loss is 0 if the temperature is not
        tuned."""
        target = self.target_entropy
        if target is None:
            return 0.0 * self.log_alpha.sum()
        return -(self.log_alpha * (log_prob.detach() + target)).mean()

    def add_actor_gradient(self, rows: Any) -> dict[str, Tensor]:
        """Adds the gradients of the actor and the temperature. Returns statistics `[]`."""
        with frozen(self.critics):
            actor_loss, log_prob = self.actor_loss(rows)
            actor_loss.backward()
        self.alpha_loss(log_prob).backward()
        return {"policy_loss": actor_loss, "entropy": -log_prob.mean()}

    def add_gradient(self, rows: Any) -> tuple[dict[str, Tensor], Tensor]:
        with self.training():
            critic_loss, errors, stats = self.critic_loss(rows)
            critic_loss.backward()
            stats |= self.add_actor_gradient(rows)
        stats["total_loss"] = critic_loss + stats["policy_loss"]
        stats["alpha_value"] = self.log_alpha[0].exp()
        return stats, errors.detach().abs().mean(0)

    @torch.inference_mode()
    def errors_of(self, rows: Transitions) -> np.ndarray:
        _, errors, _ = self.critic_loss(self.tensors(rows))
        return errors.abs().mean(0).cpu().numpy()


class DiscreteCritics(nn.Module):
    """K networks that compute the Q-values of n actions.

    Args:
        networks: the K networks.
    """

    def __init__(self, networks: list[Any]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, obs: Tensor) -> Tensor:
        """Q-values `[K, B, n]` of encoded observations `[B, ...]`."""
        return torch.stack([network.action_params(obs) for network in self.networks])  # type: ignore[operator]


class DiscreteSACPolicy(SACPolicy):
    """Soft actor-critic for discrete actions (Christodoulou, 2019). The policy knows the
    probability of each action, so the losses are expectations over the actions, without samples:

        target = r + discount * sum_a' pi(a'|s') (min_k Q_target_k(s', a') - alpha log pi(a'|s'))
        critics: sum_k of the weighted mean of (Q_k(s, a_stored) - target)^2 / 2
        actor:   mean of sum_a pi(a|s) (alpha log pi(a|s) - min_k Q_k(s, a))
        alpha:   mean of log alpha (H(pi(.|s)) - target_entropy)

    With an action mask, the sums are over the allowed actions. If the mask of a next observation
    allows no action, its value is 0.
    """

    graph_members: ClassVar[tuple[str, ...]] = (
        *("critic_loss", "actor_loss", "alpha_loss", "add_actor_gradient", "targets"),
        *("log_probs", "params_in_torch", "target_entropy"),
    )
    dist: Categorical  # type: ignore[assignment]

    def make_distribution(self) -> ActionDistribution:
        return Categorical(self.action_space)  # type: ignore[arg-type]

    def make_networks(self) -> tuple[nn.Module, Any]:
        spaces: tuple[Any, Any] = (self.encoder.space, self.action_space)
        size, model = self.dist.num_params, self.config.model
        actor, *critics = (make_q_network(*spaces, self.mask, size, False, model) for _ in range(3))
        return actor, DiscreteCritics(critics)

    @property
    def target_entropy(self) -> float | None:
        target = self.config.target_entropy
        return 0.98 * math.log(self.dist.num_params) if target == "auto" else target

    def network_params(self, obs: np.ndarray) -> np.ndarray:
        return ReplayPolicy.network_params(self, obs)

    def params_in_torch(self, network: Any, obs: Tensor) -> Tensor:
        return ReplayPolicy.params_in_torch(self, network, obs)

    def log_probs(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the probabilities `[B, n]` of all actions, and their logarithms. Both are 0 for
        actions that the mask does not allow."""
        logits = self.params_in_torch(self.model, obs)
        allowed = logits > 0.5 * MASKED_LOGIT
        logs = F.log_softmax(logits, dim=-1)
        return torch.where(allowed, logs.exp(), 0.0), torch.where(allowed, logs, 0.0)

    @torch.no_grad()
    def targets(self, rows: Any) -> Tensor:
        probs, logs = self.log_probs(rows.next_obs)
        values = self.target_critics(rows.next_obs).amin(0) - self.log_alpha.exp() * logs
        return bootstrapped(rows, (probs * values).sum(-1))

    def critic_loss(self, rows: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        targets = self.targets(rows)
        actions = rows.actions[None, :, None].expand(2, -1, -1)
        values = self.critics(rows.obs).gather(-1, actions)[..., 0]
        return critics_loss(rows, values, targets)

    def actor_loss(self, rows: Any) -> tuple[Tensor, Tensor]:
        """Computes the loss `[]` of the actor, and the expectations `[B]` of the log-probability of
        an action, which are minus the entropies."""
        probs, logs = self.log_probs(rows.obs)
        values = self.critics(rows.obs).amin(0)
        losses = probs * (self.log_alpha.exp().detach() * logs - values)
        return losses.sum(-1).mean(), (probs * logs).sum(-1)
