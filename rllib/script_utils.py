"""Functions, classes and constants that RLlib's scripts import besides algorithms: what
`ray.rllib.utils`, `ray.rllib.env` and `ray.rllib.core` have for them."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from polopt.common.config import ConfigError
from polopt.rollouts.envs.env_sources import EnvContext as polopt_env_context

DEFAULT_AGENT_ID = "default_agent"
FLOAT_MIN, FLOAT_MAX = -3.4e38, 3.4e38
#: The options that all algorithms have up to RLlib 1.13. Missing options have the defaults of the
#: algorithm.
COMMON_CONFIG: dict[str, Any] = {}
#: Constants of `utils.metrics` and `core` whose value is not their name in small letters.
_CONSTANTS = {
    "AGGREGATOR_ACTOR_RESULTS": "aggregator_actors",
    "ALL_MODULES": "__all_modules__",
    "COMPONENT_ENV_RUNNER": "env_runner",
    "COMPONENT_LEARNER": "learner",
    "COMPONENT_LEARNER_GROUP": "learner_group",
    "COMPONENT_OPTIMIZER": "optimizer",
    "COMPONENT_RL_MODULE": "rl_module",
    "ENV_RUNNER_RESULTS": "env_runners",
    "EPISODE_AGENT_RETURN_MEAN": "agent_episode_returns_mean",
    "EPISODE_MODULE_RETURN_MEAN": "module_episode_returns_mean",
    "EVALUATION_RESULTS": "evaluation",
    "FAULT_TOLERANCE_STATS": "fault_tolerance",
    "LEARNER_RESULTS": "learners",
    "LEARNER_STATS_KEY": "learner_stats",
    "NUM_SYNCH_WORKER_WEIGHTS": "num_weight_broadcasts",
    "REPLAY_BUFFER_RESULTS": "replay_buffer",
    "SAMPLE_TIMER": "sample",
    "STEPS_TRAINED_THIS_ITER_COUNTER": "num_steps_trained_this_iter",
    "SYNCH_WORKER_WEIGHTS_TIMER": "synch_weights",
    "TD_ERROR_KEY": "td_error",
    "TRAINING_ITERATION_TIMER": "training_iteration",
    "TRAINING_STEP_TIMER": "training_step",
}


class Columns:
    """Names of the columns of batches."""

    OBS, INFOS, ACTIONS, ACTIONS_FOR_ENV = "obs", "infos", "actions", "actions_for_env"
    REWARDS, TERMINATEDS, TRUNCATEDS = "rewards", "terminateds", "truncateds"
    NEXT_OBS, EPS_ID, AGENT_ID, MODULE_ID = "new_obs", "eps_id", "agent_id", "module_id"
    SEQ_LENS, T, STATE_IN, STATE_OUT = "seq_lens", "t", "state_in", "state_out"
    ACTION_DIST_INPUTS, ACTION_LOGP = "action_dist_inputs", "action_logp"
    ACTION_PROB, VF_PREDS = "action_prob", "vf_preds"
    ADVANTAGES, VALUE_TARGETS = "advantages", "value_targets"


class SampleBatch(dict[str, Any]):
    """A batch of columns. It is for code that reads or makes batches. Batches that polopt passes to
    callbacks and policies are of the class `polopt.SampleBatch`."""

    CUR_OBS = OBS = Columns.OBS
    NEXT_OBS, ACTIONS, REWARDS = Columns.NEXT_OBS, Columns.ACTIONS, Columns.REWARDS
    PREV_ACTIONS, PREV_REWARDS = "prev_actions", "prev_rewards"
    DONES, TERMINATEDS, TRUNCATEDS = "dones", Columns.TERMINATEDS, Columns.TRUNCATEDS
    INFOS, SEQ_LENS, T = Columns.INFOS, Columns.SEQ_LENS, Columns.T
    EPS_ID, AGENT_INDEX, UNROLL_ID = Columns.EPS_ID, "agent_index", "unroll_id"
    ACTION_DIST_INPUTS, ACTION_LOGP = Columns.ACTION_DIST_INPUTS, Columns.ACTION_LOGP
    ACTION_PROB, VF_PREDS = Columns.ACTION_PROB, Columns.VF_PREDS

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(next(iter(self.values()), ()))


class EnvContext(polopt_env_context):
    """The options of an environment with the indices of the environment, for scripts that make an
    environment themselves.

    Args:
        env_config: the options.
        worker_index: see `polopt.rollouts.envs.env_sources.EnvContext`.
        vector_index: see there.
        remote: has no effect.
        num_workers: see there.
        others: arguments of RLlib that have no effect here.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any],
        worker_index: int = 0,
        vector_index: int = 0,
        remote: bool = False,
        num_workers: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__(env_config or {}, worker_index, vector_index, num_workers or 0)
        self.remote = remote

    def set_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Sets options that are missing."""
        for key, value in defaults.items():
            self.setdefault(key, value)


class MultiAgentBatch:
    """A name for annotations. A batch of several policies is a `polopt.SampleBatch` for each."""


class BaseEnv:
    """A name for annotations."""


class MultiAgentEnv(gymnasium.Env[Any, Any]):
    """Base class of environments with several agents, in each form of RLlib.

    `reset` returns a dict of observations by agent, and in RLlib 2.3 and later also infos. `step`
    gets a dict of actions, and returns dicts by agent. The key `__all__` ends the episode.
    """

    def get_agent_ids(self) -> Any:
        """Returns the agents that `possible_agents`, `agents` or `_agent_ids` name."""
        for name in ("_agent_ids", "possible_agents", "agents"):
            found = vars(self).get(name, getattr(type(self), name, None))
            if found:
                return found
        return []

    def with_agent_groups(self, *arguments: Any, **named: Any) -> Any:
        """Raises an error.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("with_agent_groups: polopt has no policies that act for groups of agents")


def make_multi_agent(env: Any) -> type[MultiAgentEnv]:
    """Returns a class of environments with several independent copies of an environment.

    Args:
        env: a Gymnasium id, or a function that makes the environment from its options.

    Returns:
        the class. The option `num_agents` is the number of copies, 1 by default.
    """

    class Copies(MultiAgentEnv):
        def __init__(self, config: Any = None) -> None:
            super().__init__()
            options = dict(config or {})
            number = options.pop("num_agents", 1)
            if isinstance(env, str):
                self.envs = [gymnasium.make(env, **options) for _ in range(number)]
            else:
                self.envs = [env(options) for _ in range(number)]
            self.agents = self.possible_agents = list(range(number))
            self.observation_spaces = {i: one.observation_space for i, one in enumerate(self.envs)}
            self.action_spaces = {i: one.action_space for i, one in enumerate(self.envs)}
            self.observation_space: Any = self.envs[0].observation_space
            self.action_space: Any = self.envs[0].action_space
            self._ended: set[int] = set()

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self._ended = set()
            starts = [one.reset(seed=seed, options=options) for one in self.envs]
            return dict(enumerate(o for o, _ in starts)), dict(enumerate(i for _, i in starts))

        def step(self, action: Any) -> Any:
            observations, rewards, terminated, truncated, infos = {}, {}, {}, {}, {}
            for agent, chosen in action.items():
                (
                    observations[agent],
                    rewards[agent],
                    terminated[agent],
                    truncated[agent],
                    infos[agent],
                ) = self.envs[agent].step(chosen)
                if terminated[agent] or truncated[agent]:
                    self._ended.add(agent)
            is_over = len(self._ended) == len(self.envs)
            ends = {**terminated, "__all__": is_over}, {**truncated, "__all__": False}
            return observations, rewards, *ends, infos

    return Copies


#: Environments of RLlib's examples that many scripts import.
MultiAgentCartPole = make_multi_agent("CartPole-v1")
MultiAgentPendulum = make_multi_agent("Pendulum-v1")


class StatelessCartPole(CartPoleEnv):
    """CartPole without velocities in the observation, from RLlib's examples."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        whole: Any = self.observation_space
        self.observation_space = gymnasium.spaces.Box(whole.low[::2], whole.high[::2])

    def reset(self, **given: Any) -> Any:
        """Returns the position and the angle at the begin of an episode."""
        observation, info = super().reset(**given)
        return observation[::2], info

    def step(self, action: Any) -> Any:
        """Steps the environment."""
        observation, *others = super().step(action)  # type: ignore[no-untyped-call]
        return (observation[::2], *others)


def PettingZooEnv(env: Any) -> Any:
    """Returns the environment, because polopt takes PettingZoo's environments as they are."""
    return env


def wrap_deepmind(env: Any, dim: int = 84, framestack: bool = True, **others: Any) -> Any:
    """Wraps an Atari environment as in Mnih et al. (2015), with Gymnasium's wrappers.

    Args:
        env: the environment.
        dim: the width and the height of the images in pixels.
        framestack: whether an observation has the last four images.
        others: arguments of RLlib that have no effect here.
    """
    skips = getattr(getattr(env, "spec", None), "kwargs", {}).get("frameskip", 1)
    env = gymnasium.wrappers.AtariPreprocessing(
        env, frame_skip=1 if skips != 1 else 4, screen_size=dim
    )
    return gymnasium.wrappers.FrameStackObservation(env, 4) if framestack else env


# ---- frameworks ---------------------------------------------------------------------------------


def try_import_torch(error: bool = False) -> tuple[Any, Any]:
    """Returns the modules `torch` and `torch.nn`."""
    import torch

    return torch, torch.nn


def try_import_tf(error: bool = False) -> tuple[None, None, None]:
    """Returns three times None, because polopt does not use TensorFlow.

    Raises:
        ImportError: `error` is True.
    """
    if error:
        raise ImportError("polopt uses PyTorch, and not TensorFlow")
    return None, None, None


def try_import_tfp(error: bool = False) -> None:
    """Returns None. See `try_import_tf`."""
    try_import_tf(error)


def try_import_jax(error: bool = False) -> tuple[None, None]:
    """Returns None twice. See `try_import_tf`."""
    try_import_tf(error)
    return None, None


def get_activation_fn(name: Any = None, framework: str = "torch") -> Any:
    """Returns the class of an activation, or None for a linear layer.

    Raises:
        ValueError: torch has no such activation.
    """
    from torch import nn

    if not isinstance(name, str):
        return name
    names = {"relu": "ReLU", "tanh": "Tanh", "elu": "ELU", "swish": "SiLU", "silu": "SiLU"}
    if name.lower() in ("linear", "none"):
        return None
    found = getattr(nn, names.get(name.lower(), name), None)
    if found is None:
        raise ValueError(f"get_activation_fn: torch has no activation {name!r}")
    return found


def convert_to_torch_tensor(x: Any, device: Any = None, **others: Any) -> Any:
    """Returns a structure with tensors instead of arrays."""
    import torch

    if isinstance(x, Mapping):
        return {key: convert_to_torch_tensor(one, device) for key, one in x.items()}
    return torch.as_tensor(x, device=device)


def convert_to_numpy(x: Any, **others: Any) -> Any:
    """Returns a structure with arrays instead of tensors."""
    if isinstance(x, Mapping):
        return {key: convert_to_numpy(one) for key, one in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(convert_to_numpy(one) for one in x)
    return x.detach().cpu().numpy() if hasattr(x, "detach") else x


def softmax(x: Any, axis: int = -1, epsilon: float | None = None) -> np.ndarray:
    """Returns the softmax of logits."""
    powers = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return np.maximum(powers / powers.sum(axis=axis, keepdims=True), epsilon or 0.0)


# ---- annotations, constants and dicts -----------------------------------------------------------


def unchanged(given: Any = None, **others: Any) -> Any:
    """A decorator that changes nothing, with and without arguments."""
    return given if callable(given) else lambda one: one


def override(cls: Any = None) -> Callable[[Any], Any]:
    """A decorator that changes nothing."""
    return lambda method: method


def constant(name: str) -> str:
    """Returns the value of a constant of RLlib, such as a key of results."""
    return _CONSTANTS.get(name, name.lower())


def any_type(name: str) -> Any:
    """Returns the type of a name of `utils.typing`, for annotations."""
    return Any


def merge_dicts(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the first dict with the values of the second one. Inner dicts are merged,
    too."""
    return deep_update(copy.deepcopy(dict(first)), second)


def deep_update(original: Any, new: Mapping[str, Any], *others: Any, **named: Any) -> Any:
    """Puts the values of a dict into another dict, also in inner dicts, and returns it."""
    for key, value in new.items():
        old = original.get(key)
        if isinstance(value, Mapping) and isinstance(old, dict):
            deep_update(old, value)
        else:
            original[key] = value
    return original


def with_common_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of the options."""
    return merge_dicts(COMMON_CONFIG, extra)


# ---- example scripts ----------------------------------------------------------------------------


def check(x: Any, y: Any, decimals: int = 5, false: bool = False, **others: Any) -> None:
    """Checks that two structures are equal up to a number of decimals.

    Raises:
        AssertionError: they differ. With `false`, they are equal.
    """
    try:
        if isinstance(x, Mapping):
            assert x.keys() == y.keys()
            for key in x:
                check(x[key], y[key], decimals)
        else:
            np.testing.assert_almost_equal(convert_to_numpy(x), convert_to_numpy(y), decimals)
    except AssertionError:
        if not false:
            raise
    else:
        if false:
            raise AssertionError(f"{x} and {y} are equal")


def check_learning_achieved(
    tune_results: Any,
    min_value: float,
    evaluation: bool | None = None,
    metric: str = "env_runners/episode_return_mean",
) -> None:
    """Checks that a trial has reached a value.

    Args:
        tune_results: what `Tuner.fit` or `tune.run` has returned.
        min_value: the value.
        evaluation: whether to take the metric from `evaluation`. None means if results have it.
        metric: path of the result.

    Raises:
        ValueError: no trial has reached the value.
    """
    trials = getattr(tune_results, "trials", None)
    results = list(tune_results) if trials is None else trials
    found = []
    for one in results:
        last = getattr(one, "metrics", None) or one.last_result
        paths = [f"evaluation/{metric}", metric]
        values = [_at(last, path) for path in paths[0 if evaluation is not False else 1 :]]
        found += [value for value in values if value is not None][:1]
    best = max(found, default=float("-inf"))
    if not best >= min_value:
        raise ValueError(f"`{metric}` of {min_value} not reached: the best value is {best}")
    print(f"`{metric}` of {min_value} reached! ok")


def _at(result: Any, path: str) -> Any:
    for part in path.split("/"):
        result = result.get(part) if isinstance(result, Mapping) else None
    return result


def add_rllib_example_script_args(
    parser: argparse.ArgumentParser | None = None,
    default_reward: float = 100.0,
    default_iters: int = 200,
    default_timesteps: int = 100_000,
) -> argparse.ArgumentParser:
    """Returns a parser with the arguments of RLlib's example scripts."""
    parser = parser or argparse.ArgumentParser()
    texts = ("env", "output", "wandb-key", "wandb-project", "wandb-run-name")
    numbers: dict[str, Any] = {
        "num-env-runners": None,
        "num-envs-per-env-runner": None,
        "num-agents": 0,
        "evaluation-num-env-runners": 0,
        "evaluation-interval": 0,
        "num-samples": 1,
        "max-concurrent-trials": None,
        "verbose": 2,
        "checkpoint-freq": 0,
        "num-learners": None,
        "num-cpus": 0,
        "stop-iters": default_iters,
        "stop-timesteps": default_timesteps,
    }
    fractions: dict[str, Any] = {
        "stop-reward": default_reward,
        "num-gpus-per-learner": None,
        "num-cpus-per-learner": None,
        "num-gpus": None,
    }
    flags: tuple[str, ...] = (
        "evaluation-parallel-to-training",
        "no-tune",
        "checkpoint-at-end",
        "as-test",
    )
    flags += ("as-release-test", "old-api-stack", "enable-new-api-stack", "local-mode")
    parser.add_argument("--algo", default="PPO")
    parser.add_argument("--framework", default="torch")
    parser.add_argument("--evaluation-duration", default="10")
    parser.add_argument("--evaluation-duration-unit", default="episodes")
    parser.add_argument("--log-level", default=None)
    for name in texts:
        parser.add_argument(f"--{name}", default=None)
    for kind, defaults in ((int, numbers), (float, fractions)):
        for name, default in defaults.items():
            parser.add_argument(f"--{name}", type=kind, default=default)
    for name in flags:
        parser.add_argument(f"--{name}", action="store_true")
    return parser


def run_rllib_example_script_experiment(
    base_config: Any,
    args: Any = None,
    *,
    stop: Mapping[str, Any] | None = None,
    success_metric: Mapping[str, float] | None = None,
    tune_callbacks: Any = None,
    scheduler: Any = None,
    progress_reporter: Any = None,
    **others: Any,
) -> Any:
    """Runs the experiment of an example script of RLlib.

    Args:
        base_config: a builder.
        args: arguments of `add_rllib_example_script_args`. None reads the command line.
        stop: stop criteria. None means `stop_reward`, `stop_iters` and `stop_timesteps`.
        success_metric: what a run with `as_test` must reach.
        tune_callbacks: callbacks of Tune.
        scheduler: a scheduler of Tune.
        progress_reporter: a progress reporter of Tune.
        others: arguments of RLlib that have no effect here.

    Returns:
        the results of Tune, or with `no_tune` the last result.

    Raises:
        ValueError: the run has not reached `success_metric`.
    """
    from ray import tune

    args = args if args is not None else add_rllib_example_script_args().parse_args()
    reward, goal = "env_runners/episode_return_mean", getattr(args, "stop_reward", 100.0)
    stop = stop or {
        reward: goal,
        "num_env_steps_sampled_lifetime": getattr(args, "stop_timesteps", 100_000),
        "training_iteration": getattr(args, "stop_iters", 200),
    }
    config = base_config.copy(copy_frozen=False)
    if getattr(args, "env", None) is not None and config.env is None:
        config.environment(args.env)
    for name in ("num_env_runners", "num_envs_per_env_runner"):
        if getattr(args, name, None) is not None:
            config.env_runners(**{name: getattr(args, name)})
    if getattr(args, "evaluation_interval", 0) and not config.evaluation_interval:
        config.evaluation(
            evaluation_interval=args.evaluation_interval,
            evaluation_num_env_runners=args.evaluation_num_env_runners,
            evaluation_duration=int(args.evaluation_duration),
        )
    if getattr(args, "no_tune", False):
        algo = config.build_algo()
        try:
            for _ in range(stop.get("training_iteration", args.stop_iters)):
                result = algo.train()
                if any((_at(result, key) or float("-inf")) >= stop[key] for key in stop):
                    break
            return result
        finally:
            algo.stop()
    results = tune.Tuner(
        config.algo_class,
        param_space=config,
        run_config=tune.RunConfig(
            stop=dict(stop),
            verbose=getattr(args, "verbose", 2),
            callbacks=tune_callbacks,
            checkpoint_config=tune.CheckpointConfig(
                checkpoint_frequency=getattr(args, "checkpoint_freq", 0),
                checkpoint_at_end=getattr(args, "checkpoint_at_end", False),
            ),
            progress_reporter=progress_reporter,
        ),
        tune_config=tune.TuneConfig(
            num_samples=getattr(args, "num_samples", 1),
            max_concurrent_trials=getattr(args, "max_concurrent_trials", None),
            scheduler=scheduler,
        ),
    ).fit()
    if getattr(args, "as_test", False):
        metric, value = next(iter((success_metric or {reward: goal}).items()))
        check_learning_achieved(results, value, metric=metric)
    return results
