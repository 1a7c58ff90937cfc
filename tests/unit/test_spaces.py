"""Observations encoded batch by batch equal those that Gymnasium flattens one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces
from gymnasium.spaces.utils import flatten
from gymnasium.vector.utils import concatenate, create_empty_array

from polopt.common.config import ConfigError
from polopt.policies.spaces import ObservationEncoder

ROWS = 6
FLATTENED = {
    "discrete": spaces.Discrete(4),
    "offset": spaces.Discrete(4, start=-2),
    "multi": spaces.MultiDiscrete([2, 5, 3]),
    "grid": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, -1], [0, 5]]),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2, 2), np.float64)]),
    "dict": spaces.Dict(
        {
            "z": spaces.Discrete(3, start=7),  # the last of the alphabet; Gymnasium sorts the keys
            "image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
            "inner": spaces.Dict(
                pair=spaces.Tuple([spaces.MultiDiscrete([3, 2]), spaces.Box(-1.0, 1.0, ())]),
                a=spaces.Box(-np.inf, np.inf, (3,), np.float32),
            ),
        }
    ),
}


def observations(space: Space[Any]) -> tuple[list[Any], Any]:
    """Single observations, and the same as a vector environment batches them."""
    space.seed(0)
    singles = [space.sample() for _ in range(ROWS)]
    return singles, concatenate(space, singles, create_empty_array(space, n=ROWS))


@pytest.mark.parametrize("key", FLATTENED)
def test_batch_is_flattened_as_gymnasium_flattens_each(key: str) -> None:
    space = FLATTENED[key]
    singles, batch = observations(space)
    encoder = ObservationEncoder(space)
    encoded = encoder.encode(batch)
    assert encoded.shape == (ROWS, *encoder.shape)
    assert encoded.dtype == encoder.dtype == np.float32
    for row, single in zip(encoded, singles, strict=True):
        np.testing.assert_array_equal(row, flatten(space, single).astype(np.float32))
        np.testing.assert_array_equal(row, encoder.encode_one(single))


def test_every_value_of_a_discrete_space_has_a_place_of_its_own() -> None:
    encoded = ObservationEncoder(FLATTENED["offset"]).encode(np.array([-2, -1, 0, 1]))
    np.testing.assert_array_equal(encoded, np.eye(4))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (4, 4, 3), np.uint8),
        spaces.Box(-1.0, 1.0, (3,), np.float32),
        spaces.Box(-1.0, 1.0, (2, 2), np.float64),
        spaces.Box(-5, 5, (), np.int16),
    ],
    ids=str,
)
def test_box_passes_through(space: spaces.Box) -> None:
    singles, batch = observations(space)
    encoder = ObservationEncoder(space)
    encoded = encoder.encode(batch)
    assert np.shares_memory(encoded, batch)
    assert encoded.dtype == encoder.dtype == space.dtype
    assert encoded.shape == (ROWS, *encoder.shape) == (ROWS, *space.shape)
    np.testing.assert_array_equal(encoder.encode_one(singles[3]), encoded[3])


UNSUPPORTED = [
    spaces.MultiBinary(3),
    spaces.Text(4),
    spaces.Graph(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2)),
    spaces.Sequence(spaces.Discrete(2)),
]


@pytest.mark.parametrize("space", UNSUPPORTED, ids=lambda space: type(space).__name__)
@pytest.mark.parametrize("nested", [False, True])
def test_unsupported_space_is_named(space: Space[Any], nested: bool) -> None:
    whole: Space[Any] = space
    if nested:
        whole = spaces.Dict(good=spaces.Discrete(2), bad=spaces.Tuple([spaces.Discrete(2), space]))
    with pytest.raises(ConfigError) as error:
        ObservationEncoder(whole)
    assert str(space) in str(error.value)
    assert str(whole) in str(error.value)
    assert "Box, Discrete, MultiDiscrete, and Dict and Tuple of those" in str(error.value)
