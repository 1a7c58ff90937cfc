"""`ReplayBuffer`: stores the last transitions of all workers, and draws them at random."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polopt.common.config import ConfigError, shown
from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Sequences, Transitions
from polopt.metrics.lag import AgeHistogram
from polopt.replay.row_store import (
    ColumnSpec,
    RowFilesError,
    RowStore,
    check_size,
    read_arrays,
    readable_bytes,
    saved_specs,
    write_arrays,
)
from polopt.replay.sum_tree import SumTree

#: Bits of the column `flags`.
VALID = 1  # the row is a transition
TERMINATED = 2
TRUNCATED = 4
CUT = 8  # windows end at this row (`ReplayBuffer` explains windows)
DRAWABLE = 16  # the window of the row is complete, so the row can be drawn
SUCCESSOR = 32  # the row holds only the next observation of another row
#: `_draw_uniform` draws random places, and draws again for each place that is not drawable. After
#: this many repetitions, it draws from a list of all drawable places.
_MOST_ROUNDS = 20


@dataclass(slots=True)
class _Tail:
    """The last steps of a stream. The windows of the rows of these steps may not be complete yet.
    `ReplayBuffer` explains streams, windows and successors. `RowStore` explains serial numbers.

    Attributes:
        place: the `SampleBatch.place` of the fragment that would continue the stream. `None` means
            that the place is not known.
        steps: the serial numbers of the rows of environment 0 in the last steps, oldest first.
        starts: one bool for each of these steps. True if a fragment begins at the step.
        priorities: `[len(steps), N]`, the priorities that the caller of `add` passed. -1 stands for
            a priority that the caller did not pass.
        open: `[N]` bool. True if the last row of an environment still needs its next observation.
        nodes: `[N]` serial numbers of the rows that will be linked to the next step. For each
            environment, this is the last row, or the successor of the last row.
        next_obs: `[N, ...]`, the observations after the last step.
    """

    place: tuple[int, int] | None
    steps: list[int]
    starts: list[bool]
    priorities: np.ndarray
    open: np.ndarray
    nodes: np.ndarray
    next_obs: np.ndarray


class ReplayBuffer:
    """Keeps the last `capacity` rows of all sources in order of arrival, and draws from them. A
    source is a worker. A row is one step of one environment.

        buffer = ReplayBuffer(1_000_000, gamma=0.99, n_step=3, seed=0, alpha=0.6)
        buffer.add(batch)                             # a SampleBatch [T, N]
        rows = buffer.sample(256)                     # Transitions [256, ...]
        buffer.update_priorities(rows.indices, np.abs(td_errors))

    A fragment `[T, N]` is stored as T * N rows. The next observation of a row is usually the
    observation of the row one step later, so each observation is stored only once. In two cases,
    the next observation is stored in a separate row, which is called the successor. The first case
    is a truncated episode, if the next episode begins in the same step. (With `unit="sequence"`,
    this also applies to terminated episodes.) The second case is a row after which the steps of its
    environment are missing, because a stream was interrupted or because the batch is padded.
    Observations and actions keep their dtypes, so uint8 images stay uint8, also as a field of a
    structured array. All values must be finite, which the buffer does not check.

    To draw a row, the buffer reads the next rows of the same environment and their successors.
    These rows arrived after the row itself. The buffer overwrites the oldest rows first, so it
    overwrites a row before it overwrites the rows that it reads together with this row.

    **Windows.** The window of a row is the steps of its n-step return. A window ends early at the
    end of an episode, before a row that is not `valid` (see `SampleBatch`), and where a stream was
    interrupted. If the window ends with `terminated`, the discount is 0. Otherwise the learner
    bootstraps from the value of the true next observation. The window is complete when the buffer
    has all steps of the window, and the next observation if the learner needs it. The buffer can
    then draw the row. With `unit="transition"`, it never draws a row that is not `valid`.

    **Streams.** A stream is a series of consecutive fragments of one worker. The buffer compares
    the places of two fragments (`SampleBatch.place`) to decide whether the second fragment
    continues the first one. A fragment starts a new stream if it has no place, if the fragment
    before it was lost, or if its worker was replaced. The caller of `add` can also decide this with
    `follows`. A window never contains rows of two streams.

    **Priorities** (Schaul et al., 2016). Row i is drawn with probability P(i) = p_i^alpha / sum of
    p^alpha, where p_i is the priority of the row plus `priority_epsilon`. The weight of the row is
    (R P(i))^-beta, divided by the largest weight of the batch. R is the number of drawable rows.
    Over the first `beta_rows` added rows, the exponent beta changes linearly from the argument
    `beta` to `final_beta`.

    **Sequences** are for policies with memory. With `unit="sequence"`, `sample_sequences` draws
    sequences of `sequence_length` consecutive steps. A sequence always begins at the first step of
    a fragment, because fragments contain the state of the policy's memory only for their first
    steps.

    Args:
        capacity: the largest number of rows. Rows that are not `valid` and successors also count.
        gamma: discount factor of one step.
        n_step: largest number of steps of a return.
        seed: seed of the draws.
        alpha: exponent of priorities. `None` draws rows uniformly, with weights of 1.
        beta: exponent of the weights at the start.
        final_beta: exponent of the weights at the end.
        beta_rows: number of added rows after which the exponent is `final_beta`.
        priority_epsilon: added to every priority, so that a row with priority 0 can also be drawn.
        unit: `transition` or `sequence`.
        sequence_length: number of steps of a sequence. The steps of the burn-in also count.
        burn_in: number of first steps of a sequence that only update the memory. The learner does
            not learn from these steps.
        directory: directory of the files from which the arrays are mapped. `None` keeps the arrays
            in memory.
        capacity_key: name of the option that sets `capacity`, for error messages.

    Raises:
        ConfigError: `capacity`, `gamma`, `n_step`, `unit`, `sequence_length` or `burn_in` is out of
            range.
    """

    def __init__(
        self,
        capacity: int,
        gamma: float,
        n_step: int = 1,
        *,
        seed: int | np.random.SeedSequence = 0,
        alpha: float | None = None,
        beta: float = 0.4,
        final_beta: float = 1.0,
        beta_rows: int = 1_000_000,
        priority_epsilon: float = 1e-6,
        unit: str = "transition",
        sequence_length: int | None = None,
        burn_in: int = 0,
        directory: str | Path | None = None,
        capacity_key: str = "replay_capacity",
    ) -> None:
        _check(capacity_key, capacity, 1 <= capacity < 2**31, "1 to 2,147,483,647")
        _check("gamma", gamma, 0.0 <= gamma <= 1.0, "0 to 1")
        _check("n_step", n_step, n_step >= 1, "1 or larger")
        _check("replay_unit", unit, unit in ("transition", "sequence"), "transition, sequence")
        if unit == "sequence":
            length = sequence_length
            enough = length is not None and 1 <= length <= capacity
            _check("sequence_length", length, enough, f"1 to {capacity:,} for sequences")
            _check("burn_in", burn_in, 0 <= burn_in < (length or 0), f"0 to {(length or 1) - 1}")
        self.capacity = capacity
        self.gamma = gamma
        self.n_step = n_step
        self.alpha = alpha
        self.beta = beta
        self.final_beta = final_beta
        self.beta_rows = beta_rows
        self.priority_epsilon = priority_epsilon
        self.unit = unit
        self.sequence_length = sequence_length
        self.burn_in = burn_in
        self._directory = None if directory is None else Path(directory)
        self._capacity_key = capacity_key
        self._rng = np.random.default_rng(seed)
        # The window of a row is complete at the latest when this many further steps are stored.
        self._span = (sequence_length or 1) if unit == "sequence" else n_step
        self._store: RowStore | None = None
        self._allocated: dict[str, ColumnSpec] = {}  # from the last `allocate`
        # Only few rows begin a sequence, and random places would rarely hit these rows. So a buffer
        # of sequences always draws with the tree, even if it has no priorities.
        self._tree = SumTree(capacity) if alpha is not None or unit == "sequence" else None
        self._tails: dict[int, _Tail] = {}  # by source
        self._states: dict[int, np.ndarray] = {}  # the memory [S], by serial number of the row
        self._state_order: deque[int] = deque()
        self._end = 0  # serial number of the next row
        self._num_valid = 0
        self._num_drawable = 0
        self._max_priority = 1.0
        self._rows_added = 0
        self._num_gaps = 0
        self._num_stale_priorities = 0
        self._ages = AgeHistogram(capacity)
        self._given = _Range()

    # ---- size ---------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """The number of stored transitions."""
        return self._num_valid

    @property
    def num_drawable(self) -> int:
        """The number of rows that can be drawn now. With `unit="sequence"`, this is the number of
        sequences that can be drawn."""
        return self._num_drawable

    @property
    def end(self) -> int:
        """The index of the next row that is added. Indices count up. No index is used twice, unless
        `set_state` removes all rows."""
        return self._end

    @property
    def total_weight(self) -> float:
        """The sum of p^alpha over all drawable rows, see the class. If rows are drawn uniformly,
        this is the number of drawable rows."""
        if self._tree is None or self.alpha is None:
            return float(self._num_drawable)
        return self._tree.total

    @property
    def num_gaps(self) -> int:
        """The number of streams that were interrupted."""
        return self._num_gaps

    def nbytes_of(self, obs: ColumnSpec, actions: ColumnSpec) -> int:
        """Bytes of the full buffer for observations and actions of these shapes and dtypes, without
        the stored states of recurrent policies."""
        tree = SumTree.nbytes_of(self.capacity) if self._tree is not None else 0
        return self.capacity * RowStore.row_nbytes(_specs(obs, actions)) + tree

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer. 0 before `allocate` or the first `add`."""
        if self._store is None:
            return 0
        specs = self._store.specs
        return self.nbytes_of(specs["obs"], specs["actions"])

    def allocate(self, obs: ColumnSpec, actions: ColumnSpec) -> int:
        """Reserves the arrays of the full buffer.

        Replay optimizers call this method before sampling begins, so that a buffer that is too
        large raises the error early. If nobody has called this method, the first `add` calls it.

        Args:
            obs: shape and dtype of the row of one observation.
            actions: shape and dtype of one action.

        Returns:
            Bytes of the full buffer.

        Raises:
            ConfigError: the full buffer does not fit into the free memory, or onto the disk.
            OSError: the directory of the buffer, or a file in this directory, cannot be created.
        """
        nbytes = self.nbytes_of(obs, actions)
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
        check_size(nbytes, self._capacity_key, self.capacity, self._directory)
        self._allocated = {"obs": obs, "actions": actions}
        try:
            self._store = RowStore(self.capacity, _specs(obs, actions), self._directory)
        except MemoryError as error:  # a limit of the process that `memory` does not know
            raise ConfigError(
                f"key {self._capacity_key!r}: got {self.capacity:,}; the full buffer needs "
                f"{readable_bytes(nbytes)}, and the system does not provide them: {error}"
            ) from error
        return nbytes

    # ---- adding -------------------------------------------------------------------------------

    def add(
        self,
        batch: SampleBatch,
        priorities: np.ndarray | None = None,
        follows: bool | None = None,
    ) -> int:
        """Adds a fragment.

        Args:
            batch: `[T, N]`, with observations and rewards before normalisation.
            priorities: `[K + T, N]`, or `[N]` for sequences. The last T rows of the array are the
                priorities of this fragment. The first K rows are priorities for the K steps before
                this fragment, whose windows may end in this fragment. The buffer ignores these K
                rows if the fragment starts a new stream. For sequences, the array has the
                priorities of the N sequences that begin with this fragment. NaN or None stands for
                the largest priority so far.
            follows: whether the fragment continues the previous fragment with the same
                `worker_index`. With `None`, `batch.place` decides, and a batch without a place does
                not continue the previous fragment. A batch with another N never continues it.

        Returns:
            The number of transitions added.

        Raises:
            ValueError: the shapes or dtypes of observations or actions differ from earlier
                fragments or from `allocate`, `priorities` has a wrong shape, or a priority is
                negative or infinite.
            ConfigError: the fragment has more rows than `capacity`, or more steps than
                `sequence_length`. Also raised if the first `add` calls `allocate`, and the full
                buffer does not fit.
            OSError: `add` calls `allocate`, and a file cannot be created.
        """
        steps, envs = batch.shape
        store = self._store_for(batch)
        given = self._given_priorities(priorities, steps, envs)
        valid = batch["valid"]
        terminated, truncated = batch["terminated"] & valid, batch["truncated"]
        # `own` marks the rows that have a successor. If the buffer draws transitions, it does not
        # store the successor of a row with `terminated`, because the learner does not bootstrap
        # from this successor.
        own = np.zeros((steps, envs), dtype=bool)
        own.reshape(-1)[batch.successor_index] = True
        wanted = valid if self.unit == "sequence" else valid & ~terminated
        stored = wanted.reshape(-1)[batch.successor_index]
        own_rows, own_obs = batch.successor_index[stored], batch.successor_obs[stored]
        count = steps * envs + len(own_rows)
        if count > self.capacity:
            raise ConfigError(
                f"key {self._capacity_key!r}: got {self.capacity:,}; allowed: {count:,} or more, "
                "the number of rows of one fragment"
            )

        source = batch.worker_index
        tail = self._tails.pop(source, None)
        if tail is not None:
            if follows is None:
                follows = batch.place is not None and batch.place == tail.place
            if not follows or len(tail.open) != envs:
                self._cut(tail)
                tail = None

        start = self._reserve(count)
        extra = start + steps * envs
        serials = start + np.arange(steps * envs).reshape(steps, envs)
        extras = extra + np.arange(len(own_rows))
        # `step_after` is the row one step later. `following` is the row with the next observation,
        # which is the successor if the row has a successor. Until the next fragment arrives, the
        # last row (or its successor) is linked to itself.
        step_after = serials + envs
        nodes = serials.copy()
        nodes.reshape(-1)[own_rows] = extras
        step_after[-1] = nodes[-1]
        following = step_after.copy()
        following[-1] = serials[-1]
        following.reshape(-1)[own_rows] = extras
        cut = terminated | truncated | own
        cut[:-1] |= ~valid[1:]
        flags = valid * VALID + terminated * TERMINATED + truncated * TRUNCATED + cut * CUT

        store.write("obs", start, batch.flat("obs"))
        store.write("actions", start, batch.flat("actions"))
        store.write("rewards", start, batch.flat("rewards"))
        store.write("next", start, (following % self.capacity).reshape(-1))
        store.write("flags", start, flags.reshape(-1))
        self._write_successors(extra, own_obs, step_after.reshape(-1)[own_rows])
        if self._tree is not None:
            self._set_leaves(serials.reshape(-1), 0.0)
        num_valid = int(np.count_nonzero(valid))
        self._num_valid += num_valid
        self._rows_added += num_valid
        if self.unit == "sequence" and "state" in batch.per_env:
            self._keep_states(serials[0], batch.per_env["state"])

        if tail is not None:
            self._link(tail, serials[0], ~valid[0])
        new = _Tail(
            place=batch.next_place,
            steps=(tail.steps if tail else []) + serials[:, 0].tolist(),
            starts=(tail.starts if tail else []) + [True] + [False] * (steps - 1),
            priorities=self._joined(tail, given, steps),
            open=~(terminated[-1] | own[-1]),
            nodes=nodes[-1],
            next_obs=batch.bootstrap_obs.copy(),
        )
        self._complete(new)
        self._tails[source] = new
        return num_valid

    def _joined(self, tail: _Tail | None, given: np.ndarray, steps: int) -> np.ndarray:
        """The priorities of the steps of a tail, followed by the priorities of the new steps.

        Args:
            tail: the tail. `None` means that a new stream begins.
            given: `[K + steps, N]`, from `_given_priorities`.
            steps: number of new steps.
        """
        if tail is None:
            return given[-steps:]
        before = tail.priorities.copy()
        again = min(len(given) - steps, len(before))
        if again > 0:
            before[-again:] = given[-steps - again : -steps]
        return np.concatenate([before, given[-steps:]])

    def cut(self, source: int) -> None:
        """Ends the stream of a source, so that its next fragment starts a new stream. The last rows
        of the stream become drawable, and their windows end at the last observation.

        Args:
            source: `worker_index` of the fragments. If the buffer has no stream of this source,
                this method does nothing.
        """
        tail = self._tails.pop(source, None)
        if tail is not None:
            self._cut(tail)

    def _store_for(self, batch: SampleBatch) -> RowStore:
        obs = ColumnSpec(batch.all_obs.shape[2:], batch.all_obs.dtype)
        actions = ColumnSpec(batch["actions"].shape[2:], batch["actions"].dtype)
        if self.sequence_length is not None and batch.shape[0] > self.sequence_length:
            raise ConfigError(
                f"key 'sequence_length': got {self.sequence_length}; allowed: {batch.shape[0]} or "
                "more, the number of steps of a fragment"
            )
        if self._store is None:
            self.allocate(obs, actions)
        store = self._store
        assert store is not None
        for name, spec in (("obs", obs), ("actions", actions)):
            if spec != store.specs[name]:
                raise ValueError(
                    f"{name} must have shape {list(store.specs[name].shape)} and dtype "
                    f"{store.specs[name].dtype} in each row; got {list(spec.shape)}, {spec.dtype}"
                )
        return store

    def _given_priorities(self, priorities: np.ndarray | None, steps: int, envs: int) -> np.ndarray:
        """Converts the priorities from a caller to `[K + T, N]` float64. A missing priority becomes
        -1."""
        if priorities is None:
            return np.full((steps, envs), -1.0)
        given = np.array(priorities, dtype=np.float64, ndmin=2)
        if self.unit == "sequence":
            given = np.concatenate([given, np.full((steps - 1, envs), np.nan)])
        if given.ndim != 2 or len(given) < steps or given.shape[1] != envs:
            raise ValueError(
                f"priorities must have shape [K + T, N] with T = {steps} and N = {envs}; got "
                f"{list(np.shape(priorities))}"
            )
        missing = np.isnan(given)
        _checked(given[~missing])
        given[missing] = -1.0
        return given

    def _reserve(self, count: int) -> int:
        """Makes room for `count` rows. Returns the serial number of the first of these rows."""
        start, self._end = self._end, self._end + count
        lost = self._end - self.capacity  # rows before this serial number are overwritten
        if lost > 0:
            assert self._store is not None
            first = max(0, start - self.capacity)
            flags = self._store.read("flags", first, lost - first)
            self._num_valid -= int(np.count_nonzero(flags & VALID))
            self._num_drawable -= int(np.count_nonzero(flags & DRAWABLE))
            while self._state_order and self._state_order[0] < lost:
                del self._states[self._state_order.popleft()]
        return start

    def _keep_states(self, serials: np.ndarray, states: np.ndarray) -> None:
        for serial, state in zip(serials.tolist(), states, strict=True):
            self._states[serial] = state.copy()
            self._state_order.append(serial)

    def _write_successors(self, start: int, obs: np.ndarray, step_after: np.ndarray) -> None:
        """Writes rows that hold next observations, at consecutive serial numbers.

        Args:
            start: serial number of the first row.
            obs: `[K, ...]`, the next observations.
            step_after: `[K]` serial numbers of the rows one step later in the same environments.
        """
        assert self._store is not None
        if not len(obs):
            return
        self._store.write("obs", start, obs)
        self._store.write("next", start, step_after % self.capacity)
        self._store.write("flags", start, np.full(len(obs), SUCCESSOR))
        if self._tree is not None:
            self._set_leaves(np.arange(start, start + len(obs)), 0.0)

    def _link(self, tail: _Tail, serials: np.ndarray, cut: np.ndarray) -> None:
        """Links the last step of a tail to the next rows.

        Args:
            tail: the tail of the stream.
            serials: `[N]` serial numbers of the next rows.
            cut: `[N]` bool. True if windows must end before the next row.
        """
        assert self._store is not None
        stored = tail.nodes >= self._end - self.capacity
        self._store.put("next", tail.nodes[stored], serials[stored] % self.capacity)
        cut = cut & tail.open & stored
        places = tail.nodes[cut] % self.capacity
        self._store.put("flags", tail.nodes[cut], self._store.arrays["flags"][places] | CUT)

    def _cut(self, tail: _Tail) -> None:
        """Ends a stream. Stores the last observations of the stream, and makes its last rows
        drawable."""
        self._num_gaps += 1
        envs = np.flatnonzero(tail.open)
        if len(envs) > self.capacity:
            return
        start = self._reserve(len(envs))
        successors = start + np.arange(len(envs))
        self._write_successors(start, tail.next_obs[envs], successors)
        after = tail.nodes.copy()  # the last row of a stream is linked to itself
        after[envs] = successors
        self._link(tail, after, np.ones(len(after), dtype=bool))
        tail.open[:] = False
        self._complete(tail, ended=True)

    def _complete(self, tail: _Tail, ended: bool = False) -> None:
        """Makes rows of a tail drawable if their windows are complete. Then removes the steps that
        the tail no longer needs.

        Args:
            tail: the tail, with all steps whose windows may have become complete.
            ended: whether the stream ends after this tail.
        """
        assert self._store is not None
        envs = len(tail.open)
        serials = np.array(tail.steps)[:, None] + np.arange(envs)  # [K, N]
        places = serials % self.capacity
        flags = self._store.arrays["flags"][places]
        kept = serials >= self._end - self.capacity  # the other rows have been overwritten
        flags[~kept] = 0
        span = self._span
        complete = np.zeros(serials.shape, dtype=bool)
        complete[: max(0, len(serials) - span)] = True
        last = slice(max(0, len(serials) - span), None)  # the last `span` steps
        if self.unit == "sequence":
            starts = np.array(tail.starts)[:, None]
            if ended:
                complete[last] = True
            candidates = complete & starts & self._has_rows(flags, starts)
        else:
            closed = (flags[last] & CUT) > 0
            closed[-1] &= ~tail.open
            complete[last] = np.logical_or.accumulate(closed[::-1])[::-1]
            candidates = complete & ((flags & VALID) > 0)
        new = candidates & ((flags & DRAWABLE) == 0) & kept
        self._store.put("flags", serials[new], flags[new] | DRAWABLE)
        self._num_drawable += int(np.count_nonzero(new))
        if self._tree is not None:
            given = tail.priorities[new]
            self._set_priorities(serials[new], np.where(given < 0, self._max_priority, given))
        keep = min(len(serials), span)
        tail.steps, tail.starts = tail.steps[-keep:], tail.starts[-keep:]
        tail.priorities = tail.priorities[-keep:]

    def _has_rows(self, flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """`[K, N]` bool: whether a sequence that begins at a step has a transition after the first
        `burn_in` steps."""
        assert self.sequence_length is not None
        valid = np.concatenate([np.zeros((1, flags.shape[1]), int), (flags & VALID) > 0])
        before = np.cumsum(valid, axis=0)
        steps = np.arange(len(flags))
        first = np.minimum(steps + self.burn_in, len(flags))
        stop = np.minimum(steps + self.sequence_length, len(flags))
        return before[stop] > before[first]

    # ---- priorities ---------------------------------------------------------------------------

    def update_priorities(self, indices: np.ndarray, priorities: np.ndarray) -> None:
        """Sets the priorities of rows. Ignores rows that have been overwritten. If the buffer has
        no priorities, this method only checks `priorities`.

        Args:
            indices: `[B]` int64, the `indices` of `Transitions` or `Sequences`.
            priorities: `[B]`, for example absolute TD errors.

        Raises:
            ValueError: a priority is negative or not finite.
        """
        priorities = _checked(np.asarray(priorities, dtype=np.float64))
        if self._tree is None or self.alpha is None:
            return
        stored = (indices >= self._end - self.capacity) & (indices >= 0) & (indices < self._end)
        if not stored.all():
            self._num_stale_priorities += len(indices) - int(np.count_nonzero(stored))
            indices, priorities = indices[stored], priorities[stored]
        if len(indices):
            self._given.add(priorities)
            self._set_priorities(indices, priorities)

    def _set_priorities(self, serials: np.ndarray, priorities: np.ndarray) -> None:
        if len(serials):
            self._max_priority = max(self._max_priority, float(priorities.max()))
            alpha = self.alpha or 0.0
            self._set_leaves(serials, (priorities + self.priority_epsilon) ** alpha)

    def _set_leaves(self, serials: np.ndarray, values: np.ndarray | float) -> None:
        assert self._tree is not None
        self._tree.update(serials % self.capacity, values)

    @property
    def beta_now(self) -> float:
        """The current exponent of the importance weights. It depends on the rows added so far."""
        share = min(1.0, self._rows_added / max(1, self.beta_rows))
        return self.beta + share * (self.final_beta - self.beta)

    # ---- drawing ------------------------------------------------------------------------------

    def sample(self, batch_size: int) -> Transitions:
        """Draws B rows with replacement, and computes their n-step returns.

        Args:
            batch_size: B.

        Raises:
            ValueError: no row can be drawn yet, or the unit is `sequence`.
        """
        if self.unit != "transition":
            raise ValueError("a buffer of sequences has no transitions; call sample_sequences")
        places, weights, indices = self._draw(batch_size)
        assert self._store is not None
        arrays = self._store.arrays
        rewards, flags, following = arrays["rewards"], arrays["flags"], arrays["next"]
        last = places
        returns = rewards.take(places)
        ends = flags.take(places)
        steps = np.ones(batch_size, dtype=np.int64)
        for k in range(1, self.n_step):
            going = (ends & CUT) == 0
            last = np.where(going, following.take(last), last)
            returns += np.float32(self.gamma**k) * (rewards.take(last) * going)
            ends = np.where(going, flags.take(last), ends)
            steps += going
        powers = np.float32(self.gamma) ** np.arange(self.n_step + 1, dtype=np.float32)
        discounts = powers.take(steps)
        discounts[(ends & TERMINATED) > 0] = 0.0
        return Transitions(
            obs=arrays["obs"].take(places, axis=0),
            actions=arrays["actions"].take(places, axis=0),
            rewards=returns,
            discounts=discounts,
            next_obs=arrays["obs"].take(following.take(last), axis=0),
            weights=weights,
            indices=indices,
        )

    def sample_sequences(self, batch_size: int) -> Sequences:
        """Draws B sequences, with replacement.

        The batch is a `SampleBatch` `[sequence_length, B]` with the columns `actions`, `rewards`,
        `terminated`, `truncated` and `valid`. `per_env["state"]` is the memory that the policy had
        before the first step, if the fragments contained it. If a stream was interrupted, the
        sequence is padded with rows that are not `valid`, as in `SampleBatch.concat`.

        Args:
            batch_size: B.

        Raises:
            ValueError: no sequence can be drawn yet, or the unit is `transition`.
        """
        if self.unit != "sequence" or self.sequence_length is None:
            raise ValueError("a buffer of transitions has no sequences; call sample")
        places, weights, indices = self._draw(batch_size)
        assert self._store is not None
        arrays, length = self._store.arrays, self.sequence_length
        rows = np.empty((length + 1, batch_size), dtype=np.int64)
        rows[0] = places
        stored = np.ones((length + 1, batch_size), dtype=bool)
        successor_index, successor_rows = [], []
        for t in range(length):
            node = arrays["next"].take(rows[t])
            own = (arrays["flags"].take(node) & SUCCESSOR) > 0
            rows[t + 1] = np.where(own, arrays["next"].take(node), node)
            own &= stored[t]
            successor_index.append(t * batch_size + np.flatnonzero(own))
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

    def _draw(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draws `count` rows. Returns the places, importance weights and serial numbers of the
        rows, `[count]` each.

        Raises:
            ValueError: no row can be drawn yet.
        """
        if self._num_drawable == 0:
            raise ValueError(
                f"nothing can be drawn yet: none of the {self._num_valid:,} transitions has a "
                "complete window. Add more fragments"
            )
        if self._tree is None:
            places = self._draw_uniform(count)
            weights = np.ones(count, dtype=np.float32)
        else:
            places = self._tree.find(self._rng.random(count))
            if self.alpha is None:
                weights = np.ones(count, dtype=np.float32)
            else:
                leaves = self._tree.leaves.take(places)
                # Weights are divided by the largest weight. So R and the sum of all priorities,
                # which are the same for every row, cancel out.
                weights = (leaves / leaves.min()) ** -self.beta_now
                weights = weights.astype(np.float32)
        newest = self._end - 1
        ages = (newest - places) % self.capacity
        self._ages.add(ages)
        return places, weights, newest - ages

    def _draw_uniform(self, count: int) -> np.ndarray:
        assert self._store is not None
        flags = self._store.arrays["flags"]
        filled = min(self._end, self.capacity)
        places = self._rng.integers(0, filled, count)
        wrong = np.flatnonzero((flags.take(places) & DRAWABLE) == 0)
        for _ in range(_MOST_ROUNDS):
            if not len(wrong):
                return places
            again = self._rng.integers(0, filled, len(wrong))
            places[wrong] = again
            wrong = wrong[(flags.take(again) & DRAWABLE) == 0]
        if len(wrong):
            drawable = np.flatnonzero(flags[:filled] & DRAWABLE)
            places[wrong] = drawable[self._rng.integers(0, len(drawable), len(wrong))]
        return places

    # ---- state --------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the random generator, the counts and the largest priority. This
        state does not contain the rows, which `save` writes."""
        return {
            "rng": self._rng.bit_generator.state,
            "rows_added": self._rows_added,
            "max_priority": self._max_priority,
            "num_gaps": self._num_gaps,
            "num_stale_priorities": self._num_stale_priorities,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`, and removes all rows."""
        self._rng.bit_generator.state = state["rng"]
        self._rows_added = int(state["rows_added"])
        self._max_priority = float(state["max_priority"])
        self._num_gaps = int(state["num_gaps"])
        self._num_stale_priorities = int(state["num_stale_priorities"])
        self._clear()

    def save(self, directory: str | Path) -> dict[str, Any]:
        """Saves rows and priorities as files, and returns the other parts of the state.

        If the rows of a file have not changed since the last `save` or `load`, this method only
        creates a hard link to the old file. A file of priorities is always written anew. Use a new
        directory for each save, because a save replaces files of the same name.

        Args:
            directory: directory for the files.

        Returns:
            The state that `load` needs in addition to the files: numbers, strings, None, arrays,
            and lists and dicts of these.

        Raises:
            OSError: a file cannot be written.
        """
        directory, state = Path(directory), self.get_state()
        state |= {"kind": self._kind(), "end": self._end, "rows": None}
        state |= {"alpha": self.alpha, "priority_epsilon": self.priority_epsilon}
        if self._store is None:
            return state
        filled = min(self._end, self.capacity)
        state["rows"] = self._store.save(directory, filled)
        if self._tree is not None:
            leaves = self._tree.leaves[:filled]
            state["priorities_sha256"] = write_arrays(directory / "priorities.bin", [leaves])
        state["tails"] = [
            {
                "source": source,
                "place": None if tail.place is None else list(tail.place),
                "steps": tail.steps,
                "starts": tail.starts,
                "priorities": tail.priorities,
                "open": tail.open,
                "nodes": tail.nodes,
                "next_obs": tail.next_obs,
            }
            for source, tail in self._tails.items()
        ]
        if self._states:
            state["state_serials"] = np.array(self._state_order)
            state["states"] = np.stack([self._states[serial] for serial in self._state_order])
        return state

    @staticmethod
    def checksums(state: Mapping[str, Any]) -> dict[str, str]:
        """The SHA-256 of each file that `save` wrote, by the name of the file.

        Args:
            state: the state that `save` returned.
        """
        sums = {} if state["rows"] is None else RowStore.checksums(state["rows"])
        if "priorities_sha256" in state:
            sums["priorities.bin"] = state["priorities_sha256"]
        return sums

    def misfit(self, state: Mapping[str, Any]) -> str:
        """Returns the first difference between the options of this buffer and the options of the
        buffer whose `save` returned `state`, or between their rows. Returns an empty string if
        `load` can restore it.

        Raises:
            RowFilesError: a dtype or a shape in the state is invalid.
        """
        for key, value in self._kind().items():
            if (saved := state["kind"].get(key)) != value:
                name = {"prioritized": "prioritized_replay"}.get(key, key)
                return (
                    f"key {name!r}: got {shown(value)}; allowed: {shown(saved)}, the value of the "
                    "saved replay buffer"
                )
        saved_rows = {} if state["rows"] is None else saved_specs(state["rows"])
        for name, spec in self._allocated.items():
            if saved_rows.get(name, spec) != spec:
                found = saved_rows[name]
                return (
                    f"column {name!r} of the saved replay buffer has {found.dtype} "
                    f"{list(found.shape)} in each row, and this buffer has {spec.dtype} "
                    f"{list(spec.shape)}. Older versions of polopt stored observations of spaces "
                    "other than Box as float32 vectors"
                )
        return ""

    def load(self, directory: str | Path, state: Mapping[str, Any]) -> None:
        """Restores a saved buffer. This buffer then draws the rows that the saved buffer would have
        drawn next. If `alpha` or `priority_epsilon` has another value now, the priorities of the
        saved rows stay the same, and their probabilities follow from the new values.

        Args:
            directory: directory of the files.
            state: the state that `save` returned.

        Raises:
            RowFilesError: a file is missing or damaged, or does not fit the state.
            ConfigError: the saved buffer and this buffer differ in capacity, unit, `n_step`,
                `sequence_length`, `burn_in` or the dtypes and shapes of rows, or only one of them
                has priorities. Also raised if
                the full buffer does not fit into the free memory or onto the disk.
            OSError: see `allocate`.
        """
        if problem := self.misfit(state):
            raise ConfigError(problem)
        self.set_state(state)
        if state["rows"] is None:
            return
        specs = saved_specs(state["rows"])
        if set(specs) != {"obs", "actions", "rewards", "next", "flags"}:
            raise RowFilesError(f"{directory}: unknown columns; got {shown(sorted(specs))}")
        self.allocate(specs["obs"], specs["actions"])
        store = self._store
        assert store is not None
        if specs != store.specs:
            raise RowFilesError(
                f"{directory}: dtypes or shapes of columns differ from this replay buffer"
            )
        self._end = int(state["end"])
        filled = min(self._end, self.capacity)
        flags, following = store.arrays["flags"][:filled], store.arrays["next"][:filled]
        if store.load(Path(directory), state["rows"]) != filled or not (
            filled == 0 or 0 <= following.min() <= following.max() < filled
        ):
            raise RowFilesError(f"{directory}: the rows in the files do not fit the saved state")
        self._num_valid = int(np.count_nonzero(flags & VALID))
        drawable = (flags & DRAWABLE) > 0
        self._num_drawable = int(np.count_nonzero(drawable))
        if self._tree is not None:
            leaves, path = np.zeros(filled), Path(directory) / "priorities.bin"
            read_arrays(path, [leaves], state["priorities_sha256"])
            if not (np.isfinite(leaves).all() and ((leaves > 0) == drawable).all()):
                raise RowFilesError(f"{path}: the priorities do not fit the rows")
            leaves = self._rescaled(leaves, drawable, state)
            if not (np.isfinite(leaves).all() and ((leaves > 0) == drawable).all()):
                raise RowFilesError(f"{path}: the priorities do not fit the saved exponent")
            self._tree.update(np.arange(filled), leaves)
        for saved in state["tails"]:
            place = saved["place"]
            nodes = np.array(saved["nodes"], dtype=np.int64)
            next_obs = np.array(saved["next_obs"])
            fits = next_obs.dtype == specs["obs"].dtype
            if not fits or not ((nodes >= 0) & (nodes < self._end)).all():
                raise RowFilesError(f"{directory}: the ends of the streams do not fit the rows")
            self._tails[int(saved["source"])] = _Tail(
                place=None if place is None else (int(place[0]), int(place[1])),
                steps=[int(step) for step in saved["steps"]],
                starts=[bool(start) for start in saved["starts"]],
                priorities=np.array(saved["priorities"], dtype=np.float64),
                open=np.array(saved["open"], dtype=bool),
                nodes=nodes,
                next_obs=next_obs,
            )
        if "states" in state:
            self._keep_states(np.asarray(state["state_serials"]), np.asarray(state["states"]))

    @np.errstate(all="ignore")
    def _rescaled(
        self, leaves: np.ndarray, drawable: np.ndarray, state: Mapping[str, Any]
    ) -> np.ndarray:
        """Converts saved leaves `[B]`, which are (priority + epsilon)^alpha, to the exponent and
        the epsilon of this buffer."""
        alpha, epsilon = state.get("alpha"), state.get("priority_epsilon")
        if alpha is None or epsilon is None or self.alpha is None:
            return leaves  # no priorities, or the state of an older version
        if (alpha, epsilon) == (self.alpha, self.priority_epsilon):
            return leaves
        priorities = np.maximum(leaves ** np.divide(1.0, alpha) - epsilon, 0.0)
        return np.where(drawable, (priorities + self.priority_epsilon) ** self.alpha, 0.0)

    def _kind(self) -> dict[str, Any]:
        """The options that must be the same in a saved buffer and in the buffer that loads it."""
        prioritized = self.alpha is not None
        kind = {self._capacity_key: self.capacity, "replay_unit": self.unit}
        if self.unit == "sequence":
            kind |= {"sequence_length": self.sequence_length, "burn_in": self.burn_in}
        else:
            kind["n_step"] = self.n_step
        return {**kind, "prioritized": prioritized}

    def _clear(self) -> None:
        """Removes all rows."""
        self._store = None
        self._tails, self._states, self._state_order = {}, {}, deque()
        if self._tree is not None:
            self._tree = SumTree(self.capacity)
        self._end = self._num_valid = self._num_drawable = 0
        self._ages, self._given = AgeHistogram(self.capacity), _Range()

    # ---- reports ------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Returns statistics of the stored rows, and of the rows drawn since the last call.

        Returns:
            `num_rows`, `capacity`, `fill` (the used fraction of `capacity`), `nbytes` of the full
            buffer, `rows_added`, `num_gaps`, and `row_age` (see `AgeHistogram`). The age of a drawn
            row is the number of rows that arrived after this row. With priorities, the dict also
            has `priority`, `max_priority`, `beta`, and `num_stale_priorities`. `priority` is the
            `{mean, max}` of the priorities that `update_priorities` has set since the last call.
            `max_priority` is the largest priority so far, or 1 if all were smaller.
            `num_stale_priorities` is the number of priorities that `update_priorities` ignored,
            because their rows had been overwritten.
        """
        stats: dict[str, Any] = {
            "num_rows": self._num_valid,
            "capacity": self.capacity,
            "fill": min(self._end, self.capacity) / self.capacity,
            "nbytes": self.nbytes,
            "rows_added": self._rows_added,
            "row_age": self._ages.report(),
            "num_gaps": self._num_gaps,
        }
        if self.alpha is not None:
            stats["priority"] = self._given.take()
            stats["max_priority"] = self._max_priority
            stats["beta"] = self.beta_now
            stats["num_stale_priorities"] = self._num_stale_priorities
        return stats

    def __repr__(self) -> str:
        size = readable_bytes(self.nbytes)
        return f"ReplayBuffer({self._num_valid:,} of {self.capacity:,} rows, {size} when full)"


class _Range:
    """The mean and the maximum of the numbers that were added since the last `take`."""

    def __init__(self) -> None:
        self._sum, self._count, self._max = 0.0, 0, 0.0

    def add(self, values: np.ndarray) -> None:
        self._sum += float(values.sum())
        self._count += len(values)
        self._max = max(self._max, float(values.max()))

    def take(self) -> dict[str, float]:
        report = {"mean": self._sum / max(1, self._count), "max": self._max}
        self._sum, self._count, self._max = 0.0, 0, 0.0
        return report


def _specs(obs: ColumnSpec, actions: ColumnSpec) -> Mapping[str, ColumnSpec]:
    return {
        "obs": obs,
        "actions": actions,
        "rewards": ColumnSpec((), np.dtype(np.float32)),
        "next": ColumnSpec((), np.dtype(np.int32)),
        "flags": ColumnSpec((), np.dtype(np.uint8)),
    }


def _checked(priorities: np.ndarray) -> np.ndarray:
    if len(priorities) and not (np.isfinite(priorities).all() and priorities.min() >= 0.0):
        wrong = priorities[~(np.isfinite(priorities) & (priorities >= 0.0))]
        raise ValueError(f"priorities must be finite and 0 or larger; got {wrong.flat[0]}")
    return priorities


def _check(key: str, value: Any, allowed: bool, what: str) -> None:
    if not allowed:
        raise ConfigError(f"key {key!r}: got {shown(value)}; allowed: {what}")
