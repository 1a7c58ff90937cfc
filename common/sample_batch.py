"""`SampleBatch`: the transitions of a rollout fragment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polopt.common.compression import LOSSY, Packed, pack, unpack
from polopt.common.episodes import EpisodeStats
from polopt.common.faults import Faults, one_per_kind
from polopt.common.moments import Moments


@dataclass(slots=True)
class SampleBatch:
    """The columns of a rollout fragment with T steps of N environments. The arrays are time-major.

    `columns` holds arrays `[T, N, ...]` under these names. A policy may add further columns.

    - `actions`: the actions as sampled from the distribution, before they are mapped to the bounds,
      clipped, squashed or offset.
    - `rewards`: float32.
    - `terminated`, `truncated`: bool.
    - `valid`: bool, False in rows without a transition. Losses and counts ignore these rows. They
      are the resets in Gymnasium's next-step autoreset mode, padding, and steps in which the
      environment raised. In a row in which the environment raised, `truncated` is True, because the
      episode stops without a terminal state.
    - `action_dist_inputs`: float32 `[T, N, P]`, the parameters of the action distribution.
    - `action_logp`, `values`, `advantages`, `value_targets`: float32. `Policy.postprocess` adds
      those columns that the policy needs. Policies with V-trace compute the last three in the
      learner.

    Attributes:
        all_obs: `[T + 1, N, ...]`, the observations of the T steps, and the observations after the
            last step. The observations are rows of `ObservationEncoder`, with the dtypes of their
            space. In batches for code of the user, they are encoded.
        columns: the arrays listed above.
        successor_index: `[K]`, the flat indices `t * N + n` of the rows whose next observation is
            not `all_obs[t + 1, n]`. In these rows, an episode ended and the next episode began in
            the same step, or padding follows the row.
        successor_obs: `[K, ...]`, the next observations of these rows. In rows that are not
            `terminated`, bootstrap values are computed from these observations.
        version: the version of the weights that chose the actions. If several versions chose
            actions, this is the oldest version.
        worker_index: the index of the worker that sampled the batch.
        episodes: the statistics of the episodes that ended in the batch.
        device: the device of the tensors that `polopt.to_tensordict` makes. The arrays themselves
            are in host memory.
        faults: the exceptions of environments, and non-finite values, by kind. See `Fault`.
        compress: the codec of `polopt.common.compression` that compresses the batch when it is sent
            to another process.
        column_versions: `[N]`, the version for each environment. `None` means that `version`
            applies to all environments.
        per_env: maps names to arrays `[N, ...]` with one value for each environment. `state` is the
            memory of the policy before the first step. Workers store observations and rewards
            before normalisation, and `obs_mean`, `obs_inverse_std` and `reward_scale` say how the
            acting policy normalised them. These three arrays are missing if the policy does not
            normalise, or if the batch is already normalised (`Normalizer.normalized`).
        moments: the moments (mean and variance) of the observations and discounted returns, for
            normalisation. `None` means that the batch has no moments, for example because the
            policy does not normalise, or because the worker has already taken the moments.
        place: `(stream, step)`, the position of the fragment in the data of its sampler. A stream
            is a sequence of consecutive steps of the same environments. `step` is the number of
            steps of the stream before the fragment. `None` means that the batch has no such
            position, for example because the batch combines several fragments.
        num_env_steps: the number of environment steps, if the N environments are slots of agents.
            None means that each valid row is one environment step.
        row_counts: `[N]`, the number of rows of each slot of an agent. The later rows of the slot
            are not valid, and only fill the arrays. Their observation is the next observation of
            the slot's last row. None means that no row only fills the arrays.
    """

    all_obs: np.ndarray  # [T + 1, N, ...]
    columns: dict[str, np.ndarray]  # name -> [T, N, ...]
    successor_index: np.ndarray  # [K] int64
    successor_obs: np.ndarray  # [K, ...]
    version: int = 0
    worker_index: int = 0
    episodes: EpisodeStats = field(default_factory=EpisodeStats)
    device: str = "cpu"
    faults: Faults = field(default_factory=dict)
    compress: str = "none"
    column_versions: np.ndarray | None = None  # [N] int64
    per_env: dict[str, np.ndarray] = field(default_factory=dict)  # name -> [N, ...]
    moments: Moments | None = None
    place: tuple[int, int] | None = None
    num_env_steps: int | None = None
    row_counts: np.ndarray | None = None  # [N] int64

    def __repr__(self) -> str:
        """Shows T, N, environment steps and version, and the dtype and shape of each column."""
        columns = {"obs": self.obs, **self.columns}
        shown = [f"{name}={c.dtype}{list(c.shape)}" for name, c in columns.items()]
        steps, envs = self.shape
        head = f"T={steps}, N={envs}, env_steps={self.env_steps}, version={self.version}"
        return f"SampleBatch({', '.join([head, *shown])})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.compress == "none":
            return object.__reduce_ex__(self, protocol)
        return _unpacked, _packed(self)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.obs if name == "obs" else self.columns[name]

    def __setitem__(self, name: str, column: np.ndarray) -> None:
        if column.shape[:2] != self.shape:
            raise ValueError(
                f"column {name!r} must have leading shape [T, N] = {list(self.shape)}; "
                f"got {list(column.shape)}"
            )
        self.columns[name] = column

    def __contains__(self, name: object) -> bool:
        return name == "obs" or name in self.columns

    def __len__(self) -> int:
        """The number of rows, T * N. This includes rows that are not valid."""
        return self.shape[0] * self.shape[1]

    @property
    def obs(self) -> np.ndarray:
        """The observations of the steps, `[T, N, ...]`. A view."""
        return self.all_obs[:-1]

    @property
    def bootstrap_obs(self) -> np.ndarray:
        """The observations after the last step, `[N, ...]`. A view."""
        return self.all_obs[-1]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape `(T, N)`."""
        return len(self.all_obs) - 1, self.all_obs.shape[1]

    @property
    def env_steps(self) -> int:
        """The number of environment steps. With one agent, this is the number of valid rows."""
        return self.agent_steps if self.num_env_steps is None else self.num_env_steps

    @property
    def agent_steps(self) -> int:
        """The number of valid rows. A row is one step of one agent."""
        return int(np.count_nonzero(self.columns["valid"]))

    @property
    def versions(self) -> np.ndarray:
        """The version of the weights that chose the actions of each environment, `[N]`."""
        if self.column_versions is None:
            return np.full(self.shape[1], self.version, dtype=np.int64)
        return self.column_versions

    @property
    def nbytes(self) -> int:
        """The size of the observations, columns and `per_env` in bytes, without compression."""
        arrays = [self.all_obs, self.successor_obs, *self.columns.values(), *self.per_env.values()]
        return sum(array.nbytes for array in arrays)

    @property
    def next_place(self) -> tuple[int, int] | None:
        """The `place` of a fragment that continues this fragment. None if `place` is None."""
        return None if self.place is None else (self.place[0], self.place[1] + self.shape[0])

    def flat(self, name: str) -> np.ndarray:
        """Returns a column with time and environments flattened, `[T * N, ...]`. The result is a
        view if the column is contiguous."""
        column = self[name]
        steps, envs, *shape = column.shape
        return column.reshape(steps * envs, *shape)

    def steps(self, start: int, stop: int) -> SampleBatch:
        """Returns the steps from `start` up to, but not including, `stop` of all environments,
        `[stop - start, N, ...]`. The observations and columns are views.

        `episodes` of the result is empty, because episode statistics cannot be divided. If `start`
        is greater than 0, a policy with memory cannot learn from the result, because its memory is
        known only for step 0.
        """
        envs = self.shape[1]
        begun = {name: array for name, array in self.per_env.items() if name != "state"}
        inside = (self.successor_index >= start * envs) & (self.successor_index < stop * envs)
        return SampleBatch(
            all_obs=self.all_obs[start : stop + 1],
            columns={name: column[start:stop] for name, column in self.columns.items()},
            successor_index=self.successor_index[inside] - start * envs,
            successor_obs=self.successor_obs[inside],
            version=self.version,
            worker_index=self.worker_index,
            device=self.device,
            column_versions=self.column_versions,
            per_env=begun if start else self.per_env,
            place=None if self.place is None else (self.place[0], self.place[1] + start),
            row_counts=None
            if self.row_counts is None
            else np.clip(self.row_counts - start, 0, stop - start),
        )

    @property
    def is_row(self) -> np.ndarray:
        """`[T, N]` bool, False for the rows that only fill the arrays. See `row_counts`."""
        if self.row_counts is None:
            return np.ones(self.shape, dtype=bool)
        return np.arange(self.shape[0])[:, None] < self.row_counts

    def last_rows(self, count: int) -> SampleBatch:
        """Returns the last rows of each environment, `[K, N]`, where K is the smaller one of
        `count` and T. If a slot has fewer rows than K, its first rows are not valid."""
        length, place = min(count, self.shape[0]), self.next_place
        if self.row_counts is None:
            return self.steps(self.shape[0] - length, self.shape[0])
        order = self.row_counts - length + np.arange(length)[:, None]
        last = self.in_order(order)
        last.place = None if place is None else (place[0], place[1] - length)
        return last

    def in_order(self, order: np.ndarray) -> SampleBatch:
        """Returns `[K, N]` rows of the N environments. The observations after the last row stay.

        `episodes` of the result is empty, because episode statistics cannot be divided.

        Args:
            order: `[K, N]`, the step of each row. Negative for a row that is not valid.
        """
        steps, envs = self.shape
        kept, slots = order >= 0, np.arange(envs)
        columns = {name: column[order, slots] for name, column in self.columns.items()}
        for column in columns.values():
            column[~kept] = 0
        places = np.full((steps, envs), -1)
        places[order[kept], np.nonzero(kept)[1]] = np.flatnonzero(kept)
        successor_index = places.reshape(-1)[self.successor_index]
        obs = self.all_obs[np.where(kept, order, steps), slots]
        return SampleBatch(
            all_obs=np.concatenate([obs, self.all_obs[-1:]]),
            columns=columns,
            successor_index=successor_index[successor_index >= 0],
            successor_obs=self.successor_obs[successor_index >= 0],
            version=self.version,
            worker_index=self.worker_index,
            device=self.device,
            column_versions=self.column_versions,
            per_env=self.per_env,
        )

    def select(self, envs: np.ndarray) -> SampleBatch:
        """Returns a batch `[T, n, ...]` of some environments. The arrays are copies.

        `episodes` of the result is empty, because episode statistics cannot be divided.

        Args:
            envs: the indices `[n]` of the environments, in the order of the result.
        """
        steps, width = np.divmod(self.successor_index, self.shape[1])
        positions = np.full(self.shape[1], -1)
        positions[envs] = np.arange(len(envs))
        kept = positions[width] >= 0
        return SampleBatch(
            all_obs=self.all_obs.take(envs, axis=1),
            columns={name: column.take(envs, axis=1) for name, column in self.columns.items()},
            successor_index=(steps * len(envs) + positions[width])[kept],
            successor_obs=self.successor_obs[kept],
            version=self.version,
            worker_index=self.worker_index,
            device=self.device,
            column_versions=None if self.column_versions is None else self.column_versions[envs],
            per_env={name: array.take(envs, axis=0) for name, array in self.per_env.items()},
            row_counts=None if self.row_counts is None else self.row_counts[envs],
        )

    def iter_rows(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields `(name, [T * N, ...])` for the observations and each column. See `flat`."""
        yield "obs", self.flat("obs")
        for name in self.columns:
            yield name, self.flat(name)

    @staticmethod
    def concat(batches: Sequence[SampleBatch]) -> SampleBatch:
        """Concatenates batches along the environments, in the given order. The result has the shape
        `[max T, sum N, ...]`.

        Shorter batches are padded with rows that are not `valid`. The last observations of these
        batches become successors, so bootstrap values stay exact. The `version` of the result is
        the oldest version of all batches. A single batch is returned without a copy. Batches of
        several policies (`MultiAgentBatch`) are concatenated for each policy.
        """
        if len(batches) == 1:
            return batches[0]
        if not isinstance(batches[0], SampleBatch):
            return type(batches[0]).concat(batches)
        length = max(batch.shape[0] for batch in batches)
        width = sum(batch.shape[1] for batch in batches)
        padded = [_pad(batch, length) for batch in batches]
        index, offset = [], 0
        for batch in padded:
            t, n = np.divmod(batch.successor_index, batch.shape[1])
            index.append(t * width + offset + n)
            offset += batch.shape[1]
        names = padded[0].columns.keys()
        return SampleBatch(
            all_obs=np.concatenate([b.all_obs for b in padded], axis=1),
            columns={n: np.concatenate([b.columns[n] for b in padded], axis=1) for n in names},
            successor_index=np.concatenate(index),
            successor_obs=np.concatenate([b.successor_obs for b in padded]),
            version=min(batch.version for batch in batches),
            column_versions=np.concatenate([batch.versions for batch in batches]),
            worker_index=batches[0].worker_index,
            episodes=EpisodeStats.concat(batch.episodes for batch in batches),
            device=batches[0].device,
            faults=one_per_kind(one for batch in batches for one in batch.faults.values()),
            per_env={
                name: np.concatenate([b.per_env[name] for b in batches])
                for name in batches[0].per_env
            },
            num_env_steps=_summed([batch.num_env_steps for batch in batches]),
        )


def _summed(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _pad(batch: SampleBatch, length: int) -> SampleBatch:
    steps, envs = batch.shape
    missing = length - steps
    if missing == 0:
        return batch

    def pad(array: np.ndarray) -> np.ndarray:
        zeros = np.zeros((missing, *array.shape[1:]), dtype=array.dtype)
        return np.concatenate([array, zeros])

    # In `all_obs`, padding replaces the next observations of the last rows. Each of these next
    # observations therefore becomes a successor, unless the row already has a successor.
    last_rows = np.setdiff1d(np.arange((steps - 1) * envs, steps * envs), batch.successor_index)
    order = np.concatenate([batch.successor_index, last_rows])
    successors = np.concatenate([batch.successor_obs, batch.bootstrap_obs[last_rows % envs]])
    return dataclasses.replace(
        batch,
        all_obs=pad(batch.all_obs),
        columns={name: pad(column) for name, column in batch.columns.items()},
        successor_index=order,
        successor_obs=successors,
    )


#: The columns that determine the ratio of an action's probability under the new policy to its
#: probability under the old policy. Lossy codecs do not round these columns. With rounding, the
#: ratio would differ from 1 even if the policy has not changed.
_EXACT_COLUMNS = ("actions", "action_dist_inputs", "action_logp")
_PackedBatch = tuple[dict[str, Packed], dict[str, Packed], dict[str, Any]]


def _packed(batch: SampleBatch) -> _PackedBatch:
    """Packs observations and columns with the codec `batch.compress`. Returns the packed
    observations, the packed columns, and the other fields except `moments` and `compress`."""
    codec = batch.compress
    exact = "none" if codec in LOSSY else codec
    observations = {n: pack(getattr(batch, n), codec) for n in ("all_obs", "successor_obs")}
    columns = {
        name: pack(column, exact if name in _EXACT_COLUMNS else codec)
        for name, column in batch.columns.items()
    }
    names = ["successor_index", "version", "worker_index", "episodes", "device", "faults"]
    names += ["column_versions", "per_env", "place", "num_env_steps", "row_counts"]
    return observations, columns, {name: getattr(batch, name) for name in names}


def _unpacked(
    observations: dict[str, Packed], columns: dict[str, Packed], rest: dict[str, Any]
) -> SampleBatch:
    """Restores the batch, with the precision of its codec. The restored batch has the codec `none`,
    so it is not packed again."""
    return SampleBatch(
        all_obs=unpack(observations["all_obs"]),
        successor_obs=unpack(observations["successor_obs"]),
        columns={name: unpack(column) for name, column in columns.items()},
        **rest,
    )
