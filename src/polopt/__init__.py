"""Distributed reinforcement learning with interchangeable policy optimizers on Ray.

The names below are the public ones. Each is imported on first use, so that `import polopt` takes
milliseconds and loads neither Ray nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polopt.common.compression import GradientPacker as GradientPacker
    from polopt.common.compression import pack as pack
    from polopt.common.compression import unpack as unpack
    from polopt.common.compression import unpack_gradients as unpack_gradients
    from polopt.common.config import Config as Config
    from polopt.common.config import ConfigError as ConfigError
    from polopt.common.sample_batch import SampleBatch as SampleBatch
    from polopt.common.weights import Gradients as Gradients
    from polopt.common.weights import Weights as Weights
    from polopt.dashboards.tensorboard import TensorBoardLayout as TensorBoardLayout
    from polopt.metrics.optimizer_stats import StepResult as StepResult
    from polopt.optimizers.base import OptimizerConfig as OptimizerConfig
    from polopt.optimizers.base import PolicyOptimizer as PolicyOptimizer
    from polopt.optimizers.registry import register_optimizer as register_optimizer
    from polopt.optimizers.scheme import scheme_config as scheme_config
    from polopt.policies.learning.config import PolicyConfig as PolicyConfig
    from polopt.policies.policy import Policy as Policy
    from polopt.policies.registry import register_policy as register_policy
    from polopt.rollouts.collectors.collector import Collector as Collector
    from polopt.rollouts.collectors.collector_thread import CollectorEnded as CollectorEnded
    from polopt.rollouts.collectors.collector_thread import CollectorThread as CollectorThread
    from polopt.rollouts.collectors.gradient_worker import GradientWorker as GradientWorker
    from polopt.rollouts.collectors.gradient_worker import GradientWorkerSet as GradientWorkerSet
    from polopt.rollouts.workers.rollout_worker import RolloutWorker as RolloutWorker
    from polopt.rollouts.workers.worker_set import WorkerSet as WorkerSet
    from polopt.trainers.presets import A2C as A2C
    from polopt.trainers.presets import A3C as A3C
    from polopt.trainers.presets import DDPPO as DDPPO
    from polopt.trainers.presets import SyncPPO as SyncPPO
    from polopt.trainers.presets import register as register
    from polopt.trainers.trainer import PolicyOptimizerTrainer as PolicyOptimizerTrainer

__version__ = "0.2.0"

_MODULE_OF = {
    "A2C": "polopt.trainers.presets",
    "A3C": "polopt.trainers.presets",
    "Collector": "polopt.rollouts.collectors.collector",
    "CollectorEnded": "polopt.rollouts.collectors.collector_thread",
    "CollectorThread": "polopt.rollouts.collectors.collector_thread",
    "Config": "polopt.common.config",
    "ConfigError": "polopt.common.config",
    "DDPPO": "polopt.trainers.presets",
    "GradientPacker": "polopt.common.compression",
    "GradientWorker": "polopt.rollouts.collectors.gradient_worker",
    "GradientWorkerSet": "polopt.rollouts.collectors.gradient_worker",
    "Gradients": "polopt.common.weights",
    "OptimizerConfig": "polopt.optimizers.base",
    "Policy": "polopt.policies.policy",
    "PolicyConfig": "polopt.policies.learning.config",
    "PolicyOptimizer": "polopt.optimizers.base",
    "PolicyOptimizerTrainer": "polopt.trainers.trainer",
    "RolloutWorker": "polopt.rollouts.workers.rollout_worker",
    "SampleBatch": "polopt.common.sample_batch",
    "StepResult": "polopt.metrics.optimizer_stats",
    "SyncPPO": "polopt.trainers.presets",
    "TensorBoardLayout": "polopt.dashboards.tensorboard",
    "Weights": "polopt.common.weights",
    "WorkerSet": "polopt.rollouts.workers.worker_set",
    "pack": "polopt.common.compression",
    "register": "polopt.trainers.presets",
    "register_optimizer": "polopt.optimizers.registry",
    "register_policy": "polopt.policies.registry",
    "scheme_config": "polopt.optimizers.scheme",
    "unpack": "polopt.common.compression",
    "unpack_gradients": "polopt.common.compression",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> object:
    """Imports a public name on first use and keeps it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
