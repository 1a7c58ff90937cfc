"""The builders of RLlib's algorithms. See `AlgorithmConfig`."""

from __future__ import annotations

from typing import Any

from polopt.rllib.algorithm_config import AlgorithmConfig


class A3CConfig(AlgorithmConfig):
    """Options of `polopt.A3C`. RLlib had A3C until 2.7."""

    preset_name = algorithm_name = "A3C"


class A2CConfig(AlgorithmConfig):
    """Options of `polopt.A2C`. RLlib had A2C until 2.7."""

    preset_name = algorithm_name = "A2C"


class PPOConfig(AlgorithmConfig):
    """Options of `polopt.SyncPPO`."""

    preset_name, algorithm_name = "SyncPPO", "PPO"


class DDPPOConfig(AlgorithmConfig):
    """Options of `polopt.DDPPO`. RLlib had DD-PPO until 2.7."""

    preset_name = algorithm_name = "DDPPO"


class IMPALAConfig(AlgorithmConfig):
    """Options of `polopt.IMPALA`."""

    preset_name = algorithm_name = "IMPALA"


#: Its name in RLlib 2.7.
ImpalaConfig = IMPALAConfig


class APPOConfig(AlgorithmConfig):
    """Options of `polopt.APPO`."""

    preset_name = algorithm_name = "APPO"


class DQNConfig(AlgorithmConfig):
    """Options of `polopt.DQN`."""

    preset_name = algorithm_name = "DQN"


class SACConfig(AlgorithmConfig):
    """Options of `polopt.SAC`."""

    preset_name = algorithm_name = "SAC"


class ApexDQNConfig(AlgorithmConfig):
    """Options of `polopt.ApexDQN`. RLlib had Ape-X until 2.7."""

    preset_name = algorithm_name = "ApexDQN"


def DefaultModelConfig(**options: Any) -> dict[str, Any]:
    """Options of the network, for `rl_module(model_config=...)`. In RLlib a class."""
    return options
