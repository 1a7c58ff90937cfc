"""Distributed reinforcement learning with interchangeable policy optimizers on Ray.

The names below are the public ones. Each is imported on first use, so that `import polopt` takes
milliseconds and loads neither Ray nor torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if os.name == "nt":  # not sys.platform, which would hide all names from type checkers on Windows
    raise ImportError(
        "polopt needs Unix sockets and fork, which Windows does not have. Use it in WSL 2 or in a "
        "Linux container"
    )

if TYPE_CHECKING:
    from polopt.collectors.collector import Collector as Collector
    from polopt.collectors.collector_thread import CollectorEnded as CollectorEnded
    from polopt.collectors.collector_thread import CollectorThread as CollectorThread
    from polopt.collectors.gradient_worker import GradientWorker as GradientWorker
    from polopt.collectors.gradient_worker import GradientWorkerSet as GradientWorkerSet
    from polopt.collectors.scheme import scheme_config as scheme_config
    from polopt.collectors.tensordict import to_tensordict as to_tensordict
    from polopt.command_line.evaluate_function import evaluate as evaluate
    from polopt.command_line.train_function import TrainingResult as TrainingResult
    from polopt.common.add_ons import AddOn as AddOn
    from polopt.common.add_ons import RunListener as RunListener
    from polopt.common.add_ons import register_add_on as register_add_on
    from polopt.common.compression import GradientPacker as GradientPacker
    from polopt.common.compression import PackedGradients as PackedGradients
    from polopt.common.compression import pack as pack
    from polopt.common.compression import unpack as unpack
    from polopt.common.compression import unpack_gradients as unpack_gradients
    from polopt.common.config import Config as Config
    from polopt.common.config import ConfigError as ConfigError
    from polopt.common.episodes import Episode as Episode
    from polopt.common.sample_batch import SampleBatch as SampleBatch
    from polopt.common.transitions import Sequences as Sequences
    from polopt.common.transitions import Transitions as Transitions
    from polopt.common.weights import Gradients as Gradients
    from polopt.common.weights import Weights as Weights
    from polopt.comparison.compare_function import ComparisonResult as ComparisonResult
    from polopt.comparison.compare_function import compare as compare
    from polopt.comparison.decisions import DecisionRules as DecisionRules
    from polopt.comparison.decisions import decide as decide
    from polopt.dashboards.data.tab import Plot as Plot
    from polopt.dashboards.data.tab import Tab as Tab
    from polopt.dashboards.tensorboard import TensorBoardLayout as TensorBoardLayout
    from polopt.metrics.number import Number as Number
    from polopt.metrics.optimizer_stats import StepResult as StepResult
    from polopt.optimizers.optimizer_config import OptimizerConfig as OptimizerConfig
    from polopt.optimizers.optimizer_registry import register_optimizer as register_optimizer
    from polopt.optimizers.policy_optimizer import PolicyOptimizer as PolicyOptimizer
    from polopt.policies.actor_critic import ActorCriticConfig as ActorCriticConfig
    from polopt.policies.actor_critic import ActorCriticPolicy as ActorCriticPolicy
    from polopt.policies.learning.policy_config import PolicyConfig as PolicyConfig
    from polopt.policies.networks.model_config import register_network as register_network
    from polopt.policies.policy import Policy as Policy
    from polopt.policies.policy_registry import register_policy as register_policy
    from polopt.recording.arrival_log import RerunDifference as RerunDifference
    from polopt.recording.rerun import rerun as rerun
    from polopt.replay.rate_limiter import RateLimiter as RateLimiter
    from polopt.replay.replay_buffer import ReplayBuffer as ReplayBuffer
    from polopt.rllib.sb3_defaults import sb3_defaults as sb3_defaults
    from polopt.rollouts.rollout_config import RolloutConfig as RolloutConfig
    from polopt.rollouts.workers.call import Reply as Reply
    from polopt.rollouts.workers.call_workers import call_each as call_each
    from polopt.rollouts.workers.call_workers import foreach_worker as foreach_worker
    from polopt.rollouts.workers.call_workers import set_up_each as set_up_each
    from polopt.rollouts.workers.callbacks import CallbackError as CallbackError
    from polopt.rollouts.workers.callbacks import Callbacks as Callbacks
    from polopt.rollouts.workers.calls import Calls as Calls
    from polopt.rollouts.workers.calls import CallsLostError as CallsLostError
    from polopt.rollouts.workers.early_stop import Stragglers as Stragglers
    from polopt.rollouts.workers.errors import FunctionError as FunctionError
    from polopt.rollouts.workers.errors import NonFiniteError as NonFiniteError
    from polopt.rollouts.workers.errors import WorkersFailedError as WorkersFailedError
    from polopt.rollouts.workers.rollout_worker import RolloutWorker as RolloutWorker
    from polopt.rollouts.workers.snapshots import WEIGHTS as WEIGHTS
    from polopt.rollouts.workers.worker_handle import WorkerHandle as WorkerHandle
    from polopt.rollouts.workers.worker_set import WorkerSet as WorkerSet
    from polopt.simulation.predict_function import Forecast as Forecast
    from polopt.simulation.predict_function import predict as predict
    from polopt.simulation.predictions import Prediction as Prediction
    from polopt.trainers.play_episodes import EvaluationResult as EvaluationResult
    from polopt.trainers.presets import register as register
    from polopt.trainers.saved_policy import load as load
    from polopt.trainers.typed_presets import A2C as A2C
    from polopt.trainers.typed_presets import A3C as A3C
    from polopt.trainers.typed_presets import APPO as APPO
    from polopt.trainers.typed_presets import DDPPO as DDPPO
    from polopt.trainers.typed_presets import DQN as DQN
    from polopt.trainers.typed_presets import IMPALA as IMPALA
    from polopt.trainers.typed_presets import PQN as PQN
    from polopt.trainers.typed_presets import SAC as SAC
    from polopt.trainers.typed_presets import TD3 as TD3
    from polopt.trainers.typed_presets import ApexDQN as ApexDQN
    from polopt.trainers.typed_presets import PolicyOptimizerTrainer as PolicyOptimizerTrainer
    from polopt.trainers.typed_presets import SyncPPO as SyncPPO
    from polopt.trainers.typed_presets import train as train

__version__ = "0.4.0"

_MODULE_OF = {
    "A2C": "polopt.trainers.presets",
    "A3C": "polopt.trainers.presets",
    "APPO": "polopt.trainers.presets",
    "ActorCriticConfig": "polopt.policies.actor_critic",
    "ActorCriticPolicy": "polopt.policies.actor_critic",
    "AddOn": "polopt.common.add_ons",
    "ApexDQN": "polopt.trainers.presets",
    "CallbackError": "polopt.rollouts.workers.callbacks",
    "Callbacks": "polopt.rollouts.workers.callbacks",
    "Calls": "polopt.rollouts.workers.calls",
    "CallsLostError": "polopt.rollouts.workers.calls",
    "Collector": "polopt.collectors.collector",
    "CollectorEnded": "polopt.collectors.collector_thread",
    "CollectorThread": "polopt.collectors.collector_thread",
    "ComparisonResult": "polopt.comparison.compare_function",
    "Config": "polopt.common.config",
    "ConfigError": "polopt.common.config",
    "DDPPO": "polopt.trainers.presets",
    "DQN": "polopt.trainers.presets",
    "Episode": "polopt.common.episodes",
    "DecisionRules": "polopt.comparison.decisions",
    "EvaluationResult": "polopt.trainers.play_episodes",
    "Forecast": "polopt.simulation.predict_function",
    "FunctionError": "polopt.rollouts.workers.errors",
    "GradientPacker": "polopt.common.compression",
    "GradientWorker": "polopt.collectors.gradient_worker",
    "GradientWorkerSet": "polopt.collectors.gradient_worker",
    "Gradients": "polopt.common.weights",
    "IMPALA": "polopt.trainers.presets",
    "NonFiniteError": "polopt.rollouts.workers.errors",
    "Number": "polopt.metrics.number",
    "OptimizerConfig": "polopt.optimizers.optimizer_config",
    "PQN": "polopt.trainers.presets",
    "PackedGradients": "polopt.common.compression",
    "Plot": "polopt.dashboards.data.tab",
    "Policy": "polopt.policies.policy",
    "PolicyConfig": "polopt.policies.learning.policy_config",
    "PolicyOptimizer": "polopt.optimizers.policy_optimizer",
    "PolicyOptimizerTrainer": "polopt.trainers.trainer",
    "Prediction": "polopt.simulation.predictions",
    "RateLimiter": "polopt.replay.rate_limiter",
    "ReplayBuffer": "polopt.replay.replay_buffer",
    "Reply": "polopt.rollouts.workers.call",
    "RerunDifference": "polopt.recording.arrival_log",
    "RolloutConfig": "polopt.rollouts.rollout_config",
    "RolloutWorker": "polopt.rollouts.workers.rollout_worker",
    "RunListener": "polopt.common.add_ons",
    "SAC": "polopt.trainers.presets",
    "SampleBatch": "polopt.common.sample_batch",
    "Sequences": "polopt.common.transitions",
    "StepResult": "polopt.metrics.optimizer_stats",
    "Stragglers": "polopt.rollouts.workers.early_stop",
    "SyncPPO": "polopt.trainers.presets",
    "TD3": "polopt.trainers.presets",
    "Tab": "polopt.dashboards.data.tab",
    "TensorBoardLayout": "polopt.dashboards.tensorboard",
    "TrainingResult": "polopt.command_line.train_function",
    "Transitions": "polopt.common.transitions",
    "WEIGHTS": "polopt.rollouts.workers.snapshots",
    "Weights": "polopt.common.weights",
    "WorkerHandle": "polopt.rollouts.workers.worker_handle",
    "WorkerSet": "polopt.rollouts.workers.worker_set",
    "WorkersFailedError": "polopt.rollouts.workers.errors",
    "call_each": "polopt.rollouts.workers.call_workers",
    "compare": "polopt.comparison.compare_function",
    "decide": "polopt.comparison.decisions",
    "evaluate": "polopt.command_line.evaluate_function",
    "foreach_worker": "polopt.rollouts.workers.call_workers",
    "load": "polopt.trainers.saved_policy",
    "pack": "polopt.common.compression",
    "predict": "polopt.simulation.predict_function",
    "register": "polopt.trainers.presets",
    "register_add_on": "polopt.common.add_ons",
    "register_network": "polopt.policies.networks.model_config",
    "register_optimizer": "polopt.optimizers.optimizer_registry",
    "register_policy": "polopt.policies.policy_registry",
    "rerun": "polopt.recording.rerun",
    "sb3_defaults": "polopt.rllib.sb3_defaults",
    "scheme_config": "polopt.collectors.scheme",
    "set_up_each": "polopt.rollouts.workers.call_workers",
    "to_tensordict": "polopt.collectors.tensordict",
    "train": "polopt.command_line.train_function",
    "unpack": "polopt.common.compression",
    "unpack_gradients": "polopt.common.compression",
}

__all__ = ["__version__", *_MODULE_OF]


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Imports a public name on first use and keeps it."""
        if name not in _MODULE_OF:
            from polopt.common.add_ons import hint

            instead = "" if name.startswith("__") else hint("preset", name)
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}"
                + (f". {instead}" if instead else "")
            )
        value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
