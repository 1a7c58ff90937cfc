"""`PolicyGroup`: several policies that strategies use like one policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from gymnasium import Space, spaces

from polopt.common.compression import check_gradients
from polopt.common.config import Config, shown
from polopt.common.multi_agent_batch import MomentsByPolicy
from polopt.common.weights import Gradients, Weights
from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.learning.flat_parameters import Segment
from polopt.policies.learning.reducer import Reducer
from polopt.policies.learning.weight_updater import LearningProgress, Updates
from polopt.policies.policy import Policy

#: Names of the coefficient of a policy that holds its version, in the weights of the group.
_VERSION = "version"
#: The name of a policy without a name.
DEFAULT_POLICY = "default_policy"


class Member(Config):
    """One policy of a group.

    Attributes:
        policy_class: the class of the policy.
        config: the options of the policy.
        learns: whether the policy learns.
    """

    policy_class: Any
    config: Any
    learns: bool = True


class GroupConfig(Config):
    """The policies of a group.

    Attributes:
        members: the policies, by name.
    """

    members: dict[str, Member]

    def shared(self) -> Any:
        """The options of the first policy."""
        return next(iter(self.members.values())).config


class _Shared:
    """An attribute of a group that all its policies have with the same value."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, group: Any, owner: type) -> Any:
        return getattr(next(iter(group.policies.values())), self._name)

    def __set__(self, group: Any, value: Any) -> None:
        for one in group.policies.values():
            setattr(one, self._name, value)


class PolicyGroup(Policy):
    """Several policies that act in the same environments. Strategies use the group like one policy.

    The weights and the gradients of the group are the weights and gradients of its policies, one
    after another. So a strategy, a transport or a record treats them as one vector. The group
    learns from a `MultiAgentBatch`: each policy that learns uses its own rows, with its own torch
    optimizer. A policy without rows makes no update.

    A gradient of the group ends with one more number for each policy, which is its share of the
    rows. A mean of such gradients, weighted by rows, then has the sums that each policy needs.

    Args:
        observation_space: a Dict with the observation space of each policy.
        action_space: a Dict with the action space of each policy.
        config: the policies.
        seed: seed of the first policy. The other policies derive their seeds from it.
        device: torch device of networks.

    Attributes:
        policies: the policies, by name.
        trained: the names of the policies that learn.

    Raises:
        ConfigError: a policy does not support its spaces.
    """

    config_class: ClassVar[Any] = GroupConfig

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        config: Any,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        observations = cast("spaces.Dict", observation_space).spaces
        actions = cast("spaces.Dict", action_space).spaces
        policies: dict[str, Policy] = {}
        for place, (name, member) in enumerate(config.members.items()):
            own_seed = seed
            if place:
                sequence = np.random.SeedSequence(seed, spawn_key=(place,))
                own_seed = int(sequence.generate_state(1)[0] >> 1)
            policies[name] = member.policy_class(
                observations[name], actions[name], member.config, seed=own_seed, device=device
            )
        self._hold(policies, {name: member.learns for name, member in config.members.items()})

    @classmethod
    def of(cls, policies: Mapping[str, Policy]) -> PolicyGroup:
        """Makes a group of policies that exist already. All of them can learn."""
        group = cls.__new__(cls)
        group._hold(dict(policies), dict.fromkeys(policies, True))
        return group

    def _hold(self, policies: dict[str, Policy], learns: dict[str, bool]) -> None:
        self.policies = policies
        self.trained = [name for name, does in learns.items() if does]
        self._learns = learns
        self.action_space = spaces.Dict(
            [(name, one.action_space) for name, one in policies.items()]
        )
        self.device = next(iter(policies.values())).device
        self.progress = LearningProgress()
        first = next(iter(self.policies.values()))
        self.encoder, self.dist, self.mask, self.acting = (
            first.encoder,
            first.dist,
            first.mask,
            first.acting,
        )

    # ---- what all policies share ----------------------------------------------------------------

    @property
    def config(self) -> GroupConfig:
        """The policies, with their present options."""
        return GroupConfig(
            members={
                name: Member(policy_class=type(one), config=one.config, learns=self._learns[name])
                for name, one in self.policies.items()
            }
        )

    @property
    def version(self) -> int:  # type: ignore[override]
        """The number of updates of all policies."""
        return sum(one.version for one in self.policies.values())

    env_steps: Any = _Shared()
    worker_index: Any = _Shared()
    num_workers: Any = _Shared()

    @property
    def shuffle(self) -> np.random.Generator:
        """The generator of the first policy."""
        return next(iter(self.policies.values())).shuffle

    @shuffle.setter
    def shuffle(self, generator: np.random.Generator) -> None:
        first, *others = self.policies.values()
        first.shuffle = generator
        for place, one in enumerate(others):
            state = generator.bit_generator.state["state"]["state"]
            one.shuffle = np.random.default_rng([state, place + 1])

    @property
    def normalizer(self) -> Any:  # type: ignore[override]
        """None if no policy normalises. Otherwise, an object with the states of the normalisers."""
        if all(one.normalizer is None for one in self.policies.values()):
            return None
        return SimpleNamespace(get_state=self._normalizers)

    def _normalizers(self) -> dict[str, Any]:
        return {
            name: None if one.normalizer is None else one.normalizer.get_state()
            for name, one in self.policies.items()
        }

    @property
    def flat(self) -> Any:  # type: ignore[override]
        """The parameters of all policies, one after another. A copy."""
        return SimpleNamespace(
            params=torch.cat([one.flat.params.detach() for one in self.policies.values()])
        )

    @property
    def learns_with(self) -> str:
        """What computes the gradients of the policies that learn. See `Policy.learns_with`."""
        learning = dict.fromkeys(self.policies[name].learns_with for name in self.trained)
        return ", ".join(learning) or "nothing"

    @classmethod
    def statistic_keys(cls) -> list[str]:
        """None: the statistics of each policy have its name, see `learner_keys`."""
        return []

    def __repr__(self) -> str:
        """Shows each policy."""
        shown = ", ".join(f"{name}={one}" for name, one in self.policies.items())
        return f"PolicyGroup({shown})"

    # ---- abstract methods of `Policy`, which only single policies have -------------------------

    def make_segments(self) -> dict[str, Segment]:
        """Not used: each policy makes its own segments."""
        raise NotImplementedError("a group has no segments of its own")

    def make_distribution(self) -> ActionDistribution:
        """Not used: each policy has its own distribution."""
        raise NotImplementedError("a group has no distribution of its own")

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Not used: each policy acts for its own agents."""
        raise NotImplementedError("name the policy that acts: group.policies[name]")

    # ---- learning -------------------------------------------------------------------------------

    def postprocess(self, batch: Any) -> Any:
        """See `ActingPolicy.postprocess`. Each policy prepares its part."""
        for name, part in batch.parts.items():
            batch.parts[name] = self.policies[name].postprocess(part)
        return batch

    def encode_batch(self, batch: Any) -> Any:
        """See `ActingPolicy.encode_batch`."""
        parts = {name: self.policies[name].encode_batch(one) for name, one in batch.parts.items()}
        return dataclasses.replace(batch, parts=parts)

    def compute_gradients(self, batch: Any) -> Gradients:
        """The gradients of all policies, one after another, and their shares of the rows."""
        found = {
            name: self.policies[name].compute_gradients(batch.parts[name]) for name in self.trained
        }
        return self._joined(found, batch.version)

    def minibatch_gradients(self, batch: Any) -> Iterator[Gradients]:
        """Yields gradients of the group. Policies with more minibatches than others make the last
        updates alone."""
        going = {
            name: self.policies[name].minibatch_gradients(batch.parts[name])
            for name in self.trained
        }
        ended: set[str] = set()
        while len(ended) < len(going):
            found = {}
            for name, gradients in going.items():
                if name not in ended:
                    found[name] = next(gradients)
                    if found[name].ends_rollout:
                        ended.add(name)
            yield self._joined(found, batch.version)._replace(ends_rollout=len(ended) == len(going))

    def _joined(self, found: Mapping[str, Gradients], acted: int) -> Gradients:
        parts, shares = [], []
        rows = sum(one.rows for one in found.values())
        for name, policy in self.policies.items():
            one = found.get(name)
            share = 0.0 if one is None else one.rows / max(rows, 1)
            shares.append(share)
            if one is None or not one.rows:
                parts.append(np.zeros(policy.flat.grads.shape, np.float32))
            else:
                parts.append(one.flat * np.float32(share))
        stats = {
            f"{name}/{key}": value
            for name, one in found.items()
            for key, value in one.stats.items()
        }
        flat = np.concatenate([*parts, np.array(shares, np.float32)])
        new_rows = sum(one.new_rows for one in found.values())
        return Gradients(flat, self.version, rows, stats, new_rows, acted=acted)

    def check_gradients(self, gradients: Any) -> None:
        """See `Policy.check_gradients`."""
        size = sum(len(one.flat.grads) for one in self.policies.values()) + len(self.policies)
        check_gradients(gradients, size)

    @np.errstate(all="ignore")
    def apply_gradients(self, gradients: Gradients, lr_scale: float = 1.0) -> dict[str, float]:
        """Applies the part of each policy that had rows. See `Policy.apply_gradients`."""
        shares = gradients.flat[-len(self.policies) :]
        stats: dict[str, float] = {}
        start = 0
        for share, (name, policy) in zip(shares, self.policies.items(), strict=True):
            stop = start + len(policy.flat.grads)
            if share > 0.0 and self._learns[name]:
                rows = round(gradients.rows * float(share))
                own = gradients._replace(flat=gradients.flat[start:stop] / share, rows=rows)
                updates = Updates(policy)
                found = policy.apply_gradients(own, lr_scale)
                stats |= {f"{name}/{key}": value for key, value in found.items()}
                self._count(updates)
            start = stop
        return stats

    def learn_on_batch(self, batch: Any, reducer: Reducer | None = None) -> dict[str, float]:
        """Each policy that learns, learns from its part. All learners take the policies in the same
        order. See `Policy.learn_on_batch`."""
        stats: dict[str, float] = {}
        for name in self.trained:
            policy = self.policies[name]
            updates = Updates(policy)
            found = policy.learn_on_batch(batch.parts[name], reducer)
            stats |= {f"{name}/{key}": value for key, value in found.items()}
            self._count(updates)
        return stats

    def learn_on_transitions(
        self, rows: Any, reducer: Reducer | None = None
    ) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """Each policy that learns and has rows makes one update. See
        `ReplayPolicy.learn_on_transitions`.

        Args:
            rows: the rows of each policy, in `rows.parts`.
            reducer: sums over all learners.

        Returns:
            learner statistics, and the TD errors of the rows of each policy.
        """
        stats: dict[str, float] = {}
        errors = {}
        for name, part in rows.parts.items():
            policy: Any = self.policies[name]
            updates = Updates(policy)
            found, errors[name] = policy.learn_on_transitions(part, reducer)
            stats |= {f"{name}/{key}": value for key, value in found.items()}
            self._count(updates)
        return stats, errors

    def _count(self, updates: Updates) -> None:
        """Adds what a policy has counted to the counts of the group."""
        self.progress.rows_applied += updates.rows
        self.progress.skipped_updates += updates.skipped
        self.progress.non_finite_gradients += updates.non_finite

    def set_option(self, name: str, value: Any) -> None:
        """Changes an option of all policies that learn. See `Policy.set_option`."""
        for one in self.trained:
            self.policies[one].set_option(name, value)

    def add_moments(self, moments: Any, reducer: Reducer | None = None) -> None:
        """Adds the moments of the policies that learn. See `Policy.add_moments`."""
        for name in self.trained:
            self.policies[name].add_moments((moments or {}).get(name), reducer)

    # ---- weights and state ----------------------------------------------------------------------

    def get_weights(self) -> Weights:
        """The weights of all policies, one after another. See `Policy.get_weights`."""
        found = {name: one.get_weights() for name, one in self.policies.items()}
        coefficients = {
            f"{name}/{key}": value
            for name, one in found.items()
            for key, value in {**one.coefficients, _VERSION: float(one.version)}.items()
        }
        moments = {name: one.moments for name, one in found.items() if one.moments is not None}
        return Weights(
            np.concatenate([one.flat for one in found.values()]),
            self.version,
            self.env_steps,
            coefficients,
            MomentsByPolicy(moments) if moments else None,  # type: ignore[arg-type]
        )

    def split_weights(self, weights: Weights) -> tuple[Weights, np.ndarray]:
        """Divides what `get_weights` returned: the weights with the parameters of only the policies
        that learn, and the parameters of the other policies."""
        ends = np.cumsum([len(one.flat.params) for one in self.policies.values()])
        parts = dict(zip(self.policies, np.split(weights.flat, ends[:-1]), strict=True))
        none = np.zeros(0, np.float32)
        changing = [parts[name] for name in self.trained]
        fixed = [part for name, part in parts.items() if not self._learns[name]]
        return weights._replace(flat=np.concatenate([none, *changing])), np.concatenate(
            [none, *fixed]
        )

    def set_weights(self, weights: Weights) -> None:
        """See `Policy.set_weights`. If the weights have the parameters of only the policies that
        learn, the other policies keep theirs."""
        sizes = {name: len(one.flat.params) for name, one in self.policies.items()}
        keeps_others = len(weights.flat) == sum(sizes[name] for name in self.trained)
        if not keeps_others and len(weights.flat) != sum(sizes.values()):
            raise ValueError(
                f"the weights must have {sum(sizes.values())} numbers, {shown(sizes)}; got "
                f"{len(weights.flat)}"
            )
        start, moments = 0, cast("Mapping[str, Any]", weights.moments or {})
        for name, policy in self.policies.items():
            if keeps_others and not self._learns[name]:
                policy.env_steps = weights.env_steps
                continue
            own = {
                key.removeprefix(f"{name}/"): value
                for key, value in weights.coefficients.items()
                if key.startswith(f"{name}/")
            }
            version = int(own.pop(_VERSION))
            flat = weights.flat[start : start + sizes[name]]
            policy.set_weights(Weights(flat, version, weights.env_steps, own, moments.get(name)))
            start += sizes[name]

    def get_state(self) -> dict[str, Any]:
        """The state of each policy, in `policies`."""
        return {
            "policies": {name: one.get_state() for name, one in self.policies.items()},
            "version": self.version,
            "env_steps": self.env_steps,
            "moments": None if self.normalizer is None else self._normalizers(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the policies that are in the state. See `Policy.set_state`.

        Raises:
            ValueError: the state of a policy belongs to another network, or the state has no policy
                of this group.
        """
        saved = state.get("policies", {})
        if not set(saved) & set(self.policies):
            raise ValueError(
                f"the state must have one of the policies {shown(list(self.policies))}; got "
                f"{shown(list(saved)) if saved else 'the state of a single policy'}"
            )
        moments = state.get("moments") or {}
        for name, policy in self.policies.items():
            if name in saved:
                own = saved[name]
                policy.set_state({**own, "moments": moments.get(name, own.get("moments"))})
        self.env_steps = state["env_steps"]

    def check_network(self, layers: str) -> None:
        """Does nothing: `set_state` checks the network of each policy."""


def learning(policy: Any) -> dict[str, Any]:
    """Returns the policies that learn, by name. A single policy has the name `default_policy`.

    Args:
        policy: a policy, a `PolicyGroup`, or the options of either.
    """
    if isinstance(policy, PolicyGroup):
        return {name: policy.policies[name] for name in policy.trained}
    if isinstance(policy, GroupConfig):
        return {name: one.config for name, one in policy.members.items() if one.learns}
    return {DEFAULT_POLICY: policy}


def learner_keys(policy: Policy) -> list[str]:
    """The keys of the learner statistics of a policy. The statistics of a group have keys such as
    `prey/total_loss`."""
    if not isinstance(policy, PolicyGroup):
        return policy.statistic_keys()
    members = [(name, policy.policies[name]) for name in policy.trained]
    return [f"{name}/{key}" for name, one in members for key in one.statistic_keys()]


def by_policy(policy: Policy, statistics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Divides learner statistics by policy. A single policy has the name `default_policy`."""
    if not isinstance(policy, PolicyGroup):
        return {DEFAULT_POLICY: dict(statistics)}
    found: dict[str, dict[str, float]] = {name: {} for name in policy.trained}
    for path, value in statistics.items():
        name, _, key = path.partition("/")
        found[name][key] = value
    return found
