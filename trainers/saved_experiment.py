"""`config_of`: the config of a checkpoint for a run that continues from this checkpoint."""

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

#: Options that may name a module. A module that only a checkpoint names is not imported. The user
#: has to give the option, too.
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
    """Returns the flat config of a checkpoint with changes. `Experiment.parse` accepts the result.

    If the run continues with another optimizer, the options of the saved optimizer are left out. If
    the run continues with another policy, the options of the saved policy are left out, except the
    options of the network.

    Args:
        state: the state of the checkpoint, from `read_trainer_state`.
        where: name of the checkpoint for messages.
        changes: options that replace saved options. Nested dicts are merged.
        preset: preset of the trainer that continues the run.

    Raises:
        CheckpointError: a value could not be saved, and `changes` does not contain it. Also raised
            if the checkpoint does not name its optimizer or policy.
        ConfigError: an optimizer, a policy or the environment is unknown, or `changes` gives an
            option twice. Also raised if the checkpoint names a module in an option that is not in
            `changes`.
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
    """Returns the name under which checkpoints store a plugin. `plugin` is a name or a class."""
    if not isinstance(plugin, type):
        return plugin
    return registry.name_of(plugin) or plugin.__name__


def _saved_env(env: Any, where: str) -> Any:
    try:
        return resolve_env(env, allow_import=False)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}. To import it, pass env={env!r:.80}") from None


def _check_unsaved(
    state: Mapping[str, Any], where: str, changes: Mapping[str, Any], kept: set[str]
) -> None:
    missing, arguments = {}, []
    for path, kind in state.get("unsaved", {}).items():
        keys = argument_for(path).split(".")
        if keys[0] in ("policy", "optimizer"):
            plugin, *keys = keys
            if plugin not in kept and keys[:1] != ["model"]:
                continue  # the run continues with another optimizer or policy
        if not _has(changes, keys):
            missing[".".join(keys)] = kind
            arguments.append(f"{keys[0]}=...")
    if missing:
        raise CheckpointError(
            f"{where} does not contain {described(missing)}, because such values cannot be saved. "
            f"Pass {', '.join(dict.fromkeys(arguments))}"
        )


def _check_imports(where: str, config: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    for keys in _CODE:
        value, given = _at(config, keys), _at(changes, keys)
        if isinstance(value, str) and ":" in value and given is None:
            raise ConfigError(
                f"{where}: {'.'.join(keys)} is {value!r:.80}. polopt does not import a module that "
                f"only a checkpoint names. To import it, pass {keys[0]}=..."
            )


def _at(options: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        options = options.get(key) if isinstance(options, Mapping) else None
    return options


def _has(options: Any, keys: list[str]) -> bool:
    """Returns whether `options` has a value at the path `keys`. Also returns True if the path
    begins with a value that is not a dict."""
    for key in keys:
        if not isinstance(options, Mapping):
            return True
        if key not in options:
            return False
        options = options[key]
    return True
