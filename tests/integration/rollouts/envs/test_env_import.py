"""Worker processes can import the modules that the driver's process can import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from fakes import worker_config

from polopt.common.sample_batch import SampleBatch
from polopt.rollouts.workers.call_workers import foreach_worker
from polopt.rollouts.workers.gathering import sample
from polopt.rollouts.workers.worker_set import WorkerSet

#: A user's environment, which draws random numbers from the global generators.
GAME = """
import random
import gymnasium
import numpy as np

class Game(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.draw(), {}

    def step(self, action):
        return self.draw(), 1.0, False, random.random() < 0.1, {}

    def draw(self):
        return np.array([np.random.random(), random.random()], np.float32)

gymnasium.register("Game-v0", "mygame:Game")
"""


@pytest.fixture
def game_folder(ray_session: None, tmp_path: Path) -> Iterator[Path]:
    """Makes a folder with `mygame.py`. Ray has started before, so the folder is not on the import
    path of Ray's workers. After the test, the import path and the registry are restored."""
    (tmp_path / "mygame.py").write_text(GAME)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("mygame", None)
    gymnasium.registry.pop("Game-v0", None)


def first_fragments(env: str, seed: int = 0) -> list[SampleBatch]:
    """Returns one fragment of each of two remote workers."""
    workers = WorkerSet(worker_config("a2c", env, seed=seed))
    try:
        return list(foreach_worker(workers, sample, workers.local.get_weights()).values())
    finally:
        workers.stop()


@pytest.mark.parametrize("env", ["mygame:Game-v0", "mygame:Game"])
def test_env_of_the_current_directory_runs_in_workers(
    game_folder: Path, monkeypatch: pytest.MonkeyPatch, env: str
) -> None:
    monkeypatch.chdir(game_folder)
    sys.path.insert(0, "")  # the current directory, as with `python -c`
    batches = first_fragments(env)
    assert [batch.env_steps for batch in batches] == [10, 10]


def test_seed_covers_global_generators_of_workers(game_folder: Path) -> None:
    sys.path.append(str(game_folder))
    first, same, other = (first_fragments("mygame:Game-v0", seed) for seed in (0, 0, 1))
    for batch, again in zip(first, same, strict=True):
        np.testing.assert_array_equal(batch.all_obs, again.all_obs)
    observations = [batch.all_obs for batch in (*first, *other)]
    for i, one in enumerate(observations):
        for another in observations[i + 1 :]:
            assert not (one == another).any()
