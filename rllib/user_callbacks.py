"""Supports callbacks that are written for RLlib: `RLlibCallback`, and an adapter to
`polopt.Callbacks`."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import numpy as np

from polopt.common.add_ons import RunListener
from polopt.common.config import ConfigError, nearest, shown
from polopt.common.episodes import Episode
from polopt.rllib.accepted_options import warn
from polopt.rllib.callback_batches import Samples, observe_learning, trajectories_of
from polopt.rllib.old_results import OldResults
from polopt.rllib.views import (
    BaseEnv,
    WorkerView,
    agents_of,
    environments_of,
    policies_of,
    running_data,
)
from polopt.rollouts.workers.callbacks import Callbacks

logger = logging.getLogger("polopt")

#: Methods of RLlib's callbacks that polopt does not call, because it has no offline data.
_NOT_CALLED = (
    "on_evaluate_offline_start",
    "on_evaluate_offline_end",
    "on_offline_eval_runners_recreated",
)
#: Methods about an episode. Numbers that they log are reported when the episode has ended.
_OF_EPISODES = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")
#: Methods about the environments of a worker. They are called before its first step.
_OF_ENVIRONMENTS = ("on_environment_created", "on_sub_environment_created")
#: Names of attributes with which callbacks reach single environments.
_REACH_ENVIRONMENTS = {"get_sub_environments", "get_unwrapped", "envs", "foreach_env"}


class RLlibCallback:
    """Base class of callbacks that are written for RLlib.

        class MyCallback(RLlibCallback):
            def on_episode_start(self, *, episode, **arguments):
                episode.user_data["speeds"] = []

            def on_episode_end(self, *, episode, metrics_logger, **arguments):
                metrics_logger.log_value("my_length", len(episode))

    polopt passes all arguments by name. A method without `**arguments` gets only the arguments that
    it declares, under the names of any release of RLlib. A subclass may not define methods with
    other names that begin with `on_`.

    Workers call the methods about episodes, samples and environments. Their methods about an
    episode get `episode` (a `CallbackEpisode`), `metrics_logger` (a `MetricsLogger`), `env_runner`
    or `worker` (a `WorkerView`), `env` (the vector environment), `base_env` (with
    `get_sub_environments()`), `env_index`, `rl_module` (the policy) and `policies` (a dict with the
    policies by name, which is "default_policy" for a policy without a name). The driver calls the
    methods about the algorithm, evaluation, checkpoints and results, which get `algorithm` (also
    as `trainer`) and `metrics_logger`.
    """

    def on_algorithm_init(self, **arguments: Any) -> None:
        """Called when the workers and the optimizer were made, before the first iteration."""

    def on_create_policy(self, **arguments: Any) -> None:
        """Called in the driver for each policy, before `on_algorithm_init`.

        Args:
            arguments: `policy_id` and `policy`.
        """

    def on_environment_created(self, **arguments: Any) -> None:
        """Called before the first step of a worker, after the first reset.

        Args:
            arguments: `env` (the vector environment), `env_context` and `env_runner`.
        """

    def on_sub_environment_created(self, **arguments: Any) -> None:
        """Called for each environment of a worker before its first step, after the first reset.

        Args:
            arguments: `sub_environment`, `env_context`, `env_index` and `worker`.
        """

    def on_episode_created(self, **arguments: Any) -> None:
        """Called just before `on_episode_start`, so after the reset. RLlib calls it before the
        reset."""

    def on_episode_start(self, **arguments: Any) -> None:
        """Called before the first step of each episode, after the reset."""

    def on_episode_step(self, **arguments: Any) -> None:
        """Called after each step of each environment. `episode` is the episode up to this step."""

    def on_episode_end(self, **arguments: Any) -> None:
        """Called when an episode has ended, unless the episode is discarded, for example because of
        a fault."""

    def on_postprocess_trajectory(self, **arguments: Any) -> None:
        """Called for each trajectory of a fragment, before `on_sample_end`. A trajectory is the
        part of an episode within the fragment. The policy has already computed its advantages. Not
        called in evaluation.

        Args:
            arguments: `postprocessed_batch`, a dict of columns `[T, ...]` that the method may
                change, `original_batches`, `policy_id`, `agent_id`, `policies`, `worker` and
                `episode`, which has only `custom_metrics`, `user_data` and `env_id`.
        """

    def on_sample_end(self, **arguments: Any) -> None:
        """Called with each fragment that is not discarded because of a fault. Not called in
        evaluation.

        Args:
            arguments: `samples` (a `Samples`), `metrics_logger`, and `env_runner` or `worker`.
        """

    def on_learn_on_batch(self, **arguments: Any) -> None:
        """Called before a policy learns from a batch, in the process that learns.

        Args:
            arguments: `policy`, `train_batch`, a dict of columns `[B, ...]` that the method may
                change, and `result`, a dict to which the method may add learner statistics.
        """

    def on_evaluate_start(self, **arguments: Any) -> None:
        """Called before an evaluation of `evaluation_interval` begins."""

    def on_evaluate_end(self, **arguments: Any) -> None:
        """Called before `on_train_result`, if an evaluation has ended.

        Args:
            arguments: also `evaluation_metrics`, the block `evaluation` of the result.
        """

    def on_workers_recreated(self, **arguments: Any) -> None:
        """Called before a result is returned, if workers were replaced since the last result.

        Args:
            arguments: also `worker_set`, `worker_ids` and `is_evaluation`.
        """

    def on_env_runners_recreated(self, **arguments: Any) -> None:
        """The same as `on_workers_recreated`, with the arguments `env_runner_group` and
        `env_runner_indices`."""

    def on_checkpoint_loaded(self, **arguments: Any) -> None:
        """Called when a checkpoint was restored."""

    def on_train_result(self, **arguments: Any) -> None:
        """Called with each result. The method may change the result. Numbers that it logs with
        `metrics_logger` are added to the result.

        Args:
            arguments: also `result`.
        """


#: The methods that polopt calls. `on_trainer_init` is the name of `on_algorithm_init` in RLlib 1.
_CALLED = (*(name for name in vars(RLlibCallback) if name.startswith("on_")), "on_trainer_init")

for _name in (*_NOT_CALLED, "on_trainer_init"):
    # A user's method may call, for example, `super().on_trainer_init(...)`.
    setattr(RLlibCallback, _name, lambda self, **arguments: None)

#: The name of `RLlibCallback` up to RLlib 2.40.
DefaultCallbacks = RLlibCallback

_numbers = itertools.count()


def make_multi_callbacks(callback_class_list: Sequence[Any]) -> list[Any]:
    """Returns callbacks that call several classes, for the option `callbacks`."""
    return list(callback_class_list)


#: The name of `make_multi_callbacks` in RLlib 1.
MultiCallbacks = make_multi_callbacks


class CallbackEpisode:
    """An episode for callbacks, with the attribute names of RLlib's episodes. The episode has ended
    or is still running.

    Attributes:
        custom_metrics: a dict of numbers that the callback fills. Results contain the mean, minimum
            and maximum of each number over the episodes of an iteration.
        hist_data: a dict of lists of numbers that the callback fills. Results contain the mean,
            minimum and maximum over all numbers of a list in all episodes of an iteration,
            beside `custom_metrics`.
        user_data: a dict in which the callback can keep data from one step of the episode to the
            next.
        media: a dict that has no effect.
        episode_id: a number that no other episode of the worker has. Also `id_`.
        env_id: the index of the environment in its worker.
        total_reward: undiscounted sum of the rewards so far.
        length: number of environment steps so far.
        agent_rewards: undiscounted sum of the rewards so far, by `(agent, policy)`.
        agent_returns: undiscounted sum of the rewards of each agent. Empty with one agent.
        is_terminated: whether the episode was terminated.
        is_truncated: whether the episode was truncated.
        is_done: whether the episode has ended.
        worker: see `WorkerView`.
    """

    def __init__(self, episode: Episode, worker: Any = None) -> None:
        data = episode.data
        self.custom_metrics: dict[str, Any] = data.setdefault("custom_metrics", {})
        self.hist_data: dict[str, list[float]] = data.setdefault("hist_data", {})
        self.media: dict[str, Any] = data.setdefault("media", {})
        self.user_data: dict[str, Any] = data.setdefault("user_data", {})
        self._temporary: dict[str, list[Any]] = data.setdefault("temporary", {})
        self.custom_data = self.user_data
        if "episode_id" not in data:
            data["episode_id"] = next(_numbers)
        self.id_ = self.episode_id = data["episode_id"]
        self.env_id = episode.env_index
        self.worker = worker
        self.total_reward = episode.episode_return
        self.agent_returns, self._policies = episode.agent_returns, episode.agent_policies
        of_agents = episode.agent_returns or {"agent0": episode.episode_return}
        self.agent_rewards = {
            (agent, self._policies.get(agent, "default_policy")): sum_
            for agent, sum_ in of_agents.items()
        }
        self.length = self.env_steps = self.t = episode.episode_len
        self.is_terminated, self.is_done = episode.terminated, episode.done
        self.is_truncated = episode.done and not episode.terminated
        self._episode = episode
        #: The number of steps and the returns of the agents, after up to three steps.
        self._after: list[tuple[int, dict[Any, float]]] = data.setdefault("after", [(0, {})])
        if self._after[-1][0] != self.length:
            self._after.append((self.length, dict(of_agents)))
            del self._after[:-3]

    def get_return(self) -> float:
        """Returns the undiscounted sum of the rewards so far."""
        return self.total_reward

    def __len__(self) -> int:
        return self.length

    def module_for(self, agent_id: Any) -> str | None:
        """Returns the name of the policy of an agent. None if the agent has not appeared yet."""
        return self._policies.get(agent_id)

    policy_for = module_for

    def get_agents(self) -> list[Any]:
        """Returns the agents that have rewards. With one agent, this is `agent0`, as in RLlib."""
        return [agent for agent, _ in self.agent_rewards]

    def get_infos(self, indices: Any = None) -> Any:
        """Returns the infos of the last step. For the index -1, this is a dict. Otherwise, it is a
        list that contains only this dict."""
        return self._episode.info if indices == -1 else [self._episode.info]

    def get_observations(self, indices: Any = None) -> Any:
        """Returns the last observation, for the index -1."""
        return self._last("get_observations", indices, self._episode.observation)

    def get_actions(self, indices: Any = None) -> Any:
        """Returns the last action, for the index -1."""
        return self._last("get_actions", indices, self._episode.action)

    def get_rewards(self, indices: Any = None) -> Any:
        """Returns the last reward, for the index -1."""
        return self._last("get_rewards", indices, self._episode.reward)

    def last_info_for(self, agent_id: Any = None) -> Any:
        """Returns the infos of the last step. With several agents, those of `agent_id`."""
        return self._of_agent(self._episode.info, agent_id)

    def last_observation_for(self, agent_id: Any = None) -> Any:
        """Returns the last observation, as the environment returned it. The next step may overwrite
        its array."""
        return self._of_agent(self._episode.observation, agent_id)

    last_raw_obs_for = last_observation_for

    def last_action_for(self, agent_id: Any = None) -> Any:
        """Returns the last action, before `normalize_actions`. None before the first step."""
        return self._of_agent(self._episode.action, agent_id)

    def last_reward_for(self, agent_id: Any = "agent0") -> float:
        """Returns the last reward of an agent. See `_reward`."""
        if not self.agent_returns:
            return self._episode.reward
        return self._reward("last_reward_for", 1, agent_id)

    def prev_reward_for(self, agent_id: Any = "agent0") -> float:
        """Returns the reward of an agent one step before the last one. See `_reward`."""
        return self._reward("prev_reward_for", 2, agent_id)

    def _reward(self, name: str, steps: int, agent_id: Any) -> float:
        """Returns the reward of an agent at the step that was the last but `steps - 1`, and 0 if
        the episode has fewer steps.

        Raises:
            AttributeError: `on_episode_step` is not defined, so the rewards of single steps are not
                known.
        """
        if self.length < steps:
            return 0.0
        numbers = [number for number, _ in self._after]
        if numbers[-steps - 1 :] != [*range(self.length - steps, self.length + 1)]:
            raise AttributeError(
                f"episode.{name}() needs the rewards of single steps. polopt keeps them if the "
                "callbacks define on_episode_step"
            )
        before, after = self._after[-steps - 1][1], self._after[-steps][1]
        return after.get(agent_id, 0.0) - before.get(agent_id, 0.0)

    def add_temporary_timestep_data(self, key: str, data: Any) -> None:
        """Appends data to a list under a key. See `get_temporary_timestep_data`."""
        self._temporary.setdefault(key, []).append(data)

    def get_temporary_timestep_data(self, key: str) -> list[Any]:
        """Returns what `add_temporary_timestep_data` has added in this episode."""
        return self._temporary[key]

    def _of_agent(self, values: Any, agent_id: Any) -> Any:
        if agent_id is None or not isinstance(values, Mapping):
            return values
        return values.get(agent_id, None if self.agent_returns else values)

    def _last(self, name: str, indices: Any, value: Any) -> Any:
        if indices == -1:
            return value
        raise AttributeError(
            f"episode.{name}({'' if indices is None else indices!r}): polopt keeps only the last "
            f"step of an episode. Use {name}(-1) in on_episode_step, and collect the values in "
            "episode.user_data"
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"an episode of a callback does not have {name!r} in polopt. It has total_reward or "
            "get_return(), agent_rewards, module_for(agent_id), length or len(episode), "
            "is_terminated, is_truncated, custom_metrics, hist_data, user_data, episode_id, "
            "env_id, last_info_for(), "
            "last_observation_for(), last_action_for(), last_reward_for(), prev_reward_for(), and "
            "get_infos(-1), get_observations(-1), "
            "get_actions(-1) and get_rewards(-1). If the callback needs more, let the environment "
            "put it into the infos"
        )


#: Values of `reduce` in `MetricsLogger`, and their functions.
_REDUCED: dict[str, Any] = {"mean": np.mean, "min": np.min, "max": np.max, "sum": np.sum}


class MetricsLogger:
    """Collects numbers for the block `env_runners/custom_metrics` of results.

    If a callback logs several numbers under one name in an episode or for a fragment, they are
    combined into one number. The argument `reduce` decides how: `mean`, `min`, `max` or `sum`.
    Results contain the mean, minimum and maximum of this number over the episodes or fragments of
    an iteration.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self._reduce: dict[str, Any] = {}

    @property
    def values(self) -> dict[str, float]:
        """The combined number for each name."""
        return {
            name: float(_REDUCED[self._reduce[name]](values))
            for name, values in self._values.items()
        }

    def log_value(self, name: str | tuple[str, ...], value: Any, **how: Any) -> None:
        """Logs a number.

        Args:
            name: a name, or a tuple of nested names.
            value: the number.
            how: `reduce`. None means `mean`. Other arguments of RLlib have no effect.

        Raises:
            ValueError: `reduce` is not `mean`, `min`, `max` or `sum`.
        """
        name = "/".join(name) if isinstance(name, tuple) else name
        reduce = how.get("reduce") or "mean"
        if reduce not in _REDUCED:
            raise ValueError(
                f"metrics_logger.log_value({name!r}, reduce={reduce!r}). Allowed: "
                f"{', '.join(map(repr, _REDUCED))}"
            )
        self._values.setdefault(name, []).append(float(value))
        self._reduce[name] = reduce

    def log_dict(self, values: Mapping[str, Any], **how: Any) -> None:
        """Logs each number under its name."""
        for name, value in values.items():
            self.log_value(name, value, **how)


class _Missing:
    """Replaces an argument of RLlib that polopt does not have. Reading an attribute of this object
    raises an error that names the argument."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the callback uses the argument {self._name!r}, which polopt does not have. Methods "
            "about an episode get 'episode', 'metrics_logger', 'env_runner', 'worker', 'env', "
            "'base_env', 'env_index', 'rl_module' and 'policies'"
        )


def as_polopt_callbacks(given: Any) -> Any:
    """Returns a subclass of `polopt.Callbacks` that calls the methods of classes that were written
    for RLlib. Returns subclasses of `polopt.Callbacks`, strings and None unchanged.

    Args:
        given: a class, the `functools.partial` of a class, whose arguments are those of the
            constructor, a list of several of them, or a dict of functions as in RLlib 0.8, which
            get one dict with RLlib's keys.

    Raises:
        ConfigError: the value has another form, or a class overrides a method that polopt does not
            call.
    """
    if given is None or isinstance(given, str) or given == {}:
        return given or None
    if isinstance(given, Mapping):
        given = type("FunctionCallbacks", (), {n: _of_info(f) for n, f in given.items() if f})
    several = isinstance(given, (list, tuple)) and len(given) > 0
    makers: Sequence[Any] = given if several else [given]
    classes: list[Any] = [one.func if isinstance(one, functools.partial) else one for one in makers]
    for make, cls in zip(makers, classes, strict=True):
        partial_or_one_of_several = make is not cls or len(makers) > 1
        if not isinstance(cls, type) or (partial_or_one_of_several and issubclass(cls, Callbacks)):
            raise ConfigError(
                f"key 'callbacks': got {shown(make)}. Allowed: one class, a subclass of "
                "polopt.Callbacks or of polopt.rllib.RLlibCallback, or a list of the latter"
            )
    if issubclass(classes[0], Callbacks):
        return classes[0]
    return _adapter([(make, _methods(cls)) for make, cls in zip(makers, classes, strict=True)])


def _methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Returns the methods `on_...` that a user's class defines, and checks their names."""
    methods = dict(_overridden(cls))
    for name in methods:
        if name in _NOT_CALLED:
            raise ConfigError(
                f"key 'callbacks': {cls.__qualname__} has the method {name!r}, which polopt does "
                "not call. Instead: remove it, because polopt has no offline data"
            )
        if name not in _CALLED:
            raise ConfigError(
                f"key 'callbacks': {cls.__qualname__} has the method {name!r}, which polopt does "
                f"not call{nearest(name, _CALLED) or '.'} Allowed: "
                f"{', '.join(map(repr, _CALLED))}, and methods whose names do not begin with 'on_'"
            )
    return methods


def _overridden(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields the methods `on_...` that the user's class and its base classes define. Leaves out
    the methods that RLlib defines."""
    for base in reversed(cls.__mro__):
        if base in (object, RLlibCallback) or base.__module__.startswith("ray."):
            continue
        for name, method in vars(base).items():
            if name.startswith("on_") and callable(method):
                yield name, method


def _of_info(function: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Returns a method that passes all arguments to a function in one dict. The dict has the keys
    of RLlib 0.8."""

    def call(self: Any, **arguments: Any) -> Any:
        info = {"policy": arguments.get("policies"), **arguments}
        info["env"], info["post_batch"] = info.get("base_env"), info.get("postprocessed_batch")
        return function(info)

    call.code = getattr(function, "__code__", None)  # type: ignore[attr-defined]
    return call


def reaches_environments(callbacks: Any) -> bool:
    """Whether callbacks that `as_polopt_callbacks` returned use single environments of a worker.
    The environments then must not be in one vector implementation of their own."""
    return bool(getattr(callbacks, "reaches_environments", False))


def _names_in(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


_Made = tuple[Callable[[], Any], Mapping[str, Callable[..., Any]]]


def _adapter(made: Sequence[_Made]) -> type[Callbacks]:
    """Returns a class that calls objects of the user's classes.

    Args:
        made: for each class, a function that makes the object, and the methods that it defines.
    """
    defined = {name for _, methods in made for name in methods}
    codes = [
        getattr(method, "code", None) or getattr(inspect.unwrap(method), "__code__", None)
        for _, methods in made
        for method in methods.values()
    ]
    names = set().union(*(_names_in(code) for code in codes if code is not None))
    uses_environments = bool(defined & set(_OF_ENVIRONMENTS) or names & _REACH_ENVIRONMENTS)

    class Adapter(_Adapter):
        _makers = tuple([make for make, _ in made])
        methods_of = tuple([methods for _, methods in made])
        defined_methods = frozenset(defined)
        reaches_environments = uses_environments

        if defined & {"on_episode_created", "on_episode_start", *_OF_ENVIRONMENTS}:

            def on_episode_start(self, *, episode: Episode, worker: Any) -> None:
                self.meet(worker)
                for name in ("on_episode_created", "on_episode_start"):
                    self.of_episode(name, episode, worker)

        if "on_episode_step" in defined:

            def on_episode_step(self, *, episode: Episode, worker: Any) -> None:
                self.of_episode("on_episode_step", episode, worker)

        if defined & {*_OF_EPISODES, "on_postprocess_trajectory"}:

            def on_episode_end(self, *, episode: Episode, worker: Any) -> Mapping[str, Any]:
                self.of_episode("on_episode_end", episode, worker)
                return self.metrics_of(episode, worker)

        if defined & {"on_sample_end", "on_postprocess_trajectory", "on_learn_on_batch"}:

            def on_sample_end(self, *, worker: Any, samples: Any) -> Mapping[str, Any]:
                return self.of_samples(worker, samples)

        if "on_evaluate_start" in defined:

            def on_evaluate_start(self, *, trainer: Any) -> None:
                self.in_driver("on_evaluate_start", trainer)

        if "on_evaluate_end" in defined:

            def on_evaluate_end(self, *, trainer: Any, evaluation: dict[str, Any]) -> None:
                block = evaluation["env_runners"]
                for key in ("mean", "min", "max"):
                    evaluation.setdefault(f"episode_reward_{key}", block[f"episode_return_{key}"])
                evaluation.setdefault("episode_len_mean", block["episode_len_mean"])
                seen = {**evaluation, "evaluation": evaluation}
                self.in_driver("on_evaluate_end", trainer, evaluation_metrics=seen)
                evaluation |= {key: value for key, value in seen.items() if key != "evaluation"}

        if "on_train_result" in defined:

            def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
                metrics = self.in_driver("on_train_result", trainer, result=result)
                for name, value in metrics.values.items():
                    *path, last = name.split("/")
                    place = result
                    for part in path:
                        place = place.setdefault(part, {})
                    place[last] = value

    first = made[0][0]
    cls = first.func if isinstance(first, functools.partial) else first
    Adapter.__name__, Adapter.__qualname__ = cls.__name__, cls.__qualname__
    if "on_episode_created" in defined:
        warn(
            "%s.on_episode_created is called after the reset of the environment, just before "
            "on_episode_start. RLlib calls it before the reset",
            cls.__qualname__,
        )
    return Adapter


class _Adapter(Callbacks):
    """Calls the objects of the user's classes. `_adapter` makes a subclass that overrides only the
    methods of `polopt.Callbacks` that the user's classes need, so that other methods cost nothing.

    Class attributes:
        methods_of: for each of the user's classes, the methods that it defines.
        defined_methods: the names of all these methods.
        reaches_environments: see the function of the same name.
    """

    _makers: Sequence[Callable[[], Any]]
    methods_of: Sequence[Mapping[str, Callable[..., Any]]]
    defined_methods: frozenset[str]
    reaches_environments: bool

    def __init__(self) -> None:
        self._users = [make() for make in self._makers]
        self._met = False
        self._ended: list[Episode] = []  # in this fragment, for on_postprocess_trajectory

    def call(self, method: str, **arguments: Any) -> None:
        """Calls a method of each object that defines it."""
        for users, methods in zip(self._users, self.methods_of, strict=True):
            if method in methods:
                getattr(users, method)(**_taken(methods[method], arguments))

    def in_driver(self, method: str, trainer: Any, **arguments: Any) -> MetricsLogger:
        """Calls a method about the algorithm. Returns the logger that it has used."""
        metrics = MetricsLogger()
        self.call(method, algorithm=trainer, trainer=trainer, metrics_logger=metrics, **arguments)
        return metrics

    def tell(self, *, method: str, trainer: Any, arguments: Mapping[str, Any]) -> None:
        """Calls `in_driver`, for `FollowRun`."""
        self.in_driver(method, trainer, **arguments)

    def meet(self, worker: Any) -> None:
        """Calls the methods about environments before the first step of a worker, and lets
        `on_learn_on_batch` see what the worker learns."""
        if self._met:
            return
        self._met = True
        if "on_learn_on_batch" in self.defined_methods:
            observe_learning(worker.policy, self.call)
        if not self.defined_methods & set(_OF_ENVIRONMENTS):
            return
        shown_worker, metrics = WorkerView(worker), MetricsLogger()
        places = {"env_runner": shown_worker, "worker": shown_worker, "metrics_logger": metrics}
        context = shown_worker.context_of(0)
        env = worker.sampler.env
        self.call("on_environment_created", env=env, env_context=context, **places)
        if "on_sub_environment_created" in self.defined_methods:
            for n, one in enumerate(environments_of(worker)):
                context = shown_worker.context_of(n)
                made = {"sub_environment": one, "env_context": context, "env_index": n}
                self.call("on_sub_environment_created", **made, **places)

    def of_episode(self, method: str, episode: Episode, worker: Any) -> None:
        """Calls a method with an episode."""
        if method not in self.defined_methods:
            return
        shown_worker = WorkerView(worker)
        self.call(
            method,
            episode=CallbackEpisode(episode, shown_worker),
            metrics_logger=episode.data.setdefault("metrics_logger", MetricsLogger()),
            env_runner=shown_worker,
            worker=shown_worker,
            env=worker.sampler.env,
            base_env=BaseEnv(worker),
            env_index=episode.env_index,
            rl_module=worker.policy,
            policies=policies_of(worker.policy),
        )

    def metrics_of(self, episode: Episode, worker: Any) -> Mapping[str, Any]:
        """Returns the numbers that callbacks have given for an episode that has ended. If
        `on_postprocess_trajectory` is still to see the episode, returns none."""
        if "on_postprocess_trajectory" in self.defined_methods and not worker.config.in_evaluation:
            self._ended.append(episode)
            return {}
        return _metrics_in(episode.data)

    def of_samples(self, worker: Any, samples: Any) -> Mapping[str, Any]:
        """Calls the methods about a fragment, and returns their numbers."""
        self.meet(worker)
        metrics, shown_worker = MetricsLogger(), WorkerView(worker)
        found: dict[str, list[Any]] = {}
        if "on_postprocess_trajectory" in self.defined_methods:
            for data in self._postprocess(worker, shown_worker, samples):
                for name, value in _metrics_in(data).items():
                    found.setdefault(name, []).extend(value if isinstance(value, list) else [value])
        self.call(
            "on_sample_end",
            samples=Samples(samples),
            metrics_logger=metrics,
            env_runner=shown_worker,
            worker=shown_worker,
        )
        return {**found, **metrics.values}

    def _postprocess(
        self, worker: Any, shown_worker: Any, samples: Any
    ) -> Iterable[dict[str, Any]]:
        """Calls `on_postprocess_trajectory` for each trajectory. Yields the data of the episodes
        that have ended."""
        ended, self._ended = self._ended, []
        policies = policies_of(worker.policy)
        for one in trajectories_of(samples, ended, agents_of(worker)):
            episode = one.episode
            if episode is None:
                n = one.env_index
                episode = Episode(n, 0.0, 0, False, {}, running_data(worker, n), False)
            self.call(
                "on_postprocess_trajectory",
                worker=shown_worker,
                episode=CallbackEpisode(episode, shown_worker),
                agent_id=one.agent,
                policy_id=one.policy,
                policies=policies,
                postprocessed_batch=one.columns,
                original_batches={one.agent: (policies.get(one.policy), one.columns)},
            )
            one.write_back()
        for episode in ended:
            yield episode.data


def _metrics_in(data: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, and lists of numbers, that callbacks have given for an episode."""
    logged = data["metrics_logger"].values if "metrics_logger" in data else {}
    found = {name: float(value) for name, value in data.get("custom_metrics", {}).items()}
    lists = {
        name: [float(value) for value in np.ravel(values)]
        for name, values in data.get("hist_data", {}).items()
    }
    return {**lists, **found, **logged}


class FollowRun(RunListener):
    """Calls the methods of callbacks about the algorithm, its checkpoints and its workers. Before,
    adds the keys of older releases of RLlib to each result.

    Args:
        trainer: the trainer.
        old_results: adds the keys of older releases. None for a trainer that is not an algorithm
            of `polopt.rllib`.
    """

    def __init__(self, trainer: Any, old_results: OldResults | None) -> None:
        callbacks = trainer.experiment.trainer.callbacks
        self._trainer, self._old_results = trainer, old_results
        self._methods: frozenset[str] = getattr(callbacks, "defined_methods", frozenset())
        self._restarts: dict[tuple[bool, int], int] = {}

    def begin(self) -> None:
        trainer = self._trainer
        if "on_learn_on_batch" in self._methods:
            call = trainer.callbacks.call

            def learning(method: str, **arguments: Any) -> None:
                call("call", method=method, **arguments)

            observe_learning(trainer.optimizer.policy, learning)
        for name, policy in policies_of(trainer.optimizer.policy).items():
            self._tell("on_create_policy", policy_id=name, policy=policy)
        self._tell("on_algorithm_init")
        self._tell("on_trainer_init")
        changes = {"on_create_policy", "on_algorithm_init", "on_trainer_init"}
        if changes & self._methods and trainer.workers.remote:
            trainer.workers.weights.take(force=True)  # a callback may have changed them

    def restored(self) -> None:
        self._tell("on_checkpoint_loaded")

    def extend(self, result: dict[str, Any]) -> None:
        if self._old_results is not None:
            self._old_results.extend(result)
        evaluation = self._trainer.evaluation
        groups = [(False, self._trainer.workers)]
        groups += [] if evaluation is None else [(True, evaluation.workers)]
        for is_evaluation, workers in groups:
            new = []
            for index, count in workers.restart_counts.items():
                if count > self._restarts.get((is_evaluation, index), 0):
                    self._restarts[is_evaluation, index] = count
                    new.append(index)
            if new:
                both = {"is_evaluation": is_evaluation}
                self._tell("on_workers_recreated", worker_set=workers, worker_ids=new, **both)
                new_names = {"env_runner_group": workers, "env_runner_indices": new}
                self._tell("on_env_runners_recreated", **new_names, **both)

    def _tell(self, method: str, **arguments: Any) -> None:
        if method in self._methods:
            caller = self._trainer.callbacks
            caller.call("tell", method=method, trainer=self._trainer, arguments=arguments)


def _taken(method: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a method declares. For a required argument that polopt does not
    have, the value is a `_Missing`. It raises an error when the method reads one of its
    attributes."""
    parameters = inspect.signature(method).parameters.values()
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = {
        p.name: arguments.get(p.name, _Missing(p.name))
        for p in named
        if p.name != "self" and (p.name in arguments or p.default is p.empty)
    }
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        taken = {**arguments, **taken}
    return taken
