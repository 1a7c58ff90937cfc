"""What polopt passes to `ray.init`."""

from __future__ import annotations

from typing import Any

import pytest

from polopt.rollouts import ray_session


@pytest.mark.parametrize("runs", [False, True])
def test_messages_of_nodes_are_kept_from_a_report(
    monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """`polopt plan` prints a report, and Ray would print between its lines."""
    given: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        given.append(options)
        if runs and "num_cpus" in options:  # as Ray does if a cluster is already running
            raise ValueError

    monkeypatch.setattr(ray_session.ray, "init", init)
    for said in (False, True):
        ray_session._connect(0.2, None, said)
        assert given[-1]["log_to_driver"] is said
        assert ("num_cpus" in given[-1]) is not runs
