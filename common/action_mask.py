"""`ActionMask`: which actions an observation allows, for Discrete and MultiDiscrete actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from polopt.common.config import ConfigError

#: Key of a Dict observation space that holds a mask.
MASK_KEY = "action_mask"
#: Logit of an action that is not allowed. Its probability is exactly 0 beside any logit that a
#: network computes. Sums and squares of it are finite in float32, so that entropy, KL and gradients
#: are.
MASKED_LOGIT = -1e18


@dataclass(frozen=True)
class ActionMask:
    """The mask of an observation space.

    Attributes:
        sizes: number of categories of each action: one number for Discrete.
        place: where the mask is in an encoded observation `[D]`.
        rest: the observation space without the mask.
    """

    sizes: tuple[int, ...]
    place: slice
    rest: spaces.Dict

    def masked(self, logits: np.ndarray | float, obs: np.ndarray) -> np.ndarray:
        """Logits `[N, sum of sizes]` float32, in which forbidden actions get `MASKED_LOGIT`.

        Args:
            logits: `[N, sum of sizes]`. One number: the allowed actions are equally probable.
            obs: encoded observations `[N, D]`.
        """
        return np.where(obs[:, self.place] > 0.5, np.float32(logits), np.float32(MASKED_LOGIT))

    def check(self, masks: np.ndarray, needed: np.ndarray | bool = True) -> None:
        """Checks masks.

        Args:
            masks: `[N, sum of sizes]`.
            needed: `[N]` bool, or one for all: whether an action will be chosen. If not, as in the
                last observation of an episode, the mask may allow none.

        Raises:
            ValueError: another shape, values other than 0 and 1, or no allowed action.
        """
        if masks.shape[1:] != (sum(self.sizes),):
            raise ValueError(
                f"the action mask must have shape {[sum(self.sizes)]}; got {[*masks.shape[1:]]}"
            )
        wrong = (masks != 0) & (masks != 1)  # NaN is neither
        if wrong.any():
            row, column = map(int, np.argwhere(wrong)[0])
            raise ValueError(
                f"{_mask_of(masks, row)} must have values 0 and 1; got {masks[row, column]} at "
                f"index {column}"
            )
        starts = np.cumsum((0, *self.sizes[:-1]))
        empty = np.add.reduceat(masks.astype(bool), starts, axis=1) == 0
        lacking = empty.any(axis=1) & needed
        if lacking.any():
            row = int(np.flatnonzero(lacking)[0])
            part = int(np.flatnonzero(empty[row])[0])
            which = f" of action {part}" if len(self.sizes) > 1 else ""
            raise ValueError(
                f"{_mask_of(masks, row)} allows none of the {self.sizes[part]} choices{which}"
            )


def _mask_of(masks: np.ndarray, row: int) -> str:
    """Names a mask of a batch in an error."""
    return "the action mask" + (f" of environment {row}" if len(masks) > 1 else "")


def find_action_mask(observation_space: Space[Any], action_space: Space[Any]) -> ActionMask | None:
    """Finds the mask in an observation space, which is a Dict with the key `action_mask` and other
    keys. Returns None for a space without this key.

    Raises:
        ConfigError: the value of that key does not fit `action_space`.
    """
    if not isinstance(observation_space, spaces.Dict) or MASK_KEY not in observation_space.spaces:
        return None
    space = observation_space.spaces[MASK_KEY]
    problem = f"observation space, key {MASK_KEY!r}: got {space}"
    sizes = sizes_of(action_space)
    if sizes is None:
        raise ConfigError(
            f"{problem} for action space {action_space}. Allowed: a mask for Discrete and "
            "MultiDiscrete actions; an observation that is no mask has another key"
        )
    total = sum(sizes)
    numbers = isinstance(space, spaces.Box | spaces.MultiBinary)
    if not numbers or space.shape != (total,):
        raise ConfigError(
            f"{problem} for action space {action_space}. Allowed: MultiBinary({total}), or a Box "
            f"of shape ({total},): 1 for each action that is allowed, else 0"
        )
    rest = [(key, part) for key, part in observation_space.spaces.items() if key != MASK_KEY]
    if not rest:
        raise ConfigError(f"{problem} and no other key. Allowed: a mask beside observations")
    start = 0
    for key, part in observation_space.spaces.items():
        if key == MASK_KEY:
            break
        start += spaces.utils.flatdim(part)
    # A list keeps the order. A dict would be sorted.
    return ActionMask(sizes, slice(start, start + total), spaces.Dict(rest))


def sizes_of(action_space: Space[Any]) -> tuple[int, ...] | None:
    """Number of categories of each action of a Discrete or MultiDiscrete space. Else None."""
    if isinstance(action_space, spaces.Discrete):
        return (int(action_space.n),)
    if isinstance(action_space, spaces.MultiDiscrete):
        return tuple(int(n) for n in action_space.nvec.reshape(-1))
    return None
