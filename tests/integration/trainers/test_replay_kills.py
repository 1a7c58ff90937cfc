"""A run with a saved replay buffer that is killed and restored equals an uninterrupted run, bit for
bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

#: A program that reads commands from its standard input, one per line. `train` trains for one
#: iteration. `save PATH` saves a checkpoint, and `load PATH` restores one. After each command, the
#: program writes one line with its state.
_RUN = """
import json, sys
import numpy as np
from gymnasium import spaces
import gymnasium, hashlib, polopt

class Drift(gymnasium.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.ACTIONS

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.normal(size=3)
        return self.position.astype(np.float32), {}

    def step(self, action):
        self.position = self.position + 0.1 * np.sum(action) + self.np_random.normal(size=3)
        fate = self.np_random.random()
        obs = self.position.astype(np.float32)
        return obs, float(self.position[0]), bool(fate < 0.05), bool(fate > 0.95), {}

    def get_checkpoint_state(self):
        return {"rng": self.np_random.bit_generator.state, "position": self.position.tolist()}

    def set_checkpoint_state(self, state):
        self.np_random.bit_generator.state = state["rng"]
        self.position = np.array(state["position"])

trainer = polopt.PRESET(
    env=lambda config: Drift(), num_workers=0, num_envs_per_worker=2, rollout_fragment_length=4,
    min_sample_timesteps_per_iteration=100, buffer_size=300, learning_starts=50,
    train_batch_size=16, training_intensity=1.7, prioritized_replay=True, save_replay_buffer=True,
    random_timesteps=60, normalize_observations=True, n_step=3, seed=3,
    model={"fcnet_hiddens": [8]},
)
for line in sys.stdin:
    name, _, path = line.strip().partition(" ")
    if name == "save":
        trainer.save(path)
    elif name == "load":
        trainer.restore(path)
    else:
        trainer.train()
    optimizer = trainer.optimizer
    flat = optimizer.policy.get_weights().flat.tobytes()
    print(json.dumps({
        "weights": hashlib.sha256(flat).hexdigest(), "version": optimizer.policy.version,
        "steps": optimizer.metrics.num_env_steps_sampled,
        "limiter": optimizer.limiter.get_state(), "buffer": optimizer.buffer.get_state(),
        "learned": optimizer.metrics.num_env_steps_trained,
    }), flush=True)
"""


class Run:
    """A trainer in a separate process."""

    def __init__(self, preset: str) -> None:
        actions = "Discrete(3)" if preset == "DQN" else "Box(-1.0, 2.0, (2,), np.float32)"
        code = _RUN.replace("PRESET", preset).replace("ACTIONS", actions)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, line: str) -> Any:
        """Sends a command to the process. Returns the state of the process after the command."""
        self.send(line)
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        assert answer, "the process has ended"
        return json.loads(answer)

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=60)


@pytest.mark.parametrize("preset", ["DQN", "SAC", pytest.param("TD3", marks=pytest.mark.slow)])
def test_killed_run_continues_bit_for_bit(preset: str, tmp_path: Path) -> None:
    run = Run(preset)
    for _ in range(4):  # the ring of 300 rows wraps
        run.say("train")
    saved = run.say(f"save {tmp_path / 'checkpoint_000000'}")
    expected = [run.say("train") for _ in range(3)]
    run.send("train")
    time.sleep(0.05)
    run.kill()  # during an iteration

    restored = Run(preset)
    restored.say("train")  # the state before `load` must not matter
    state = restored.say(f"load {tmp_path / 'checkpoint_000000'}")
    assert state == saved
    assert saved["learned"] > 200
    assert [restored.say("train") for _ in range(3)] == expected
    # A second checkpoint links the files of rows that have not changed, and is complete.
    again = restored.say(f"save {tmp_path / 'checkpoint_000001'}")
    restored.kill()
    third = Run(preset)
    assert third.say(f"load {tmp_path / 'checkpoint_000001'}") == again
    third.kill()


def test_damaged_buffer_falls_back_to_the_checkpoint_before(tmp_path: Path) -> None:
    run = Run("DQN")
    run.say("train")
    first = run.say(f"save {tmp_path / 'checkpoint_000000'}")
    run.say("train")
    run.say(f"save {tmp_path / 'checkpoint_000001'}")
    rows = next((tmp_path / "checkpoint_000001" / "replay").glob("rows-*"))
    data = bytearray(rows.read_bytes())
    data[-1] ^= 1
    rows.write_bytes(data)
    assert run.say(f"load {tmp_path / 'checkpoint_000001'}") == first
    run.kill()
