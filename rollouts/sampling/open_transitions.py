"""`OpenTransitions`: what a sampler keeps of transitions that take several steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polopt.policies.acting_policy import ActingPolicy
from polopt.rollouts.envs.agent_vector_env import SlotGroup
from polopt.rollouts.sampling.fragment_columns import FragmentColumns


class OpenTransitions:
    """Keeps the actions of the slots whose transitions have begun and not closed. In a turn-based
    environment, the row of a transition is the row of the step in which it closed. The action was
    chosen in an earlier step, or in an earlier fragment. `SlotGroup` explains slots.

    Args:
        slots: the slots.
        policy: the policy that chooses the actions.
    """

    def __init__(self, slots: SlotGroup, policy: ActingPolicy) -> None:
        self._slots = slots
        n, dist = slots.num_envs, policy.dist
        self._params = np.zeros((n, dist.num_params), dtype=np.float32)
        self._actions = np.zeros((n, *dist.action_shape), dtype=dist.action_dtype)
        self._memory = np.zeros((n, policy.state_size), dtype=np.float32)
        self._open = slots.open.copy()

    @classmethod
    def of(cls, env: Any, policy: ActingPolicy) -> OpenTransitions | None:
        """Returns None for a vector of environments with one agent each."""
        return cls(env, policy) if isinstance(env, SlotGroup) else None

    def hold(
        self,
        t: int,
        rows: FragmentColumns,
        before: np.ndarray,
        after: np.ndarray,
    ) -> np.ndarray:
        """Replaces the actions of step `t` in the slots whose agents do not act, with the actions
        with which their transitions began.

        Args:
            t: the index of the step in the fragment.
            rows: the rows of the fragment, with the actions of all slots in step `t`.
            before: `[N, S]`, the memory before this step.
            after: `[N, S]`, the memory after this step, if all agents act.

        Returns:
            the memory `[N, S]` after this step.
        """
        acts = self._slots.acts
        if not self._slots.all_act:
            waits = ~acts
            rows.params[t, waits] = (rows.params[t - 1] if t else self._params)[waits]
            rows.actions[t, waits] = (rows.actions[t - 1] if t else self._actions)[waits]
            after = np.where(acts[:, None], after, before)
        if before.shape[1]:
            self._memory = np.where(acts[:, None], before, self._memory)
        return after

    def note_rows(self, t: int, rows: FragmentColumns) -> None:
        """Marks the rows of step `t` in which a transition closed as `valid`."""
        rows.valid[t] = self._slots.has_row
        self._open = self._slots.open

    def first_memory(self, memory: np.ndarray) -> np.ndarray:
        """Returns the memory `[N, S]` before the first row of the next fragment.

        Args:
            memory: `[N, S]`, the current memory.
        """
        return np.where(self._open[:, None], self._memory, memory)

    def end_fragment(self, steps: int, rows: FragmentColumns) -> int:
        """Closes the gaps between the rows of each slot. Returns the new number of steps.

        Args:
            steps: the number of sampled steps.
            rows: the rows. Rows of lost steps are marked.
        """
        self._params, self._actions = rows.params[steps - 1].copy(), rows.actions[steps - 1].copy()
        kept = rows.valid[:steps].copy()
        for t, lost in rows.lost.items():
            kept[t] |= lost
        return rows.close_up(kept)

    def get_state(self) -> dict[str, Any]:
        """Returns the actions of open transitions, and the memory before them."""
        return {
            "params": self._params.copy(),
            "actions": self._actions.copy(),
            "memory": self._memory.copy(),
            "open": self._open.copy(),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned."""
        self._params, self._actions = np.array(state["params"]), np.array(state["actions"])
        self._memory = np.array(state["memory"])
        self._open = np.array(state["open"], dtype=bool)
