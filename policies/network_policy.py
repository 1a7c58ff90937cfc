"""`NetworkPolicy`: a policy that acts with a `Network`. Subclasses define how it learns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polopt.common.add_ons import faster
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Acting
from polopt.policies import gae
from polopt.policies.distributions.gaussians import DiagGaussian
from polopt.policies.learning.flat_parameters import Segment
from polopt.policies.networks.actor_critics import MaskedNetwork
from polopt.policies.networks.backend import Backend, as_tensor
from polopt.policies.networks.make_network import make_network
from polopt.policies.networks.network import ActorCriticNetwork, Network
from polopt.policies.policy import Policy


class NetworkPolicy(Policy):
    """Acts with the first output of a `Network`, the distribution parameters.

    A network policy supports memory, action masks and normalised observations. A subclass must
    define `loss`, and at least one of the methods `compute_gradients` and `learn_on_batch`. A
    subclass may define `make_network`. The subclass `ActorCriticPolicy` also uses the second output
    of the network, the values.

    `Policy` describes the arguments.

    Attributes (besides the attributes of `Policy`):
        backend: computes outputs and gradients of `model`.

    Raises:
        ConfigError: for spaces, or options of the network, that are not supported.
    """

    model: Network

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.state_size = self.model.state_size
        self.backend = self.make_backend(self.model)

    def make_segments(self) -> dict[str, Segment]:
        return {"network": Segment(self.masked(self.make_network()))}

    def act_as(self, acting: Acting) -> None:
        super().act_as(acting)
        for segment in self.segments.values():
            for module in segment.module.modules():
                if isinstance(module, ActorCriticNetwork):
                    for part in module.parts:
                        part.scale_bytes(acting.scale_by_high)

    def make_network(self) -> Network:
        """A new network for `encoder`, `mask`, `dist` and `config.model`, with random weights."""
        gaussian = isinstance(self.dist, DiagGaussian)
        spaces = self.encoder.space, self.action_space
        num_params = self.dist.num_params
        return make_network(*spaces, self.mask, num_params, gaussian, self.config.model)

    def masked(self, network: Network) -> Network:
        """Returns a network that applies the action mask, if observations have a mask.

        If `make_network` of a subclass returns a network that does not apply the mask, this method
        wraps that network. The wrapped network gets observations that contain the mask.
        """
        if self.mask is None or isinstance(network, MaskedNetwork):
            return network
        return MaskedNetwork(network, self.mask, seen=True)

    def make_backend(self, network: Network) -> Backend:
        """Makes the backend that computes the outputs of the network and the gradients of `loss`:
        a faster one of an add-on, or a `Backend`, which computes in torch.

        Args:
            network: a network from `make_network`. Its parameters must be in `flat`.
        """
        found = faster(self, "make_backend")
        make = found.active()
        return Backend(network, self, found.why_not) if make is None else make(network)

    @property
    def learns_with(self) -> str:
        return self.backend.learns_with

    @abstractmethod
    def loss(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes the loss to minimise, and learner statistics. `backend` computes the gradient.

        The loss must be a mean over rows, so that the gradient does not grow with the batch.

        Args:
            rows: the columns `[B, ...]` by name. They hold valid rows only. For a policy with
                memory, `FragmentPolicy.training_rows` describes the columns that differ.

        Returns: the loss `[]`, and learner statistics `[]` that are means over these rows.
        """

    # ---- acting ---------------------------------------------------------------------------------

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        if self.state_size:
            return self.act(obs, np.zeros((len(obs), self.state_size), np.float32))[0]
        return self.backend.action_params(self._normalized_obs(obs))

    def act(self, obs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        obs = self._normalized_obs(obs)
        if not self.state_size:
            return self.backend.action_params(obs), state
        params, _, states = self.backend.unroll(obs[None], state)
        return params[0], states[0]

    def act_in_torch(self, network: Any, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.normalizer is not None:
            obs = self.normalizer.in_torch()(obs)
        if not self.state_size:
            return network.action_params(obs), state
        params, _, states = network.unroll(obs[None], state)
        return params[0], states[0]

    def _normalized_obs(self, obs: np.ndarray) -> np.ndarray:
        if self.normalizer is None:
            return self.encoder.encode(obs)
        return self.normalizer.observations(obs)

    # ---- outputs for a batch --------------------------------------------------------------------

    def normalized(self, batch: SampleBatch) -> SampleBatch:
        """Returns the batch with encoded and normalised observations, and normalised rewards, for
        the network and the loss.

        The batch contains the means and scales with which the policy normalised when it chose the
        actions, and this method uses these. It returns the same batch if the batch is already
        encoded and normalised. If the policy does not normalise, this method only encodes.
        """
        if self.normalizer is None:
            return self.encoder.encode_batch(batch)
        return self.normalizer.normalized(batch)

    def dist_inputs(self, batch: SampleBatch, backend: Backend | None = None) -> np.ndarray:
        """Distribution parameters `[T, N, P]` of the observations of a batch.

        Args:
            batch: `[T, N]`. N may be 0.
            backend: the backend that computes the parameters. `None` means the backend of `model`.
        """
        batch, backend = self.normalized(batch), backend or self.backend
        if self.state_size:
            starts = gae.episode_starts(batch)[:-1]
            return backend.unroll(batch.obs, batch.per_env["state"], starts)[0]
        params = backend.action_params(batch.flat("obs"))
        return params.reshape(*batch.shape, self.dist.num_params)

    def log_prob(self, batch: SampleBatch, params: np.ndarray) -> np.ndarray:
        """Log-probabilities `[T, N]` of the actions of a batch under distribution parameters `[T,
        N, P]`. One call for the whole batch is faster than one call per step."""
        with torch.inference_mode():
            log_prob = self.dist.log_prob(as_tensor(params), as_tensor(batch["actions"]))
        return log_prob.numpy()
