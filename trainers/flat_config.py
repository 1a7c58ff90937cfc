"""`read_config`: from a flat config dict to the options of each part of an experiment.

Each config class owns its keys and validates their values. This module resolves the preset, the
optimizer, the policy and other names of keys, and finds the owner of each key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polopt.common.add_ons import add_ons, fixed_options, hint
from polopt.common.config import (
    Config,
    ConfigError,
    Problems,
    canonical,
    differ,
    instead_of,
    nearest_of,
    shown,
    without_fixed,
)
from polopt.common.registry import load_path
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.networks.model_config import ModelConfig
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers.trainer_config import TrainerConfig

NO_ENV = (
    "key 'env' is missing. Allowed: a Gymnasium id, a name registered with "
    "ray.tune.registry.register_env, or a callable that makes an environment"
)


def read_config(options: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Reads a flat config dict. Passes each key to the config class that owns this key. Arguments:
    see `Experiment.parse`.

    Returns:
        the fields of an `Experiment`.

    Raises:
        ConfigError: keys are unknown or values are wrong. The message has one line for each wrong
            key.
    """
    _check_mapping(options)
    options, preset = with_preset(options, preset)
    for plugin in ("optimizer", "policy"):
        _check_not_fixed(plugin, options, preset)
    optimizer_name, optimizer_only = _plugin("optimizer", options, preset)
    policy_name, policy_only = _plugin("policy", options, preset)
    optimizer_class, policy_class = OPTIMIZERS.get(optimizer_name), POLICIES.get(policy_name)
    owners = _owners(optimizer_class, policy_class)
    aliases = _aliases(owners)
    names = {
        "optimizer": OPTIMIZERS.saved_name(optimizer_name),
        "policy": POLICIES.saved_name(policy_name),
    }
    problems, known, fixed = Problems(), _known(owners), fixed_options("config")
    with problems.collected():
        without_fixed(options, fixed, known)
    former = {key for owner in owners.values() for key in (*owner.renamed, *owner.removed)}
    for owner in owners.values():
        with problems.collected():
            owner.check_former_keys(options)
    options = {
        key: value
        for key, value in options.items()
        if key in known or key not in former | fixed.keys()
    }
    merged = canonical(preset, aliases) | canonical(options, aliases)
    parts: dict[str, dict[str, Any]] = {name: {} for name in owners}
    for key, value in merged.items():
        if key not in ("optimizer", "policy"):
            with problems.collected():
                parts[_owner(key, owners, names, preset)][key] = value
    for plugin, only in (("optimizer", optimizer_only), ("policy", policy_only)):
        keys = _keys(owners[plugin])
        with problems.collected():
            without_fixed(only, fixed, keys)
        own = {key: value for key, value in only.items() if key in keys or key not in fixed}
        foreign = [key for key in own if key not in keys and hint("option", key)]
        problems.lines += [
            f"{plugin} {names[plugin]!r}: unknown key {key!r}{instead_of('option', key, keys)}"
            for key in foreign
        ]
        own = {key: value for key, value in own.items() if key not in foreign}
        parts[plugin] |= canonical(own, owners[plugin].other_names())
    given = {*canonical(options, aliases), *canonical(optimizer_only, aliases)}
    parts["optimizer"] = optimizer_class.config_class.fit_preset(parts["optimizer"], given)
    parsed: dict[str, Any] = {}
    for name, owner in owners.items():
        with problems.collected():
            parsed[name] = owner.parse(parts[name])
    if problems.lines and merged.get("env") is None:
        problems.lines.append(NO_ENV)
    problems.raise_all()
    return {
        "add_ons": tuple(parsed.pop(name) for name in owners if name not in _CORE_PARTS),
        "policy_name": names["policy"],
        "policy_class": policy_class,
        "optimizer_name": names["optimizer"],
        "optimizer_class": optimizer_class,
        **parsed,
    }


def with_keywords(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Merges a config dict with keyword arguments.

    Raises:
        ConfigError: a key is in `config` and in `options`, or `config` is not a dict with strings
            as keys.
    """
    _check_mapping(config)
    for key in options:
        if key in config:
            raise ConfigError(
                f"key {key!r}: got {shown(config[key])} in config and {shown(options[key])} as a "
                "keyword argument. Give only one of them"
            )
    return {**config, **options} if options else config


def plugin_names(options: Mapping[str, Any], preset: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the chosen optimizer and policy, each as a name or a class.

    Raises:
        ConfigError: the optimizer or the policy is neither a name nor a class, or the key `preset`
            is wrong. See `with_preset`.
    """
    options, preset = with_preset(options, preset)
    return _plugin("optimizer", options, preset)[0], _plugin("policy", options, preset)[0]


def with_preset(
    options: Mapping[str, Any], preset: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Resolves the key `preset` of a config. With this key, one Tune experiment can compare several
    presets.

    Returns:
        `options` without the key `preset`, and the options of the named preset that differ from
        the defaults. If the value of `preset` is a dict, the further options in this dict are added
        to `options`. If `options` has no key `preset`, both arguments are returned unchanged.

    Raises:
        ConfigError: the preset is unknown, or the trainer already has a preset.
    """
    if "preset" not in options:
        return options, preset
    chosen = options["preset"]
    rest = {key: value for key, value in options.items() if key != "preset"}
    if chosen is None:
        return rest, preset
    if preset:
        raise ConfigError(
            f"key 'preset': got {shown(chosen)}, but the class of this trainer is a preset "
            "already. Leave the key out, or use PolicyOptimizerTrainer"
        )
    name, only = chosen, {}
    if isinstance(chosen, Mapping):
        name, only = chosen.get("name"), {k: v for k, v in chosen.items() if k != "name"}
    preset = _preset_options(chosen if name is None else name)
    if only:
        aliases = aliases_for({**rest, **only}, preset)
        rest = canonical(rest, aliases) | canonical(only, aliases, "preset")
    return rest, preset


def _preset_options(name: Any) -> Mapping[str, Any]:
    """Returns the options of a preset that differ from the defaults.

    Raises:
        ConfigError: the preset is unknown.
    """
    presets = load_path(_PRESETS)
    found: Any = presets.get(name) if isinstance(name, str) else name
    problem = "."
    if isinstance(name, str) and ":" in name:
        try:
            found = load_path(name)
        except (ImportError, AttributeError) as error:
            problem = f": {error}."
    elif isinstance(name, str) and found is None:
        instead = hint("preset", name)
        problem = f". {instead}." if instead else f"{nearest_of(name, presets)}."
    if isinstance(found, type) and issubclass(found, presets["PolicyOptimizerTrainer"]):
        trainer: Any = found
        return dict(trainer.preset)
    raise ConfigError(
        f"key 'preset': got {shown(name)}{problem} Allowed: the name of a preset, its class or "
        "'module:Class', or a dict of its 'name' and options"
    )


def aliases_for(options: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, str]:
    """Returns a dict from each alias of an option to the key of this option, for the chosen
    optimizer and policy.

    Raises:
        ConfigError: the optimizer or the policy is unknown, or the key `preset` is wrong.
    """
    optimizer_name, policy_name = plugin_names(options, preset)
    return _aliases(_owners(OPTIMIZERS.get(optimizer_name), POLICIES.get(policy_name)))


def _owners(
    optimizer_class: type[PolicyOptimizer], policy_class: type[Policy]
) -> dict[str, type[Config]]:
    core = (TrainerConfig, RolloutConfig, policy_class.config_class, optimizer_class.config_class)
    further = (add_on.config_class for add_on in add_ons())
    return {
        **dict(zip(_CORE_PARTS, core, strict=True)),
        **{cls.__name__: cls for cls in further if cls is not None},
    }


def _aliases(owners: Mapping[str, type[Config]]) -> dict[str, str]:
    return {alias: key for owner in owners.values() for alias, key in owner.other_names().items()}


def _check_mapping(options: Any) -> None:
    if isinstance(options, str) or callable(options):
        environment = f"If this is the environment, pass it as env={shown(options)}"
        raise ConfigError(
            f"config: got {shown(options)}. Allowed: a dict of keys to values, or keyword "
            f"arguments. {hint('policy', options) or environment}"
        )
    if not isinstance(options, Mapping):
        raise ConfigError(f"config: got {shown(options)}. Allowed: a dict of keys to values")
    for key in options:
        if not isinstance(key, str):
            raise ConfigError(f"config: got key {shown(key)}. Allowed: strings")


def _check_not_fixed(plugin: str, options: Mapping[str, Any], preset: Mapping[str, Any]) -> None:
    given, fixed = options.get(plugin), preset.get(plugin)
    name = given.get("name", fixed) if isinstance(given, Mapping) else given
    if name is not None and fixed is not None and differ(name, fixed):
        other = "To choose another, use PolicyOptimizerTrainer"
        raise ConfigError(
            f"key {plugin!r}: got {shown(name)}, but this preset always uses {fixed!r}. "
            f"{hint(plugin, name) or other}"
        )


def _plugin(
    key: str, options: Mapping[str, Any], preset: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """Returns the name or class of the optimizer or policy, and the options that apply only to this
    optimizer or policy. `key` is `optimizer` or `policy`."""
    fixed = preset.get(key)
    chosen = options.get(key, fixed or _DEFAULT_PLUGINS[key])
    name, only = chosen, {}
    if isinstance(chosen, Mapping):
        name, only = chosen.get("name", fixed), {k: v for k, v in chosen.items() if k != "name"}
    if not isinstance(name, str | type):
        raise ConfigError(
            f"key {key!r}: got {shown(chosen)}. Allowed: a class, 'module:Class', a name, "
            "or a dict with a 'name'"
        )
    return (OPTIMIZERS if key == "optimizer" else POLICIES).named(name), only


#: The parts of an experiment whose options the core owns. The other parts belong to add-ons.
_CORE_PARTS = ("trainer", "rollout", "policy", "optimizer")
#: Where the presets are defined. They are loaded at the first use, because their module imports
#: this module.
_PRESETS = "polopt.trainers.presets:PRESETS"
#: The default optimizer and policy of `PolicyOptimizerTrainer`.
_DEFAULT_PLUGINS = {"optimizer": "sync_samples", "policy": "ppo"}


def _owner(
    key: str,
    owners: Mapping[str, type[Config]],
    names: Mapping[str, str],
    preset: Mapping[str, Any],
) -> str:
    for name, owner in owners.items():
        if key in owner.keys():  # noqa: SIM118 - a classmethod of Config, not of a dict
            return name
    for plugin, registry in (("optimizer", OPTIMIZERS), ("policy", POLICIES)):
        others = [n for n in registry.names() if key in _keys(registry.get(n).config_class)]
        if others:
            trainer = " with PolicyOptimizerTrainer" if preset.get(plugin) else ""
            raise ConfigError(
                f"key {key!r} is an option of {plugin} {', '.join(map(repr, others))}. The "
                f"{plugin} of this config is {names[plugin]!r}. Leave the key out, or choose "
                f'another {plugin}{trainer}, for example {plugin}={{"name": "{others[-1]}", '
                f'"{key}": ...}}'
            )
    if key in _keys(ModelConfig):
        raise ConfigError(
            f"key {key!r} is an option of the network. Set it with model={{{key!r}: ...}}"
        )
    listed = "" if hint("option", key) else " (`polopt list PRESET` lists all keys)"
    raise ConfigError(f"unknown key {key!r}{instead_of('option', key, _known(owners))}{listed}")


def _known(owners: Mapping[str, type[Config]]) -> list[str]:
    return [key for owner in owners.values() for key in _keys(owner)] + [
        "optimizer",
        "policy",
        "preset",
    ]


def _keys(owner: type[Config]) -> list[str]:
    return [*owner.keys(), *owner.other_names()]
