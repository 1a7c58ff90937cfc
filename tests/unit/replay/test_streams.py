"""The flags of the rows of a fragment. With a single event in the fragment, each flag is known."""

from __future__ import annotations

import numpy as np
import pytest
from replay_streams import fragment

from polopt.replay.streams import CUT, TERMINATED, TRUNCATED, VALID, flags_of


@pytest.mark.parametrize("t", [0, 1, 3])
@pytest.mark.parametrize(
    ("event", "own", "before"),
    [
        ("nothing", VALID, VALID),
        ("terminated", VALID | TERMINATED | CUT, VALID),
        ("truncated", VALID | TRUNCATED | CUT, VALID),
        ("invalid", 0, VALID | CUT),
        ("successor", VALID | CUT, VALID),
    ],
)
def test_flags_of_a_fragment_with_one_event(event: str, own: int, before: int, t: int) -> None:
    batch = fragment(0)
    if event == "invalid":
        batch["valid"][t, 1] = False
    elif event == "successor":
        batch.successor_index = np.array([2 * t + 1])
        batch.successor_obs = batch.all_obs[t + 1, 1:]
    elif event != "nothing":
        batch[event][t, 1] = True
    expected = np.full(batch.shape, VALID)
    expected[t, 1] = own
    if t:
        expected[t - 1, 1] = before
    np.testing.assert_array_equal(flags_of(batch), expected)
