"""`ActionMask`: finds and applies the mask of allowed actions in an observation. It supports
Discrete and MultiDiscrete action spaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from polopt.common.config import ConfigError

#: The key of a Dict observation space that holds the mask.
MASK_KEY = "action_mask"
#: The logit of a forbidden action. It is so low that the probability of the action is exactly 0.
#: Its sums and squares are finite in float32, so that entropy, KL and gradients are also finite.
MASKED_LOGIT = -1e18


@dataclass(frozen=True)
class ActionMask:
    """Describes the mask in an observation space.

    Attributes:
        sizes: the number of categories of each action. A Discrete space has one action.
        place: the slice of an encoded observation `[D]` that holds the mask.
        rest: the observation space without the mask.
    """

    sizes: tuple[int, ...]
    place: slice
    rest: spaces.Dict

    def masked(self, logits: np.ndarray | float, obs: np.ndarray) -> np.ndarray:
        """Returns logits `[N, sum of sizes]` float32, with `MASKED_LOGIT` for forbidden actions.

        Args:
            logits: the logits `[N, sum of sizes]`, or one number for all logits. With one number,
                all allowed actions are equally probable.
            obs: the encoded observations `[N, D]`, which contain the masks.
        """
        return np.where(obs[:, self.place] > 0.5, np.float32(logits), np.float32(MASKED_LOGIT))

    def check(self, masks: np.ndarray, needed: np.ndarray | bool = True) -> None:
        """Checks the shape and the values of masks.

        Args:
            masks: the masks `[N, sum of sizes]`.
            needed: `[N]` bool or one bool for all masks: whether an action will be chosen with the
                mask. If no action will be chosen, as for the last observation of an episode, the
                mask may forbid all actions.

        Raises:
            ValueError: if the masks have a wrong shape or values other than 0 and 1, or if a mask
                that is needed allows no action.
        """
        if masks.shape[1:] != (sum(self.sizes),):
            raise ValueError(
                f"the action mask must have shape {[sum(self.sizes)]}; got {[*masks.shape[1:]]}"
            )
        wrong = (masks != 0) & (masks != 1)  # also True for NaN
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
    """Returns the name of one mask of a batch for an error message."""
    return "the action mask" + (f" of environment {row}" if len(masks) > 1 else "")


def find_action_mask(observation_space: Space[Any], action_space: Space[Any]) -> ActionMask | None:
    """Finds the mask in an observation space. The observation space has a mask if it is a Dict with
    the key `action_mask`. Returns None for other spaces.

    Raises:
        ConfigError: if the space of the mask does not fit `action_space`, or if the Dict has no
            other key.
    """
    if not isinstance(observation_space, spaces.Dict) or MASK_KEY not in observation_space.spaces:
        return None
    space = observation_space.spaces[MASK_KEY]
    problem = f"observation space, key {MASK_KEY!r}: got {space}"
    sizes = sizes_of(action_space)
    if sizes is None:
        raise ConfigError(
            f"{problem} for action space {action_space}. Allowed: a mask for Discrete and "
            "MultiDiscrete actions. If this observation is not a mask, rename its key"
        )
    total = sum(sizes)
    numbers = isinstance(space, spaces.Box | spaces.MultiBinary)
    if not numbers or space.shape != (total,):
        raise ConfigError(
            f"{problem} for action space {action_space}. Allowed: MultiBinary({total}), or a Box "
            f"of shape ({total},), with 1 for each allowed action and 0 for all others"
        )
    rest = [(key, part) for key, part in observation_space.spaces.items() if key != MASK_KEY]
    if not rest:
        raise ConfigError(f"{problem} and no other key. Allowed: a mask and at least one other key")
    start = 0
    for key, part in observation_space.spaces.items():
        if key == MASK_KEY:
            break
        start += spaces.utils.flatdim(part)
    # `rest` is a list, because `spaces.Dict` would sort the keys of a dict.
    return ActionMask(sizes, slice(start, start + total), spaces.Dict(rest))


def sizes_of(action_space: Space[Any]) -> tuple[int, ...] | None:
    """Returns the number of categories of each action in a Discrete or MultiDiscrete space. Returns
    None for other spaces."""
    if isinstance(action_space, spaces.Discrete):
        return (int(action_space.n),)
    if isinstance(action_space, spaces.MultiDiscrete):
        return tuple(int(n) for n in action_space.nvec.reshape(-1))
    return None
