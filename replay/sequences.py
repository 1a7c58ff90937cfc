"""`SequenceUnit`: draws sequences of steps from a replay buffer, for policies with memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Sequences
from polopt.replay.replay_unit import ReplayUnit
from polopt.replay.streams import SUCCESSOR, TERMINATED, TRUNCATED, VALID, StreamTail


class SequenceUnit(ReplayUnit):
    """Draws sequences of consecutive steps from a `ReplayBuffer`. A sequence begins at the first
    step of a fragment, because fragments contain the state of the policy's memory only for their
    first steps.

    Args:
        length: number of steps of a sequence. The steps of the burn-in also count.
        burn_in: number of first steps of a sequence that only update the memory.
    """

    name = "sequence"

    def __init__(self, length: int, burn_in: int) -> None:
        self.length = self.span = length
        self.burn_in = burn_in
        self._states: dict[int, np.ndarray] = {}  # the memory [S], by serial number of the row
        self._order: deque[int] = deque()  # the keys of `_states`, oldest first

    def options(self) -> dict[str, Any]:
        """See `ReplayUnit.options`."""
        unit = {"replay_unit": self.name}
        return {**unit, "sequence_length": self.length, "burn_in": self.burn_in}

    def check(self, batch: SampleBatch) -> None:
        """Raises ConfigError if a fragment is longer than a sequence."""
        if batch.shape[0] > self.length:
            raise ConfigError(
                f"key 'sequence_length': got {self.length}; allowed: {batch.shape[0]} or more, the "
                "number of steps of a fragment"
            )

    def leaves_out(self, batch: SampleBatch) -> bool:
        """Returns False: sequences have all rows of their fragments."""
        return False

    def needs_successor(self, flags: np.ndarray) -> np.ndarray:
        """See `ReplayUnit.needs_successor`."""
        return (flags & VALID) > 0

    def drawable(self, flags: np.ndarray, tail: StreamTail, ended: bool) -> np.ndarray:
        """Returns `[K, N]` bool: the rows of a tail that begin a complete sequence with a
        transition after its burn-in. See `ReplayUnit.drawable`."""
        valid = np.concatenate([np.zeros((1, flags.shape[1]), int), (flags & VALID) > 0])
        before = np.cumsum(valid, axis=0)  # number of transitions before each step
        steps = np.arange(len(flags))
        first = np.minimum(steps + self.burn_in, len(flags))
        stop = np.minimum(steps + self.length, len(flags))
        complete = np.array(tail.starts) & (ended | (steps < len(flags) - self.span))
        return complete[:, None] & (before[stop] > before[first])

    def added(self, batch: SampleBatch, serials: np.ndarray) -> None:
        """Keeps the states of the policy's memory before the first step of a fragment."""
        if "state" in batch.per_env:
            self._keep(serials[0], batch.per_env["state"])

    def _keep(self, serials: np.ndarray, states: np.ndarray) -> None:
        for serial, state in zip(serials.tolist(), states, strict=True):
            self._states[serial] = state.copy()
            self._order.append(serial)

    def overwritten(self, end: int) -> None:
        """Removes the states of rows with serial numbers below `end`."""
        while self._order and self._order[0] < end:
            del self._states[self._order.popleft()]

    def get_state(self) -> dict[str, np.ndarray]:
        """Returns the kept states and their serial numbers, or an empty dict."""
        if not self._states:
            return {}
        states = np.stack([self._states[serial] for serial in self._order])
        return {"state_serials": np.array(self._order), "states": states}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`."""
        self._states, self._order = {}, deque()
        if "states" in state:
            self._keep(np.asarray(state["state_serials"]), np.asarray(state["states"]))

    def read(
        self,
        arrays: Mapping[str, np.ndarray],
        places: np.ndarray,
        weights: np.ndarray,
        indices: np.ndarray,
    ) -> Sequences:
        """Reads the sequences that begin at drawn rows.

        Args:
            arrays: the columns of the stored rows.
            places: `[B]`, the places of the drawn rows in the columns.
            weights: `[B]` float32, the weights of the sequences.
            indices: `[B]`, the serial numbers of the rows.
        """
        length, count = self.length, len(places)
        rows = np.empty((length + 1, count), dtype=np.int64)
        rows[0] = places
        stored = np.ones((length + 1, count), dtype=bool)
        successor_index, successor_rows = [], []
        for t in range(length):
            node = arrays["next"].take(rows[t])
            own = (arrays["flags"].take(node) & SUCCESSOR) > 0
            rows[t + 1] = np.where(own, arrays["next"].take(node), node)
            own &= stored[t]
            successor_index.append(t * count + np.flatnonzero(own))
            successor_rows.append(node[own])
            # The stream ends at a row that is linked to itself.
            stored[t + 1] = stored[t] & (rows[t + 1] != np.where(own, node, rows[t]))
        obs_rows, steps, rows = rows, stored[:-1], rows[:-1]
        flags = arrays["flags"].take(rows) * steps
        columns = {
            "actions": arrays["actions"].take(rows, axis=0),
            "rewards": arrays["rewards"].take(rows) * steps,
            "terminated": (flags & TERMINATED) > 0,
            "truncated": (flags & TRUNCATED) > 0,
            "valid": (flags & VALID) > 0,
        }
        per_env = {}
        if self._states:
            per_env["state"] = np.stack([self._states[serial] for serial in indices.tolist()])
        batch = SampleBatch(
            all_obs=arrays["obs"].take(obs_rows, axis=0),
            columns=columns,
            successor_index=np.concatenate(successor_index),
            successor_obs=arrays["obs"].take(np.concatenate(successor_rows), axis=0),
            per_env=per_env,
        )
        return Sequences(batch, weights, indices, self.burn_in)
