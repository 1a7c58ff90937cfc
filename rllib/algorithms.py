"""Adds the methods of RLlib's `Algorithm`, and RLlib's old result keys, to the presets."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from polopt.common.config import ConfigError
from polopt.policies.policy_group import PolicyGroup
from polopt.rllib.multi_agent import as_mapping
from polopt.rllib.rl_modules import to_rl_module
from polopt.trainers.presets import PRESETS
from polopt.trainers.trainer import PolicyOptimizerTrainer

#: Result keys of RLlib 2.7, and the current keys of the same values.
OLD_RESULTS = {
    "episode_reward_mean": "env_runners/episode_return_mean",
    "episode_reward_min": "env_runners/episode_return_min",
    "episode_reward_max": "env_runners/episode_return_max",
    "episode_len_mean": "env_runners/episode_len_mean",
    "episodes_this_iter": "env_runners/num_episodes",
    "episodes_total": "env_runners/num_episodes_lifetime",
    "num_env_steps_sampled": "num_env_steps_sampled_lifetime",
    "num_env_steps_trained": "num_env_steps_trained_lifetime",
    "num_agent_steps_sampled": "num_agent_steps_sampled_lifetime",
    "num_agent_steps_trained": "num_env_steps_trained_lifetime",
    "agent_timesteps_total": "num_agent_steps_sampled_lifetime",
}
#: Names of a policy that has no name.
_UNNAMED = ("default_policy", "default_agent")
#: Presets of the algorithms for which an iteration of RLlib is one training batch.
_ONE_BATCH = ("SyncPPO", "DDPPO")
#: Attributes of RLlib's algorithms that a trainer does not have, and what to use instead.
_INSTEAD = {
    "add_module": "add_policy(name, copy_of=...), which copies the weights, too",
    "remove_module": "remove_policy(name)",
    "env_runner": "get_policy() for the policy, and `workers` for the workers",
    "env_runner_group": "`workers`, for example polopt.foreach_worker(algo.workers, function)",
    "eval_env_runner_group": "`evaluation.workers`",
    "evaluation_workers": "`evaluation.workers`",
    "learner_group": "get_policy(), because polopt has no separate learner processes",
    "local_replay_buffer": "`optimizer`, which has the replay buffer",
    "compute_actions": "get_policy(name).predict(observations), for a batch of observations",
    "export_policy_model": "`polopt export CHECKPOINT`, which writes an ONNX model",
    "from_state": "from_checkpoint(path)",
    "get_weights": "get_policy(name).get_weights()",
    "set_weights": "get_policy(name).set_weights(weights)",
    "import_model": "polopt.rllib.load_rl_module(path), which reads the weights of an RLModule",
    "metrics": "the return value of train()",
    "training_step": "`optimizer.step()`",
}


class Algorithm(PolicyOptimizerTrainer):
    """A trainer that also has methods of RLlib's `Algorithm` and the result keys of RLlib 2.7."""

    def step(self) -> dict[str, Any]:
        """Runs one iteration. The result also has the keys of RLlib 2.7. Stop conditions and
        metrics of Tune therefore work with the old keys."""
        result = super().step()
        add_old_names(result)
        if "evaluation" in result:
            add_old_names(result["evaluation"])
        return result

    def get_policy(self, policy_id: str | None = None) -> Any:
        """Returns a policy.

        Args:
            policy_id: the name of the policy. The policy of a run with one policy is
                "default_policy" or "default_agent". `None` means this policy, or the `PolicyGroup`
                of all policies.

        Raises:
            ValueError: the run has no policy of this name.
        """
        policy = super().get_policy()
        is_only = policy_id in _UNNAMED and not isinstance(policy, PolicyGroup)
        return policy if is_only else super().get_policy(policy_id)

    def get_module(self, module_id: str = _UNNAMED[0]) -> Any:
        """Returns RLlib's `RLModule` with a copy of the weights of a policy. Requires
        `polopt[rllib]`. See `polopt.rllib.to_rl_module`.

        Raises:
            ValueError: the run has no policy of this name.
        """
        return to_rl_module(self.get_policy(module_id))

    def add_policy(  # type: ignore[override]  # the arguments of RLlib
        self,
        policy_id: str,
        copy_of: Any = None,
        trainable: bool = False,
        policy_mapping_fn: Any = None,
        **others: Any,
    ) -> Any:
        """Adds a policy, and returns it. See `PolicyOptimizerTrainer.add_policy`.

        Args:
            policy_id: the name of the new policy.
            copy_of: the name of the policy whose weights, state and options the new policy gets.
            trainable: whether the new policy learns.
            policy_mapping_fn: see `AlgorithmConfig.multi_agent`.
            others: arguments of RLlib, which are refused.

        Raises:
            ConfigError: `copy_of` is missing, or `others` is not empty. See also
                `PolicyOptimizerTrainer.add_policy`.
        """
        if others or not isinstance(copy_of, str):
            names = ", ".join(others) or "no copy_of"
            raise ConfigError(
                f"add_policy: got {names}. Allowed: copy_of, the name of a policy whose weights "
                "and options the new policy gets, trainable, and policy_mapping_fn"
            )
        mapping = as_mapping(policy_mapping_fn, "add_policy")
        super().add_policy(policy_id, copy_of, trainable, mapping)
        return self.get_policy(policy_id)

    def remove_policy(self, policy_id: str, policy_mapping_fn: Any = None) -> None:
        """Removes a policy. See `PolicyOptimizerTrainer.remove_policy`.

        Args:
            policy_id: the name of the policy.
            policy_mapping_fn: see `AlgorithmConfig.multi_agent`.
        """
        super().remove_policy(policy_id, as_mapping(policy_mapping_fn, "remove_policy"))

    def compute_single_action(  # type: ignore[override]  # the arguments of RLlib
        self, observation: Any = None, state: Any = None, explore: bool | None = None, **others: Any
    ) -> Any:
        """Returns the action for one observation. `env.step` accepts the action.

        Args:
            observation: an element of the environment's observation space.
            state: state of a policy with memory. See `get_policy().predict`.
            explore: True samples the action. False and None take the mode of the policy's
                distribution. In RLlib, None samples the action.
            others: `policy_id`, the name of the policy, and arguments of RLlib that have no effect
                here. With several policies, `policy_id` is required.

        Returns:
            the action. With `state`, a tuple of the action, the next state and an empty dict.

        Raises:
            ValueError: the run has no policy of this name, or the policy has memory, and `state` is
                None. See also `get_policy().predict`.
        """
        policy = self.get_policy(others.get("policy_id", _UNNAMED[0]))
        if state is None and policy.state_size:
            raise ValueError(f"{type(policy).__name__} has memory. Give its `state`")
        action, following = policy.predict(observation, state, deterministic=not explore)
        return action if state is None else (action, following, {})

    def save_to_path(self, path: str | Path | None = None, **others: Any) -> str:
        """Saves a checkpoint, and returns its directory.

        Args:
            path: directory of the checkpoint. `None` means a new directory in `logdir`.
            others: arguments of RLlib that have no effect here.
        """
        saved = self.save(None if path is None else str(path))
        return str(saved.checkpoint.path)

    def restore_from_path(self, path: str | Path, **others: Any) -> None:
        """Restores a checkpoint of polopt.

        Args:
            path: directory of the checkpoint.
            others: arguments of RLlib that have no effect here.
        """
        self.restore(str(path))

    def evaluate(self, *others: Any, **more: Any) -> dict[str, Any]:  # type: ignore[override]
        """Plays `evaluation_duration` episodes with the current policy in this process. See
        `PolicyOptimizerTrainer.evaluate`.

        Args:
            others: arguments of RLlib that have no effect here.
            more: arguments of RLlib that have no effect here.

        Returns:
            a dict with the key `env_runners`, as in RLlib 2.60. It also has the keys of RLlib 2.7,
            for example `evaluation/episode_reward_mean`.
        """
        played = super().evaluate().episodes
        returns = [episode.episode_return for episode in played]
        lengths = [episode.episode_len for episode in played]
        block = {
            "episode_return_mean": sum(returns) / len(played),
            "episode_return_min": min(returns),
            "episode_return_max": max(returns),
            "episode_len_mean": sum(lengths) / len(played),
            "num_episodes": len(played),
        }
        result: dict[str, Any] = {"env_runners": block}
        add_old_names(result)
        return result | {"evaluation": dict(result)}

    def __getattr__(self, name: str) -> Any:
        instead = _INSTEAD.get(name)
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
            + (f". Use this instead: {instead}" if instead else "")
        )


def add_old_names(result: dict[str, Any]) -> None:
    """Adds each old key of `OLD_RESULTS` whose current key has a value in the result."""
    for old, path in OLD_RESULTS.items():
        value: Any = result
        for part in path.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            result.setdefault(old, value)


@functools.cache
def algorithm_of(preset_name: str) -> type[PolicyOptimizerTrainer]:
    """Returns the preset with the methods of `Algorithm`. The name of the class is the name of the
    algorithm in RLlib."""
    preset = PRESETS[preset_name]
    name = "PPO" if preset_name == "SyncPPO" else preset_name
    attributes: dict[str, Any] = {"__doc__": preset.__doc__, "__module__": __name__}
    if preset_name in _ONE_BATCH:
        attributes["preset"] = {**preset.preset, "min_sample_timesteps_per_iteration": 0}
    made = type(name, (Algorithm, preset), attributes)
    return made


def __getattr__(name: str) -> Any:
    """Returns an algorithm as an attribute of this module. Without this function, other processes
    could not unpickle the class."""
    preset_name = "SyncPPO" if name == "PPO" else name
    if preset_name in PRESETS and preset_name != PolicyOptimizerTrainer.__name__:
        return algorithm_of(preset_name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
