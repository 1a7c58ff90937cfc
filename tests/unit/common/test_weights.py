"""Weights, gradients and episode statistics survive pickling."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import ray

from polopt.common.episodes import EpisodeStats
from polopt.common.weights import Acting, Gradients, Weights

VECTOR = np.linspace(-1.0, 1.0, 9155, dtype=np.float32)
MESSAGES = [
    Weights(VECTOR, 7, 1234, {"kl_coeff": 0.2}, acting=Acting(True, False)),
    Gradients(VECTOR[::2], 3, 160, {"vf_loss": 0.5}),  # not contiguous
    EpisodeStats([500.0, 1.5], [500, 2]),
    EpisodeStats(),
    Weights(VECTOR[:0], 0, 0, {}),  # the weights of a policy without parameters
]


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert one._fields == other._fields
    for a, b in zip(one, other, strict=True):
        assert type(a) is type(b)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("message", MESSAGES)
def test_messages_survive_pickling(message: Any, protocol: int) -> None:
    assert_same(pickle.loads(pickle.dumps(message, protocol)), message)
    assert_same(copy.deepcopy(message), message)


def test_vectors_are_pickled_out_of_band() -> None:
    beside: list[pickle.PickleBuffer] = []
    data = pickle.dumps(MESSAGES[0], 5, buffer_callback=beside.append)
    assert [buffer.raw().nbytes for buffer in beside] == [4 * len(VECTOR)]
    assert b"dtype" not in data  # pickling NumPy's description of an array would take long
    assert_same(pickle.loads(data, buffers=beside), MESSAGES[0])


def test_float64_vectors_arrive_as_float32() -> None:
    sent = Gradients(VECTOR.astype(np.float64), 3, 160, {})
    assert_same(pickle.loads(pickle.dumps(sent, 5)), sent._replace(flat=VECTOR))


def test_pickles_contain_no_code() -> None:
    sizes = {type(message).__name__: len(ray.cloudpickle.dumps(message, 5)) for message in MESSAGES}
    assert sizes.pop("Weights") < VECTOR.nbytes + 300
    assert sizes.pop("Gradients") < VECTOR.nbytes / 2 + 300
    assert max(sizes.values()) < 200
