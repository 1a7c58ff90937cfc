"""Tests that three of the scripts for RLlib in `rllib_scripts` train with polopt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from plugin_page import code_blocks
from rllib_scripts import SCRIPTS

#: Scripts with and without workers, with Tune, with old names and with current names.
NAMES = ("2.7 callbacks", "2.7 ddppo", "2.60 callbacks")
#: Checks the results of the first script, in which Tune trains.
_REPORT = """
(trial,) = results.trials
last = trial.last_result
assert last["callback_ok"] is True
assert last["episode_reward_mean"] == last["env_runners"]["episode_return_mean"] > 8.0
assert last["env_runners"]["custom_metrics"]["twice_mean"] > 16.0
assert last["evaluation"]["env_runners"]["num_episodes"] == 3
assert last["evaluation"]["episode_reward_mean"] > 8.0
assert trial.trainable_name == "PPO"
"""

#: Trains by names. A stop key that no result has ends the experiment. The second experiment trains
#: with a plugin of the docs, by a name that no other library uses. Tune makes directories from this
#: name, although it contains a slash.
_BY_NAME = """
import polopt, polopt.rllib
from polopt.rllib.algorithms.pg import PG
polopt.rllib.register()
polopt.register()
options = {"env": "CartPole-v1", "num_workers": 0, "train_batch_size": 40}
(trial,) = tune.run("PG", config=options, stop={"timesteps_total": 80}, verbose=0).trials
assert trial.get_trainable_cls() is PG
assert trial.last_result["training_iteration"] == 2
options = {"env": "CartPole-v1", "num_workers": 0, "optimizer": LocalSGD}
stop = {"episodes_totl": 1, "training_iteration": 1}
try:
    tune.run("polopt/PolicyOptimizerTrainer", config=options, stop=stop, verbose=0)
except tune.error.TuneError as error:
    print("STOP KEY", error)
"""


def test_scripts_train(tmp_path: Path) -> None:
    scripts = [SCRIPTS[name] for name in NAMES]
    scripts[0] += _REPORT
    program = "import ray\nray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)\n"
    for number, script in enumerate(scripts):
        program += f"print('SCRIPT {number}', flush=True)\n{script}\n"
    (plugin,) = (block for block in code_blocks() if 'register_optimizer("local_sgd"' in block)
    program += f"print('SCRIPT end')\n{plugin}\n{_BY_NAME}"
    (tmp_path / "scripts.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "scripts.py"],
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},  # the directory of results
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    _, _, ddppo, callbacks = done.stdout.partition("SCRIPT end")[0].split("SCRIPT ")
    lines = ddppo.splitlines()[1:]
    (first_return, first_steps), (_, steps) = lines[0].split(), lines[1].split()
    assert float(first_return) > 8.0
    assert int(steps) > int(first_steps) > 0  # an iteration is one training batch
    assert lines[2].endswith("checkpoint_000000")
    assert float(callbacks.split()[1]) > 8.0
    assert "log_level='ERROR' is ignored" in done.stderr
    assert "'episodes_totl'" in done.stdout.partition("STOP KEY")[2]
