"""`missing_package`: one line about a package that an environment needs and that is missing."""

from __future__ import annotations

import re

from gymnasium.error import DependencyNotInstalled

#: Maps modules that Gymnasium's environments and wrappers import to the extra of Gymnasium that
#: installs the module. Some environments do not say how to install the module that they import.
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
#: Matches the variants of Gymnasium's message "MuJoCo is not installed, run `pip install ...`".
_NOT_INSTALLED = re.compile(r"(?P<what>.+?)(?: packages?)? (?:is |are )?not installed")
#: Matches all text from the first command in backquotes to the last.
_COMMANDS = re.compile(r"`(pip install .*)`")


def missing_package(error: BaseException | None, env: str) -> str | None:
    """Returns one line that names the missing package and, if known, the command that installs it.
    Returns None if no package is missing, or if the error is an ImportError and the command is not
    known. An example:

        HalfCheetah-v5 needs MuJoCo: pip install "gymnasium[mujoco]"

    Args:
        error: the error that `gymnasium.make`, a user's callable or a method of an environment
            raised.
        env: the name of the environment.
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
