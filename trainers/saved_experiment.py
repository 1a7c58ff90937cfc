"""The config of a checkpoint, for a run that continues it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polopt.common.config import ConfigError, canonical
from polopt.common.registry import Registry
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.experiment import aliases_for, merged_options, plugin_names, with_preset
from polopt.trainers.saved_config import argument_for, described

#: Options that may name code: a module is imported only if the user names it, too.
_CODE = (
    ("callbacks",),
    ("model", "custom"),
    ("optimizer",),
    ("policy",),
)
_REGISTRIES = {"optimizer": OPTIMIZERS, "policy": POLICIES}


def config_of(
    state: Mapping[str, Any], where: str, changes: Mapping[str, Any], preset: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the flat config of a checkpoint with changes to it, which `Experiment.parse` accepts.
    Options of another optimizer, and of another policy except the network, are left out.

    Args:
        state: of the checkpoint, from `read_trainer_state`.
        where: name of the checkpoint in messages.
        changes: options that replace saved ones. Nested dicts are merged.
        preset: of the trainer that continues the run.

    Raises:
        CheckpointError: the checkpoint lacks a value that could not be saved, or its plugins.
        ConfigError: it names a module that `changes` do not name, or a plugin that is not known.
    """
    changes, preset = with_preset(changes, preset)
    saved = dict(state["config"])
    own = {}
    for plugin in ("optimizer", "policy"):
        options = saved.pop(plugin, None)
        if not isinstance(options, Mapping) or not isinstance(options.get("name"), str):
            raise CheckpointError(f"{where}: field 'config/{plugin}' has no name")
        own[plugin] = dict(options)
    names = {plugin: options.pop("name") for plugin, options in own.items()}
    chosen = {
        "optimizer": changes.get("optimizer", preset.get("optimizer", names["optimizer"])),
        "policy": changes.get("policy", preset.get("policy", names["policy"])),
    }
    _check_imports(where, chosen, {**preset, **changes})  # `plugin_names` imports classes
    classes = dict(zip(chosen, plugin_names(chosen, preset), strict=True))
    wanted = {plugin: _name(classes[plugin], registry) for plugin, registry in _REGISTRIES.items()}
    changes = canonical(changes, aliases_for(chosen, preset))
    if wanted["optimizer"] == names["optimizer"]:
        config_class = OPTIMIZERS.get(classes["optimizer"]).config_class
        saved |= config_class.of_checkpoint(own["optimizer"])
    if wanted["policy"] == names["policy"]:
        config_class = POLICIES.get(classes["policy"]).config_class
        saved |= config_class.of_checkpoint(own["policy"])
    elif "model" in own["policy"]:
        saved["model"] = own["policy"]["model"]
    kept = {plugin for plugin in own if wanted[plugin] == names[plugin]}
    _check_unsaved(state, where, changes, kept)
    config = merged_options(saved, changes) | chosen
    _check_imports(where, config, changes)
    for options, given, key in (
        (config, changes, "env"),
        (config.get("evaluation_config"), changes.get("evaluation_config", {}), "env"),
    ):
        if isinstance(options, dict) and options.get(key) is not None and given.get(key) is None:
            options[key] = _saved_env(options[key], where)
    return config


def _name(plugin: Any, registry: Registry) -> Any:
    """The name that a checkpoint has for a plugin, which is given as a name or a class."""
    if not isinstance(plugin, type):
        return plugin
    return registry.name_of(plugin) or plugin.__name__


def _saved_env(env: Any, where: str) -> Any:
    try:
        return resolve_env(env, allow_import=False)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}; to import it, give it: env={env!r:.80}") from None


def _check_unsaved(
    state: Mapping[str, Any], where: str, changes: Mapping[str, Any], kept: set[str]
) -> None:
    missing, arguments = {}, []
    for path, kind in state.get("unsaved", {}).items():
        keys = argument_for(path).split(".")
        if keys[0] in ("policy", "optimizer"):
            plugin, *keys = keys
            if plugin not in kept and keys[:1] != ["model"]:
                continue  # the plugin is not used
        if not _has(changes, keys):
            missing[".".join(keys)] = kind
            arguments.append(f"{keys[0]}=...")
    if missing:
        raise CheckpointError(
            f"{where} does not hold {described(missing)}, because a value of such a type cannot be "
            f"saved. Give it: {', '.join(dict.fromkeys(arguments))}"
        )


def _check_imports(where: str, config: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    for keys in _CODE:
        value, given = _at(config, keys), _at(changes, keys)
        if isinstance(value, str) and ":" in value and given is None:
            raise ConfigError(
                f"{where}: {'.'.join(keys)} is {value!r:.80}, and nothing that only a checkpoint "
                f"names is imported. To import it: {keys[0]}=..."
            )


def _at(options: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        options = options.get(key) if isinstance(options, Mapping) else None
    return options


def _has(options: Any, keys: list[str]) -> bool:
    """Whether options have a value at nested keys, or one in the place of a dict above it."""
    for key in keys:
        if not isinstance(options, Mapping):
            return True
        if key not in options:
            return False
        options = options[key]
    return True
