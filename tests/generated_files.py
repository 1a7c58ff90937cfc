"""Generates files from config classes, signatures, docstrings and declarations of numbers:
`docs/options.md`, `docs/api.md`, the tables of `docs/metrics.md`, the pictures of
`docs/choose-an-optimizer.md`, and the type stub of the presets.

`python tests/generated_files.py` writes the files. `tests/unit/project/test_options.py` compares
them with the code.
"""

from __future__ import annotations

import inspect
import keyword
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import scheme_pictures
import yaml

import polopt
from polopt.common.add_ons import add_ons
from polopt.common.config import Config
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.networks.model_config import ModelConfig
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers import trainer
from polopt.trainers.flat_config import plugin_names
from polopt.trainers.options import (
    Option,
    config_classes,
    first_sentence,
    nested_config,
    options_of,
    own_options,
    shown_default,
)
from polopt.trainers.presets import PRESETS
from polopt.trainers.trainer import PolicyOptimizerTrainer
from polopt.trainers.trainer_config import EvaluationConfig, TrainerConfig

ROOT = Path(__file__).parents[1]
STUB = Path(trainer.__file__).with_name("typed_presets.pyi")
PAGE = ROOT / "docs" / "options.md"
API_PAGE = ROOT / "docs" / "api.md"
IMAGES = ROOT / "docs" / "images"
#: Writes the tables of `docs/metrics.md`.
METRICS_PAGE = ROOT / "tests" / "unit" / "project" / "metrics_page.py"
_NESTED = {ModelConfig: "ModelOptions", EvaluationConfig: "EvaluationOptions"}
_HEAD = '''"""The signatures of the presets and of `polopt.train` for type checkers and editors.

`python tests/generated_files.py` makes this file from the config classes. Programs do not import
this file.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from typing_extensions import Self, TypedDict, Unpack

from polopt.command_line.train_function import TrainingResult
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.policy import Policy
from polopt.trainers.trainer import PolicyOptimizerTrainer as _Trainer

_Path = str | os.PathLike[str]
'''
_PLUGIN_KEYS = """
class PluginOptions(TypedDict, total=False):
    optimizer: str | type[PolicyOptimizer] | Mapping[str, Any]
    policy: str | type[Policy] | Mapping[str, Any]
"""


def builtin_configs() -> list[type[Config]]:
    """Returns the config classes of polopt's own optimizers and policies, each once."""
    found: dict[type[Config], None] = {RolloutConfig: None}
    for registry in (POLICIES, OPTIMIZERS):
        for name in registry.names():
            plugin = registry.get(name)
            if plugin.__module__.startswith("polopt."):
                found[plugin.config_class] = None
    return [*found, TrainerConfig, *add_on_configs()]


def add_on_configs() -> list[type[Config]]:
    """Returns the config classes of polopt's own add-ons."""
    return [add_on.config_class for add_on in add_ons() if add_on.config_class is not None]


def stub() -> str:
    """Returns the text of the type stub of the presets."""
    blocks: dict[str, list[Option]] = {}  # by the class that declares them first
    for config in builtin_configs():
        for option in own_options(config):
            assert option.owner is not None
            known = blocks.setdefault(f"_{option.owner.__name__}", [])
            if option.key not in [one.key for one in known]:
                known.append(option)
    parts = [_HEAD]
    for nested, name in _NESTED.items():
        parts.append(_typed_dict(name, own_options(nested)))
    parts.append(_PLUGIN_KEYS)
    parts += [_typed_dict(name, options) for name, options in blocks.items()]
    parts.append(_any_options(blocks.values()))
    parts.append(_base_class())
    for name, preset in PRESETS.items():
        if preset is PolicyOptimizerTrainer:
            continue
        bases = ["PluginOptions", *_bases(config_classes(preset.preset))]
        parts.append(_combined(f"{name}Options", bases))
        parts.append(_preset_class(name))
    parts.append(_train())
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", STUB.name, "-"]
    done = subprocess.run(
        ruff, input="\n\n".join(parts), capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stdout


def _bases(configs: Sequence[type[Config]]) -> list[str]:
    owners = dict.fromkeys(option.owner for config in configs for option in own_options(config))
    return [f"_{owner.__name__}" for owner in owners if owner is not None]


def _typed_dict(name: str, options: Sequence[Option]) -> str:
    lines = [f"class {name}(TypedDict, total=False):"]
    for option in options:
        written = [option.key, *option.aliases]
        lines += [
            f"    {key}: {type_text(option.annotation)}"
            for key in written
            if not keyword.iskeyword(key)
        ]
    return "\n".join(lines)


def _any_options(blocks: Iterable[Sequence[Option]]) -> str:
    """Returns the options of all classes. If two classes have the same key with different types,
    both types are allowed. A class that inherits from both classes could not express this."""
    types_of: dict[str, dict[str, None]] = {}
    for options in blocks:
        for option in options:
            for key in (option.key, *option.aliases):
                if not keyword.iskeyword(key):
                    types_of.setdefault(key, {}).update(dict.fromkeys(_parts(option.annotation)))
    lines = ["class AnyOptions(PluginOptions, total=False):"]
    lines.append("    preset: str | type[_Trainer] | Mapping[str, Any]")
    for key, texts in types_of.items():
        none = ["None"] if "None" in texts else []
        lines.append(f"    {key}: {' | '.join([*(t for t in texts if t != 'None'), *none])}")
    # With these, the error of pyright for an unknown option of `train` names the option. Without
    # them, it says that the first argument has a wrong type.
    lines += ["", "class NoSuchOption: ...", ""]
    lines.append(
        "class UnknownOptions(  # type: ignore[call-arg]  # mypy does not know `extra_items`\n"
        "    AnyOptions, total=False, extra_items=NoSuchOption\n): ..."
    )
    return "\n".join(lines)


def _parts(annotation: Any) -> list[str]:
    """Returns the types of a union. For another annotation, returns its only type."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return [type_text(annotation)]
    return ["None" if one is type(None) else type_text(one) for one in get_args(annotation)]


def _combined(name: str, bases: Sequence[str]) -> str:
    listed = "".join(f"    {base},\n" for base in bases)
    return f"class {name}(\n{listed}    total=False,\n): ..."


def _base_class() -> str:
    return """
class PolicyOptimizerTrainer(_Trainer):
    # The second form accepts the options of plugins, which are not known here.
    @overload
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[AnyOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Any,
    ) -> None: ...
"""


def _preset_class(name: str) -> str:
    return f"""
class {name}(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[{name}Options],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[{name}Options]
    ) -> Self: ...
"""


def _train() -> str:
    presets = [(f'Literal["{name}"] | type[{name}]', f"{name}Options") for name in PRESETS]
    forms = [
        (name, options)
        for name, options in presets
        if options != f"{PolicyOptimizerTrainer.__name__}Options"
    ]
    forms += [("str", "AnyOptions"), ("None", "AnyOptions"), ("type[_Trainer]", "")]
    forms += [("str", "UnknownOptions")]
    lines = []
    for experiment, options in forms:
        given = f"Unpack[{options}]" if options else "Any"
        never = "  # type: ignore[overload-cannot-match]" * (options == "UnknownOptions")
        lines.append(
            "@overload\n"
            f"def train({never}\n"
            f"    experiment: {experiment}{' = None' * (experiment == 'None')},\n"
            "    config: Mapping[str, Any] | None = None,\n"
            "    *,\n"
            "    stop: Mapping[str, float] | None = None,\n"
            "    log_dir: _Path | None = None,\n"
            "    checkpoint_every: int = 20,\n"
            "    restore: _Path | None = None,\n"
            "    verbose: int = 1,\n"
            f"    **options: {given},\n"
            ") -> TrainingResult: ..."
        )
    return "\n".join(lines)


def type_text(annotation: Any) -> str:
    """Returns the type annotation of the values that users pass. For a tuple, they may pass any
    sequence. For a nested config, they pass a dict of its options."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return "Any"
    if annotation in _NESTED:
        return _NESTED[annotation]
    if origin is Annotated:
        return type_text(parts[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(_quoted, parts))}]"
    if origin in (Union, types.UnionType):
        texts = [type_text(part) for part in parts if part is not type(None)]
        return " | ".join(dict.fromkeys([*texts, *(["None"] * (type(None) in parts))]))
    if origin in (list, tuple) or annotation in (list, tuple):
        inner = list(dict.fromkeys(type_text(part) for part in parts if part is not Ellipsis))
        return f"Sequence[{' | '.join(inner) or 'Any'}]"
    if isinstance(origin, type) and issubclass(origin, Mapping | dict):
        return f"Mapping[{', '.join(map(type_text, parts))}]"
    if annotation in (int, float, bool, str):
        return str(annotation.__name__)
    return "Any"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def page() -> str:
    """Returns the text of `docs/options.md`."""
    return _linked("\n".join(_page_lines()) + "\n")


def _linked(text: str) -> str:
    """Replaces the paths of pages, as in docstrings, by links to these pages."""
    return re.sub(r"`docs/([\w-]+\.md)`", r"[\1](\1)", text)


def _page_lines() -> Iterator[str]:
    presets = [f"[{name}](#{name.lower()})" for name in PRESETS]
    yield from (
        "# Options",
        "",
        "This page has two parts. The tables explain each option once. The sections after the "
        "tables show each preset whole, with all its options and its own defaults: "
        f"{', '.join(presets)}. `polopt list PRESET` prints both for one preset.",
        "",
        "In the tables, the column *default* begins with the default of most presets. Other "
        "defaults follow with the names of the presets, or with the names of policies and "
        "optimizers that no preset uses. The last column has other names that polopt accepts. Most "
        "of them are names in RLlib.",
        "",
        "This page is made from the config classes: `python tests/generated_files.py` writes it.",
        "",
        "## What the options mean",
    )
    users = _users()
    for title, owners in _groups():
        yield from ("", f"### {title}", "")
        yield "| key | default | allowed | meaning | other names |"
        yield "|---|---|---|---|---|"
        for owner in owners:
            for option in own_options(owner):
                if option.owner is owner:
                    key = (owner, option.key)
                    yield _row({name: users[name][key] for name in users if key in users[name]})
    for name, cls in PRESETS.items():
        yield from _preset_section(name, cls.preset)


def _row(users: Mapping[str, Option]) -> str:
    """Returns the row of an option. `users` maps each preset that has the option to the option."""
    option = next(iter(users.values()))
    assert option.owner is not None
    names = ", ".join(f"`{name}`" for name in option.aliases)
    cells = (
        f"`{option.key}`",
        _variants({name: f"`{shown_default(one.default)}`" for name, one in users.items()}, "; "),
        option.allowed.replace("'", "`"),
        _variants({name: one.meaning for name, one in users.items()}, " "),
        names,
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _variants(texts: Mapping[str, str], separator: str) -> str:
    """Returns the most common text, and then the other texts with the names that have them."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    first, *others = sorted(names, key=lambda text: -len(names[text]))
    return separator.join([first, *(f"{', '.join(names[text])}: {text}" for text in others)])


def _users() -> dict[str, dict[tuple[type[Config] | None, str], Option]]:
    """Returns the options of each preset, and of each policy and optimizer that no preset uses."""
    used = {name for preset in PRESETS.values() for name in plugin_names({}, preset.preset)}
    found = {name: options_of(preset.preset) for name, preset in PRESETS.items()}
    for registry in (OPTIMIZERS, POLICIES):
        for name in _builtin(registry):
            if name not in used:
                found[f"`{name}`"] = own_options(registry.get(name).config_class)
    for options in found.values():
        for option in [*options]:
            nested = nested_config(option.annotation)
            if nested is not None:
                values = option.default.to_dict()
                options += [replace(one, default=values[one.key]) for one in own_options(nested)]
    return {name: {(one.owner, one.key): one for one in found[name]} for name in found}


def _builtin(registry: Any) -> list[str]:
    names = registry.names()
    return [name for name in names if registry.get(name).__module__.startswith("polopt.")]


def _groups() -> Iterator[tuple[str, list[type[Config]]]]:
    """Yields the config classes that introduce options, each with a title that says whose options
    these are."""
    yield "Sampling", [RolloutConfig]
    yield "Trainer and evaluation", [TrainerConfig]
    for config in add_on_configs():
        yield config.__name__.removesuffix("Config"), [config]
    yield "`evaluation_config`", [EvaluationConfig]
    yield "`model`", [ModelConfig]
    for kind, registry in (("optimizer", OPTIMIZERS), ("policy", POLICIES)):
        plural = "policies" if kind == "policy" else "optimizers"
        every, users = _builtin(registry), dict[type[Config], list[str]]()
        for name in every:
            options = own_options(registry.get(name).config_class)
            for owner in dict.fromkeys(option.owner for option in options):
                assert owner is not None
                users.setdefault(owner, []).append(name)
        groups: dict[tuple[str, ...], list[type[Config]]] = {}
        for owner, names in users.items():
            groups.setdefault(tuple(names), []).append(owner)
        for group in sorted(groups, key=len, reverse=True):
            listed = f"{kind if len(group) == 1 else plural} {', '.join(f'`{n}`' for n in group)}"
            title = f"all {plural}" if len(group) == len(every) else listed
            yield title.capitalize(), groups[group]


def _preset_section(name: str, preset: Mapping[str, Any]) -> Iterator[str]:
    """Yields the section of a preset: its whole config as YAML."""
    optimizer, policy = plugin_names({}, preset)
    first = (inspect.getdoc(PRESETS[name]) or "").partition("\n\n")[0].replace("\n", " ")
    yield from ("", f"## {name}", "")
    if preset:
        yield f"{first} Optimizer `{optimizer}`, policy `{policy}`."
        yield "The preset itself sets the values that are marked with `# *`."
    else:
        yield "Any optimizer with any policy that fits it. These are the options for the optimizer"
        yield f"`{optimizer}` and the policy `{policy}`, which are the defaults."
    yield from ("", "```yaml", f"run: {name}", "config:")
    sampling, for_policy, for_optimizer, for_trainer, *of_add_ons = config_classes(preset)
    parts = {
        f"policy {policy}": for_policy,
        f"optimizer {optimizer}": for_optimizer,
        "sampling": sampling,
        "trainer and evaluation": for_trainer,
        **{f"add-on {config.__module__.split('.')[1]}": config for config in of_add_ons},
    }
    for title, config in parts.items():
        yield f"  # {title}"
        for option in own_options(config, preset):
            nested = nested_config(option.annotation)
            if nested is not None:
                yield f"  {option.key}:"
                values = option.default.to_dict()
                yield from (f"    {key}: {_yaml(value)}" for key, value in values.items())
            else:
                mark = "  # *" if option.key in preset else ""
                yield f"  {option.key}: {_yaml(option.default)}{mark}"
    yield "```"


def _yaml(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()


#: The public names with a section of their own in `docs/api.md`, by the heading above them. For a
#: class, the names of the methods that users call follow.
_API: dict[str, dict[str, tuple[str, ...]]] = {
    "Functions": {
        "train": (),
        "evaluate": (),
        "load": (),
        "rerun": (),
        "register": (),
        "sb3_defaults": (),
        "foreach_worker": (),
        "to_tensordict": (),
    },
    "Trainers and results": {
        "PolicyOptimizerTrainer": (
            *("train", "evaluate", "save", "restore", "from_checkpoint", "request_stop"),
            *("get_policy", "compute_single_action", "stop"),
        ),
        "TrainingResult": ("stop_reason",),
        "EvaluationResult": ("episode_return_mean",),
        "Policy": ("predict", "export_onnx", "get_weights", "set_weights", "set_option"),
        "Episode": (),
        "Callbacks": (
            *("on_episode_start", "on_episode_step", "on_episode_end", "on_sample_end"),
            *("on_evaluate_start", "on_evaluate_end", "on_train_result"),
        ),
    },
    "Data": {
        "SampleBatch": (
            *("obs", "bootstrap_obs", "shape", "env_steps", "versions", "flat", "iter_rows"),
            *("select", "steps", "concat"),
        ),
        "Transitions": (),
        "Sequences": (),
        "Weights": (),
        "Gradients": (),
        "StepResult": (),
    },
}


def api_page() -> str:
    """Returns the text of `docs/api.md`."""
    return _linked("\n".join(_api_lines()) + "\n")


def _api_lines() -> Iterator[str]:
    yield from (
        "# Python interface",
        "",
        "The functions and classes that users call, with their arguments, fields and errors. "
        "[strategy-names.md](strategy-names.md) lists what strategies use, "
        "and [options.md](options.md) lists the options. In Python, `help(polopt.NAME)` shows the "
        "same text for every name.",
        "",
        "This page is made from the docstrings: `python tests/generated_files.py` writes it.",
    )
    shown = []
    for heading, names in _API.items():
        yield from ("", f"## {heading}")
        for name, methods in names.items():
            shown.append(name)
            owner = getattr(polopt, name)
            yield from ("", f"### `{name}`", "", *_described(f"polopt.{name}", owner))
            for method in methods:
                member = inspect.getattr_static(owner, method)
                called = f"{name}.{method}" if _is_static(member) else method
                yield from ("", f"#### `{name}.{method}`", "")
                yield from _described(called, getattr(owner, method))
    yield from ("", "## All other public names", "", "| name | what it is |", "|---|---|")
    for name in sorted({*polopt.__all__} - {*shown, "__version__", "WEIGHTS", *PRESETS}):
        value = getattr(polopt, name)
        first = first_sentence(" ".join((inspect.getdoc(value) or "").split()))
        yield f"| `polopt.{name}` | {first.replace('|', chr(92) + '|')} |"
    yield from ("", "[options.md](options.md) has the presets.")


def _is_static(member: Any) -> bool:
    return isinstance(member, classmethod | staticmethod)


def _described(called: str, value: Any) -> Iterator[str]:
    """Yields the signature of a function, method or class, and its docstring as Markdown."""
    if callable(value) and not (isinstance(value, type) and issubclass(value, polopt.Policy)):
        yield from ("```python", _signature(called, value), "```", "")
    yield from _as_markdown(inspect.getdoc(value) or "")


def _signature(called: str, value: Any) -> str:
    """Returns a call with the parameters of a function, method or class. Omits the options of a
    trainer, because `docs/options.md` has them."""
    empty, parts = inspect.Parameter.empty, []
    signature = inspect.signature(value)
    is_trainer = value is polopt.PolicyOptimizerTrainer
    for one in signature.parameters.values():
        if one.name == "self" or (
            one.default is not empty and is_trainer and "log_dir=None" in parts
        ):
            continue
        if one.kind is one.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        name = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "") + one.name
        kind = "" if one.annotation is empty else f": {_annotation(one.annotation)}"
        equals = " = " if kind else "="
        parts.append(name + kind + ("" if one.default is empty else f"{equals}{one.default!r}"))
    end = signature.return_annotation
    result = "" if isinstance(value, type) or end is empty else f" -> {_annotation(end)}"
    text = f"{called}({', '.join(parts)}){result}"
    if len(text) > 88:
        text = "\n    ".join([f"{called}(", *(f"{part}," for part in parts)]) + f"\n){result}"
    return text.replace("=<factory>", "=...").replace("= <factory>", "= ...")


def _annotation(annotation: Any) -> str:
    text = getattr(annotation, "__forward_arg__", annotation)
    return text if isinstance(text, str) else inspect.formatannotation(text)


def _as_markdown(doc: str) -> Iterator[str]:
    """Yields the lines of a docstring. Its sections, such as `Args:`, become lists."""
    section = ""
    for line in doc.splitlines():
        heading = re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):", line)
        entry = re.match(r"    ([\w, ]+):(?: (.*))?$", line)
        if heading:
            section = heading[1]
            yield from (f"**{section}**", "")
        elif line and not line.startswith(" "):
            section = ""
            yield line
        elif not section:
            yield line
        elif entry and section not in ("Returns", "Yields"):
            yield f"- `{entry[1]}`: {entry[2] or ''}".rstrip()
        elif section in ("Returns", "Yields"):
            yield line.removeprefix("    ")
        else:
            yield f"  {line.strip()}".rstrip()


def pictures() -> dict[Path, str]:
    """Returns the text of each picture of `docs/choose-an-optimizer.md`, by its path."""
    found = scheme_pictures.PICTURES.items()
    return {
        IMAGES / scheme_pictures.file_name(name): scheme_pictures.svg(one) for name, one in found
    }


if __name__ == "__main__":
    runpy.run_path(str(METRICS_PAGE), run_name="__main__")
    STUB.write_text(stub())
    PAGE.write_text(page())
    API_PAGE.write_text(api_page())
    for path, text in pictures().items():
        path.write_text(text)
