"""`config_of`: the config of a checkpoint for a run that continues from this checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polopt.common.config import ConfigError, canonical
from polopt.common.plain_data import argument_for, described
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.trainers.checkpoint_fields import plugin_places, value_at
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.flat_config import aliases_for, plugin_names, with_preset
from polopt.trainers.trainer_config import merged_options

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
    _check_imports(
        where, chosen, {**preset, **changes}, argument_of
    )  # `plugin_names` imports classes
    classes = dict(zip(chosen, plugin_names(chosen, preset), strict=True))
    wanted = {
        plugin: registry.saved_name(classes[plugin]) for plugin, registry in _REGISTRIES.items()
    }
    changes = canonical(changes, aliases_for(chosen, preset))
    kept = {plugin for plugin in own if wanted[plugin] == names[plugin]}
    if "optimizer" in kept:
        config_class = OPTIMIZERS.get(classes["optimizer"]).config_class
        saved |= config_class.of_checkpoint(own["optimizer"])
    if "policy" in kept:
        saved |= own["policy"]
    elif "model" in own["policy"]:
        saved["model"] = own["policy"]["model"]
    _check_unsaved(state, where, changes, kept)
    config = merged_options(saved, changes) | chosen
    refuse_imports(config, changes, where, argument_of)
    return config


def refuse_imports(
    config: Mapping[str, Any],
    changes: Mapping[str, Any],
    where: str,
    advice: Callable[[str], str],
) -> None:
    """Refuses a saved config that names a module, unless the user names it, too. Calls
    `resolve_env` for saved environments in `config`, without importing their modules.

    Args:
        config: the saved config with the changes.
        changes: the options that the user gave.
        where: name of the file with the saved config, for messages.
        advice: a function that says how to pass an option. It is called with the option's key.

    Raises:
        ConfigError: the config names a module that `changes` do not name.
    """
    _check_imports(where, config, changes, advice)
    options: Any
    for key, options, given in (
        ("env", config, changes),
        ("evaluation_config", config.get("evaluation_config"), changes.get("evaluation_config")),
    ):
        saved = value_at(options, ("env",))
        if saved is not None and value_at(given, ("env",)) is None:
            options["env"] = _saved_env(saved, where, advice(key))


def argument_of(key: str) -> str:
    """Returns the keyword argument with which a user gives code for an option, for a message."""
    return "evaluation_config={'env': ...}" if key == "evaluation_config" else f"{key}=..."


def _saved_env(env: Any, where: str, advice: str) -> Any:
    try:
        return resolve_env(env, allow_import=False)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}. To import it, pass {advice}") from None


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
        if not is_given(changes, keys):
            missing[".".join(keys)] = kind
            arguments.append(f"{keys[0]}=...")
    if missing:
        raise CheckpointError(
            f"{where} does not contain {described(missing)}, because such values cannot be saved. "
            f"Pass {', '.join(dict.fromkeys(arguments))}"
        )


def _check_imports(
    where: str,
    config: Mapping[str, Any],
    changes: Mapping[str, Any],
    advice: Callable[[str], str],
) -> None:
    # Options that may name a module. polopt imports a module that a saved config names only if the
    # user names it, too.
    for keys in (("callbacks",), ("policy_mapping_fn",), *plugin_places()):
        value = value_at(config, keys)
        if isinstance(value, str) and ":" in value and not is_given(changes, keys):
            key = "model" if "model" in keys else keys[0]
            raise ConfigError(
                f"{where}: {'.'.join(keys)} is {value!r:.80}. polopt does not import a module that "
                f"only a saved config names. To import it, pass {advice(key)}"
            )


def is_given(options: Any, keys: Sequence[str]) -> bool:
    """Returns whether `options` has a value at the path `keys`. Also returns True if the path
    begins with a value that is not a dict."""
    for key in keys:
        if not isinstance(options, Mapping):
            return True
        if key not in options:
            return False
        options = options[key]
    return True
