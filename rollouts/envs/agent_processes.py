"""`AgentProcesses`: copies of an environment with several agents, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gymnasium import Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from polopt.rollouts.envs.agent_vector_env import AgentID, AgentVectorEnv, FaultTolerantAgents
from polopt.rollouts.envs.agents_env import AgentsEnv
from polopt.rollouts.envs.env_errors import close_env
from polopt.rollouts.envs.fault_tolerant_env import FAULT_KEY

#: Largest number of seconds until the error of a process arrives, after the news that there is one.
_ERROR_S = 60.0


class _Seen(NamedTuple):
    """What a process returns in place of the observations of a step or a reset.

    Attributes:
        observations: see `AgentsEnv.step`.
        acting, over: see `AgentsEnv`.
        reset: the result of the reset after the end of the episode. None if the episode goes on.
    """

    observations: Mapping[AgentID, Any]
    acting: list[AgentID]
    over: bool
    reset: tuple[_Seen, dict[Any, Any]] | None = None


class AgentsInProcess(FaultTolerantAgents):
    """A `FaultTolerantAgents` in a process of its own. Its observations are a `_Seen`. It resets
    itself at the end of an episode, so that a reset needs no message. It returns the infos that
    `keep_infos` selects, as `FaultTolerantEnv` does, because a message has to carry them."""

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps the environment. See `FaultTolerantAgents.step`."""
        observations, rewards, terminated, truncated, info = super().step(action)
        env: Any = self.env
        if FAULT_KEY not in info:
            is_kept = self._keep_infos == "all" or (env.over and self._keep_infos == "last")
            info = self._kept(info) if is_kept else {}
        seen = _Seen(observations, env.acting, env.over)
        if env.over:
            seen = seen._replace(reset=self.reset())
        return seen, rewards, terminated, truncated, info

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the environment. See `FaultTolerantEnv.reset`."""
        observations, info = super().reset(seed=seed, options=options)
        return _Seen(observations, self.env.acting, False), info  # type: ignore[attr-defined]


class _Copy:
    """One copy, as `AgentVectorEnv` uses it. `AgentProcesses` puts the results of its process here.

    Attributes:
        env: this object, which has the attributes of an `AgentsEnv` that do not change anything.
        stepped: the result of the last step.
        first: the result of the last reset.
    """

    def __init__(
        self, spaces: Mapping[AgentID, tuple[Space[Any], Space[Any]]], render_mode: str | None
    ) -> None:
        self.env = self
        self.spaces_of = spaces.__getitem__
        self.render_mode = render_mode
        self.acting: list[AgentID] = []
        self.over = False
        self.continued = None  # see `AgentsEnv`
        self.stepped: Any = None
        self.first: Any = None

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Returns the result of the last step."""
        seen, *others = self.stepped
        self.acting, self.over, self.first = seen.acting, seen.over, seen.reset
        return seen.observations, *others

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[Any, Any]]:
        """Returns the result of the last reset."""
        seen, info = self.first
        self.acting, self.over = seen.acting, False
        return seen.observations, info


class AgentProcesses(AgentVectorEnv):
    """Steps K copies at the same time, each in its own process. Otherwise it is like
    `AgentVectorEnv`.

    Gymnasium's `AsyncVectorEnv` runs the processes. Actions and results are dicts of the
    agents that are there, so they travel as two pickled messages for each copy and step, and not in
    shared memory.

    Args:
        guards: functions that make the K `AgentsInProcess`.
        example: an environment like the copies. It may be closed.

    Attributes:
        processes: the vector that owns the processes.

    Raises:
        EOFError, ConnectionError: from `step` and `reset`, if a process has died.
        EnvironmentFailedError: see `FaultTolerantEnv`.
    """

    def __init__(self, guards: Sequence[Callable[[], AgentsInProcess]], example: AgentsEnv) -> None:
        # `AgentsInProcess` resets itself, which no mode of Gymnasium allows for dicts of agents.
        mode = AutoresetMode.DISABLED
        self.processes = AsyncVectorEnv(
            guards, shared_memory=False, copy=False, autoreset_mode=mode
        )
        spaces = {agent: example.spaces_of(agent) for agent in example.possible_agents}
        self._copies = [_Copy(spaces, example.render_mode) for _ in guards]
        super().__init__([lambda each=each: each for each in self._copies])  # type: ignore[misc]

    def reset(self, copies: Iterable[int], seeds: Sequence[int] | None) -> None:
        """Begins new episodes in some copies. See `AgentVectorEnv.reset`."""
        copies = list(copies)
        asked = {k: {"seed": None if seeds is None else seeds[k]} for k in copies}
        for k, first in self._ask("reset", asked).items():
            self._copies[k].first = first
        super().reset(copies, seeds)

    def step(self, actions: Sequence[Any]) -> None:
        """Steps all copies at the same time. See `AgentVectorEnv.step`."""
        for group, of_group in zip(self.groups, actions, strict=True):
            group.actions = of_group
        asked = {}
        for k, acting in enumerate(self._acting):
            places = ((agent, *self._slots[k][agent]) for agent in acting)
            asked[k] = {agent: group.actions[slot] for agent, group, slot in places}
        for k, stepped in self._ask("step", asked).items():
            self._copies[k].stepped = stepped
        super().step(actions)

    def _ask(self, command: str, of_copies: Mapping[int, Any]) -> dict[int, Any]:
        """Sends a command to the processes of some copies, and returns their answers."""
        pipes: list[Any] = self.processes.parent_pipes
        for k, data in of_copies.items():
            pipes[k].send((command, data))
        answers = {k: pipes[k].recv() for k in of_copies}
        failed = [k for k, (_, is_fine) in answers.items() if not is_fine]
        for k in failed:  # these processes have ended
            pipes[k].close()
            pipes[k] = None
        if failed:
            _, _, error, _ = self.processes.error_queue.get(timeout=_ERROR_S)
            raise error
        return {k: answer for k, (answer, _) in answers.items()}

    def get_state(self) -> None:
        """Returns None, as for other environments in processes."""
        return

    def set_state(self, state: Mapping[str, Any]) -> bool:
        """Returns False: the caller begins new episodes."""
        return False

    def render(self) -> tuple[Any, ...]:
        """Returns what each copy renders."""
        return self.processes.render() or ()

    def close(self) -> None:
        """Closes the environments, and ends their processes."""
        close_env(self.processes, "environments in processes")
