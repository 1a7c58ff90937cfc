"""The environments, agents and policies of a worker, as callbacks of RLlib get them."""

from __future__ import annotations

from typing import Any

#: The name of a policy that has no name.
DEFAULT_POLICY_ID = "default_policy"


def policies_of(policy: Any) -> dict[str, Any]:
    """Returns the policies of a group by name, or a single policy under `default_policy`."""
    found: dict[str, Any] = getattr(policy, "policies", {DEFAULT_POLICY_ID: policy})
    return found


def environments_of(worker: Any) -> list[Any]:
    """Returns the environments of a worker, as the user has made them.

    Raises:
        AttributeError: they are in other processes, or the vector has an implementation of its own.
    """
    env = worker.sampler.env
    vector = getattr(env, "vector", env)  # of slots of agents
    if not hasattr(vector, "envs"):
        raise AttributeError(
            f"{type(env).__name__} has no single environments. Callbacks reach them with "
            'vectorization_mode="sync" (in RLlib: gym_env_vectorize_mode="sync")'
        )
    made = [one.env for one in vector.envs]  # each is wrapped in a `FaultTolerantEnv`
    return made if vector is env else [one.env for one in made]


def running_data(worker: Any, env_index: int) -> dict[str, Any]:
    """Returns the data of the current episode of an environment."""
    holder = getattr(worker.sampler.env, "vector", worker.sampler.steps)
    data: dict[str, Any] = holder.data[env_index]
    return data


def agents_of(worker: Any) -> dict[str, list[Any]]:
    """Returns the agents of one environment for each policy, in the order of their slots. Empty
    with one agent."""
    vector = getattr(worker.sampler.env, "vector", None)
    if vector is None:
        return {}
    return {
        name: group.agents
        for name, group in zip(policies_of(worker.policy), vector.groups, strict=True)
    }


class BaseEnv:
    """The environments of a worker, with methods of RLlib's `BaseEnv`."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def get_sub_environments(self, as_dict: bool = False) -> Any:
        """Returns the environments as a list, or as a dict by index."""
        found = environments_of(self._worker)
        return dict(enumerate(found)) if as_dict else found

    get_unwrapped = get_sub_environments

    @property
    def envs(self) -> list[Any]:
        """The environments."""
        return environments_of(self._worker)

    @property
    def num_envs(self) -> int:
        """The number of environments."""
        return len(self.envs)

    @property
    def observation_space(self) -> Any:
        """The observation space of one environment."""
        return self._worker.config.observation_space

    @property
    def action_space(self) -> Any:
        """The action space of one environment."""
        return self._worker.config.action_space

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"base_env has no {name!r} in polopt. It has get_sub_environments(), envs, num_envs, "
            "observation_space and action_space"
        )
