"""Lets scripts that were written for RLlib use the presets of polopt. In a script, `ray.rllib`
becomes `polopt.rllib` everywhere.

    from polopt.rllib.algorithms.ppo import PPOConfig
    # was: from ray.rllib.algorithms.ppo import PPOConfig

A script that names algorithms by strings also calls `register`.

The files, in the order in which a script meets them:

    module_paths           the paths and names that a script imports
      script_utils         small functions and classes behind these names
    builders               PPOConfig and others, subclasses of AlgorithmConfig
      algorithm_config     the methods of a builder
    rllib_options          all options of an algorithm as a dict, and as a config of a preset
      rllib_defaults       the algorithms, and RLlib's defaults
      translation          one option, and options that depend on each other
        accepted_options, exploration_config, replay_buffer_config, multi_agent, custom_models
        other_libraries    the tables of names and texts, also for errors and docs/migration*.md
    algorithm              the trainer that a script makes (registration: its names in Tune)
      views                policies, networks, workers and environments
      old_results          result keys of older releases
      user_callbacks       callbacks (callback_batches: the batches that they get)
    rl_modules, rllib_config
                           modules and configs of RLlib itself (cnn_modules: convolutions)
    add_on                 attaches this package to every run
    sb3_defaults           defaults of Stable-Baselines3

Most of this package works without `ray[rllib]`. Only `from_rllib`, `load_rl_module` and
`to_rl_module` require it, because they read or make objects of RLlib
(`pip install 'polopt[rllib]'`).

Each name is imported on first use, because the core loads the add-on of this package in every
program.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from polopt.rllib import module_paths

if TYPE_CHECKING:
    from polopt.rllib.builders import A2CConfig as A2CConfig
    from polopt.rllib.builders import A3CConfig as A3CConfig
    from polopt.rllib.builders import ApexDQNConfig as ApexDQNConfig
    from polopt.rllib.builders import APPOConfig as APPOConfig
    from polopt.rllib.builders import DDPPOConfig as DDPPOConfig
    from polopt.rllib.builders import DefaultModelConfig as DefaultModelConfig
    from polopt.rllib.builders import DQNConfig as DQNConfig
    from polopt.rllib.builders import IMPALAConfig as IMPALAConfig
    from polopt.rllib.builders import ImpalaConfig as ImpalaConfig
    from polopt.rllib.builders import PGConfig as PGConfig
    from polopt.rllib.builders import PPOConfig as PPOConfig
    from polopt.rllib.builders import SACConfig as SACConfig
    from polopt.rllib.custom_models import FullyConnectedNetwork as FullyConnectedNetwork
    from polopt.rllib.custom_models import ModelCatalog as ModelCatalog
    from polopt.rllib.custom_models import RecurrentNetwork as RecurrentNetwork
    from polopt.rllib.custom_models import TFModelV2 as TFModelV2
    from polopt.rllib.custom_models import TorchModelV2 as TorchModelV2
    from polopt.rllib.custom_models import TorchRNN as TorchRNN
    from polopt.rllib.multi_agent import MultiRLModuleSpec as MultiRLModuleSpec
    from polopt.rllib.multi_agent import PolicySpec as PolicySpec
    from polopt.rllib.multi_agent import RLModuleSpec as RLModuleSpec
    from polopt.rllib.registration import register as register
    from polopt.rllib.rl_modules import load_rl_module as load_rl_module
    from polopt.rllib.rl_modules import to_rl_module as to_rl_module
    from polopt.rllib.rllib_config import from_rllib as from_rllib
    from polopt.rllib.user_callbacks import DefaultCallbacks as DefaultCallbacks
    from polopt.rllib.user_callbacks import RLlibCallback as RLlibCallback

_NAMES_OF = {
    "custom_models": (
        "FullyConnectedNetwork",
        "ModelCatalog",
        "RecurrentNetwork",
        "TFModelV2",
        "TorchModelV2",
        "TorchRNN",
    ),
    "builders": (
        "A2CConfig",
        "A3CConfig",
        "APPOConfig",
        "ApexDQNConfig",
        "DDPPOConfig",
        "DQNConfig",
        "DefaultModelConfig",
        "IMPALAConfig",
        "ImpalaConfig",
        "PGConfig",
        "PPOConfig",
        "SACConfig",
    ),
    "multi_agent": ("MultiRLModuleSpec", "PolicySpec", "RLModuleSpec"),
    "registration": ("register",),
    "rl_modules": ("load_rl_module", "to_rl_module"),
    "rllib_config": ("from_rllib",),
    "user_callbacks": ("DefaultCallbacks", "RLlibCallback"),
}
_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}

__all__ = [*_MODULE_OF]


module_paths.install()

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Imports a public name on first use and keeps it. Also finds the modules and names of
        `ray.rllib` that `module_paths` has."""
        if name in _MODULE_OF:
            value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        elif name in module_paths.TOP:
            value = module_paths.resolve(module_paths.TOP[name], name)
        elif name in module_paths.MODULES:
            return import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module_paths.watch_tune()
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
