"""RLlib's scripts after one changed import: builders of its algorithms for the presets of polopt.

    from polopt.rllib import PPOConfig  # was: from ray.rllib.algorithms.ppo import PPOConfig

Needs no `ray[rllib]`. The functions that read or make objects of RLlib do: `from_rllib`,
`load_rl_module` and `to_rl_module` (`pip install 'polopt[rllib]'`).
"""

from polopt.rllib.builders import (
    A2CConfig,
    A3CConfig,
    ApexDQNConfig,
    APPOConfig,
    DDPPOConfig,
    DefaultModelConfig,
    DQNConfig,
    IMPALAConfig,
    ImpalaConfig,
    PPOConfig,
    SACConfig,
)
from polopt.rllib.from_rllib import from_rllib
from polopt.rllib.rl_modules import load_rl_module, to_rl_module
from polopt.rllib.user_callbacks import DefaultCallbacks, RLlibCallback

__all__ = [
    "A2CConfig",
    "A3CConfig",
    "APPOConfig",
    "ApexDQNConfig",
    "DDPPOConfig",
    "DQNConfig",
    "DefaultCallbacks",
    "DefaultModelConfig",
    "IMPALAConfig",
    "ImpalaConfig",
    "PPOConfig",
    "RLlibCallback",
    "SACConfig",
    "from_rllib",
    "load_rl_module",
    "to_rl_module",
]
