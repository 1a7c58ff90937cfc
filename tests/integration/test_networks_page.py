"""The network that docs/networks.md prints trains unchanged, also under a registered name and on
several ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "networks.md"
MODULE, SCRIPT = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
CHECK = """
length = result["env_runners"]["episode_len_mean"]
assert length < 20.0, length
assert result["fault_tolerance"]["num_env_faults"] == 0, result
for _ in range(50):
    assert observation["action_mask"][action]
    action, _ = policy.predict(observation, deterministic=False)
"""
#: Registers a variant of the network with batch normalisation, selects it by name in a trial of
#: Tune, and trains on two ranks. The driver compares the checksums of the ranks after every ten of
#: the twenty rounds.
BY_NAME = """
from grid import Grid, GridNetwork
from torch import nn
import polopt
import ray
from ray import tune
from ray.tune import RunConfig


class Normalised(GridNetwork):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.convolution = nn.Sequential(self.convolution, nn.BatchNorm2d(8))


ray.init(num_cpus=3)
polopt.register_network("normalised grid", Normalised)
config = {
    "env": Grid,
    "num_workers": 2,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 20,
    "min_sample_timesteps_per_iteration": 1,
    "model": {"custom": "normalised grid"},
}
(result,) = tune.Tuner(
    polopt.DDPPO,
    param_space=config,
    run_config=RunConfig(stop={"training_iteration": 20}, verbose=0, storage_path="RESULTS"),
).fit()
optimizer = result.metrics["optimizer"]
assert optimizer["num_checksums"] == 2, optimizer
assert optimizer["num_resynchronized"] == 0, optimizer
print("trained", optimizer["num_updates"])
"""


def run(folder: Path, script: str) -> str:
    (folder / "grid.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_printed_network_with_a_mask_trains(tmp_path: Path) -> None:
    assert float(run(tmp_path, SCRIPT + CHECK).split()[-1]) < 20.0


def test_registered_network_reaches_trials_and_ranks(tmp_path: Path) -> None:
    assert "trained" in run(tmp_path, BY_NAME.replace("RESULTS", str(tmp_path)))
