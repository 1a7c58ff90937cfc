"""Presets: combinations of an optimizer and a policy, named after the published algorithms."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from polopt.common.add_ons import hint
from polopt.common.ray_names import registered
from polopt.trainers.trainer import PolicyOptimizerTrainer
from polopt.trainers.tune_callbacks import add_callbacks

logger = logging.getLogger("polopt")
#: Options of SAC and TD3. They result in one update with 256 transitions for each environment step.
_CONTINUOUS: dict[str, Any] = {
    "num_workers": 0,
    "num_envs_per_worker": 1,
    "rollout_fragment_length": 8,
    "buffer_size": 1_000_000,
    "train_batch_size": 256,
    "training_intensity": 256.0,
    "min_sample_timesteps_per_iteration": 1000,
}


class A3C(PolicyOptimizerTrainer):
    """Asynchronous advantage actor-critic (Mnih et al., 2016)."""

    preset: ClassVar[dict[str, Any]] = {"optimizer": "async_gradients", "policy": "a3c"}


class A2C(PolicyOptimizerTrainer):
    """Advantage actor-critic: the loss of A3C on synchronous samples."""

    preset: ClassVar[dict[str, Any]] = {"optimizer": "sync_samples", "policy": "a2c"}


class SyncPPO(PolicyOptimizerTrainer):
    """Proximal policy optimization (Schulman et al., 2017) on synchronous samples."""

    preset: ClassVar[dict[str, Any]] = {
        "optimizer": "sync_samples",
        "policy": "ppo",
        "rollout_fragment_length": 128,
    }


class DDPPO(PolicyOptimizerTrainer):
    """Decentralized distributed PPO (Wijmans et al., 2020)."""

    preset: ClassVar[dict[str, Any]] = {
        "optimizer": "decentralized_allreduce",
        "policy": "ppo",
        "rollout_fragment_length": 128,
    }


class IMPALA(PolicyOptimizerTrainer):
    """Importance weighted actor-learner (Espeholt et al., 2018): asynchronous samples that are
    corrected with V-trace."""

    preset: ClassVar[dict[str, Any]] = {
        "optimizer": "async_samples",
        "policy": "impala",
        "rollout_fragment_length": 32,
        "train_batch_size": 512,
        "max_rollout_lag": 4,
    }


class APPO(PolicyOptimizerTrainer):
    """Asynchronous PPO (IMPACT, Luo et al., 2020): V-trace with a target network."""

    preset: ClassVar[dict[str, Any]] = {
        "optimizer": "async_samples",
        "policy": "appo",
        "rollout_fragment_length": 32,
        "train_batch_size": 512,
        "max_rollout_lag": 4,
    }


class DQN(PolicyOptimizerTrainer):
    """Deep Q-learning (Mnih et al., 2015), with double Q-learning and a dueling network."""

    preset: ClassVar[dict[str, Any]] = {
        "optimizer": "sync_replay",
        "policy": "dqn",
        "num_workers": 0,
        "num_envs_per_worker": 8,
        "rollout_fragment_length": 4,
        "min_sample_timesteps_per_iteration": 1000,
    }


class ApexDQN(PolicyOptimizerTrainer):
    """Ape-X (Horgan et al., 2018): DQN whose samplers, replay shards and learner run at the same
    time. Each environment explores with a different epsilon."""

    preset: ClassVar[dict[str, Any]] = {
        "optimizer": "async_replay",
        "policy": "dqn",
        "num_workers": 4,
        "num_replay_shards": 2,
        "rollout_fragment_length": 50,
        "per_worker_epsilon": True,
        "n_step": 3,
        "prioritized_replay": True,
        "final_prioritized_replay_beta": 0.4,
        "buffer_size": 1_000_000,
        "learning_starts": 10_000,
        "train_batch_size": 512,
        "training_intensity": 2.0,
        "target_network_update_freq": 500,
    }


class SAC(PolicyOptimizerTrainer):
    """Soft actor-critic (Haarnoja et al., 2018)."""

    preset: ClassVar[dict[str, Any]] = {
        "optimizer": "sync_replay",
        "policy": "sac",
        **_CONTINUOUS,
    }


class TD3(PolicyOptimizerTrainer):
    """Twin delayed deterministic policy gradients (Fujimoto et al., 2018)."""

    preset: ClassVar[dict[str, Any]] = {
        "optimizer": "sync_replay",
        "policy": "td3",
        **_CONTINUOUS,
    }


class PQN(PolicyOptimizerTrainer):
    """Parallelised Q-network (Gallici et al., 2024): Q(lambda) on synchronous samples. PQN has
    neither a replay buffer nor a target network."""

    preset: ClassVar[dict[str, Any]] = {
        "optimizer": "sync_samples",
        "policy": "pqn",
        "rollout_fragment_length": 32,
    }


PRESETS: dict[str, type[PolicyOptimizerTrainer]] = {
    cls.__name__: cls
    for cls in (
        *(A3C, A2C, SyncPPO, DDPPO, IMPALA, APPO, DQN, ApexDQN, SAC, TD3, PQN),
        PolicyOptimizerTrainer,
    )
}


#: Prefix of names that no other library registers with Tune.
PREFIX = "polopt/"
_warned: set[str] = set()


def register(override: bool | None = None) -> None:
    """Registers every preset with Tune. Each preset gets two names: its class name, for example
    `A3C`, and a name such as `polopt/A3C`, which no other library uses. `Tuner("A3C", ...)` then
    finds the preset.

    Other libraries may register their algorithms under some of the same class names. Tune uses the
    class that was registered last.

    Args:
        override: whether to register a preset under a class name that is already registered for
            another class. `None` registers it and logs a warning. True registers it without a
            warning. False does not register it, and only `polopt/A3C` and so on are available.

    polopt has no name `PPO`, because its preset is `SyncPPO`. If Tune trains an algorithm of
    another library under such a name, polopt logs a warning.

    Stop conditions use the result keys that `docs/results.md` lists. If the first result of a trial
    does not contain a stop key, the experiment ends with a ConfigError, which names the current key
    for a key of older libraries.
    """
    register_names(PRESETS, override)


def register_names(
    presets: Mapping[str, type[PolicyOptimizerTrainer]], override: bool | None = None
) -> None:
    """Registers trainers with Tune under the keys of `presets`. See `register`."""
    from ray.tune import register_trainable

    add_callbacks()
    for name, cls in presets.items():
        register_trainable(PREFIX + name, cls)
        # For an unknown name, Tune's public function would import RLlib.
        other = registered("trainable_class", name)
        if getattr(other, "__module__", "").startswith("polopt."):
            other = None
        if other is not None and override is False:
            continue
        if other is not None and override is None:
            _warn(
                name,
                f"{name!r} was registered with Tune by {other.__module__}, and now names the "
                f"preset of polopt. {PREFIX + name!r} always names the preset of polopt. Call "
                f"polopt.register(override=False) to keep the other {name!r}, or "
                "polopt.register(override=True) to hide this warning",
            )
        elif override is None and (warning := hint("tune name", name)):
            _warn(name, f"{warning}. {PREFIX + name!r} always names the preset of polopt")
        register_trainable(name, cls)


def _warn(name: str, message: str) -> None:
    if name not in _warned:
        _warned.add(name)
        logger.warning(message)
