"""Without an add-on, everything else still trains: each add-on is deleted from a copy of polopt."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import PACKAGE_FOLDERS, ROOT

from polopt.trainers.presets import PRESETS

ADD_ONS = ("collectors", "command_line", "dashboards", "recording", "rllib")

#: Trains SyncPPO through Tune, with a checkpoint, and then the given presets. Without collectors,
#: an option that only they support is an error.
PROGRAM = """
import sys
import polopt
from polopt.trainers.presets import PRESETS
from ray import tune

assert polopt.__file__.startswith(sys.argv[1]), polopt.__file__
short = {"num_workers": 0, "rollout_fragment_length": 8, "min_sample_timesteps_per_iteration": 16}
learns = {"env": "CartPole-v1", **short}
run = tune.RunConfig(
    storage_path=sys.argv[2],
    stop={"training_iteration": 1},
    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
)
if "collectors" in sys.argv[3]:
    try:
        polopt.A3C(env="CartPole-v1", num_workers=1, num_workers_below=1)
    except ValueError as error:
        assert "no add-on starts workers below" in str(error), error
    else:
        raise AssertionError("num_workers_below was ignored")
best = tune.Tuner(polopt.SyncPPO, param_space=learns, run_config=run).fit()[0]
assert best.error is None and polopt.load(best.checkpoint.path) is not None
for name in sys.argv[4:]:
    env = "Pendulum-v1" if name in ("SAC", "TD3") else "CartPole-v1"
    needed = {"num_workers": 1} if name in ("A3C", "DDPPO", "IMPALA", "APPO", "ApexDQN") else {}
    shards = {"num_replay_shards": 1} if name == "ApexDQN" else {}
    trainer = PRESETS[name]({**learns, "env": env, **needed, **shards})
    assert trainer.train()["num_env_steps_sampled_lifetime"] > 0, name
    trainer.stop()
print("trained")
"""


def copy_without(deleted: tuple[str, ...], to: Path) -> Path:
    """Copies the package, without some of its folders, and returns the folder to import from."""
    package = to / "polopt"
    shutil.copytree(ROOT / "src" / "polopt", package, symlinks=True)
    for folder in PACKAGE_FOLDERS:
        (package / folder).unlink(missing_ok=True)
        if folder not in deleted:
            shutil.copytree(ROOT / folder, package / folder)
    return to


def test_each_add_on_is_known() -> None:
    with_file = {path.parent.name for path in ROOT.glob("*/add_on.py")}
    assert with_file <= {*ADD_ONS} <= {*PACKAGE_FOLDERS}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "deleted", [*((name,) for name in ADD_ONS), ADD_ONS], ids=[*ADD_ONS, "all of them"]
)
def test_everything_else_trains(deleted: tuple[str, ...], tmp_path: Path) -> None:
    """With all add-ons deleted, trains every preset. With one deleted, only SyncPPO."""
    presets = [*PRESETS.keys() - {"PolicyOptimizerTrainer"}] if deleted == ADD_ONS else []
    source = copy_without(deleted, tmp_path / "copy")
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PROGRAM,
            str(source),
            str(tmp_path / "results"),
            ",".join(deleted),
            *presets,
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("trained\n")
