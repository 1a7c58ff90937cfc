"""Batches as callbacks of RLlib get them: fragments, trajectories, and what policies learn from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polopt.common.episodes import Episode
from polopt.common.multi_agent_batch import MultiAgentBatch
from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Transitions
from polopt.common.weights import Gradients
from polopt.rllib.views import DEFAULT_POLICY_ID, policies_of

#: Names of columns in polopt, and the names of the same columns in RLlib.
_RLLIB = {"terminated": "terminateds", "truncated": "truncateds", "values": "vf_preds"}
#: Methods of a policy that learn from a batch, which is their first argument.
_LEARN = ("learn_on_batch", "learn_on_transitions", "compute_gradients", "minibatch_gradients")


class Samples:
    """A fragment with the attributes of RLlib's `SampleBatch`. All attributes of polopt's
    `SampleBatch` are there, too.

    `samples["rewards"]` is a column `[B, ...]` of the B valid rows, under its name in RLlib or
    polopt. With several policies, `policy_batches` has the samples of each policy.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    @property
    def count(self) -> int:
        """The number of environment steps."""
        steps: int = self._batch.env_steps
        return steps

    def __len__(self) -> int:
        return len(self._batch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # called by copy or pickle
            raise AttributeError(name)
        return getattr(self._batch, name)

    def __getitem__(self, name: str) -> np.ndarray:
        return _columns(self._batch)[name]

    def __contains__(self, name: object) -> bool:
        return name in _columns(self._batch)

    def keys(self) -> list[str]:
        """The names of the columns."""
        return list(_columns(self._batch))

    def env_steps(self) -> int:
        """The number of environment steps."""
        return self.count

    def agent_steps(self) -> int:
        """The number of steps of agents."""
        steps: int = self._batch.agent_steps
        return steps

    @property
    def policy_batches(self) -> dict[str, Samples]:
        """The samples of each policy, by name."""
        return {name: Samples(part) for name, part in _parts(self._batch).items()}


class Trajectory:
    """The part of an episode within a fragment.

    Attributes:
        env_index: the index of the environment.
        policy, agent: the names of the policy and of the agent. "agent0" is the only agent.
        episode: the episode, if it has ended in the fragment.
        columns: the columns `[T, ...]` of the T steps. A callback may change them.
    """

    def __init__(
        self,
        env_index: int,
        policy: str,
        agent: Any,
        episode: Episode | None,
        views: Mapping[str, np.ndarray],
    ) -> None:
        self.env_index, self.policy, self.agent = env_index, policy, agent
        self.episode = episode
        self._views = views
        self.columns: dict[str, np.ndarray] = dict(views)

    def write_back(self) -> None:
        """Copies columns that a callback has replaced into the fragment."""
        for name, view in self._views.items():
            if self.columns.get(name) is not view:
                view[...] = self.columns[name]


def trajectories_of(
    batch: SampleBatch | MultiAgentBatch, ended: Sequence[Episode], agents: Mapping[str, Any]
) -> Iterator[Trajectory]:
    """Yields the trajectories of a fragment.

    Args:
        batch: the fragment.
        ended: the episodes that have ended since the fragment before.
        agents: for each policy, the agents of one environment in the order of its slots.
    """
    for policy, part in _parts(batch).items():
        names = list(agents.get(policy, ["agent0"]))
        for slot in range(part.shape[1]):
            env_index, place = divmod(slot, len(names))
            of_env = [one for one in ended if one.env_index == env_index]
            pieces = list(_pieces(part, slot))
            num_ended = sum(ends for _, _, ends in pieces)
            # Fragments may have been discarded since, so the last episodes are those of this one.
            found = iter(of_env[max(0, len(of_env) - num_ended) :])
            for start, stop, ends in pieces:
                episode = next(found, None) if ends else None
                views = {name: column[start:stop, slot] for name, column in _named(part)}
                yield Trajectory(env_index, policy, names[place], episode, views)


def _pieces(batch: SampleBatch, slot: int) -> Iterator[tuple[int, int, bool]]:
    """Yields the start and the stop of each run of valid rows of an episode, and whether the
    episode ends with it."""
    valid = batch["valid"][:, slot]
    over = (batch["terminated"] | batch["truncated"])[:, slot]
    start = 0
    for t in range(len(valid)):
        if not valid[t]:
            if start < t:
                yield start, t, False
            start = t + 1
        elif over[t]:
            yield start, t + 1, True
            start = t + 1
    if start < len(valid):
        yield start, len(valid), False


def observe_learning(policy: Any, call: Callable[..., None]) -> None:
    """Makes a policy, or each policy of a group, call `on_learn_on_batch` before it learns from a
    batch.

    Args:
        policy: the policy.
        call: a function that is called with "on_learn_on_batch" and its arguments.
    """
    for one in policies_of(policy).values():
        if "on_learn_on_batch" in vars(one):
            continue  # with `num_workers=0`, the worker and the driver have the same policy
        vars(one)["on_learn_on_batch"] = call
        for name in _LEARN:
            if hasattr(one, name):
                setattr(one, name, _observed(one, getattr(one, name), call))


def _observed(policy: Any, learn: Callable[..., Any], call: Callable[..., None]) -> Any:
    def observed(batch: Any, *args: Any, **kwargs: Any) -> Any:
        # `learn_on_batch` of a replay policy calls `learn_on_transitions`.
        if vars(policy).get("is_observed"):
            return learn(batch, *args, **kwargs)
        result: dict[str, Any] = {}
        columns = _columns(batch)
        given = dict(columns)
        call("on_learn_on_batch", policy=policy, train_batch=given, result=result)
        _write_back(batch, columns, given)
        stats = {key: float(value) for key, value in result.items()}
        learned = _unobserved(policy, lambda: learn(batch, *args, **kwargs))
        if inspect.isgenerator(learned):
            parts = iter(lambda: _unobserved(policy, lambda: next(learned, None)), None)
            return (_with_stats(one, stats) for one in parts)
        return _with_stats(learned, stats)

    return observed


def _unobserved(policy: Any, function: Callable[[], Any]) -> Any:
    vars(policy)["is_observed"] = True
    try:
        return function()
    finally:
        vars(policy)["is_observed"] = False


def _with_stats(learned: Any, stats: dict[str, float]) -> Any:
    if not stats:
        return learned
    if isinstance(learned, dict):
        return learned | stats
    if isinstance(learned, Gradients):
        return learned._replace(stats={**learned.stats, **stats})
    if isinstance(learned, tuple):
        return (learned[0] | stats, *learned[1:])
    return learned


def _named(batch: SampleBatch) -> Iterable[tuple[str, np.ndarray]]:
    yield "obs", batch.obs
    yield "new_obs", batch.all_obs[1:]
    for name, column in batch.columns.items():
        if name != "valid":
            yield _RLLIB.get(name, name), column
    yield "dones", batch["terminated"] | batch["truncated"]


def _columns(batch: Any) -> dict[str, np.ndarray]:
    """Returns the columns `[B, ...]` of the valid rows of a batch, under their names in RLlib."""
    if isinstance(batch, Transitions):
        return {"obs": batch.obs, "actions": batch.actions, "rewards": batch.rewards} | {
            "new_obs": batch.next_obs,
            "weights": batch.weights,
            "batch_indexes": batch.indices,
        }
    batch = getattr(batch, "batch", batch)  # sequences
    if isinstance(batch, MultiAgentBatch):
        batch = batch.first
    valid = batch["valid"]
    return {name: column[valid] for name, column in _named(batch)}


def _write_back(batch: Any, columns: Mapping[str, np.ndarray], given: Mapping[str, Any]) -> None:
    """Copies the columns that a callback has changed into a batch."""
    if isinstance(batch, Transitions):
        for name, column in columns.items():
            if given.get(name) is not column:
                column[...] = given[name]
        return
    batch = getattr(batch, "batch", batch)
    for name, column in _named(batch):
        if name in given and name not in ("obs", "new_obs", "dones"):
            column[batch["valid"]] = given[name]


def _parts(batch: Any) -> dict[str, Any]:
    return batch.parts if isinstance(batch, MultiAgentBatch) else {DEFAULT_POLICY_ID: batch}
