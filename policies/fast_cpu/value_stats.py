"""How values compare with their targets, in NumPy."""

from __future__ import annotations

import numpy as np


def value_stats_of(errors: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """`value_stats` of the errors `[B]` of values and their targets `[B]`."""
    count = len(errors)
    target, error = float(np.add.reduce(targets)) / count, float(np.add.reduce(errors)) / count
    centred = targets - np.float32(target)
    variance = float(np.dot(centred, centred)) / count
    unexplained = float(np.dot(errors, errors)) / count - error * error
    return {
        "vf_explained_var": 1.0 - unexplained / variance if variance > 1e-12 else 0.0,
        "vf_predicted_mean": target + error,
        "vf_target_mean": target,
    }
