"""`OldGymEnv`: adapts environments with the API of Gym before 0.26 to Gymnasium."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec, load_env_creator

logger = logging.getLogger("polopt")
_said: set[type] = set()


def is_old(env: Any) -> bool:
    """Whether an object looks like an environment with the API of Gym before 0.26. Its `reset` does
    not take `seed`, or takes `return_info` as in Gym 0.22 to 0.25."""
    if any(not hasattr(env, name) for name in ("reset", "step", "action_space")):
        return False
    if not hasattr(env, "observation_space"):
        return False
    try:
        parameters = inspect.signature(env.reset).parameters
    except (TypeError, ValueError):
        return False
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return "return_info" in parameters or not ("seed" in parameters or takes_all)


def adapted(env: Any, says: bool) -> Any:
    """Returns an environment with the API of Gymnasium. An environment with the API of Gym before
    0.26 becomes an `OldGymEnv`, also below wrappers of Gymnasium, which `gymnasium.make` adds.

    Args:
        env: the environment.
        says: see `OldGymEnv`.
    """
    outer, inner = None, env
    while isinstance(inner, gymnasium.Wrapper) and inner.__module__.startswith("gymnasium."):
        outer, inner = inner, inner.env
    if not is_old(inner):
        return env
    if outer is None:
        return OldGymEnv(inner, says)
    outer.env = OldGymEnv(inner, says)
    return env


def accepted_by_make(spec: EnvSpec, says: bool) -> EnvSpec:
    """Returns a spec that `gymnasium.make` accepts, although the class of the environment has the
    API of Gym before 0.26 and does not derive from `gymnasium.Env`.

    Args:
        spec: the spec of a registered environment.
        says: see `OldGymEnv`.
    """
    entry = spec.entry_point
    create = load_env_creator(entry) if isinstance(entry, str) else entry
    if not isinstance(create, type) or issubclass(create, gymnasium.Env):
        return spec
    return dataclasses.replace(spec, entry_point=lambda **options: adapted(create(**options), says))


class OldGymEnv(gymnasium.Env[Any, Any]):
    """An environment whose `reset` returns only the observation, and whose `step` returns four
    values. Answers in Gymnasium's form are passed on unchanged.

    `info["TimeLimit.truncated"]` says that an episode was truncated. The seed of an episode goes to
    `reset` if it takes a seed, and otherwise to the method `seed` if the environment has it. All
    other attributes are those of the environment.

    Args:
        env: the environment. Its spaces may be of the package `gym`.
        says: whether to log that the environment is adapted, once for each class.
    """

    def __init__(self, env: Any, says: bool) -> None:
        self.env = env
        self.observation_space = space_of(env.observation_space)
        self.action_space = space_of(env.action_space)
        self.render_mode = getattr(env, "render_mode", None)
        self.metadata = getattr(env, "metadata", None) or {}
        self._takes_seed = "seed" in inspect.signature(env.reset).parameters
        if says and type(env) not in _said:
            _said.add(type(env))
            logger.warning(
                "%s has the API of Gym before 0.26. polopt adapts it: an episode that ends counts "
                "as terminated, unless info['TimeLimit.truncated'] is true",
                type(env).__name__,
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the environment."""
        given = {"seed": seed} if self._takes_seed else {}
        if not self._takes_seed and seed is not None:
            if isinstance(self.env, gymnasium.Env):
                gymnasium.Env.reset(self.env, seed=seed)  # seeds `np_random`
            if callable(set_seed := getattr(self.env, "seed", None)):
                set_seed(seed)
        result = self.env.reset(**given)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        return result, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps the environment."""
        result = self.env.step(action)
        if not isinstance(result, tuple | list) or len(result) != 4:
            return result  # type: ignore[return-value]  # checked by the caller
        observation, reward, done, info = result
        is_cut = bool(done and isinstance(info, dict) and info.get("TimeLimit.truncated"))
        return observation, reward, bool(done) and not is_cut, is_cut, info

    def render(self) -> Any:
        """Renders the environment."""
        return self.env.render()

    def close(self) -> None:
        """Closes the environment, if it has such a method."""
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """The spec of the environment, which `gymnasium.make` sets."""
        return getattr(self.env, "spec", None)

    @property
    def unwrapped(self) -> Any:
        """The environment itself."""
        return getattr(self.env, "unwrapped", self.env)

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # called by copy or pickle
            raise AttributeError(name)
        return getattr(self.env, name)


def space_of(space: Any) -> spaces.Space[Any]:
    """Returns the space of Gymnasium for a space of the package `gym`.

    Raises:
        TypeError: Gymnasium has no such space.
    """
    if isinstance(space, spaces.Space):
        return space
    kind = type(space).__name__
    if kind == "Box":
        return spaces.Box(space.low, space.high, space.shape, space.dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(space.nvec)
    if kind == "MultiBinary":
        return spaces.MultiBinary(space.n)
    if kind == "Dict":
        return spaces.Dict({name: space_of(part) for name, part in space.spaces.items()})
    if kind == "Tuple":
        return spaces.Tuple([space_of(part) for part in space.spaces])
    raise TypeError(f"{space!r:.200} is not a space of Gymnasium")
