"""The gradient of a minibatch does not depend on the size of its microbatches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from policy_helpers import make_batch, moved, small_policy

from polopt.policies.policy import Policy

SIZES = [1, 5, 7, 1000]


def prepared(name: str, size: int | None, **options: Any) -> tuple[Policy, Any]:
    policy: Any = moved(small_policy(name, microbatch_size=size, **options))
    batch = make_batch(policy, steps=6)
    batch["valid"][1, 0] = False
    return policy, policy.training_rows(policy.prepare_batch(batch))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("memory", [False, True])
def test_gradient_and_statistics_do_not_depend_on_the_size(
    size: int, fast: bool, memory: bool
) -> None:
    options = {"fast_cpu": fast, "model": {"use_lstm": memory, "lstm_cell_size": 4}}
    whole, rows = prepared("ppo", None, **options)
    split, same = prepared("ppo", size, **options)
    np.testing.assert_array_equal(rows["actions"], same["actions"])
    expected, stats = whole.backward(rows), split.backward(rows)  # type: ignore[attr-defined]
    assert stats == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert np.abs(whole.flat.get_grads()).max() > 1e-3
    np.testing.assert_allclose(split.flat.get_grads(), whole.flat.get_grads(), rtol=1e-3, atol=1e-6)


def test_at_most_microbatch_size_rows_are_computed_at_once() -> None:
    policy, rows = prepared("a2c", 7, fast_cpu=False)
    counts: list[int] = []
    policy.model.register_forward_hook(lambda _module, args, _out: counts.append(len(args[0])))
    policy.backward(rows)  # type: ignore[attr-defined]
    assert max(counts) <= 7
    assert sum(counts) == len(rows["actions"])
