"""Encoded observations equal the results of `gymnasium.spaces.utils.flatten`."""

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
    "binary": spaces.MultiBinary(3),
    "binary grid": spaces.MultiBinary([2, 3]),
    "grid": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, -1], [0, 5]]),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2, 2), np.float64)]),
    "dict": spaces.Dict(
        {
            "z": spaces.Discrete(3, start=7),  # Gymnasium sorts the keys
            "image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
            "inner": spaces.Dict(
                pair=spaces.Tuple([spaces.MultiDiscrete([3, 2]), spaces.Box(-1.0, 1.0, ())]),
                a=spaces.Box(-np.inf, np.inf, (3,), np.float32),
            ),
        }
    ),
}


def observations(space: Space[Any]) -> tuple[list[Any], Any]:
    """Returns single observations, and the batch of them that a vector environment would return."""
    space.seed(0)
    singles = [space.sample() for _ in range(ROWS)]
    return singles, concatenate(space, singles, create_empty_array(space, n=ROWS))


@pytest.mark.parametrize("key", FLATTENED)
def test_batch_encoding_equals_gymnasium_flatten(key: str) -> None:
    space = FLATTENED[key]
    singles, batch = observations(space)
    encoder = ObservationEncoder(space)
    rows = encoder.rows(batch)
    assert rows.shape == (ROWS, *encoder.row_shape)
    assert rows.dtype == encoder.row_dtype
    encoded = encoder.encode(rows)
    assert encoded.shape == (ROWS, *encoder.shape)
    assert encoded.dtype == encoder.dtype == np.float32
    for row, vector, single in zip(rows, encoded, singles, strict=True):
        np.testing.assert_array_equal(row, encoder.row(single))
        np.testing.assert_array_equal(vector, flatten(space, single).astype(np.float32))
    np.testing.assert_array_equal(encoder.encode(batch), encoded)
    assert encoder.encode(encoded) is encoded
    in_time = rows.reshape(2, ROWS // 2, *encoder.row_shape)  # rows of a batch [T, N]
    np.testing.assert_array_equal(encoder.encode(in_time).reshape(encoded.shape), encoded)
    np.testing.assert_array_equal(encoder.encode(rows, np.float64).astype(np.float32), encoded)
    assert encoder.encode(rows[:0]).shape == (0, *encoder.shape)


def test_discrete_values_are_one_hot() -> None:
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
def test_box_is_not_copied(space: spaces.Box) -> None:
    singles, batch = observations(space)
    encoder = ObservationEncoder(space)
    encoded = encoder.encode(batch)
    assert np.shares_memory(encoded, batch)
    assert encoded.dtype == encoder.dtype == space.dtype
    assert encoded.shape == (ROWS, *encoder.shape) == (ROWS, *space.shape)
    np.testing.assert_array_equal(encoder.row(singles[3]), encoded[3])


def test_box_observation_gets_the_dtype_of_the_space() -> None:
    encoder = ObservationEncoder(spaces.Box(0, 255, (3, 4, 4), np.float32))
    image = np.full((3, 4, 4), 200, np.uint8)
    one, batch = encoder.row(image), encoder.encode(image[None])
    assert one.dtype == batch.dtype == np.float32  # a uint8 observation would be scaled by networks
    np.testing.assert_array_equal(one, batch[0])


def test_list_observation_of_integer_box_gets_its_dtype() -> None:
    encoder = ObservationEncoder(spaces.Box(0, 255, (2,), np.uint8))
    assert encoder.row([3, 255]).dtype == np.uint8


UNSUPPORTED = [
    spaces.Text(4),
    spaces.Graph(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2)),
    spaces.Sequence(spaces.Discrete(2)),
]


@pytest.mark.parametrize("space", UNSUPPORTED, ids=lambda space: type(space).__name__)
@pytest.mark.parametrize("nested", [False, True])
def test_unsupported_space_error_names_the_space(space: Space[Any], nested: bool) -> None:
    whole: Space[Any] = space
    if nested:
        whole = spaces.Dict(good=spaces.Discrete(2), bad=spaces.Tuple([spaces.Discrete(2), space]))
    with pytest.raises(ConfigError) as error:
        ObservationEncoder(whole)
    assert str(space) in str(error.value)
    assert str(whole) in str(error.value)
    assert "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those" in str(
        error.value
    )


@pytest.mark.parametrize("key", ["discrete", "offset", "multi", "grid"])
@pytest.mark.parametrize("step", [-1, 100])
def test_value_outside_the_space_is_refused(key: str, step: int) -> None:
    space = FLATTENED[key]
    _, batch = observations(space)
    batch = np.asarray(batch).copy()
    batch[2] = np.asarray(space.start) - 1 if step < 0 else 100
    with pytest.raises(ValueError, match="must be in the space"):
        ObservationEncoder(space).rows(batch)


WRONG_OBSERVATIONS: list[tuple[Space[Any], Any, str]] = [
    (spaces.Box(-1.0, 1.0, (3,)), np.zeros(4), r"shape \[3\], for Box.*got array"),
    (spaces.Box(-1.0, 1.0, (3,)), 0.5, r"shape \[3\], for Box.*got 0.5"),
    (spaces.Box(-1.0, 1.0, (3,)), [[1.0], [1.0, 2.0]], r"shape \[3\]"),
    (spaces.Box(-1.0, 1.0, (3,)), "abc", r"shape \[3\].*got 'abc'"),
    (spaces.Box(-1.0, 1.0, (3,)), None, r"shape \[3\].*got None"),
    (spaces.Box(0, 255, (2,), np.uint8), [0.5, 1.0], "values of dtype uint8.*got .0.5, 1.0"),
    (spaces.Box(0, 255, (2,), np.uint8), [0, 256], "values of dtype uint8.*got .0, 256"),
    (spaces.Discrete(3), [1], r"shape \[\], for Discrete\(3\).*got \[1\]"),
    (spaces.Discrete(3), 3, "must be in the space; got 3"),
    (spaces.Discrete(3), 0.5, r"observation must have whole numbers, for Discrete\(3\); got 0.5"),
    (FLATTENED["multi"], [0, 1.5, 0], "must have whole numbers, for MultiDiscrete"),
    (spaces.Discrete(3), np.nan, "must have whole numbers"),
    (FLATTENED["tuple"], (1,), "must have 2 parts"),
    (FLATTENED["tuple"], (1, np.zeros(2)), r"observation\[1\] must have shape \[2, 2\]"),
    (FLATTENED["dict"], {"z": 7}, "must have the keys"),
    (FLATTENED["dict"], 7, "must have the keys"),
]


@pytest.mark.parametrize(("space", "observation", "error"), WRONG_OBSERVATIONS)
def test_wrong_shape_error_has_expected_shape(space: Any, observation: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ObservationEncoder(space).row(observation)


def test_list_observation_of_tuple_space_is_accepted() -> None:
    space = FLATTENED["tuple"]
    space.seed(0)
    observation = space.sample()
    encoder = ObservationEncoder(space)
    encoded = encoder.row(list(observation))
    np.testing.assert_array_equal(encoded, encoder.row(observation))


@pytest.mark.parametrize("space", [spaces.Dict(), spaces.Tuple([]), spaces.Box(-1.0, 1.0, (0,))])
def test_empty_space_is_refused(space: Space[Any]) -> None:
    with pytest.raises(ConfigError, match=r"is empty. Allowed:"):
        ObservationEncoder(space)


@pytest.mark.parametrize(
    ("observation", "said"),
    [
        ({"image": np.full((4, 4, 1), 300), "at": np.zeros(2)}, r"\['image'\] must have values of"),
        ({"image": np.full((4, 4, 1), 0.5), "at": np.zeros(2)}, r"\['image'\] must have values of"),
        ({"image": np.zeros((4, 4, 1)), "at": np.array([0.0, np.nan])}, r"\['at'\] must be finite"),
        ({"image": np.zeros((4, 4, 1)), "at": [1e300, 0.0]}, r"\['at'\] must be finite"),
        ({"picture": np.zeros((4, 4, 1))}, r"keys \['image', 'at'\]; got the keys \['picture'\]$"),
    ],
)
def test_values_that_a_user_may_not_pass_are_named(observation: Any, said: str) -> None:
    space = spaces.Dict(
        image=spaces.Box(0, 255, (4, 4, 1), np.uint8), at=spaces.Box(-1.0, 1.0, (2,))
    )
    with pytest.raises(ValueError, match=said):
        ObservationEncoder(space).some_rows(observation)


@pytest.mark.parametrize("shape", [(2,), (1, 3), ()])
def test_one_observation_of_the_right_dtype_needs_its_shape(shape: tuple[int, ...]) -> None:
    encoder = ObservationEncoder(spaces.Box(-1.0, 1.0, (3,)))
    with pytest.raises(ValueError, match=r"must have shape \[3\]"):
        encoder.row(np.zeros(shape, np.float32))
