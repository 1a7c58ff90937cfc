"""`RunRecord`: writes the record of a run next to its results (`record_arrivals: true`). The record
lists the events that depend on timing, and `polopt rerun` repeats the run from it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pyarrow import fs

from polopt.common.plain_data import encode
from polopt.policies.policy import Policy
from polopt.recording.arrival_log import PATTERN, ArrivalLog, Rerun

logger = logging.getLogger("polopt")

#: Packages whose version may change the numbers that a run computes.
_PACKAGES = (
    "polopt",
    "numpy",
    "torch",
    "ray",
    "gymnasium",
    "ale-py",
    "box2d",
    "box2d-py",
    "envpool",
    "gymnasium-robotics",
    "jax",
    "minigrid",
    "mujoco",
    "pettingzoo",
    "scipy",
)


class RunRecord:
    """The record of a run, or in a rerun the record that is repeated.

    Args:
        trainer: a `PolicyOptimizerTrainer` whose workers and optimizer were made.

    Attributes:
        log: the record.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.log: ArrivalLog | Rerun = trainer.workers.transport.log
        if isinstance(self.log, Rerun):
            return
        path = _next_path(_folder(trainer))
        # The header has the seed, even if the workers drew it.
        config = trainer.experiment.to_dict() | {"seed": trainer.workers.config.seed}
        try:
            self.log.open(path, header_of(config, type(trainer).__name__))
        except OSError as error:
            logger.warning("%s: the run is not recorded: %s", path, error)

    def result(self, iteration: int) -> None:
        """Records the hash of the weights after an iteration, or compares this hash with the
        record."""
        policy = self._trainer.get_policy()
        self.log.result(iteration, policy.version, digest_of(policy))


def digest_of(policy: Policy) -> str:
    """Returns the SHA-256 of the policy's weights as hexadecimal text. If the policy normalises
    observations or rewards, the hash also covers the running means and variances."""
    weights = policy.get_weights()
    digest = hashlib.sha256(weights.flat.tobytes())
    if (moments := weights.moments) is not None:
        digest.update(f"{moments.rows}".encode())
        digest.update(moments.mean.tobytes() + moments.m2.tobytes())
    return digest.hexdigest()


def header_of(config: Mapping[str, Any], trainer: str) -> dict[str, Any]:
    """Returns the content of the record's first line: the config of the run, and the software and
    processor with which the run was made."""
    encoded: dict[str, Any] = {}
    unsaved: dict[str, str] = {}
    for key, value in config.items():
        left_out: dict[str, str] = {}
        tree, tensors = encode({key: value}, left_out)
        if tensors:  # the file of a record holds only JSON
            unsaved[key] = type(value).__name__
        else:
            encoded |= tree
            unsaved |= left_out
    return {"trainer": trainer, "config": encoded, "unsaved": unsaved, "made_by": this_machine()}


def this_machine() -> dict[str, str]:
    """Returns the versions of packages and the processor, which may change how numbers are
    rounded."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    capability = torch.backends.cpu.get_cpu_capability()
    return {**found, "processor": f"{_processor()} ({capability})"}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _folder(trainer: Any) -> Path:
    """Returns the directory of the trial's results. If the results are in cloud storage, returns a
    local directory. Tune copies this directory there with `SyncConfig(sync_artifacts=True)`."""
    filesystem, folder = trainer.results_folder or (None, "")
    return Path(folder if isinstance(filesystem, fs.LocalFileSystem) else trainer.logdir)


def _next_path(folder: Path) -> Path:
    numbers = (int(path.name[9:15]) for path in folder.glob(PATTERN))
    return folder / f"arrivals_{max(numbers, default=-1) + 1:06}.jsonl.gz"
