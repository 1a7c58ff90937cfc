"""Nodes that Ray drains, and workers that get SIGTERM, during training on a real cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

OPTIMIZERS = (
    "async_gradients",
    "sync_gradients",
    "sync_samples",
    "async_samples",
    "decentralized_allreduce",
    "sync_replay",
    "async_replay",
)
CASES = [
    pytest.param("async_replay", 1, id="async_replay"),
    *(pytest.param(name, 20, id=f"{name}-20", marks=pytest.mark.slow) for name in OPTIMIZERS),
    # a strategy of docs/write-an-optimizer.md
    pytest.param("local_sgd", 3, id="local_sgd-3", marks=pytest.mark.slow),
]


def preempted(name: str, number: int) -> dict[str, Any]:
    """Runs `preemption_script.py`, and returns its findings."""
    # `tmp_path` can be too long for a Unix socket.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        own, counts = Path(folder, "own"), Path(folder, "counts")
        own.mkdir()
        counts.mkdir()
        done = subprocess.run(
            [sys.executable, "tests/preemption_script.py", name, str(number), str(counts)],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(own), "RAY_TMPDIR": str(own)},
            capture_output=True,
            text=True,
            timeout=300.0 + 120.0 * number,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "number"), CASES)
def test_preempted_nodes_cost_no_step(name: str, number: int) -> None:
    """Each preempted node has at least one worker. Ray gives the node back once its workers and its
    agent have left. Another node follows. At the end, one worker gets SIGTERM."""
    found = preempted(name, number)
    assert found["counted"] == found["made"] > 0, "each step of an environment is counted once"
    assert found["left_by_drain"] >= number
    assert found["left_by_sigterm"] == 1
    assert found["num_worker_preemptions"] == found["left_by_drain"] + 1
    assert found["least_up"] < found["processes"], "the run shrinks, and grows again"
    assert found["failures"] == {"deaths": 0, "hangs": 0}
    assert found["lost_arguments"] == 0
    assert found["broken_rounds"] == 0
    assert found["num_agents"] == 2, "the agents of preempted nodes have ended"
    assert found["transport"] == "ray"
