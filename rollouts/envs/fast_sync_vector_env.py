"""`FastSyncVectorEnv`: a `SyncVectorEnv` with a faster step."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import create_empty_array

#: Spaces whose batches are arrays with one row for each environment.
_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class FastSyncVectorEnv(SyncVectorEnv):
    """`SyncVectorEnv` of `FaultTolerantEnv`s. In same-step mode, where observations and actions are
    arrays, `step` writes each observation to its row of the batch, and handles ends and infos only
    where there are any. In other cases it uses `SyncVectorEnv.step`. Results are the same.

    `FaultTolerantEnv` checks shape and dtype of observations, which this class does not.

    Args:
        args: as of `SyncVectorEnv`.
        kwargs: as of `SyncVectorEnv`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batch: Any = None  # [N, ...]. None: `SyncVectorEnv.step` is used
        if (
            self.autoreset_mode == AutoresetMode.SAME_STEP
            and isinstance(self.single_observation_space, _ARRAYS)
            and isinstance(self.single_action_space, _ARRAYS)
        ):
            self._batch = create_empty_array(self.single_observation_space, self.num_envs)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all environments, or only `options["reset_mask"]`. See `SyncVectorEnv`."""
        mask = (options or {}).get("reset_mask", slice(None))
        observations: Any
        observations, infos = super().reset(seed=seed, options=options)
        if self._batch is None:
            return observations, infos
        # The base class does not know the observations of the steps in between.
        self._batch[mask] = observations[mask]
        return self._observed(), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps each environment. Resets those whose episode ends.

        Args:
            actions: `[N, ...]`.

        Returns:
            observations `[N, ...]`, which the next step overwrites unless `copy` is set. Rewards
            `[N]` float64. `terminated` and `truncated` `[N]` bool. Infos.

        Raises:
            ValueError: the number of actions is not N.
            Exception: from an environment.
        """
        if self._batch is None:
            return super().step(actions)
        num, batch = self.num_envs, self._batch
        rewards, terminated, truncated = np.zeros(num), np.zeros(num, bool), np.zeros(num, bool)
        infos: dict[str, Any] = {}
        for i, (env, action) in enumerate(zip(self.envs, actions, strict=True)):
            observation, rewards[i], is_terminal, is_truncated, info = env.step(action)
            if is_terminal or is_truncated:
                terminated[i], truncated[i] = is_terminal, is_truncated
                infos = self._add_info(infos, {"final_obs": observation, "final_info": info}, i)
                observation, info = env.reset()
            if info:
                infos = self._add_info(infos, info, i)
            batch[i] = observation
        return self._observed(), rewards, terminated, truncated, infos

    def _observed(self) -> Any:
        return self._batch.copy() if self.copy else self._batch
