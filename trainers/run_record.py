"""`RunRecord`: the file with the record of a run, beside its results (`record_arrivals: true`)."""

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
from polopt.rollouts.workers.arrival_log import ArrivalLog, Rerun
from polopt.rollouts.workers.recorded_transport import RecordedTransport
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.saved_config import encode_config

logger = logging.getLogger("polopt")

#: Files of a trial: one for each process that has trained it.
PATTERN = f"arrivals_{'[0-9]' * 6}.jsonl.gz"
#: Packages whose version may change what a run computes.
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
    """What a trainer tells the record of its run, or asks of it in a rerun. Without
    `record_arrivals`, the methods record nothing.

    Args:
        workers: of training.
        config: the flat config, with the seed that was drawn.
        trainer: name of the trainer's class.
        storage: Tune's `StorageContext` of the trial. None without Tune.
        logdir: of the trainable.

    Attributes:
        log: the record. None: the run is not recorded.
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
        """Notes what the trainer does next, or compares it. See `EVENT_KINDS`."""
        if self.log is not None:
            self.log.mark(kind, *values)

    def decide(self, decision: Callable[[], bool], repeat: Callable[[], object]) -> bool:
        """A decision that depends on time. See `ArrivalLog.decide`."""
        return decision() if self.log is None else self.log.decide(decision, repeat)

    def result(self, iteration: int, policy: Policy) -> None:
        """Notes the hash of the weights after an iteration, or compares it."""
        if self.log is not None:
            self.log.result(iteration, policy.version, digest_of(policy))


def digest_of(policy: Policy) -> str:
    """SHA-256 of the weights, and of the moments if the policy normalises, as hexadecimal."""
    weights = policy.get_weights()
    digest = hashlib.sha256(weights.flat.tobytes())
    if (moments := weights.moments) is not None:
        digest.update(f"{moments.rows}".encode())
        digest.update(moments.mean.tobytes() + moments.m2.tobytes())
    return digest.hexdigest()


def header_of(config: Mapping[str, Any], trainer: str) -> dict[str, Any]:
    """The first line of the file: what the run was made from, and where."""
    encoded, unsaved = encode_config(config)
    for key in list(encoded):
        try:
            json.dumps(encoded[key])
        except TypeError:  # a tensor
            unsaved[key] = type(config[key]).__name__
            del encoded[key]
    return {"trainer": trainer, "config": encoded, "unsaved": unsaved, "made_by": this_machine()}


def this_machine() -> dict[str, str]:
    """What decides how this process rounds: versions of packages, and the processor."""
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
    """The directory of the trial's results. For a cloud, the local one that Tune copies."""
    if storage is None or not isinstance(storage.storage_filesystem, fs.LocalFileSystem):
        return Path(logdir)
    return Path(storage.trial_fs_path)


def _next_path(folder: Path) -> Path:
    numbers = (int(path.name[9:15]) for path in folder.glob(PATTERN))
    return folder / f"arrivals_{max(numbers, default=-1) + 1:06}.jsonl.gz"
