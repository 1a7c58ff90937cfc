"""Tests that a SIGKILL while a checkpoint is written leaves an older checkpoint complete."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from checkpoint_helpers import kill_while_saving

from polopt.trainers.checkpoints import CheckpointError, read_checkpoint

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
    for wait_ms in (3, 17):
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


def test_fallback_after_8_kills(tmp_path: Path) -> None:
    kill_while_saving(tmp_path, kills=8)
