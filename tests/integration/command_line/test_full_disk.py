"""Tests that a run with a full disk reports the directory. The disks are tmpfs in a mount
namespace."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def _can_mount() -> bool:
    try:
        mounted = subprocess.run(
            [*_NAMESPACE, "mount", "-t", "tmpfs", "disk", "/mnt"], capture_output=True, timeout=60
        )
    except FileNotFoundError:
        return False
    return mounted.returncode == 0


pytestmark = pytest.mark.skipif(not _can_mount(), reason="needs a user namespace that can mount")

#: The disk has space for a few checkpoints of 120 KB.
_RESULTS_FULL = """
mount -t tmpfs -o size=700k disk "$1"
cd "$1"
"""
#: The disk also contains Ray's files. The script fills the disk when `checkpoint_000001` is
#: complete.
_RAY_FULL = """
mount -t tmpfs -o size=300m disk "$1"
cd "$1"
mkdir ray tmp
export RAY_TMPDIR="$1/ray" TMPDIR="$1/tmp"
(
  for attempt in $(seq 1000); do
    sleep 0.1
    if ls results/*/A3C*/checkpoint_000001/manifest.json; then
      exec dd if=/dev/zero of=fill bs=64k
    fi
  done
) >/dev/null 2>&1 &
"""
#: The example stops at a return of 450, which a fast machine reaches before its disk is full.
#: The return of CartPole-v1 is 500 at most.
_TRAIN = """
exec "$2" -m polopt.command_line.cli train cartpole_a3c --results-dir results \\
  --checkpoint-every 1 num_workers=1 model.fcnet_hiddens=[64,64] min_time_s_per_iteration=0.3 \\
  min_sample_timesteps_per_iteration=1 stop.training_iteration=1000 \\
  stop.env_runners/episode_return_mean=1000
"""


@pytest.fixture
def mounted() -> Iterator[Path]:
    """Returns the directory where the disk is mounted. Its path is short, because paths of Ray's
    sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="disk") as folder:
        yield Path(folder)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("disk", [_RESULTS_FULL, _RAY_FULL], ids=["results", "ray"])
def test_full_disk_is_reported_with_its_directory(mounted: Path, disk: str) -> None:
    command = [*_NAMESPACE, "bash", "-ec", disk + _TRAIN, "bash", str(mounted), sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "No space left on device" in errors[0]
    assert f"{mounted}/" in errors[0]
    assert "Traceback" not in errors[0]
    assert "Expecting value" not in done.stdout
    assert any(line.startswith("checkpoint  ") for line in done.stdout.splitlines())


#: Each result takes about 20 KB, with TensorBoard's copy.
_SMALL = 'mount -t tmpfs -o size=300k disk "$1"\n'
_TRAINER = """
import json, sys
import polopt

options = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "rollout_fragment_length": 16,
    "train_batch_size": 64,
    "min_sample_timesteps_per_iteration": 64,
    **json.loads(sys.argv[2]),
}
trainer = polopt.SyncPPO(options, log_dir=sys.argv[1])
for iteration in range(1000):
    try:
        trainer.train()
    except OSError as error:
        print(f"{iteration} {error}")
        break
trainer.stop()
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "options",
    ["{}", '{"record_arrivals": true}', '{"trace": true, "trace_first_step": 2}'],
    ids=["results", "record", "trace"],
)
def test_train_ends_with_one_error_when_the_disk_of_log_dir_is_full(
    mounted: Path, options: str
) -> None:
    """TensorBoard's writer once waited for ever for the thread that could not write."""
    start = [*_NAMESPACE, "bash", "-ec", _SMALL + 'exec "$2" -c "$3" "$1" "$4"', "bash"]
    command = [*start, str(mounted), sys.executable, _TRAINER, options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    iteration, _, error = done.stdout.strip().splitlines()[-1].partition(" ")
    assert int(iteration) >= 1
    assert "No space left on device" in error
    assert str(mounted) in error
