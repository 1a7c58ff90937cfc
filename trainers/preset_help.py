"""What `help` and the signature of a preset show: its options, as their config classes declare
them."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from polopt.common.config import ConfigError
from polopt.trainers.options import Option, first_sentence, options_of, shown_default


class PresetDoc:
    """The attribute `__doc__` of a preset: its docstring, an example and its options. It is made
    when it is asked for, so that importing a preset costs no time.

    Args:
        text: the docstring.
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
            f"Options and defaults. `polopt list {owner.__name__}` also says what is allowed.",
            "",
        ]
        for option in options:
            meaning = first_sentence(option.meaning)
            lines.append(f"    {option.key}={shown_default(option.default)}: {meaning}")
        return "\n".join(lines)


class PresetSignature:
    """The attribute `__signature__` of a preset, from which notebooks complete its options."""

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
    """The types without the metadata of `Annotated`, which a reader of a signature cannot use."""

    def holder() -> None: ...

    holder.__annotations__ = annotations
    return get_type_hints(holder)


def _options(preset: type[Any]) -> list[Option]:
    """The options of a preset. None where its optimizer or policy is not known here."""
    try:
        return options_of(preset.preset)
    except ConfigError:
        return []
