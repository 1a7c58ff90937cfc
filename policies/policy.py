"""`Policy`: an acting policy that learns. What strategies need of an algorithm."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import nn

from polopt.common.compression import PackedGradients
from polopt.common.config import ConfigError
from polopt.common.moments import Moments
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import FORMER_ACTING, Acting, Gradients, Weights
from polopt.metrics.learner import LEARNER_KEYS
from polopt.policies.acting_policy import ActingPolicy
from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.distributions.make_distribution import make_distribution
from polopt.policies.learning.flat_parameters import FlatParameters, Segment
from polopt.policies.learning.learning_progress import LearningProgress
from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.learning.reducer import Reducer
from polopt.policies.learning.weight_updater import WeightUpdater
from polopt.policies.normalization import kinds_of, sum_moments
from polopt.policies.onnx_export import write_onnx


class Policy(ActingPolicy):
    """Chooses actions, and learns from batches. Ray and the strategy do not appear in it.

        actions, extras = policy.compute_actions(obs)
        batch = policy.postprocess(batch)      # in the worker that sampled the batch
        stats = policy.learn_on_batch(batch)   # in the learner

    A subclass provides `make_segments` and `action_params`. It says in `learns_from` what a batch
    is, and provides `compute_gradients` of it, or `learn_on_batch`, or both. `NetworkPolicy` acts
    with a network of polopt, and `ActorCriticPolicy` also learns: it leaves the loss to a subclass.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        config: an instance of `config_class`.
        seed: seed of the initial weights and of the shuffling of minibatches.
        device: torch device of the networks.

    Attributes (besides the attributes of `ActingPolicy`):
        acting: how observations and actions are scaled. Sent with the weights. `act_as` changes it.
        segments: the modules, by name.
        model: the network that acts, the segment `network`.
        flat: parameters of all segments and their gradients, one tensor each.
        coefficients: scalars that learning adapts, which start from the options of the same names.
            They are sent with the weights.
        progress: counts of the updates that this object has made.

    Raises:
        ConfigError: for spaces that are not supported.
    """

    config_class: ClassVar[type[PolicyConfig]] = PolicyConfig
    #: The type of a batch: `SampleBatch`, or `Transitions` or `Sequences` of a replay buffer. An
    #: optimizer with the same `learns_from` can train the policy.
    learns_from: ClassVar[type] = SampleBatch
    #: Any, because a subclass declares its own config class, and type checkers refuse a variable
    #: that narrows the type of another one.
    config: Any

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        config: PolicyConfig,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        super().__init__(observation_space, action_space, config, seed, device)
        self.acting = Acting(config.normalize_actions, config.clip_actions)
        # The initial weights depend on `seed` only, and torch's global generators are not changed:
        # `torch.manual_seed` would also seed the GPUs' generators, and equally in every process.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.segments = self.make_segments()
        for segment in self.segments.values():
            segment.module.to(self.device).eval()
        self.model: nn.Module = self.segments["network"].module
        self.flat = FlatParameters(self.segments, tail=len(LEARNER_KEYS) + 1)
        self._updater = WeightUpdater(self.flat, config)
        self.coefficients: dict[str, float] = {}
        self.progress = LearningProgress()

    def __repr__(self) -> str:
        """Spaces, number of parameters that are trained, and version."""
        spaces = f"{_short(self.encoder.space)} -> {_short(self.action_space)}"
        size = sum(place.stop - place.start for place in self.flat.trained.values())
        name = type(self).__name__
        return f"{name}({spaces}, {size:,} parameters, version {self.version}, {self.device})"

    def make_distribution(self) -> ActionDistribution:
        config = self.config
        squash, normalize = config.model.squash_actions, config.normalize_actions
        return make_distribution(self.action_space, squash, normalize, config.clip_actions)

    def act_as(self, acting: Acting) -> None:
        """From now on scales actions as the policy that weights are taken from, and observations
        where the family of the policy does. The config says so, too."""
        if acting == self.acting:
            return
        self.acting = acting
        options = {"normalize_actions": acting.normalize_actions}
        options["clip_actions"] = acting.clip_actions
        self.config = self.config.model_copy(update=options)
        self.dist = self.make_distribution()

    @classmethod
    def count_parameters(
        cls, observation_space: Space[Any], action_space: Space[Any], config: PolicyConfig
    ) -> int | None:
        """The number of trained parameters, of all segments but copies. Takes no memory for
        them. None if the segments need real numbers, for example to print weights.

        Raises:
            ConfigError: for spaces or sizes that are not supported.
        """
        policy = cls.__new__(cls)
        ActingPolicy.__init__(policy, observation_space, action_space, config)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            try:
                segments = policy.make_segments()
            except (NotImplementedError, RuntimeError):  # torch's, for values of meta tensors
                return None
        modules = [segment.module for segment in segments.values() if segment.copy_of is None]
        return sum(p.numel() for module in modules for p in module.parameters())

    @abstractmethod
    def make_segments(self) -> dict[str, Segment]:
        """New modules with random weights, by name. `network` is the one that acts. Called once,
        when `encoder`, `dist` and `config` are there."""

    def export_onnx(self, path: str | Path) -> None:
        """Writes the policy as an ONNX model that acts deterministically, as `predict`.

        Inputs are batches `[N, ...]` in the dtype of the observation space: `observations`. Of a
        Dict or Tuple space one for each part, such as `observations.position` (Discrete and
        MultiDiscrete: int64). Outputs are `actions` `[N, ...]` for the environment and
        `action_dist_inputs` `[N, P]`, the parameters of the distribution. N is free. A policy with
        memory has the further input `state` and output `next_state`, `[N, S]` float32.

        Raises:
            ConfigError: the extra `onnx` is not installed, the policy cannot be exported, or the
                file cannot be written.
        """
        write_onnx(path, self, self.model)

    # ---- learning -------------------------------------------------------------------------------

    def compute_gradients(self, batch: Any) -> Gradients:
        """The gradient of a batch, not clipped, not applied. Optimizers with
        `needs_gradients` need it (`async_gradients`, `sync_gradients`), and so does
        `learn_on_batch` as it is here.

        Args:
            batch: an object of `learns_from`. A `SampleBatch` is postprocessed.

        Raises:
            NotImplementedError: the policy does not have it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} gives no gradients: it does not define compute_gradients"
        )

    @classmethod
    def gives_gradients(cls) -> bool:
        """Whether the class defines how the gradients of a batch are computed."""
        methods = ("compute_gradients", "minibatch_gradients")
        return any(getattr(cls, name) is not getattr(Policy, name) for name in methods)

    def minibatch_gradients(self, batch: Any) -> Iterator[Gradients]:
        """The gradients that a batch is learned with, one after the other. By default one, of the
        whole batch. Each is computed when it is asked for, with the weights of that moment. Its
        `new_rows` are the rows that no gradient before it was of, and the last one has
        `ends_rollout`. Argument and errors as `compute_gradients`."""
        gradients = self.compute_gradients(batch)
        yield gradients._replace(new_rows=gradients.rows, ends_rollout=True)

    def check_gradients(self, gradients: Any) -> None:
        """Checks that `gradients` fit this network. None stands for a gradient that was not finite.

        Raises:
            TypeError, ValueError: says what it is.
        """
        if gradients is None:
            return
        vector: Any
        if isinstance(gradients, Gradients):
            vector = gradients.flat
        elif isinstance(gradients, PackedGradients):
            vector = gradients.packed
        else:
            raise TypeError(f"gradients were expected; got {type(gradients).__name__}")
        if vector.shape != self.flat.grads.shape:
            size = len(self.flat.grads)
            raise ValueError(f"a gradient of shape [{size}] was expected; got {list(vector.shape)}")

    @np.errstate(all="ignore")
    def learn_on_batch(self, batch: Any, reducer: Reducer | None = None) -> dict[str, float]:
        """Learns from a batch of this learner: applies updates to the weights. By default one
        update, by the mean gradient of all learners.

        Args:
            batch: an object of `learns_from`. A `SampleBatch` is postprocessed.
            reducer: sums over all learners, which make the same updates. None for one learner.

        Returns: learner statistics, means over rows (of all learners) and minibatches. Empty if no
            learner has a valid row.
        """
        gradients = self.compute_gradients(batch)
        self.flat.set_grads(gradients.flat)
        self.progress.gradient_rows = gradients.rows
        stats = gradients.stats
        if reducer is not None and reducer.world_size > 1:
            stats = reduce_gradient(self, gradients.rows, stats, reducer)
        return {**stats, **self.apply_flat()} if self.progress.gradient_rows else {}

    @np.errstate(all="ignore")
    def apply_gradients(self, gradients: Gradients, lr_scale: float = 1.0) -> dict[str, float]:
        """Clips and applies a gradient, computed by this policy or another. See `apply_flat`."""
        self.flat.set_grads(gradients.flat)
        self.progress.gradient_rows = gradients.rows
        return self.apply_flat(lr_scale)

    @np.errstate(all="ignore")
    def apply_flat(self, lr_scale: float = 1.0) -> dict[str, float]:
        """Clips and applies the gradient in `flat.grads`. See `WeightUpdater.apply`.

        Returns `grad_norm` (before clipping) and `default_optimizer_learning_rate`. Without
        `grad_norm` if the gradient was not finite and was skipped.
        """
        applied, stats = self._updater.apply(self.env_steps, lr_scale, self.resting)
        self.progress.count_update(applied)
        if applied:
            self.version += 1
            self.on_update()
        return stats

    @property
    def resting(self) -> Collection[str]:
        """Segments that the next update leaves as they are. Their gradient is 0."""
        return ()

    def on_update(self) -> None:
        """Called after each update of the weights, to refresh what is computed from them."""
        return

    def set_option(self, name: str, value: Any) -> None:
        """Changes an option of the config during training.

        Raises:
            ConfigError: for an unknown option, a wrong value, or an option that is fixed.
        """
        name = self.config_class.aliases.get(name, name)
        if name in self.config_class.fixed:
            raise ConfigError(f"key {name!r} cannot be changed while the policy exists")
        options = {**self.config.to_dict(), name: value}
        self.config = self.config_class.parse(options, "policy")
        self._updater.configure(self.config)
        if name in self.coefficients:
            self.coefficients[name] = float(value)

    # ---- weights and state ----------------------------------------------------------------------

    def get_weights(self) -> Weights:
        """A copy of the weights `[P]`, with the arguments of schedules and losses, the moments of
        the normaliser, and how the policy acts."""
        flat = self.flat.get_params()
        moments = None if self.normalizer is None else self.normalizer.moments
        coefficients = dict(self.coefficients)
        return Weights(flat, self.version, self.env_steps, coefficients, moments, self.acting)

    def set_weights(self, weights: Weights) -> None:
        """Copies weights, their version, environment steps, coefficients and, if they have any,
        moments. Acts as they say.

        Raises:
            ValueError: if the weights belong to another network.
        """
        if weights.moments is not None:
            if self.normalizer is None:
                raise ValueError("the weights have moments, and this policy does not normalise")
            self.normalizer.moments = weights.moments
        self.flat.set_params(weights.flat)
        if weights.acting is not None:
            self.act_as(weights.acting)
        self.version = weights.version
        self.env_steps = weights.env_steps
        self.coefficients = dict(weights.coefficients)

    @np.errstate(all="ignore")
    def add_moments(self, moments: Moments | None, reducer: Reducer | None = None) -> None:
        """Adds the moments of new samples to the normaliser, if the policy has one.

        Args:
            moments: moments of the samples of this learner. None: it has no samples.
            reducer: sums over all learners, so that each adds the moments of all learners' samples.
                None for one learner.
        """
        if self.normalizer is not None:
            moments = moments or Moments.zero(len(self.normalizer.moments.mean))
            if reducer is not None:
                moments = sum_moments(moments, reducer)
            self.normalizer.moments = self.normalizer.moments.merge(moments)

    def get_state(self) -> dict[str, Any]:
        """The state of learning: tensors, numbers, strings, and lists and dicts of these."""
        return {
            "network": _layers(self.model),
            **self.flat.get_state(),
            **self._updater.get_state(),
            "version": self.version,
            "env_steps": self.env_steps,
            "coefficients": dict(self.coefficients),
            "configured_coefficients": self._configured_coefficients(),
            "shuffle": self.shuffle.bit_generator.state,
            "moments": None if self.normalizer is None else self.normalizer.get_state(),
            "acting": self.acting._asdict(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`.

        An adapted coefficient is restored if it was adapted from the value that the config has.
        Otherwise the config's value is used, because it was changed since. How the policy acts is
        restored in any case.

        Raises:
            ValueError: if it belongs to another network or another torch optimizer, or normalises
                something else.
        """
        self.check_network(state["network"])
        moments = state.get("moments")  # not in states of version 0.2
        own = "nothing" if self.normalizer is None else self.normalizer.kinds
        if kinds_of(moments) != own:
            raise ValueError(
                f"the state must be of a policy that normalises {own}; got one that normalises "
                f"{kinds_of(moments)}"
            )
        flat = self.flat.params_of(state)
        acting = _acting_of(state)
        if self.normalizer is not None:
            self.normalizer.set_state(state["moments"])
        configured, before = self._configured_coefficients(), state["configured_coefficients"]
        adapted = {
            name: value
            for name, value in state["coefficients"].items()
            if before.get(name) == configured.get(name)
        }
        coefficients = {**self.coefficients, **configured, **adapted}
        weights = Weights(flat, state["version"], state["env_steps"], coefficients, acting=acting)
        self.set_weights(weights)
        self._updater.set_state(state)
        self.shuffle.bit_generator.state = state["shuffle"]

    def check_network(self, layers: str) -> None:
        """Checks that `layers`, from the key `network` of a state, describes `model`.

        Class names are not compared, so that they may change.

        Raises:
            ValueError: if the layers differ.
        """
        if layers.partition("(")[2] != _layers(self.model).partition("(")[2]:
            raise ValueError(
                f"the state must be of network {_layers(self.model)}; got {layers}: it belongs to "
                "another network"
            )

    def _configured_coefficients(self) -> dict[str, float]:
        """The options of the config with which coefficients start."""
        named = [name for name in self.coefficients if hasattr(self.config, name)]
        return {name: getattr(self.config, name) for name in named}


# Overflow makes the gradient non-finite. The weight updater does not apply such gradients.
@np.errstate(all="ignore")
def reduce_gradient(
    policy: Policy, count: int, stats: Mapping[str, float], reducer: Reducer
) -> dict[str, float]:
    """Averages `policy.flat.grads`, the buffers of modules and `stats` over the rows of all
    learners.

    They are in one tensor with the gradient and the row count: one all-reduce sums them.

    Args:
        policy: this learner. Its gradient is the mean over `count` rows.
        count: its number of rows.
        stats: its statistics, means over the same rows.
        reducer: sums over all learners.

    Returns:
        the averaged statistics.
    """
    flat = policy.flat
    if count == 0:
        flat.zero_grads()
    elif not math.isfinite(flat.norm()):
        # The sum will not be finite either, and no learner will apply it. Which learner caused it
        # is only known here.
        policy.progress.non_finite_gradients += 1
    flat.set_tail([1.0, *(stats.get(key, 0.0) for key in LEARNER_KEYS)])
    flat.pack_buffers()
    flat.scale(float(count))
    reducer.sum_(flat.buffer)
    rows, *sums = flat.get_tail()
    policy.progress.gradient_rows = round(rows)
    flat.scale(1.0 / max(rows, 1.0))
    if rows:
        flat.unpack_buffers()
    return {key: total / max(rows, 1.0) for key, total in zip(LEARNER_KEYS, sums, strict=True)}


def _acting_of(state: Mapping[str, Any]) -> Acting:
    """How the policy of a state acts.

    Raises:
        ValueError: it is not said by three truth values.
    """
    saved = state.get("acting", FORMER_ACTING._asdict())
    if set(saved) != set(Acting._fields) or not all(isinstance(v, bool) for v in saved.values()):
        raise ValueError(f"'acting' must have {list(Acting._fields)}, true or false; got {saved}")
    return Acting(**saved)


def _layers(network: nn.Module) -> str:
    """The layers of a network and their sizes on one line."""
    return " ".join(str(network).split())


def _short(space: Space[Any]) -> str:
    """A space without the bounds of a box."""
    return f"Box{space.shape}" if isinstance(space, spaces.Box) else f"{space!s:.80}"
