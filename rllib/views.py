"""Policies, networks, workers and environments of polopt, with the methods that scripts and
callbacks of RLlib call on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polopt.common.config import ConfigError
from polopt.policies.policy import Policy
from polopt.policies.policy_group import PolicyGroup
from polopt.rollouts.envs.env_sources import EnvContext
from polopt.rollouts.workers.call_workers import foreach_worker
from polopt.trainers.saved_policy import load

#: The name of a policy that has no name.
DEFAULT_POLICY_ID = "default_policy"
#: The names in RLlib of this policy.
UNNAMED = (DEFAULT_POLICY_ID, "default_agent")


class View:
    """An object of polopt with further methods. All other attributes are those of the object, and
    `isinstance` treats the view like the object.

    Args:
        viewed: the object.
    """

    def __init__(self, viewed: Any) -> None:
        vars(self)["viewed"] = viewed

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(vars(self)["viewed"])

    def __getattr__(self, name: str) -> Any:
        if "viewed" not in vars(self):  # called by copy or pickle
            raise AttributeError(name)
        return getattr(self.viewed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.viewed, name, value)

    def __reduce__(self) -> Any:
        return type(self), (self.viewed,)


class PolicyView(View):
    """A policy with the methods of RLlib's `Policy`.

    Args:
        viewed: the policy.
        save: writes a checkpoint of the policy into a directory. None for a loaded policy.
        explore: whether actions are sampled if a call does not say so.
    """

    def __init__(
        self, viewed: Policy, save: Callable[[str], Any] | None = None, explore: bool = True
    ) -> None:
        super().__init__(viewed)
        vars(self).update(_save=save, _explores=explore)

    @staticmethod
    def from_checkpoint(checkpoint: Any, policy_ids: Any = None) -> Any:
        """Returns the policy of a checkpoint of polopt, or a dict of several policies by name.

        Args:
            checkpoint: a directory, or the return value of `save`.
            policy_ids: names of the policies to load. None means all.

        Raises:
            CheckpointError, ConfigError: see `polopt.load`.
        """
        found = load(_folder(checkpoint))
        if not isinstance(found, PolicyGroup):
            return PolicyView(found)
        name = Path(str(checkpoint)).name
        if name in found.policies:
            return PolicyView(found.policies[name])
        return {
            name: PolicyView(policy)
            for name, policy in found.policies.items()
            if policy_ids is None or name in policy_ids
        }

    def __getitem__(self, policy_id: str) -> Any:
        """Returns this policy, for scripts that expect a dict of policies by name."""
        if policy_id not in UNNAMED:
            raise KeyError(policy_id)
        return self

    @property
    def observation_space(self) -> Any:
        """The observation space of the environment."""
        return self.viewed.encoder.space

    @property
    def model(self) -> Any:
        """The network, a torch module. It also has `base_model.summary()`, which prints it."""
        return ModelView(self.viewed.model)

    def is_recurrent(self) -> bool:
        """Returns whether the policy has memory."""
        return bool(self.viewed.state_size)

    def get_initial_state(self) -> list[np.ndarray]:
        """Returns the memory at the begin of an episode: one array, or nothing."""
        size = self.viewed.state_size
        return [np.zeros(size, np.float32)] if size else []

    def compute_single_action(
        self, obs: Any = None, state: Any = None, *others: Any, explore: Any = None, **more: Any
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        """Returns the action for one observation, the next memory, and an empty dict.

        Args:
            obs: an element of the environment's observation space.
            state: the memory, as `get_initial_state` or the last call has returned it.
            others: arguments of RLlib that have no effect here.
            explore: True samples the action, and False takes the mode of the distribution. None
                means the option `explore` of the algorithm.
            more: arguments of RLlib that have no effect here.
        """
        explore = vars(self)["_explores"] if explore is None else explore
        action, following = self.viewed.predict(obs, as_memory(state), deterministic=not explore)
        return action, [] if following is None else [following], {}

    def compute_actions(
        self, obs_batch: Any, state_batches: Any = None, *others: Any, **more: Any
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        """Returns the actions for a batch of observations, the next memories, and an empty dict.
        See `compute_single_action`."""
        batch = np.asarray(obs_batch) if isinstance(obs_batch, list) else obs_batch
        return self.compute_single_action(batch, state_batches, **more)

    def export_checkpoint(self, export_dir: str, **others: Any) -> None:
        """Writes a checkpoint of the run with this policy. `from_checkpoint` reads it.

        Raises:
            ConfigError: the policy was loaded, so it belongs to no run.
        """
        save = vars(self)["_save"]
        if save is None:
            raise ConfigError("export_checkpoint: a loaded policy has its checkpoint already")
        save(str(export_dir))


class ModelView(View):
    """A network with `base_model.summary()` of RLlib's TensorFlow networks, for tutorials that
    print networks."""

    @property
    def base_model(self) -> Any:
        """The network."""
        return self

    def summary(self) -> None:
        """Prints the layers of the network."""
        print(self.viewed)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Computes the outputs of the network."""
        return self.viewed(*values, **named)

    def __repr__(self) -> str:
        return repr(self.viewed)


class ModuleView:
    """A policy with the methods of RLlib's `RLModule` that choose actions.

    Args:
        policy: the policy.

    Attributes:
        policy: the policy.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy.viewed if isinstance(vars(policy).get("viewed"), Policy) else policy

    @staticmethod
    def from_checkpoint(path: Any, **others: Any) -> Any:
        """Returns the network of a checkpoint of polopt. Returns a dict of networks by name if the
        checkpoint has several policies, and the path ends with no name of a policy.

        RLlib's own checkpoint of a default module works, too, with `polopt[rllib]`. It is a pickle,
        so load only checkpoints that you trust.

        Raises:
            CheckpointError, ConfigError: see `polopt.load` and `polopt.rllib.load_rl_module`.
        """
        if Path(str(path), "rllib_checkpoint.json").exists():
            from polopt.rllib.rl_modules import load_rl_module

            return ModuleView(load_rl_module(path))
        found = PolicyView.from_checkpoint(path)
        if isinstance(found, dict):
            return {name: ModuleView(policy) for name, policy in found.items()}
        return ModuleView(found)

    def __getitem__(self, module_id: str) -> Any:
        """Returns this module, for scripts that expect the modules of several policies."""
        if module_id not in UNNAMED:
            raise KeyError(module_id)
        return self

    @property
    def observation_space(self) -> Any:
        """The observation space of the environment."""
        return self.policy.encoder.space

    @property
    def action_space(self) -> Any:
        """The action space of the environment."""
        return self.policy.action_space

    def is_stateful(self) -> bool:
        """Returns whether the policy has memory."""
        return bool(self.policy.state_size)

    def get_initial_state(self) -> dict[str, np.ndarray]:
        """Returns the memory at the begin of an episode. Empty without memory."""
        size = self.policy.state_size
        return {"memory": np.zeros(size, np.float32)} if size else {}

    def forward_inference(self, batch: Mapping[str, Any], **others: Any) -> dict[str, Any]:
        """Computes the parameters of the distribution of actions.

        Args:
            batch: `obs`, observations `[N, ...]`, and for a policy with memory `state_in`, as
                `get_initial_state` or the last call has returned it, with a dimension for N.
            others: arguments of RLlib that have no effect here.

        Returns:
            `action_dist_inputs` `[N, P]`, the most probable `actions`, ready for `env.step`, and
            `state_out` of a policy with memory. The values are tensors.
        """
        return self._forward(batch, explore=False)

    def forward_exploration(self, batch: Mapping[str, Any], **others: Any) -> dict[str, Any]:
        """Does the same as `forward_inference`, but samples `actions`."""
        return self._forward(batch, explore=True)

    def _forward(self, batch: Mapping[str, Any], explore: bool) -> dict[str, Any]:
        rows, _ = self.policy.encoder.some_rows(_numpy(batch["obs"]))
        memory = batch.get("state_in") if self.policy.state_size else None
        if memory is not None:
            memory = np.asarray(_numpy(memory)["memory"], np.float32)
        actions, extras = self.policy.compute_actions(rows, explore, None, memory)
        found: dict[str, Any] = {
            "action_dist_inputs": torch.as_tensor(extras["action_dist_inputs"])
        }
        found["actions"] = torch.as_tensor(np.asarray(actions))
        if self.policy.state_size:
            found["state_out"] = {"memory": torch.as_tensor(extras["state"])}
        return found

    def get_inference_action_dist_cls(self) -> Any:
        """Returns an object whose `from_logits` makes a distribution of actions."""
        return _Distributions(self.policy)

    get_exploration_action_dist_cls = get_inference_action_dist_cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "policy" not in vars(self):
            raise AttributeError(name)
        return getattr(self.policy.model, name)


class _Distributions:
    def __init__(self, policy: Any, params: Any = None, is_mode: bool = False) -> None:
        self._policy, self._params, self._is_mode = policy, params, is_mode

    def from_logits(self, logits: Any, **others: Any) -> Any:
        """Returns the distribution with the parameters `[N, P]`."""
        return _Distributions(self._policy, np.asarray(_numpy(logits), np.float32))

    def to_deterministic(self) -> Any:
        """Returns the distribution whose samples are the most probable actions."""
        return _Distributions(self._policy, self._params, is_mode=True)

    def sample(self, **others: Any) -> Any:
        """Returns actions `[N, ...]`, ready for `env.step`."""
        dist, noise = self._policy.dist, None
        if not self._is_mode:
            noise = dist.draw_noise(np.random.default_rng(), len(self._params))
        return torch.as_tensor(np.asarray(dist.to_env(dist.sample(self._params, noise))))


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
    if not hasattr(vector, "envs") or hasattr(vector, "processes"):
        raise AttributeError(
            f"{type(vector).__name__} has no single environments. Callbacks reach them with "
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


class WorkerView(View):
    """A worker with the attributes of RLlib's `RolloutWorker` and `EnvRunner`, in scripts and in
    callbacks."""

    @property
    def worker_index(self) -> int:
        """The index of the worker. The local worker has the index 0."""
        return int(self.viewed.index)

    @property
    def num_workers(self) -> int:
        """The number of workers in other processes."""
        return int(self.viewed.config.rollout.num_workers)

    @property
    def env(self) -> Any:
        """The first environment, or None if the worker has none."""
        return next(iter(self._environments()), None)

    @property
    def async_env(self) -> Any:
        """The environments of the worker."""
        return BaseEnv(self.viewed)

    def _environments(self) -> list[Any]:
        return [] if self.viewed.sampler is None else environments_of(self.viewed)

    @property
    def env_context(self) -> EnvContext:
        """The config of the first environment."""
        return self.context_of(0)

    def context_of(self, env_index: int) -> EnvContext:
        """Returns the config of an environment, with its indices."""
        config = self.viewed.config
        places = self.worker_index + config.env_index_offset, env_index, self.num_workers
        return EnvContext(config.rollout.env_config, *places, config.in_evaluation)

    @property
    def policy_map(self) -> dict[str, Any]:
        """The policies by name."""
        return {name: PolicyView(one) for name, one in policies_of(self.viewed.policy).items()}

    def get_policy(self, policy_id: str = DEFAULT_POLICY_ID) -> Any:
        """Returns a policy."""
        return self.policy_map[policy_id]

    def foreach_env(self, function: Callable[[Any], Any]) -> list[Any]:
        """Calls a function with each environment, and returns the values."""
        return [function(env) for env in self._environments()]

    def foreach_policy(self, function: Callable[..., Any], **others: Any) -> list[Any]:
        """Calls a function with each policy and its name, and returns the values."""
        return [function(policy, name) for name, policy in self.policy_map.items()]

    def apply(self, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Calls a function with this worker."""
        return function(self, *values, **named)


class WorkersView(View):
    """The workers of a run with the methods of RLlib's `WorkerSet` and `EnvRunnerGroup`."""

    @property
    def local_env_runner(self) -> Any:
        """The worker in this process."""
        return self.local_worker()

    def local_worker(self) -> Any:
        """Returns the worker in this process. It has environments only if `num_workers` is 0."""
        return WorkerView(self.viewed.local)

    def num_remote_workers(self) -> int:
        """Returns the number of workers in other processes."""
        return len(self.viewed.remote)

    num_remote_env_runners = num_remote_workers

    def foreach_worker(
        self, func: Callable[..., Any], local_worker: bool = True, **others: Any
    ) -> list[Any]:
        """Calls a function with each worker, and returns the values. A worker in another process
        runs the function there, so cloudpickle must be able to pickle the function and its value.

        Args:
            func: the function. Its argument is a `WorkerView`.
            local_worker: whether to call the function also with the worker in this process.
            others: arguments of RLlib that have no effect here.

        Raises:
            see `polopt.foreach_worker`.
        """
        is_local = not self.viewed.config.rollout.num_workers
        values = [func(self.local_worker())] if local_worker and not is_local else []
        return values + list(foreach_worker(self.viewed, _call, func).values())

    def foreach_env_runner(
        self, func: Callable[..., Any], *others: Any, local_env_runner: bool = True, **more: Any
    ) -> list[Any]:
        """The name of `foreach_worker` in RLlib 2.40."""
        return self.foreach_worker(func, local_env_runner)

    def foreach_env(self, func: Callable[[Any], Any]) -> list[list[Any]]:
        """Calls a function with each environment of each worker. Returns a list for each worker."""
        return self.foreach_worker(lambda worker: worker.foreach_env(func))

    def foreach_policy(self, func: Callable[..., Any]) -> list[Any]:
        """Calls a function with each policy of each worker, and its name."""
        values = self.foreach_worker(lambda worker: worker.foreach_policy(func))
        return [one for of_worker in values for one in of_worker]

    def __getattr__(self, name: str) -> Any:
        if name in ("remote_workers", "foreach_worker_async", "foreach_worker_with_id"):
            raise AttributeError(
                f"the workers have no {name!r} in polopt. Use foreach_worker(function), which runs "
                "the function in each worker"
            )
        return super().__getattr__(name)


def _call(worker: Any, function: Callable[..., Any]) -> Any:
    return function(WorkerView(worker))


def as_memory(state: Any) -> Any:
    """Returns the memory for `predict` from RLlib's list of arrays, which may be empty."""
    if isinstance(state, list | tuple):
        return np.asarray(state[0]) if state else None
    return state


def _numpy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _numpy(one) for key, one in value.items()}
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def _folder(checkpoint: Any) -> Any:
    """Returns the folder of the algorithm's checkpoint for a folder of RLlib below it."""
    if not isinstance(checkpoint, str | Path):
        return checkpoint
    path = Path(str(checkpoint).removeprefix("file://"))
    while not path.is_dir() and path.parts[1:]:
        path = path.parent
    return str(path)
