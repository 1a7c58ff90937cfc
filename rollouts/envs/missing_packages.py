"""`missing_package`: one line about a package that an environment needs and that is not there."""

from __future__ import annotations

import re

from gymnasium.error import DependencyNotInstalled

#: Modules that Gymnasium's environments and wrappers import, and the extra of Gymnasium that
#: installs each. Some environments import them without a message of their own.
_EXTRAS = {
    "ale_py": "atari",
    "array_api_compat": "array-api",
    "Box2D": "box2d",
    "cv2": "other",
    "flax": "jax",
    "jax": "jax",
    "jaxlib": "jax",
    "matplotlib": "other",
    "moviepy": "other",
    "mujoco": "mujoco",
    "pygame": "classic-control",
    "seaborn": "other",
}
#: "MuJoCo is not installed, run `pip install ...`", in the forms that Gymnasium has of it.
_NOT_INSTALLED = re.compile(r"(?P<what>.+?)(?: packages?)? (?:is |are )?not installed")
#: From the first command between backquotes to the last.
_COMMANDS = re.compile(r"`(pip install .*)`")


def missing_package(error: BaseException | None, env: str) -> str | None:
    """Returns what an environment needs and the command that installs it, on one line. None for an
    error that has another reason.

        HalfCheetah-v5 needs MuJoCo: pip install "gymnasium[mujoco]"

    Args:
        error: of `gymnasium.make`, of a callable, or of an environment's method.
        env: name of the environment.
    """
    if not isinstance(error, ImportError | DependencyNotInstalled):
        return None
    env = "the environment" if env.startswith("<") else env  # a lambda
    message = " ".join(str(error).split())
    what, commands = _NOT_INSTALLED.match(message), _COMMANDS.search(message)
    if commands is not None:
        command = commands[1].replace("` followed by `", " && ").replace("`", "")
        return f"{env} needs {what['what'] if what else 'a package'}: {command}"
    module = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and module in _EXTRAS:
        return f'{env} needs {module}: pip install "gymnasium[{_EXTRAS[module]}]"'
    return f"{env} cannot be used: {message}" if isinstance(error, DependencyNotInstalled) else None
