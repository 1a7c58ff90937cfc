"""`ReplayBuffer`: stores the last transitions of all workers, and draws them at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polopt.common.config import ConfigError, shown
from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Sequences, Transitions
from polopt.metrics.lag import AgeHistogram
from polopt.replay.n_step import TransitionUnit
from polopt.replay.priorities import Priorities
from polopt.replay.replay_unit import ReplayUnit
from polopt.replay.row_store import (
    ColumnSpec,
    RowFilesError,
    RowStore,
    check_size,
    readable_bytes,
    saved_specs,
)
from polopt.replay.sequences import SequenceUnit
from polopt.replay.streams import (
    CUT,
    DRAWABLE,
    SUCCESSOR,
    TERMINATED,
    VALID,
    StreamTail,
    flags_of,
    has_successor,
)

_PRIORITIES = "priorities.bin"


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
    interrupted. The window of a slot of an agent goes over the rows of this slot, also if the agent
    has no row in a fragment. If the window ends with `terminated`, the discount is 0. Otherwise the
    learner bootstraps from the value of the true next observation. The window is complete when the
    buffer has all steps of the window, and the next observation if the learner needs it. The buffer
    can then draw the row. With `unit="transition"`, it never draws a row that is not `valid`.

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
        n_step: largest number of steps of a return. With a pair `(FEWEST, MOST)`, it is drawn for
            each drawn row, uniformly from FEWEST to MOST.
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
        n_step: int | Sequence[int] = 1,
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
        steps = list(n_step) if isinstance(n_step, Sequence) else [n_step]
        ordered = 1 <= steps[0] <= steps[-1] and len(steps) <= 2
        _check("n_step", n_step, ordered, "1 or larger, or two such numbers in order")
        _check("replay_unit", unit, unit in ("transition", "sequence"), "transition, sequence")
        if unit == "sequence":
            length = sequence_length
            enough = length is not None and 1 <= length <= capacity
            _check("sequence_length", length, enough, f"1 to {capacity:,} for sequences")
            _check("burn_in", burn_in, 0 <= burn_in < (length or 0), f"0 to {(length or 1) - 1}")
        self.capacity = capacity
        self.beta = beta
        self.final_beta = final_beta
        self.beta_rows = beta_rows
        self.unit = unit
        self._unit: ReplayUnit = (
            SequenceUnit(sequence_length or 1, burn_in)
            if unit == "sequence"
            else TransitionUnit(gamma, n_step)
        )
        self._directory = None if directory is None else Path(directory)
        self._capacity_key = capacity_key
        self._rng = np.random.default_rng(seed)
        self._store: RowStore | None = None
        self._allocated: dict[str, ColumnSpec] = {}  # from the last `allocate`
        # Only few rows begin a sequence.
        self._priorities = Priorities(capacity, alpha, priority_epsilon, few=unit == "sequence")
        self._tails: dict[int, StreamTail] = {}  # by source
        self._end = 0  # serial number of the next row
        self._num_valid = 0
        self._num_drawable = 0
        self._rows_added = 0
        self._num_gaps = 0
        self._ages = AgeHistogram(capacity)

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
        if self._priorities.tree is None or self._priorities.alpha is None:
            return float(self._num_drawable)
        return self._priorities.tree.total

    @property
    def num_gaps(self) -> int:
        """The number of streams that were interrupted."""
        return self._num_gaps

    def nbytes_of(self, obs: ColumnSpec, actions: ColumnSpec) -> int:
        """Bytes of the full buffer for observations and actions of these shapes and dtypes, without
        the stored states of recurrent policies."""
        rows = self.capacity * RowStore.row_nbytes(_specs(obs, actions))
        return rows + self._priorities.nbytes

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
                priorities of this fragment. The first K rows are priorities for the last K rows of
                each environment before this fragment, whose windows may end in this fragment. The
                buffer ignores these K rows if the fragment starts a new stream. For sequences, the
                array has the priorities of the N sequences that begin with this fragment. NaN or
                None stands for the largest priority so far.
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
        self._unit.check(batch)
        self._fit(batch)
        given = self._given_priorities(priorities, batch)
        flags, valid = flags_of(batch), batch["valid"]
        stored = own_rows = batch.successor_index
        if len(own_rows):
            stored = np.flatnonzero(self._unit.needs_successor(flags).reshape(-1)[own_rows])
        count = flags.size + len(stored)
        if count > self.capacity:
            raise ConfigError(
                f"key {self._capacity_key!r}: got {self.capacity:,}; allowed: {count:,} or more, "
                "the number of rows of one fragment"
            )
        before = self._tails.pop(batch.worker_index, None)
        if before is not None and not before.continues_with(batch, follows):
            self._end_stream(before)
            before = None

        start = self._reserve(count)
        serials = start + np.arange(flags.size).reshape(flags.shape)
        nodes = self._write(batch, flags, serials, stored)
        self._unit.added(batch, serials)
        num_valid = int(np.count_nonzero(valid))
        self._num_valid += num_valid
        self._rows_added += num_valid
        steps = len(serials)
        ended = (flags & TERMINATED) > 0
        if len(own_rows):
            ended |= has_successor(batch)
        tail = StreamTail(
            place=batch.next_place,
            rows=serials,
            starts=[True] + [False] * (steps - 1),
            priorities=given[-steps:],
            open=~ended[-1],
            nodes=nodes[-1],
            next_obs=batch.bootstrap_obs.copy(),
        )
        has_row: Any = True
        if self._unit.leaves_out(batch):
            assert batch.row_counts is not None
            has_row = batch.row_counts > 0
            last = batch.row_counts - 1, np.arange(len(has_row))
            tail.open, tail.nodes = ~ended[last] & has_row, np.where(has_row, nodes[last], -1)
            tail.rows = np.where(batch.is_row, serials, -1)
            tail.align()
        if before is not None:
            self._link(before, serials[0], ~valid[0], has_row)
            tail.prepend(before, given[:-steps], has_row)
        self._complete(tail)
        self._tails[batch.worker_index] = tail
        return num_valid

    def _write(
        self, batch: SampleBatch, flags: np.ndarray, serials: np.ndarray, stored: np.ndarray
    ) -> np.ndarray:
        """Writes the rows of a fragment, and its successors. The next observation of a row is
        in its successor, or else in the row one step later. Until the next fragment arrives, the
        last row (or its successor) is linked to itself.

        Args:
            batch: the fragment `[T, N]`.
            flags: `[T, N]`, see `flags_of`.
            serials: `[T, N]`, the serial numbers of the rows.
            stored: the positions in `batch.successor_obs` of the observations that are stored.

        Returns:
            `[T, N]`, the serial numbers of the rows that are linked to the next step: the
            successors of the rows, or else the rows themselves.
        """
        store, start = self._store, int(serials[0, 0])
        assert store is not None
        nodes, following = serials, np.concatenate([serials[1:], serials[-1:]])
        if len(stored):
            own_rows = batch.successor_index[stored]
            successors = start + serials.size + np.arange(len(own_rows))
            nodes = serials.copy()
            nodes.reshape(-1)[own_rows] = successors
            following.reshape(-1)[own_rows] = successors
            step_after = np.concatenate([serials[1:], nodes[-1:]]).reshape(-1)[own_rows]
            self._write_successors(successors, batch.successor_obs[stored], step_after)
        store.write("obs", start, batch.flat("obs"))
        store.write("actions", start, batch.flat("actions"))
        store.write("rewards", start, batch.flat("rewards"))
        store.write("next", start, (following % self.capacity).reshape(-1))
        store.write("flags", start, flags.reshape(-1))
        return nodes

    def cut(self, source: int) -> None:
        """Ends the stream of a source, so that its next fragment starts a new stream. The last rows
        of the stream become drawable, and their windows end at the last observation.

        Args:
            source: `worker_index` of the fragments. If the buffer has no stream of this source,
                this method does nothing.
        """
        tail = self._tails.pop(source, None)
        if tail is not None:
            self._end_stream(tail)

    def _fit(self, batch: SampleBatch) -> None:
        """Reserves the arrays before the first fragment. Later fragments must have the same shapes
        and dtypes."""
        obs = ColumnSpec(batch.all_obs.shape[2:], batch.all_obs.dtype)
        actions = ColumnSpec(batch["actions"].shape[2:], batch["actions"].dtype)
        if self._store is None:
            self.allocate(obs, actions)
        assert self._store is not None
        for name, spec in (("obs", obs), ("actions", actions)):
            own = self._store.specs[name]
            if spec != own:
                raise ValueError(
                    f"{name} must have shape {list(own.shape)} and dtype {own.dtype} in each row; "
                    f"got {list(spec.shape)}, {spec.dtype}"
                )

    def _given_priorities(self, priorities: np.ndarray | None, batch: SampleBatch) -> np.ndarray:
        """Converts the priorities from a caller to `[K + T, N]` float64. A missing priority becomes
        -1."""
        steps, envs = batch.shape
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
            self._unit.overwritten(lost)
        self._priorities.remove(start, self._end)
        return start

    def _write_successors(
        self, serials: np.ndarray, obs: np.ndarray, step_after: np.ndarray
    ) -> None:
        """Writes rows that hold next observations.

        Args:
            serials: `[K]` consecutive serial numbers of the rows.
            obs: `[K, ...]`, the next observations.
            step_after: `[K]` serial numbers of the rows one step later in the same environments.
        """
        assert self._store is not None
        if len(serials):
            self._store.write("obs", int(serials[0]), obs)
            self._store.write("next", int(serials[0]), step_after % self.capacity)
            self._store.write("flags", int(serials[0]), np.full(len(obs), SUCCESSOR))

    def _link(
        self, tail: StreamTail, serials: np.ndarray, cut: np.ndarray, has_next: np.ndarray | bool
    ) -> None:
        """Links the last rows of a tail to the next rows.

        Args:
            tail: the tail of the stream.
            serials: `[N]` serial numbers of the next rows.
            cut: `[N]` bool. True if windows must end before the next row.
            has_next: `[N]` bool. False if an environment has no next row yet. True: all have one.
        """
        assert self._store is not None
        stored = (tail.nodes >= max(0, self._end - self.capacity)) & has_next
        self._store.put("next", tail.nodes[stored], serials[stored] % self.capacity)
        cut = cut & tail.open & stored
        if np.count_nonzero(cut):
            places = tail.nodes[cut] % self.capacity
            self._store.put("flags", tail.nodes[cut], self._store.arrays["flags"][places] | CUT)

    def _end_stream(self, tail: StreamTail) -> None:
        """Ends a stream. Stores the last observations of the stream, and makes its last rows
        drawable."""
        self._num_gaps += 1
        envs = np.flatnonzero(tail.open)
        if len(envs) > self.capacity:
            return
        successors = self._reserve(len(envs)) + np.arange(len(envs))
        self._write_successors(successors, tail.next_obs[envs], successors)
        after = tail.nodes.copy()  # the last row of a stream is linked to itself
        after[envs] = successors
        self._link(tail, after, np.ones(len(after), dtype=bool), True)
        tail.open[:] = False
        self._complete(tail, ended=True)

    def _complete(self, tail: StreamTail, ended: bool = False) -> None:
        """Makes rows of a tail drawable if their windows are complete. Then removes the steps that
        the tail no longer needs.

        Args:
            tail: the tail, with all steps whose windows may have become complete.
            ended: whether the stream ends after this tail.
        """
        assert self._store is not None
        serials = tail.rows
        flags = self._store.arrays["flags"][serials % self.capacity]
        # The other rows have been overwritten, or do not exist.
        kept = serials >= max(0, self._end - self.capacity)
        flags[~kept] = 0
        drawable = self._unit.drawable(flags, tail, ended)
        new = drawable & ((flags & DRAWABLE) == 0) & kept
        serials = serials[new]
        self._store.put("flags", serials, flags[new] | DRAWABLE)
        self._num_drawable += len(serials)
        self._priorities.add(serials % self.capacity, tail.priorities[new])
        tail.keep(self._unit.span)

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
        if self._priorities.alpha is None:
            return
        stored = (indices >= self._end - self.capacity) & (indices >= 0) & (indices < self._end)
        if not stored.all():
            self._priorities.num_stale += len(indices) - int(np.count_nonzero(stored))
            indices, priorities = indices[stored], priorities[stored]
        self._priorities.update(indices % self.capacity, priorities)

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
        if not isinstance(self._unit, TransitionUnit):
            raise ValueError("a buffer of sequences has no transitions; call sample_sequences")
        places, weights, indices = self._draw(batch_size)
        return self._unit.read(self._arrays, places, weights, indices, self._rng)

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
        if not isinstance(self._unit, SequenceUnit):
            raise ValueError("a buffer of transitions has no sequences; call sample")
        places, weights, indices = self._draw(batch_size)
        return self._unit.read(self._arrays, places, weights, indices)

    @property
    def _arrays(self) -> Mapping[str, np.ndarray]:
        assert self._store is not None
        return self._store.arrays

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
        flags = self._arrays["flags"][: min(self._end, self.capacity)]
        places, weights = self._priorities.draw(self._rng, count, flags, self.beta_now)
        newest = self._end - 1
        ages = (newest - places) % self.capacity
        self._ages.add(ages)
        return places, weights, newest - ages

    # ---- state --------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the random generator, the counts and the largest priority. This
        state does not contain the rows, which `save` writes."""
        return {
            "rng": self._rng.bit_generator.state,
            "rows_added": self._rows_added,
            "max_priority": self._priorities.largest,
            "num_gaps": self._num_gaps,
            "num_stale_priorities": self._priorities.num_stale,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `get_state`, and removes all rows."""
        self._rng.bit_generator.state = state["rng"]
        self._rows_added = int(state["rows_added"])
        self._priorities.largest = float(state["max_priority"])
        self._num_gaps = int(state["num_gaps"])
        self._priorities.num_stale = int(state["num_stale_priorities"])
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
        state |= {"kind": self._options(), "end": self._end, "rows": None}
        state |= {"alpha": self._priorities.alpha, "priority_epsilon": self._priorities.epsilon}
        if self._store is None:
            return state
        filled = min(self._end, self.capacity)
        state["rows"] = self._store.save(directory, filled)
        state |= self._priorities.save(directory / _PRIORITIES, filled)
        state["tails"] = [
            {"source": source, **tail.get_state()} for source, tail in self._tails.items()
        ]
        return state | self._unit.get_state()

    @staticmethod
    def checksums(state: Mapping[str, Any]) -> dict[str, str]:
        """The SHA-256 of each file that `save` wrote, by the name of the file.

        Args:
            state: the state that `save` returned.
        """
        sums = {} if state["rows"] is None else RowStore.checksums(state["rows"])
        if "priorities_sha256" in state:
            sums[_PRIORITIES] = state["priorities_sha256"]
        return sums

    def misfit(self, state: Mapping[str, Any]) -> str:
        """Returns the first difference between the options of this buffer and the options of the
        buffer whose `save` returned `state`, or between their rows. Returns an empty string if
        `load` can restore it.

        Raises:
            RowFilesError: a dtype or a shape in the state is invalid.
        """
        for key, value in self._options().items():
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
        self._priorities.load(Path(directory) / _PRIORITIES, state, drawable)
        for saved in state["tails"]:
            tail = StreamTail.from_state(saved)
            fits = tail.next_obs.dtype == specs["obs"].dtype
            serials = np.concatenate([tail.nodes[None], tail.rows])
            if not fits or not ((serials >= -1) & (serials < self._end)).all():
                raise RowFilesError(f"{directory}: the ends of the streams do not fit the rows")
            self._tails[int(saved["source"])] = tail
        self._unit.set_state(state)

    def _options(self) -> dict[str, Any]:
        """The options that must be the same in a saved buffer and in the buffer that loads it."""
        prioritized = self._priorities.alpha is not None
        capacity = {self._capacity_key: self.capacity}
        return {**capacity, **self._unit.options(), "prioritized": prioritized}

    def _clear(self) -> None:
        """Removes all rows."""
        self._store = None
        self._tails = {}
        self._unit.set_state({})
        self._priorities.clear()
        self._end = self._num_valid = self._num_drawable = 0
        self._ages = AgeHistogram(self.capacity)

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
        if priorities := self._priorities.stats():
            stats |= {**priorities, "beta": self.beta_now}
        return stats

    def __repr__(self) -> str:
        size = readable_bytes(self.nbytes)
        return f"ReplayBuffer({self._num_valid:,} of {self.capacity:,} rows, {size} when full)"


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
