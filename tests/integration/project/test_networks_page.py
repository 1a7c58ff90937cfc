"""The networks that docs/networks.md prints train unchanged, also under a registered name and on
several ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from source_tree import ROOT

PAGE = ROOT / "docs" / "networks.md"
MODULE, SCRIPT, EXTRACTOR, PORT = re.findall(
    r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
)
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
    (folder / "ported_extractor.py").write_text(EXTRACTOR)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_printed_network_with_a_mask_trains(tmp_path: Path) -> None:
    assert float(run(tmp_path, SCRIPT + CHECK).split()[-1]) < 20.0


#: The network for a box has the initial weights of Stable-Baselines3: orthogonal, with these gains.
INITIAL = """
import math
import gymnasium
import torch

env = gymnasium.make("Pendulum-v1")
network = PortedPolicy(env.observation_space, env.action_space, 2)
gains = {"action_net": 0.01, "value_net": 1.0}
for name, layer in network.named_modules():
    if isinstance(layer, torch.nn.Linear):
        gain, rows = gains.get(name, math.sqrt(2.0)), layer.weight.detach()
        rows = rows if len(rows) <= rows.shape[1] else rows.T
        expected = gain**2 * torch.eye(len(rows))
        torch.testing.assert_close(rows @ rows.T, expected, atol=1e-5, rtol=1e-5)
        assert not layer.bias.any()
params, values = network(torch.ones(5, 3))
assert params.shape == (5, 2) and values.shape == (5,)
assert not params[:, 1].any()  # log standard deviations
"""


def test_ported_extractor_of_stable_baselines3_learns(tmp_path: Path) -> None:
    printed = [float(text) for text in run(tmp_path, PORT + INITIAL).split()]
    assert len(printed) == 8
    assert printed[-1] > 80.0


def test_registered_network_reaches_trials_and_ranks(tmp_path: Path) -> None:
    assert "trained" in run(tmp_path, BY_NAME.replace("RESULTS", str(tmp_path)))
