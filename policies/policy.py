"""`Policy`: base class of all algorithms, and the interface that `polopt.optimizers` uses."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import nn

from polopt.common.checks import Checks
from polopt.common.compression import check_gradients
from polopt.common.config import ConfigError
from polopt.common.moments import Moments
from polopt.common.sample_batch import SampleBatch
from polopt.common.threads import one_torch_thread
from polopt.common.weights import Acting, Gradients, Weights
from polopt.metrics.learner import LEARNER_KEYS
from polopt.metrics.number import Number, declared
from polopt.policies.acting_policy import ActingPolicy
from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.distributions.make_distribution import make_distribution
from polopt.policies.learning.flat_parameters import FlatParameters, Segment
from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.learning.reducer import Reducer
from polopt.policies.learning.weight_updater import LearningProgress, WeightUpdater
from polopt.policies.normalization import kinds_of, sum_moments
from polopt.policies.onnx_export import write_onnx


class Policy(ActingPolicy, Checks):
    """Chooses actions and learns from batches. A policy does not use Ray.

        actions, extras = policy.compute_actions(obs)
        batch = policy.postprocess(batch)      # in the worker that sampled the batch
        stats = policy.learn_on_batch(batch)   # in the learner

    A subclass must define `make_segments`, `action_params`, and at least one of the methods
    `compute_gradients` and `learn_on_batch`. It sets `learns_from` to the type of its batches.

    Some subclasses already define most of these methods. `NetworkPolicy` defines how to act with a
    `Network`. `ActorCriticPolicy` also defines how to learn, so that its subclasses need to define
    only the loss.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        config: an instance of `config_class`.
        seed: seed of the initial weights and of the shuffling of minibatches.
        device: torch device of the networks.

    Attributes (besides the attributes of `ActingPolicy`):
        acting: how observations and actions are scaled. The weights carry a copy of `acting`. To
            change `acting`, call `act_as`.
        segments: the modules of the policy, each in a `Segment`, by name.
        model: the network that acts. This is the module of the segment `network`.
        flat: one tensor with the parameters of all segments, and one tensor with their gradients.
        coefficients: scalars that learning adapts, such as a KL coefficient. If an option has the
            same name as a coefficient, the option is the initial value of the coefficient. The
            weights carry a copy of the coefficients.
        progress: counts the rows from which this object has learned, and the gradients that it has
            skipped.

    Raises:
        ConfigError: for spaces, or options of the network, that are not supported.
    """

    config_class: ClassVar[type[PolicyConfig]] = PolicyConfig
    #: The type of a batch: `SampleBatch`, or `Transitions` or `Sequences` of a replay buffer. Only
    #: a `PolicyOptimizer` that makes batches of this type can train the policy.
    learns_from: ClassVar[type] = SampleBatch
    #: The learner statistics that the class computes in addition to `LEARNER_KEYS` and to the
    #: numbers of its base classes. Their keys are relative to `learners/default_policy/`. Because
    #: Tune takes the columns of `progress.csv` from the first result, results before the first
    #: update have these keys with the value NaN.
    numbers: ClassVar[tuple[Number, ...]] = ()
    #: Keys of further statistics, without a declaration.
    further_statistics: ClassVar[Sequence[str]] = ()
    #: The type is Any, because each subclass has its own config class, and type checkers do not
    #: allow a subclass to narrow the type of a variable.
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
        # Random initial weights depend only on `seed`, and the states of torch's global generators
        # do not change. `torch.manual_seed` would also change the states of the generators on the
        # GPUs. Without `fork_rng`, all processes would continue with the same generator state,
        # because their policies have the same `seed`. The orthogonal weights of torch depend on the
        # number of threads in their last digits, so they are made in one thread.
        with torch.random.fork_rng(devices=[]), one_torch_thread():
            torch.default_generator.manual_seed(seed)
            self.segments = self.make_segments()
        for segment in self.segments.values():
            segment.module.to(self.device).eval()
        self.model: nn.Module = self.segments["network"].module
        self.flat = FlatParameters(self.segments, tail=len(self.statistic_keys()) + 1)
        self._updater = WeightUpdater(self.flat, config)
        self.coefficients: dict[str, float] = {}
        self.progress = LearningProgress()

    def __repr__(self) -> str:
        """Shows the spaces, the number of trained parameters, the version, the device, and what
        computes the gradients."""
        spaces = f"{_short(self.encoder.space)} -> {_short(self.action_space)}"
        size = sum(place.stop - place.start for place in self.flat.trained.values())
        name = type(self).__name__
        where = f"version {self.version}, {self.device}, learns with {self.learns_with}"
        return f"{name}({spaces}, {size:,} parameters, {where})"

    @classmethod
    def statistic_keys(cls) -> list[str]:
        """The keys of the learner statistics in results: `LEARNER_KEYS`, and the
        `further_statistics` and `numbers` of the class and of its base classes."""
        return [*_statistic_keys(cls)]

    @property
    def learns_with(self) -> str:
        """What computes the gradients in this process: `torch`, or the name of a faster
        implementation, such as `NumPy`. If a faster implementation exists but is not used, the
        reason follows, such as `torch (MyPolicy changes loss)`."""
        return "torch"

    def make_distribution(self) -> ActionDistribution:
        config = self.config
        squash, normalize = config.model.squash_actions, config.normalize_actions
        return make_distribution(self.action_space, squash, normalize, config.clip_actions)

    def act_as(self, acting: Acting) -> None:
        """Sets `acting`, and changes the config and the action distribution accordingly.

        `set_weights` calls this method, because weights carry the `acting` of the policy that
        learned them. `NetworkPolicy.act_as` also changes how the network scales images.
        """
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
        """The number of trained parameters. Parameters of target networks do not count.

        The method makes the segments on torch's meta device, so it allocates no memory for the
        parameters. It returns None if `make_segments` needs the values of parameters, for example
        because a module prints its weights.

        Raises:
            ConfigError: for spaces or sizes that are not supported.
        """
        new: Any = cls.__new__  # a class may choose a subclass for the spaces
        policy: Policy = new(cls, observation_space, action_space)
        ActingPolicy.__init__(policy, observation_space, action_space, config)
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            try:
                segments = policy.make_segments()
            except (NotImplementedError, RuntimeError):  # raised when code reads a meta tensor
                return None
        modules = [segment.module for segment in segments.values() if segment.copy_of is None]
        return sum(p.numel() for module in modules for p in module.parameters())

    @abstractmethod
    def make_segments(self) -> dict[str, Segment]:
        """Makes the modules, with random weights, by name. The segment `network` acts.

        `__init__` calls this method once, after it has set `encoder`, `dist` and `config`.
        """

    def export_onnx(self, path: str | Path) -> None:
        """Writes the policy as an ONNX model that acts deterministically, like `predict`.

        The input is `observations` `[N, ...]`, in the dtype of the observation space. For a Dict or
        Tuple space, the model has one input for each part, such as `observations.position`.
        Discrete and MultiDiscrete inputs are int64. The outputs are `actions` `[N, ...]` for the
        environment, and `action_dist_inputs` `[N, P]`, the parameters of the distribution. N must
        be at least 1. The model of a policy with memory also has the input `state` and the output
        `next_state`, both `[N, S]` float32.

        Raises:
            ConfigError: the extra `onnx` is not installed, the policy cannot be exported, or the
                file cannot be written.
        """
        write_onnx(path, self, self.model)

    # ---- learning -------------------------------------------------------------------------------

    def compute_gradients(self, batch: Any) -> Gradients:
        """Computes the gradient of a batch. Does not clip or apply the gradient.

        The default `minibatch_gradients` and the default `learn_on_batch` call this method.

        Args:
            batch: an instance of `learns_from`. A `SampleBatch` must be postprocessed.

        Raises:
            NotImplementedError: the class does not define this method.
            ConfigError: a `FragmentPolicy` has a network with buffers that learning changes, such
                as the running statistics of batch normalisation.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot compute gradients: it does not define compute_gradients"
        )

    @classmethod
    def gives_gradients(cls) -> bool:
        """Whether the class defines `compute_gradients` or `minibatch_gradients`."""
        methods = ("compute_gradients", "minibatch_gradients")
        return any(getattr(cls, name) is not getattr(Policy, name) for name in methods)

    def minibatch_gradients(self, batch: Any) -> Iterator[Gradients]:
        """Yields one gradient for each update that the policy makes with a batch. The default
        yields one gradient of the whole batch.

        Workers of `async_gradients` and `sync_gradients` call this method. The generator computes
        each gradient when the worker requests it, with the weights that the policy has then.
        `new_rows` of a gradient counts the rows of the batch that no earlier gradient of the
        generator has used. The last gradient has `ends_rollout=True`. `compute_gradients` describes
        the argument and the errors.
        """
        gradients = self.compute_gradients(batch)
        yield gradients._replace(new_rows=gradients.rows, ends_rollout=True)

    def check_gradients(self, gradients: Any) -> None:
        """Checks that `gradients` fit this network.

        `None` stands for a gradient that was not finite, and passes the check.

        Raises:
            TypeError: the argument is not a gradient.
            ValueError: the gradient has another shape than the trained parameters of this policy.
        """
        check_gradients(gradients, len(self.flat.grads))

    @np.errstate(all="ignore")
    def learn_on_batch(self, batch: Any, reducer: Reducer | None = None) -> dict[str, float]:
        """Learns from the batch of this learner. The default makes one update, with the gradient of
        the mean loss over the rows of all learners.

        Args:
            batch: an instance of `learns_from`. A `SampleBatch` must be postprocessed.
            reducer: sums over all learners, so that all learners make the same updates. `None`
                means that there is only one learner.

        Returns: learner statistics, which are means over the rows of all learners and over
            minibatches. Empty if no learner has a valid row.
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
        """Clips and applies a gradient. A copy of this policy in another process may have computed
        the gradient. `apply_flat` describes the statistics that this method returns."""
        self.flat.set_grads(gradients.flat)
        self.progress.gradient_rows = gradients.rows
        return self.apply_flat(lr_scale)

    @np.errstate(all="ignore")
    def apply_flat(self, lr_scale: float = 1.0) -> dict[str, float]:
        """Clips and applies the gradient in `flat.grads`. See `WeightUpdater.apply`.

        Returns `default_optimizer_learning_rate`, and `grad_norm`, the norm before clipping. A
        gradient that is not finite or too large is skipped, and then `grad_norm` is missing.
        """
        applied, stats = self._updater.apply(self.env_steps, lr_scale, self.resting)
        self.progress.count_update(applied)
        if applied:
            self.version += 1
            self.on_update()
        return stats

    @property
    def resting(self) -> Collection[str]:
        """The names of the segments that the next update must not change. The gradient of these
        segments is 0."""
        return ()

    def on_update(self) -> None:
        """Updates values that depend on the weights, such as target networks. `apply_flat` calls
        this method after each update of the weights. The default does nothing."""
        return

    def set_option(self, name: str, value: Any) -> None:
        """Changes an option of the config during training.

        Raises:
            ConfigError: for an unknown option, a wrong value, or an option that cannot be changed.
        """
        name = self.config_class.other_names().get(name, name)
        if name in self.config_class.fixed:
            raise ConfigError(f"key {name!r} cannot be changed after the policy has been made")
        options = {**self.config.to_dict(), name: value}
        self.config = self.config_class.parse(options, "policy")
        self._updater.configure(self.config)
        if name in self.coefficients:
            self.coefficients[name] = float(value)

    # ---- weights and state ----------------------------------------------------------------------

    def get_weights(self) -> Weights:
        """Returns a copy of the weights `[P]`. The result also has the version, the environment
        steps, the coefficients, `acting`, and the moments (running mean and variance) of the
        normaliser."""
        flat = self.flat.get_params()
        moments = None if self.normalizer is None else self.normalizer.moments
        coefficients = dict(self.coefficients)
        return Weights(flat, self.version, self.env_steps, coefficients, moments, self.acting)

    def set_weights(self, weights: Weights) -> None:
        """Copies `weights` into this policy, with the version, environment steps and coefficients.
        If `weights` has `acting` or the moments of a normaliser, the policy also copies these.

        Raises:
            ValueError: the weights belong to another network, or have moments that this policy
                cannot use.
        """
        if weights.moments is not None and self.normalizer is None:
            raise ValueError(
                "the weights have the moments of a normaliser, but this policy does not normalise"
            )
        self.flat.set_params(weights.flat)  # raises for another network, before anything changes
        if weights.moments is not None and self.normalizer is not None:
            self.normalizer.moments = weights.moments
        if weights.acting is not None:
            self.act_as(weights.acting)
        self.version = weights.version
        self.env_steps = weights.env_steps
        self.coefficients = dict(weights.coefficients)

    @np.errstate(all="ignore")
    def add_moments(self, moments: Moments | None, reducer: Reducer | None = None) -> None:
        """Adds the moments (row count, mean and variance) of new samples to the normaliser, if the
        policy has one.

        Args:
            moments: moments of the new samples of this learner. `None` means that this learner has
                no new samples.
            reducer: sums over all learners, so that each learner adds the moments of all samples.
                `None` means that there is only one learner.
        """
        if self.normalizer is not None:
            moments = moments or Moments.zero(len(self.normalizer.moments.mean))
            if reducer is not None:
                moments = sum_moments(moments, reducer)
            self.normalizer.moments = self.normalizer.moments.merge(moments)

    def get_state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint needs to continue learning. The state consists of
        tensors, numbers, bools, strings, None, and lists and dicts of these."""
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

        A coefficient is restored if its option has the same value now as when the state was saved.
        If the user has changed the option since, the coefficient gets the new value of the option.
        `acting` is restored even if its options have other values now.

        Raises:
            ValueError: the state belongs to another network or another torch optimizer, the policy
                that saved the state normalises something else, or a value of the state is wrong.
        """
        self.check_network(state["network"])
        moments = state["moments"]
        own = "nothing" if self.normalizer is None else self.normalizer.kinds
        if kinds_of(moments) != own:
            raise ValueError(
                f"the state must be of a policy that normalises {own}; got the state of a policy "
                f"that normalises {kinds_of(moments)}"
            )
        flat = self.flat.params_of(state)
        acting = _acting_of(state)
        self._updater.set_state(state)  # first, because it may refuse the state
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
        self.shuffle.bit_generator.state = state["shuffle"]

    def check_network(self, layers: str) -> None:
        """Checks that `layers`, from the key `network` of a state, describes `model`.

        The name of the network's class may differ, so that a later version can rename the class.

        Raises:
            ValueError: the layers differ.
        """
        if layers.partition("(")[2] != _layers(self.model).partition("(")[2]:
            raise ValueError(
                f"the state must be of network {_layers(self.model)}; got {layers}: the state "
                "belongs to another network"
            )

    def _configured_coefficients(self) -> dict[str, float]:
        """The initial values of the coefficients from the config, by name."""
        named = [name for name in self.coefficients if hasattr(self.config, name)]
        return {name: getattr(self.config, name) for name in named}


@functools.cache  # read for each minibatch
def _statistic_keys(cls: type[Policy]) -> tuple[str, ...]:
    named = [key for base in cls.__mro__ for key in vars(base).get("further_statistics", ())]
    return tuple(dict.fromkeys([*LEARNER_KEYS, *named, *(n.key for n in declared(cls))]))


# An overflow here makes the gradient non-finite, and the weight updater skips such gradients.
@np.errstate(all="ignore")
def reduce_gradient(
    policy: Policy, count: int, stats: Mapping[str, float], reducer: Reducer
) -> dict[str, float]:
    """Averages `policy.flat.grads`, the buffers of modules and `stats` over the rows of all
    learners.

    The gradient, the buffers, the statistics and the row count are in one tensor, so one all-reduce
    sums all of them.

    Args:
        policy: policy of this learner. Its gradient is the mean over `count` rows.
        count: number of rows of this learner.
        stats: statistics of this learner, which are means over the same `count` rows.
        reducer: sums over all learners.

    Returns:
        the averaged statistics. A statistic is missing if a learner with rows did not compute it.
    """
    flat, keys = policy.flat, policy.statistic_keys()
    if count == 0:
        flat.zero_grads()
    elif not math.isfinite(flat.norm()):
        # The sum over all learners will not be finite, so no learner will apply it. Only this
        # learner knows that its gradient is the cause, so this learner counts the gradient.
        policy.progress.non_finite_gradients += 1
    missing = math.nan if count else 0.0
    flat.set_tail([1.0, *(stats.get(key, missing) for key in keys)])
    flat.pack_buffers()
    flat.scale(float(count))
    reducer.sum_(flat.buffer)
    rows, *sums = flat.get_tail()
    policy.progress.gradient_rows = round(rows)
    flat.scale(1.0 / max(rows, 1.0))
    if not rows:
        return {}
    flat.unpack_buffers()
    means = ((key, total / rows) for key, total in zip(keys, sums, strict=True))
    return {key: mean for key, mean in means if not math.isnan(mean)}


def _acting_of(state: Mapping[str, Any]) -> Acting:
    """Reads `acting` from a state.

    Raises:
        ValueError: `acting` does not have the three fields of `Acting`, each true or false.
    """
    saved = state["acting"]
    if set(saved) != set(Acting._fields) or not all(isinstance(v, bool) for v in saved.values()):
        raise ValueError(f"'acting' must have {list(Acting._fields)}, true or false; got {saved}")
    return Acting(**saved)


def _layers(network: nn.Module) -> str:
    """The layers of a network and their sizes, as one line of text."""
    return " ".join(str(network).split())


def _short(space: Space[Any]) -> str:
    """A short text for a space. Leaves out the bounds of a Box."""
    return f"Box{space.shape}" if isinstance(space, spaces.Box) else f"{space!s:.80}"
