"""Compares ONNX models with the policies that they export."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from polopt.policies.policy import Policy

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnxruntime", "onnxscript")),
    reason="onnxruntime or onnxscript is not installed: pip install 'polopt[dev]'",
)


def leaves(batch: Any) -> list[np.ndarray]:
    if isinstance(batch, dict):
        return [leaf for part in batch.values() for leaf in leaves(part)]
    if isinstance(batch, tuple):
        return [leaf for part in batch for leaf in leaves(part)]
    return [batch]


def batch_of(space: Any, rows: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: batch_of(part, rows) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(batch_of(part, rows) for part in space.spaces)
    return np.stack([space.sample() for _ in range(rows)])


def check_model(policy: Policy, path: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    inputs = [node.name for node in session.get_inputs()]
    space = policy.encoder.space
    space.seed(3)
    for rows in (1, 2, 7):
        batch = batch_of(space, rows)
        if policy.mask is not None:
            batch["action_mask"][:, rows % 3] = 1  # at least one action is allowed
        states = np.random.default_rng(rows).normal(size=(rows, policy.state_size))
        memory = [states.astype(np.float32)] if policy.state_size else []
        feed = dict(zip(inputs, [*leaves(batch), *memory], strict=True))
        actions, params, *after = session.run(None, feed)
        expected, state = policy.predict(batch, memory[0] if memory else None)
        if memory:
            np.testing.assert_allclose(after[0], state, rtol=1e-5, atol=1e-5)
        assert actions.dtype == expected.dtype
        assert actions.shape == expected.shape == (rows, *policy.action_space.shape)
        np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)
        exact = policy.compute_actions(policy.encoder.rows(batch), state=states.astype(np.float32))[
            1
        ]["action_dist_inputs"]
        np.testing.assert_allclose(params, exact, rtol=1e-5, atol=1e-5)
