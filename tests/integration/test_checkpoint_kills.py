"""Tests that a SIGKILL while a checkpoint is written leaves an older checkpoint complete."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from polopt.trainers.checkpoints import CheckpointError, read_checkpoint
from polopt.trainers.restoring import read_or_fall_back

_WRITER = """
import sys, torch
from polopt.trainers.checkpoints import write_checkpoint
print("ready", flush=True)
for number in range(1, 10**6):
    tensors = {str(i): torch.full((20_000,), float(number)) for i in range(5)}
    write_checkpoint(sys.argv[1] + f"/{number % 2}", {"number": number, **tensors})
"""


def test_sigkill_leaves_the_other_checkpoint_complete(tmp_path: Path) -> None:
    """Like Tune, the process writes to two directories in turn. After a kill at any time, one
    checkpoint is complete. The other checkpoint is complete or refused."""
    outcomes, refusals = [], []
    for wait_ms in (3, 11, 17, 29):
        root = tmp_path / str(wait_ms)
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(root)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        deadline_s = time.monotonic() + 120
        while not (root / "0" / "manifest.json").exists() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        time.sleep(wait_ms / 1000)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        numbers = []
        for name in ("0", "1"):
            try:
                state = read_checkpoint(root / name)
            except CheckpointError as error:
                refusals.append(str(error))
                continue
            numbers.append(state["number"])
            assert all((state[str(i)] == state["number"]).all() for i in range(5))
        outcomes.append(len(numbers))
    assert min(outcomes) >= 1
    assert all("complete" in refusal and "damaged" not in refusal for refusal in refusals)


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


def test_fallback_after_8_kills(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, kills=8)
