"""Adds the options of a preset to its `help` and to its signature. The options come from the config
classes."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from polopt.common.config import ConfigError
from polopt.trainers.options import Option, first_sentence, options_of, shown_default


class PresetDoc:
    """Descriptor for the attribute `__doc__` of a preset: the docstring, an example and the
    options. The text is made when it is read, so importing a preset takes no extra time.

    Args:
        text: docstring of the class.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type[Any]) -> str:
        options = _options(owner)
        if not options:
            return self._text
        chosen = {option.key: option.default for option in options}
        lines = [
            inspect.cleandoc(self._text),
            "",
            f"Optimizer: {chosen['optimizer']}. Policy: {chosen['policy']}.",
            "",
            f'    trainer = polopt.{owner.__name__}(env="CartPole-v1", num_workers=0)',
            "    result = trainer.train()",
            '    print(result["episode_return_mean"])',
            "    trainer.stop()",
            "",
            f"Options and defaults. `polopt list {owner.__name__}` also shows the allowed values.",
            "",
        ]
        for option in options:
            meaning = first_sentence(option.meaning)
            lines.append(f"    {option.key}={shown_default(option.default)}: {meaning}")
        return "\n".join(lines)


class PresetSignature:
    """Descriptor for the attribute `__signature__` of a preset. Notebooks use the signature to
    complete the names of options."""

    def __get__(self, instance: object, owner: type[Any]) -> inspect.Signature:
        keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
        parameters = [
            inspect.Parameter("config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None),
            inspect.Parameter("log_dir", keyword, default=None),
        ]
        options = _options(owner)
        types = _plain_types({option.key: option.annotation for option in options})
        for option in options:
            annotation = empty if option.annotation is Any else types[option.key]
            for name in option.names:
                if name.isidentifier():
                    parameters.append(
                        inspect.Parameter(
                            name, keyword, default=option.default, annotation=annotation
                        )
                    )
        parameters.append(inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD))
        return inspect.Signature(parameters)


def _plain_types(annotations: dict[str, Any]) -> dict[str, Any]:
    """Returns the types without the metadata of `Annotated`, which readers of a signature do not
    need."""

    def holder() -> None: ...

    holder.__annotations__ = annotations
    return get_type_hints(holder)


def _options(preset: type[Any]) -> list[Option]:
    """Returns the options of a preset. Returns an empty list if its optimizer or policy is not
    known in this process."""
    try:
        return options_of(preset.preset)
    except ConfigError:
        return []
