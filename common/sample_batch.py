"""`SampleBatch`: the transitions of a rollout fragment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polopt.common.compression import LOSSY, Packed, pack, unpack
from polopt.common.data_faults import NO_FAULTS, DataFaults
from polopt.common.episodes import EpisodeStats
from polopt.common.moments import Moments


@dataclass(slots=True)
class SampleBatch:
    """Columns of a rollout fragment, time-major: T steps of N environments.

    `columns` holds arrays `[T, N, ...]` under these names (a policy may add its own):

    - `actions`: as sampled from the distribution, before they are mapped to the bounds, clipped,
      squashed or offset.
    - `rewards` float32. `terminated`, `truncated` bool.
    - `valid` bool: False in rows without a transition, which losses and counts leave out. These are
      resets of next-step autoreset, padding, and steps in which the environment raised. Where an
      environment raised, `truncated` is set, because the episode stops without a terminal state.
    - `action_dist_inputs` float32 `[T, N, P]`: parameters of the distribution of the action.
    - after `Policy.postprocess`, some of `action_logp`, `values`, `advantages`, `value_targets`,
      float32. Policies with V-trace compute the last three in the learner.

    Attributes:
        all_obs: `[T + 1, N, ...]`, the observations of the T steps, and the observation after them.
        columns: the arrays listed above, by name.
        successor_index: `[K]` flat row numbers `t * N + n` whose next observation is not
            `all_obs[t + 1, n]`, because an episode ended there and the next began in the same step.
        successor_obs: `[K, ...]`, the next observations of these rows. Truncated rows bootstrap
            from them.
        version: version of the weights that chose the actions. The oldest if there were several.
        worker_index: index of the worker that sampled the batch.
        episodes: statistics of the episodes that ended in the batch.
        device: device of the tensors of `to_tensordict`. The arrays are in host memory.
        faults: exceptions of environments, and non-finite values.
        compress: codec of `polopt.common.compression` with which the batch is sent to another
            process.
        column_versions: `[N]`, the version for each environment. None: `version` holds for all.
        per_env: arrays `[N, ...]` by name, with one value for each environment. `state` is the
            memory of the policy before the first step. `obs_mean`, `obs_inverse_std` and
            `reward_scale` say how the acting policy normalised observations and rewards, because
            the batch stores them as the environment returned them. These three are missing if the
            policy does not normalise, or if the batch is normalised already
            (`Normalizer.normalized`).
        moments: moments of the observations and discounted returns, until the worker has counted
            them. None: they have been counted, or the policy does not normalise.
        place: `(stream, step)`, the place of the fragment in the data of its sampler. A stream is a
            sequence of consecutive steps of the same environments. `step` is the number of steps
            before the fragment. None: not known, because the batch was put together from several
            fragments.
    """

    all_obs: np.ndarray  # [T + 1, N, ...]
    columns: dict[str, np.ndarray]  # name -> [T, N, ...]
    successor_index: np.ndarray  # [K] int64
    successor_obs: np.ndarray  # [K, ...]
    version: int = 0
    worker_index: int = 0
    episodes: EpisodeStats = field(default_factory=EpisodeStats)
    device: str = "cpu"
    faults: DataFaults = NO_FAULTS
    compress: str = "none"
    column_versions: np.ndarray | None = None  # [N] int64
    per_env: dict[str, np.ndarray] = field(default_factory=dict)  # name -> [N, ...]
    moments: Moments | None = None
    place: tuple[int, int] | None = None

    def __repr__(self) -> str:
        """T, N, environment steps and version, and the type and shape of each column."""
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
        """Number of rows, T * N, valid or not."""
        return self.shape[0] * self.shape[1]

    @property
    def obs(self) -> np.ndarray:
        """`[T, N, ...]` observations of the steps. A view."""
        return self.all_obs[:-1]

    @property
    def bootstrap_obs(self) -> np.ndarray:
        """`[N, ...]` observations after the last step. A view."""
        return self.all_obs[-1]

    @property
    def shape(self) -> tuple[int, int]:
        """`(T, N)`."""
        return len(self.all_obs) - 1, self.all_obs.shape[1]

    @property
    def env_steps(self) -> int:
        """Number of environment steps: the valid rows."""
        return int(np.count_nonzero(self.columns["valid"]))

    @property
    def versions(self) -> np.ndarray:
        """`[N]`, for each environment the version of the weights that chose its actions."""
        if self.column_versions is None:
            return np.full(self.shape[1], self.version, dtype=np.int64)
        return self.column_versions

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays without compression."""
        arrays = [self.all_obs, self.successor_obs, *self.columns.values(), *self.per_env.values()]
        return sum(array.nbytes for array in arrays)

    @property
    def next_place(self) -> tuple[int, int] | None:
        """The `place` of the fragment that continues this one. None: not known."""
        return None if self.place is None else (self.place[0], self.place[1] + self.shape[0])

    def flat(self, name: str) -> np.ndarray:
        """`[T * N, ...]`: a column with time and environments flattened. A view."""
        column = self[name]
        return column.reshape(-1, *column.shape[2:])

    def steps(self, start: int, stop: int) -> SampleBatch:
        """Returns steps `start` to `stop` of all environments, `[stop - start, N, ...]`, as views.

        `episodes` of the result is empty, because episode statistics cannot be divided. If `start`
        is above 0, a policy with memory cannot learn from the result, because the state of its
        memory is known only for step 0.
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
            column_versions=self.column_versions,
            per_env=begun if start else self.per_env,
            place=None if self.place is None else (self.place[0], self.place[1] + start),
        )

    def select(self, envs: np.ndarray) -> SampleBatch:
        """Returns a batch `[T, n, ...]` of the environments `envs` `[n]`, in that order, as copies.

        `episodes` of the result is empty, because episode statistics cannot be divided.
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
            per_env={name: array.take(envs, axis=0) for name, array in self.per_env.items()},
        )

    def iter_rows(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields `(name, [T * N, ...])` for the observations and each column, as views."""
        yield "obs", self.flat("obs")
        for name in self.columns:
            yield name, self.flat(name)

    def to_tensordict(self, device: str | None = None) -> Any:
        """A `tensordict.TensorDict` of batch size `[N, T]`, for TorchRL's losses.

        Names are the same as in TorchRL's collectors:

        - `observation`, `action` (as in `actions`, with indices for categories) and
          `sample_log_prob`.
        - `("next", "observation")`, which is the true next observation also where an episode ended.
        - `("next", "reward")`, `("next", "done")`, `("next", "terminated")` and
          `("next", "truncated")`, `[N, T, 1]`.
        - `state_value`, `advantage` and `value_target` `[N, T, 1]`, if `Policy.postprocess` has
          computed them.
        - `("collector", "mask")`, which is False in rows without a transition, and
          `("collector", "traj_ids")`, which numbers the trajectories.

        Args:
            device: device of the tensors. By default the batch's `device`.

        Raises:
            ImportError: `tensordict` is not installed.
        """
        from polopt.common.tensordict import to_tensordict

        next_obs = self.all_obs[1:].copy()
        if len(self.successor_index):
            next_obs.reshape(-1, *next_obs.shape[2:])[self.successor_index] = self.successor_obs
        return to_tensordict(self.all_obs, next_obs, self.columns, device or self.device)

    @staticmethod
    def concat(batches: Sequence[SampleBatch]) -> SampleBatch:
        """Concatenates batches along the environments, in the given order: `[max T, sum N, ...]`.

        Shorter batches are padded with rows that are not `valid`. Their last observations become
        successors, so bootstrapping stays exact. The `version` of the result is the oldest one. A
        single batch is returned without a copy.
        """
        if len(batches) == 1:
            return batches[0]
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
            faults=DataFaults.concat(batch.faults for batch in batches),
            per_env={
                name: np.concatenate([b.per_env[name] for b in batches])
                for name in batches[0].per_env
            },
        )


def _pad(batch: SampleBatch, length: int) -> SampleBatch:
    steps, envs = batch.shape
    missing = length - steps
    if missing == 0:
        return batch

    def pad(array: np.ndarray) -> np.ndarray:
        zeros = np.zeros((missing, *array.shape[1:]), dtype=array.dtype)
        return np.concatenate([array, zeros])

    # Padding follows the last rows now, instead of their next observation. So the next observation
    # of a last row becomes its successor, unless the row has one already.
    last_rows = np.setdiff1d(np.arange((steps - 1) * envs, steps * envs), batch.successor_index)
    order = np.concatenate([batch.successor_index, last_rows])
    successors = np.concatenate([batch.successor_obs, batch.bootstrap_obs[last_rows % envs]])
    return SampleBatch(
        all_obs=pad(batch.all_obs),
        columns={name: pad(column) for name, column in batch.columns.items()},
        successor_index=order,
        successor_obs=successors,
        version=batch.version,
        worker_index=batch.worker_index,
        episodes=batch.episodes,
        faults=batch.faults,
        column_versions=batch.column_versions,
        per_env=batch.per_env,
    )


#: Columns from which the ratio of new to old probability is computed. They are never rounded,
#: because the ratio would then differ from 1 although the policy has not changed.
_EXACT_COLUMNS = ("actions", "action_dist_inputs", "action_logp")
_PackedBatch = tuple[dict[str, Packed], dict[str, Packed], dict[str, Any]]


def _packed(batch: SampleBatch) -> _PackedBatch:
    """Packs observations and columns with the codec `batch.compress`. Returns them and the other
    fields."""
    codec = batch.compress
    exact = "none" if codec in LOSSY else codec
    observations = {n: pack(getattr(batch, n), codec) for n in ("all_obs", "successor_obs")}
    columns = {
        name: pack(column, exact if name in _EXACT_COLUMNS else codec)
        for name, column in batch.columns.items()
    }
    names = ["successor_index", "version", "worker_index", "episodes", "device", "faults"]
    names += ["column_versions", "per_env", "place"]
    return observations, columns, {name: getattr(batch, name) for name in names}


def _unpacked(
    observations: dict[str, Packed], columns: dict[str, Packed], rest: dict[str, Any]
) -> SampleBatch:
    """Makes the batch again, with the precision of its codec. Its `compress` is `none`, so it is
    packed only once."""
    return SampleBatch(
        all_obs=unpack(observations["all_obs"]),
        successor_obs=unpack(observations["successor_obs"]),
        columns={name: unpack(column) for name, column in columns.items()},
        **rest,
    )
