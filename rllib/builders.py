"""Builders with the names of RLlib's configs. See `AlgorithmConfig`."""

from __future__ import annotations

from typing import Any

from polopt.rllib.algorithm_config import AlgorithmConfig


class A3CConfig(AlgorithmConfig):
    """Builder for `polopt.A3C`. RLlib had A3C up to version 2.7."""

    preset_name = algorithm_name = "A3C"


class A2CConfig(AlgorithmConfig):
    """Builder for `polopt.A2C`. RLlib had A2C up to version 2.7."""

    preset_name = algorithm_name = "A2C"


class PGConfig(AlgorithmConfig):
    """Builder for `polopt.A2C` without a critic, which is REINFORCE. RLlib had PG up to version
    2.7."""

    preset_name, algorithm_name = "A2C", "PG"


class PPOConfig(AlgorithmConfig):
    """Builder for `polopt.SyncPPO`."""

    preset_name, algorithm_name = "SyncPPO", "PPO"


class DDPPOConfig(AlgorithmConfig):
    """Builder for `polopt.DDPPO`. RLlib had DD-PPO up to version 2.7."""

    preset_name = algorithm_name = "DDPPO"


class IMPALAConfig(AlgorithmConfig):
    """Builder for `polopt.IMPALA`."""

    preset_name = algorithm_name = "IMPALA"


#: The name of `IMPALAConfig` in RLlib 2.7.
ImpalaConfig = IMPALAConfig


class APPOConfig(AlgorithmConfig):
    """Builder for `polopt.APPO`."""

    preset_name = algorithm_name = "APPO"


class DQNConfig(AlgorithmConfig):
    """Builder for `polopt.DQN`."""

    preset_name = algorithm_name = "DQN"


class SACConfig(AlgorithmConfig):
    """Builder for `polopt.SAC`."""

    preset_name = algorithm_name = "SAC"


class ApexDQNConfig(AlgorithmConfig):
    """Builder for `polopt.ApexDQN`. RLlib had Ape-X up to version 2.7."""

    preset_name = algorithm_name = "ApexDQN"


def DefaultModelConfig(**options: Any) -> dict[str, Any]:
    """Returns options of the network for `rl_module(model_config=...)`. In RLlib,
    `DefaultModelConfig` is a class."""
    return options
