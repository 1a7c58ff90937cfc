"""Without an add-on, everything else still trains, and its tests pass: each add-on is deleted from
a copy of polopt, with its tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import PACKAGE_FOLDERS, ROOT

from polopt.common.add_ons import add_ons
from polopt.trainers.presets import PRESETS

ADD_ONS = (
    *("collectors", "command_line", "comparison", "dashboards", "recording", "rllib"),
    "simulation",
    *("policies/fast_cpu", "policies/fast_gpu"),
)

#: Trains SyncPPO with a checkpoint, and then the given presets. With presets, SyncPPO trains
#: through Tune, whose start takes seconds. Without collectors, an option that only they support is
#: an error. So are names of RLlib without the add-on `rllib`.
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
if "rllib" in sys.argv[3]:
    try:
        polopt.SyncPPO(env="CartPole-v1", num_env_runners=0)
    except ValueError as error:
        assert "unknown key 'num_env_runners'" in str(error), error
    else:
        raise AssertionError("num_env_runners was accepted")
if sys.argv[4:]:
    best = tune.Tuner(polopt.SyncPPO, param_space=learns, run_config=run).fit()[0]
    assert best.error is None
    result, saved = best.metrics, best.checkpoint.path
else:
    trainer = polopt.SyncPPO(learns, log_dir=sys.argv[2])
    result, saved = trainer.train(), sys.argv[2] + "/saved"
    trainer.save(saved)
    trainer.stop()
assert polopt.load(saved) is not None
expected = "torch" if "fast_cpu" in sys.argv[3] else "NumPy"
assert result["optimizer"]["learns_with"] == expected, result["optimizer"]
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
    """Copies the package and the tests, without some folders of the package and the tests of these
    folders. Returns the folder to import from."""
    package = to / "polopt"
    shutil.copytree(ROOT / "src" / "polopt", package, symlinks=True)
    for folder in PACKAGE_FOLDERS:
        (package / folder).unlink(missing_ok=True)
        shutil.copytree(ROOT / folder, package / folder)
    for folder in ("docs", "tests"):
        shutil.copytree(ROOT / folder, to / folder)
    for name in ("constraints.txt", "pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, to)
    for folder in deleted:
        shutil.rmtree(package / folder)
        for kind in ("unit", "integration"):
            shutil.rmtree(to / "tests" / kind / folder, ignore_errors=True)
    return to


def run(source: Path, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs Python with the arguments, in the folder `source` and with its package."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(source)},
        cwd=source,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_each_add_on_is_known() -> None:
    found = {type(add_on).__module__ for add_on in add_ons()}
    named = {f"polopt.{name.replace('/', '.')}.add_on" for name in ADD_ONS}
    assert found == named - {"polopt.command_line.add_on"}, "the command line attaches nothing"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "deleted", [*((name,) for name in ADD_ONS), ADD_ONS], ids=[*ADD_ONS, "all of them"]
)
def test_everything_else_trains(deleted: tuple[str, ...], tmp_path: Path) -> None:
    """With all add-ons deleted, trains every preset. With one deleted, trains only SyncPPO."""
    presets = [*PRESETS.keys() - {"PolicyOptimizerTrainer"}] if deleted == ADD_ONS else []
    source = copy_without(deleted, tmp_path / "copy")
    results = str(tmp_path / "results")
    done = run(
        source, "-c", PROGRAM, str(source), results, ",".join(deleted), *presets, timeout=380
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("trained\n")


#: Keeps the first case of each test. More cases of the same test need the same modules.
FIRST_CASES = """

def pytest_collection_modifyitems(items):
    first = {}
    for item in items:
        first.setdefault(item.nodeid.partition("[")[0], item)
    items[:] = first.values()
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cases", ["first", pytest.param("all", marks=pytest.mark.slow)])
def test_unit_tests_of_the_core_pass_without_add_ons(cases: str, tmp_path: Path) -> None:
    """Leaves out the tests in `project`, which check the whole repository. Leaves out the tests in
    `optimizers`, too: they simulate many processes and take a third of the time, and
    `test_everything_else_trains` trains with each optimizer."""
    source = copy_without(ADD_ONS, tmp_path / "copy")
    for folder in ("project", "optimizers"):
        shutil.rmtree(source / "tests" / "unit" / folder)
    if cases == "first":
        with (source / "tests" / "conftest.py").open("a") as file:
            file.write(FIRST_CASES)
    # One process, because `make test-integration` has as many processes as the machine has cores.
    done = run(source, "-m", "pytest", "tests/unit", "-q", "-n", "0", "-x", timeout=1180)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout.splitlines()[-1]
