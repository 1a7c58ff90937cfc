"""What the three autoreset modes of Gymnasium mean for the rows of a fragment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from polopt.policies.spaces import ObservationEncoder
from polopt.rollouts.envs.env_errors import EnvironmentAPIError
from polopt.rollouts.envs.vector_env import autoreset_mode
from polopt.rollouts.sampling.fragment_columns import FragmentColumns
from polopt.rollouts.sampling.non_finite import replace_unused, surely_finite
from polopt.rollouts.sampling.sampler_faults import SamplerFaults

_Vector = VectorEnv[Any, Any, Any]
_TRUE = np.True_.tobytes()


class Autoreset:
    """What the autoreset mode of a vector environment decides: which rows are reset rows, where the
    true last observation of an episode comes from, and which observation is the first of the next
    episode. In the modes same-step and disabled, there are no reset rows, and the observation after
    an end is the first of the next episode.

    Args:
        num_envs: the number N of environments.
        encoder: converts observations to rows.
        faults: takes the faults of the environments.

    Attributes:
        pending: `[N]` bool, True for the environments that the next step only resets.
        resets_some: whether every vector in this mode can reset some of its environments without
            the others.
    """

    resets_some = False

    def __init__(self, num_envs: int, encoder: ObservationEncoder, faults: SamplerFaults) -> None:
        self.pending = np.zeros(num_envs, dtype=bool)
        self._encoder = encoder
        self._faults = faults

    def end_episodes(
        self, env: _Vector, t: int, rows: FragmentColumns, raw: Any, infos: Mapping[str, Any]
    ) -> Any:
        """Stores the last observations of the episodes that ended in step `t`.

        Args:
            env: the vector environment.
            t: the index of the step in the fragment.
            rows: the fragment, with `terminated` and `truncated` of step `t`.
            raw: the observations of the step, as the environment returned them.
            infos: the infos of the step.

        Returns:
            the current observations of all environments. If an episode ended, its environment has
            the first observation of the next episode.

        Raises:
            Exception: any exception of the environment.
        """
        over = rows.terminated[t] | rows.truncated[t]
        if np.count_nonzero(over):
            ended = over.nonzero()[0]
            last, raw = self._finish(env, ended, raw, infos)
            rows.add_last_observations(t, ended, last)
        return raw

    def _finish(
        self, env: _Vector, ended: np.ndarray, raw: Any, infos: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], Any]:
        """Returns the rows of the K last observations, and the current observations of all
        environments.

        Args:
            env: the vector environment.
            ended: `[K]`, the indices of the environments whose episodes ended.
            raw: the observations of the step.
            infos: the infos of the step.
        """
        raise NotImplementedError

    def acts_next(self, t: int, rows: FragmentColumns) -> np.ndarray | bool:
        """Which environments use the action that follows step `t`. True means all of them."""
        return True

    def observed(self, t: int, rows: FragmentColumns) -> None:
        """Called when the observations after step `t` are in `rows.all_obs`."""
        return

    def reset_rows(self, t: int, rows: FragmentColumns) -> np.ndarray:
        """Returns `[N]` bool, True for the environments that step `t` only resets."""
        return self.pending

    def begins(self, t: int, rows: FragmentColumns) -> np.ndarray:
        """Returns `[N]` bool, True for each environment in which an episode begins with the
        observation before step `t`. `t` is at least 1."""
        return rows.terminated[t - 1] | rows.truncated[t - 1]

    def end_fragment(self, steps: int, rows: FragmentColumns) -> None:
        """Marks the reset rows of a fragment with this number of steps."""
        return

    def infos_of_ends(self, infos: Mapping[str, Any]) -> Any:
        """Returns the part of the infos of a step with the infos of the episodes that ended."""
        return infos

    def last_of(self, raw: Any, infos: Mapping[str, Any], n: int) -> Any:
        """Returns the last observation of the episode of environment `n` that ended in this step.
        None means that the observations `raw` of the step have it."""
        return None


class NextStep(Autoreset):
    """The step after the end of an episode only resets the environment. The row of this step is
    called a reset row. Its observation is the last observation of the episode."""

    def end_episodes(
        self, env: _Vector, t: int, rows: FragmentColumns, raw: Any, infos: Mapping[str, Any]
    ) -> Any:
        """Returns the observations of the step, which are the last observations of episodes that
        ended."""
        return raw

    def acts_next(self, t: int, rows: FragmentColumns) -> np.ndarray:
        """Returns `[N]` bool. The action after the end of an episode is not used."""
        return ~(rows.terminated[t] | rows.truncated[t])

    def observed(self, t: int, rows: FragmentColumns) -> None:
        """Replaces observations after `terminated` that are not finite. See `replace_unused`."""
        over = rows.terminated[t]
        # The search in the bytes is the fastest way to know whether an episode ended.
        if _TRUE in over.tobytes() and not surely_finite(rows.all_obs[t + 1]):
            used, last = rows.all_obs[t], rows.all_obs[t + 1]
            last[over] = replace_unused(used[over], last[over])

    def reset_rows(self, t: int, rows: FragmentColumns) -> np.ndarray:
        """Returns `[N]` bool, True for the environments whose episode ended one step before."""
        return rows.terminated[t - 1] | rows.truncated[t - 1] if t else self.pending

    def begins(self, t: int, rows: FragmentColumns) -> np.ndarray:
        """Returns `[N]` bool. An episode begins with the observation after a reset row."""
        return self.reset_rows(t - 1, rows)

    def end_fragment(self, steps: int, rows: FragmentColumns) -> None:
        """Marks the reset rows of a fragment: `valid` becomes False and the reward 0. This is
        faster once per fragment than once per step."""
        ended = rows.terminated[:steps] | rows.truncated[:steps]
        resets = np.concatenate([self.pending[None], ended[:-1]])
        rows.valid[:steps][resets] = False
        rows.rewards[:steps][resets] = 0.0
        self.pending = ended[-1]


class SameStep(Autoreset):
    """The step that ends an episode also resets the environment. The last observation of the
    episode is in `infos["final_obs"]`."""

    def _finish(
        self, env: _Vector, ended: np.ndarray, raw: Any, infos: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], Any]:
        encoder = self._encoder
        try:
            last = [item_of(encoder.space, infos["final_obs"], n) for n in ended]
            # Copies, because the environment may use its arrays again.
            return [encoder.row(one).copy() for one in last], raw
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EnvironmentAPIError(
                f"{self._faults.place} has the autoreset mode same_step. If episodes end in a "
                "step, infos['final_obs'] of this step must contain the last observation of each "
                f"of these episodes: {type(error).__name__}: {error}"
            ) from error

    def infos_of_ends(self, infos: Mapping[str, Any]) -> Any:
        """Returns `infos["final_info"]`."""
        return infos.get("final_info", {})

    def last_of(self, raw: Any, infos: Mapping[str, Any], n: int) -> Any:
        """Returns the last observation of the episode of environment `n` that ended in this
        step."""
        return item_of(self._encoder.space, infos["final_obs"], n)


class Disabled(Autoreset):
    """The sampler resets the environments whose episodes ended. The last observation of an episode
    is the observation of the step."""

    resets_some = True

    def _finish(
        self, env: _Vector, ended: np.ndarray, raw: Any, infos: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], Any]:
        last = list(self._encoder.rows(raw)[ended])
        mask = np.zeros(env.num_envs, dtype=bool)
        mask[ended] = True
        raw, reset_infos = env.reset(options={"reset_mask": mask})
        self._faults.note(reset_infos)
        return last, raw


_MODES: Mapping[AutoresetMode, type[Autoreset]] = {
    AutoresetMode.NEXT_STEP: NextStep,
    AutoresetMode.SAME_STEP: SameStep,
    AutoresetMode.DISABLED: Disabled,
}


def autoreset_of(env: _Vector, encoder: ObservationEncoder, faults: SamplerFaults) -> Autoreset:
    """Makes the object for the autoreset mode of a vector environment."""
    return _MODES[autoreset_mode(env)](env.num_envs, encoder, faults)


def item_of(space: spaces.Space[Any], batch: Any, index: int) -> Any:
    """Returns one observation of a batch. A batch of Dict or Tuple observations is an array of
    observations, or a dict or tuple of batches."""
    if isinstance(space, spaces.Dict) and isinstance(batch, Mapping):
        return {key: item_of(part, batch[key], index) for key, part in space.items()}
    if isinstance(space, spaces.Tuple) and isinstance(batch, tuple):
        return tuple([item_of(*both, index) for both in zip(space, batch, strict=True)])
    return batch[index]
