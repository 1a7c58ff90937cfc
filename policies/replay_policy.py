"""`ReplayPolicy`: base class of policies that learn from transitions of a replay buffer."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import numpy as np
import pydantic
import torch
from torch import Tensor, nn

from polopt.common.add_ons import faster
from polopt.common.config import Automatic, shown
from polopt.common.transitions import Sequences, Transitions
from polopt.common.weights import Gradients
from polopt.policies.learning.policy_config import NormalizingConfig
from polopt.policies.learning.reducer import Reducer, value_stats
from polopt.policies.networks.backend import aligned, as_tensor
from polopt.policies.networks.network import Network
from polopt.policies.normalization import Normalizer
from polopt.policies.policy import Policy, reduce_gradient


def _check_steps(value: Any) -> Any:
    """Checks that a list has two whole numbers in order, from 1 to 10,000."""
    if isinstance(value, list | tuple):
        whole = [step for step in value if type(step) is int and 1 <= step <= 10_000]
        if not len(value) == len(whole) == 2 or whole[0] > whole[1]:
            raise ValueError("two whole numbers [FEWEST, MOST] from 1 to 10,000")
    return value


#: The type of the option `n_step`.
_Steps = Annotated[
    Annotated[int, pydantic.Field(ge=1, le=10_000)] | tuple[int, int],
    pydantic.BeforeValidator(_check_steps),
    pydantic.Field(
        description="a whole number from 1 to 10,000, or two of them, [FEWEST, MOST]",
    ),
]
#: The type of the option `target_network_update_freq`.
UpdateFrequency = Annotated[
    int,
    pydantic.Field(
        ge=1,
        le=10**9,
        description="a whole number from 1 to 1,000,000,000. With 1, the target networks move with "
        "every update",
    ),
]


class ReplayConfig(NormalizingConfig):
    """Options of policies that learn from replayed transitions, in addition to the options of
    `NormalizingConfig`.

    Attributes:
        gamma: the discount factor.
        n_step: the largest number of steps of a transition. The reward of a transition is the sum
            of the discounted rewards of its steps. A transition has fewer steps if the episode ends
            earlier, or if the following steps are missing, for example after a failure of a worker.
            With two numbers, the largest number of steps is drawn for each row that the learner
            draws, uniformly from the first number to the second. Both numbers are included.
        tau: how far each move brings a target network towards the trained network, as a fraction of
            their distance. With 1, the target network becomes a copy of the trained network.
        target_network_update_freq: the target networks move once in this number of updates of the
            weights. With `target_network_update_timesteps`, this option has no effect.
        target_network_update_timesteps: the target networks move once in this number of environment
            steps of all workers, as in the DQN of RLlib and of Stable-Baselines3. They move with
            the first update after each multiple of this number. `None` means that
            `target_network_update_freq` counts updates instead.
        random_timesteps: the number of environment steps at the beginning of a run in which actions
            are uniformly random. After these steps, the policy chooses the actions.
        fast_gpu: whether to record the gradient as a CUDA graph if the policy learns on a GPU. This
            gives the same results up to rounding in less time. With False, Python starts each
            kernel. This is also the case if a subclass overrides the loss, or if a network has
            buffers or modules from outside of torch and polopt.
    """

    adam_epsilon: float = pydantic.Field(default=1e-8, ge=1e-30, le=1e6)
    gamma: float = pydantic.Field(default=0.99, ge=0.0, le=1.0)
    n_step: _Steps = 1
    tau: float = pydantic.Field(default=1.0, gt=0.0, le=1.0)
    target_network_update_freq: UpdateFrequency = 1
    target_network_update_timesteps: Automatic = pydantic.Field(default=None, ge=0, le=2**62)
    random_timesteps: int = pydantic.Field(default=0, ge=0, le=2**62)
    fast_gpu: bool = True

    fixed: ClassVar[tuple[str, ...]] = (*NormalizingConfig.fixed, "gamma", "n_step", "fast_gpu")

    @property
    def most_steps(self) -> int:
        """The largest number of steps of a transition."""
        return self.n_step if isinstance(self.n_step, int) else self.n_step[1]


class ReplayPolicy(Policy):
    """Learns from n-step transitions of a replay buffer, with target networks.

        rows = buffer.sample(batch_size)                       # Transitions, B rows
        stats, errors = policy.learn_on_transitions(rows)      # one update
        buffer.update_priorities(rows.indices, errors)         # [B]

    The buffer computes the rewards and discounts of rows with `config.gamma` and `config.n_step`.
    The buffer holds observations as rows of `encoder`. When the policy learns, it encodes these
    observations and normalises them with the current mean and variance of its normaliser.

    A subclass must define `make_segments` and `errors_of`, and one of `add_gradient` and
    `backward`. A policy with memory sets `learns_from = Sequences`. Then `rows` are B sequences in
    all methods, and errors `[B]` have one number for each sequence.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        config: an instance of `config_class`.
        seed: seed of the initial weights, and of the noise in losses.
        device: torch device of the networks.

    Raises:
        ConfigError: for spaces, or options of the network, that are not supported.
    """

    config_class: ClassVar[type[ReplayConfig]] = ReplayConfig
    learns_from: ClassVar[type] = Transitions
    #: Names of the methods from which `add_gradient` computes the gradient. A class that sets them
    #: states that each call starts the same kernels on a GPU, which a recording can repeat. See
    #: docs/write-a-policy.md for what these methods may use.
    graph_members: ClassVar[tuple[str, ...]] = ()
    config: Any  # see Policy
    model: Network

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._updated_at = 0  # environment steps at the last update
        self._faster_params = faster(self, "network_params").active()
        self._faster_backward = faster(self, "backward")

    def make_normalizer(self) -> Normalizer | None:
        config = self.config
        if not config.normalize_observations:
            return None
        return Normalizer(self.encoder, config.clip_observations, None, config.gamma)

    @property
    def samples_uniformly(self) -> bool:
        return self.env_steps < self.config.random_timesteps

    # ---- acting ---------------------------------------------------------------------------------

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        if self.normalizer is None:
            return self.network_params(self.encoder.encode(obs))
        return self.network_params(self.normalizer.observations(obs))

    def network_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` float32 of normalised observations `[N, ...]`."""
        if self._faster_params is not None:
            faster_params: np.ndarray = self._faster_params(obs)
            return faster_params
        with torch.inference_mode():
            params = self.model.action_params(as_tensor(aligned(obs), self.device))
        return params.cpu().numpy()

    def params_in_torch(self, network: Any, obs: Tensor) -> Tensor:
        """Computes the same as `network_params`, in torch and with gradients: `[N, P]`.

        Args:
            network: a network with the same layers as `model`.
            obs: normalised observations `[N, ...]`.
        """
        params: Tensor = network.action_params(obs)
        return params

    def act_in_torch(self, network: Any, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if self.normalizer is not None:
            obs = self.normalizer.in_torch()(obs)
        return self.params_in_torch(network, obs), state

    # ---- learning -------------------------------------------------------------------------------

    @property
    def learns_with(self) -> str:
        return self._faster_backward.described

    def backward(self, rows: Transitions) -> tuple[dict[str, float], np.ndarray]:
        """Adds the gradient of the weighted mean loss to `flat.grads`. The caller must first set
        `flat.grads` to 0.

        Args:
            rows: B encoded and normalised rows.

        Returns:
            learner statistics, and the absolute TD errors `[B]` before the update.
        """
        if compute := self._faster_backward.active():
            found: tuple[dict[str, float], np.ndarray] | None = compute(rows)
            if found is not None:
                return found
        return self.backward_in_torch(rows)

    @abstractmethod
    def errors_of(self, rows: Transitions) -> np.ndarray:
        """The absolute TD errors `[B]` float32 of encoded and normalised rows, with the current
        weights."""

    @np.errstate(all="ignore")
    def td_errors(self, rows: Transitions) -> np.ndarray:
        """The absolute TD errors `[B]` float32 of rows before normalisation, with the current
        weights. An error that is not finite becomes 0. With prioritised replay, the workers of
        `async_replay` compute the initial priorities of new rows in this way (Horgan et al.,
        2018)."""
        return _finite(self.errors_of(self.normalized(rows)))

    @np.errstate(all="ignore")
    def learn_on_transitions(
        self, rows: Transitions, reducer: Reducer | None = None
    ) -> tuple[dict[str, float], np.ndarray]:
        """Makes one update, with the gradient of the weighted mean loss over the rows of all
        learners.

        Args:
            rows: B rows of this learner.
            reducer: sums over all learners, so that all learners make the same update. `None` means
                that there is only one learner.

        Returns:
            learner statistics (means over the rows of all learners), and the absolute TD errors
            `[B]` before the update. These errors are the new priorities of the B rows. An error
            that is not finite becomes 0, so that the buffer does not draw its row again soon.
        """
        self.flat.zero_grads()
        stats, errors = self.backward(self.normalized(rows))
        self.progress.gradient_rows = rows.num_rows
        if reducer is not None and reducer.world_size > 1:
            stats = reduce_gradient(self, rows.num_rows, stats, reducer)
        return stats | self.apply_flat(), _finite(errors)

    def learn_on_batch(
        self, batch: Transitions, reducer: Reducer | None = None
    ) -> dict[str, float]:
        return self.learn_on_transitions(batch, reducer)[0]

    @np.errstate(all="ignore")
    def compute_gradients(self, batch: Transitions) -> Gradients:
        """Computes the gradient that `learn_on_transitions` would apply. To apply this gradient,
        call `apply_gradients`."""
        self.flat.zero_grads()
        stats, _ = self.backward(self.normalized(batch))
        count = batch.num_rows
        return Gradients(self.flat.get_grads(), self.version, count, stats, count)

    def normalized(self, rows: Any) -> Any:
        """Returns the rows with encoded and normalised observations, for the networks."""
        if self.normalizer is None:
            return self.encoder.encode_batch(rows)
        observations = self.normalizer.observations
        if isinstance(rows, Sequences):
            obs, successors = map(observations, (rows.batch.all_obs, rows.batch.successor_obs))
            batch = dataclasses.replace(rows.batch, all_obs=obs, successor_obs=successors)
            return rows._replace(batch=batch)
        return rows._replace(obs=observations(rows.obs), next_obs=observations(rows.next_obs))

    def tensors(self, rows: Transitions) -> Any:
        """Converts the rows to tensors on the device of the networks."""
        return Transitions._make(as_tensor(array, self.device) for array in rows)

    def backward_in_torch(self, rows: Transitions) -> tuple[dict[str, float], np.ndarray]:
        """Computes what `backward` computes, with `add_gradient`."""
        stats, errors = self.add_gradient(self.tensors(rows))
        return as_floats(stats), errors.cpu().numpy()

    def add_gradient(self, rows: Any) -> tuple[dict[str, Tensor], Tensor]:
        """Adds the gradient to `flat.grads` in torch, for `backward_in_torch`.

        Args:
            rows: `Transitions` of tensors.

        Returns:
            statistics `[]`, and the absolute TD errors `[B]`, without gradients.

        Raises:
            NotImplementedError: the class does not define this method.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define add_gradient")

    @property
    def graph_key(self) -> Hashable:
        """What the next gradient depends on, besides the weights, the rows, noise from `normal` and
        the config. A recorded gradient is only used for the key with which it was recorded."""
        return None

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal noise `[*shape]` float32 for losses, on the device of the networks."""
        return self.drawn(shape).to(self.device)

    def drawn(self, shape: tuple[int, ...]) -> Tensor:
        """New standard normal noise `[*shape]` float32 on the CPU."""
        return torch.from_numpy(self.shuffle.standard_normal(shape, dtype=np.float32))

    @contextmanager
    def training(self, *names: str) -> Iterator[None]:
        """A context in which networks are in training mode. When the context ends, they return to
        evaluation mode.

        Args:
            names: names of segments. By default, all trained segments.
        """
        modules = [self.segments[name].module for name in names or self.flat.trained]
        for module in modules:
            module.train()
        try:
            yield
        finally:
            for module in modules:
                module.eval()

    def on_update(self) -> None:
        """Moves the target networks if `target_network_update_timesteps` environment steps, or
        otherwise `target_network_update_freq` updates, are complete."""
        every = self.config.target_network_update_timesteps
        if every is None:
            is_due = self.version % self.config.target_network_update_freq == 0
        else:
            is_due = self.env_steps // every > self._updated_at // every
        self._updated_at = self.env_steps
        if is_due:
            self.flat.refresh_copies(self.config.tau)

    # ---- state ----------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "updated_at": self._updated_at}

    def set_state(self, state: Mapping[str, Any]) -> None:
        # Older versions saved no `updated_at`.
        updated_at = state.get("updated_at", state["env_steps"])
        if type(updated_at) is not int or not 0 <= updated_at <= state["env_steps"]:
            raise ValueError(
                f"'updated_at' must be a number of environment steps, at most "
                f"{state['env_steps']}; got {shown(updated_at)}"
            )
        super().set_state(state)
        self._updated_at = updated_at


def bootstrapped(rows: Any, values: Tensor) -> Tensor:
    """Computes the targets `[B]`, which are rewards plus discounted values of the next
    observations.

    If the discount of a row is 0, its next observation is meaningless, and the value may be NaN.
    This function ignores such a value.

    Args:
        rows: `Transitions` of tensors.
        values: `[B]` values of the next observations.
    """
    return rows.rewards + torch.where(rows.discounts > 0.0, rows.discounts * values, 0.0)


def critics_loss(
    rows: Any, values: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Computes the sum over K critics of the weighted mean of `(values - targets)^2 / 2`. Returns
    this loss `[]`, the TD errors `[K, B]`, and statistics `[]`.

    Args:
        rows: `Transitions` of tensors.
        values: `[K, B]` values of the stored actions.
        targets: `[B]`.
    """
    errors = values - targets
    loss = 0.5 * (rows.weights * errors.square().sum(0)).mean()
    return loss, errors, {"vf_loss": loss, **value_stats(values.mean(0), targets)}


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """A context in which the parameters of `module` get no gradients."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)


def as_floats(stats: Mapping[str, Tensor]) -> dict[str, float]:
    """Converts scalar tensors to numbers, with one transfer from the device."""
    numbers = torch.stack([value.detach() for value in stats.values()]).tolist()
    return dict(zip(stats, numbers, strict=True))


def _finite(errors: np.ndarray) -> np.ndarray:
    """Returns the errors `[B]`, with 0 in place of each error that is not finite."""
    if math.isfinite(float(np.add.reduce(errors))):
        return errors
    return np.nan_to_num(errors, nan=0.0, posinf=0.0, neginf=0.0)
