"""Lets scripts that were written for RLlib use the presets of polopt. In most such scripts, only
the imports change.

    from polopt.rllib import PPOConfig  # was: from ray.rllib.algorithms.ppo import PPOConfig

Most of this package works without `ray[rllib]`. Only `from_rllib`, `load_rl_module` and
`to_rl_module` require it, because they read or make objects of RLlib
(`pip install 'polopt[rllib]'`).
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
