"""`RunRecord`: writes the record of a run next to its results (`record_arrivals: true`). The record
lists the events that depend on timing, and `polopt rerun` repeats the run from it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pyarrow import fs

from polopt.policies.policy import Policy
from polopt.recording.arrival_log import ArrivalLog, Rerun
from polopt.recording.recorded_transport import RecordedTransport
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.saved_config import encode_config

logger = logging.getLogger("polopt")

#: Name pattern of the files of a record. Each process that trains a trial begins a file. With
#: `record_restarts`, it also begins a new file after each checkpoint.
PATTERN = f"arrivals_{'[0-9]' * 6}.jsonl.gz"
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
    """Gives the trainer access to the record of its run. In a recorded run, the methods add events
    to the record. In a rerun, the methods compare events with the record. In other runs, the
    methods do neither.

    Args:
        workers: the training workers.
        config: the flat config. It includes the seed, even if the workers drew the seed.
        trainer: name of the trainer's class.
        storage: Tune's `StorageContext` of the trial. `None` means that the trainer runs without
            Tune.
        logdir: `logdir` of the trainable.

    Attributes:
        log: the record. It is None if the run is neither recorded nor rerun.
    """

    def __init__(
        self,
        workers: WorkerSet,
        config: Mapping[str, Any],
        trainer: str,
        storage: Any,
        logdir: str,
    ) -> None:
        transport = workers.transport
        self.log: ArrivalLog | Rerun | None = None
        if isinstance(transport, RecordedTransport):
            self.log = transport.log
        if not isinstance(self.log, ArrivalLog):
            return
        path = _next_path(_folder(storage, logdir))
        try:
            self.log.open(path, header_of(config, trainer))
        except OSError as error:
            logger.warning("%s: the run is not recorded: %s", path, error)

    def mark(self, kind: str, *values: Any) -> None:
        """Records the next action of the trainer, or compares this action with the record. The
        kinds of actions are in `polopt.recording.arrival_log.EVENT_KINDS`."""
        if self.log is not None:
            self.log.mark(kind, *values)

    def decide(self, decision: Callable[[], bool], repeat: Callable[[], object]) -> bool:
        """Makes and records a decision that depends on time, or repeats the recorded decision. See
        `ArrivalLog.decide`."""
        return decision() if self.log is None else self.log.decide(decision, repeat)

    def result(self, iteration: int, policy: Policy) -> None:
        """Records the hash of the weights after an iteration, or compares this hash with the
        record."""
        if self.log is not None:
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
    encoded, unsaved = encode_config(config)
    for key in list(encoded):
        try:
            json.dumps(encoded[key])
        except TypeError:  # the value contains a tensor
            unsaved[key] = type(config[key]).__name__
            del encoded[key]
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


def _folder(storage: Any, logdir: str) -> Path:
    """Returns the directory of the trial's results. If the results are in cloud storage, returns a
    local directory. Tune copies this directory there with `SyncConfig(sync_artifacts=True)`."""
    if storage is None or not isinstance(storage.storage_filesystem, fs.LocalFileSystem):
        return Path(logdir)
    return Path(storage.trial_fs_path)


def _next_path(folder: Path) -> Path:
    numbers = (int(path.name[9:15]) for path in folder.glob(PATTERN))
    return folder / f"arrivals_{max(numbers, default=-1) + 1:06}.jsonl.gz"
