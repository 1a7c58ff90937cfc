"""A small trainer whose checkpoints tests change, and a process that is killed while it saves."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save

from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.checkpoints import FORMAT, TENSORS, CheckpointError
from polopt.trainers.find_checkpoint import read_or_fall_back
from polopt.trainers.trainer import PolicyOptimizerTrainer

SMALL = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 32,
    "num_sgd_iter": 1,
    "model": {"fcnet_hiddens": [8]},
    "seed": 5,
}


def trainer(**changes: Any) -> PolicyOptimizerTrainer:
    return PolicyOptimizerTrainer({**SMALL, **changes})


def resign(directory: Path) -> None:
    """Writes a manifest that agrees with the changed files."""
    sums = {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in (TENSORS, "state.json")
    }
    (directory / "manifest.json").write_text(json.dumps({"format": FORMAT, "sha256": sums}))


def rewrite(directory: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """Changes the files of a checkpoint, and writes a manifest with the new SHA-256 sums."""
    tensors = load_file(directory / TENSORS)
    tree = json.loads((directory / "state.json").read_text())
    change(tensors, tree)
    (directory / TENSORS).write_bytes(save(tensors))
    (directory / "state.json").write_text(json.dumps(tree))
    resign(directory)


#: The name of the parameters in the file of tensors, and their field in messages.
PARAMS, FIELD = "optimizer.policy.params", "optimizer/policy/params"


def refusal(checkpoint: Path) -> str:
    """Returns the message with which a checkpoint is refused. It is one short line."""
    with pytest.raises(CheckpointError) as caught:
        read_trainer_state(checkpoint)
    message = str(caught.value)
    assert str(checkpoint) in message
    assert message.isprintable()
    assert len(message) < 500 + len(str(checkpoint))
    return message


# A program that forks a process for each line that it reads, so that it imports torch only once.
# It prints the id of the process.
_WRITERS = """
import os, shutil, sys, torch
from pathlib import Path
from polopt.trainers.checkpoints import write_checkpoint

def state_of(number):
    params = torch.full((50,), float(number))
    return {"config": {}, "optimizer": {"policy": {"params": params}, "number": number}}

for line in sys.stdin:
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)
        continue
    root = Path(line.strip())
    for number in range(10**6):
        write_checkpoint(root / f"checkpoint_{number:06d}", state_of(number))
        if number > 2:
            shutil.rmtree(root / f"checkpoint_{number - 3:06d}")
"""


def kill_while_saving(tmp_path: Path, kills: int) -> int:
    """Checks the checkpoints after each kill. Returns the number of kills that left an incomplete
    checkpoint."""
    rng = random.Random(0)
    cut_off = 0
    with subprocess.Popen(
        [sys.executable, "-c", _WRITERS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writers:
        assert writers.stdin is not None
        assert writers.stdout is not None
        for kill in range(kills):
            root = tmp_path / str(kill)
            print(root, file=writers.stdin, flush=True)
            pid = int(writers.stdout.readline())
            deadline_s = time.monotonic() + 120.0
            while not (root / "checkpoint_000001").is_dir():
                assert time.monotonic() < deadline_s
                time.sleep(0.001)
            time.sleep(0.03 * rng.random())
            os.kill(pid, signal.SIGKILL)
            assert writers.stdout.readline() == "gone\n"
            newest = max(root.iterdir())
            found, state = read_or_fall_back(newest)
            number = int(newest.name[-6:])
            assert state["optimizer"]["number"] == int(found.name[-6:]) in (number, number - 1)
            assert (state["optimizer"]["policy"]["params"] == int(found.name[-6:])).all()
            cut_off += found != newest
            shutil.rmtree(root)
        writers.stdin.close()
    return cut_off
