"""Errors and warnings about environments: their texts and tracebacks, missing packages, and
environments that fail to close."""

from __future__ import annotations

import inspect
import logging
import os
import re
import threading
import traceback
from types import TracebackType
from typing import Any

from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv, VectorWrapper

logger = logging.getLogger("polopt")
_ROLLOUTS = os.path.dirname(os.path.dirname(__file__))
_formatted: dict[Any, str] = {}  # maps exceptions and their code positions to tracebacks
_MAX_FORMATTED = 20
_warned: set[tuple[type, str]] = set()
_MOST_QUOTED = 300
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


class EnvironmentFailedError(RuntimeError):
    """Raised when an environment cannot be made, needs a missing package, or fails repeatedly. The
    message names the environment. After repeated failures, the message also names the worker and
    the step, and ends with the environment's own traceback."""


class EnvironmentAPIError(EnvironmentFailedError):
    """Raised when an environment breaks Gymnasium's API, or when its spaces do not fit the policy.
    The message says how. The run ends without restarts, because a restart would not help."""


class APIViolation(TypeError):
    """Raised when an environment returns a result that Gymnasium's API does not allow."""


def warn_without(owner: Any, name: str, problem: Exception | str, without: str) -> None:
    """Warns that polopt cannot use a method or attribute of an environment, and that the run goes
    on without it. Each process logs the warning once for each pair of class and name.

    Args:
        owner: an environment, a wrapper, or an object that belongs to one of them. The warning
            names the class of this object.
        name: the name of the method or attribute.
        problem: the reason why polopt cannot use the method or attribute.
        without: how the run differs without the method or attribute.
    """
    if (type(owner), name) in _warned:
        return
    _warned.add((type(owner), name))
    if isinstance(problem, Exception):
        problem = described(problem)
    problem = " ".join(problem.split())
    if len(problem) > _MOST_QUOTED:
        problem = f"{problem[:_MOST_QUOTED]}..."
    logger.warning(
        "%s.%s cannot be used (%s). The run goes on without it: %s",
        type(owner).__qualname__,
        name,
        problem,
        without,
    )


def innermost(env: Any) -> Any:
    """Returns the environment without its wrappers, for messages. Returns `env` itself if
    `env.unwrapped` raises."""
    try:
        return env.unwrapped
    except Exception:  # a user's property may raise anything
        return env


def described(error: BaseException) -> str:
    """Returns the type and text of an exception. If the exception has no text, returns its type and
    the line that raised it.

    Some wrappers of Gymnasium refuse the autoreset mode of the vector environment that they wrap.
    For such an exception, the result also says what the user can do. Up to Gymnasium 1.3, the
    exception is an AssertionError without a text. Later versions raise a ValueError.
    """
    text, frames = str(error), list(traceback.walk_tb(error.__traceback__))
    if not frames or (text and "autoreset_mode" not in text):
        return f"{type(error).__name__}: {text}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f" in {last.filename}, line {last.lineno}: {last.line}"
    text = f"{type(error).__name__}" + (f": {text}" if text else where)
    wrapper = frames[-1][0].f_locals.get("self")
    if isinstance(wrapper, VectorWrapper):
        mode = getattr(vars(wrapper).get("env"), "metadata", {}).get("autoreset_mode")
        if isinstance(mode, AutoresetMode) and mode != AutoresetMode.NEXT_STEP:
            text += (
                f". {type(wrapper).__name__} cannot wrap a vector in autoreset mode "
                f"{mode.value!r}: make the vector in the mode 'NextStep', or wrap each of its "
                "environments instead of the vector"
            )
    return text


def other_thread() -> str:
    """Returns a text for messages about an environment that raised. The text names the current
    thread, and says what the user can do if the environment works only in the main thread. In the
    main thread, the text is empty."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    return (
        f" (in the thread {thread.name!r}; an environment that works only in the main thread, or "
        "in the thread that made it, needs a process of its own: num_workers or num_collectors of "
        "1 or more)"
    )


def traceback_of(error: BaseException, env: Any = None, method: str = "step") -> str:
    """Returns the traceback of an exception without its leading frames in `polopt.rollouts`, so
    that it usually starts in the environment's code.

    The environment's code does not raise `APIViolation` itself. For an `APIViolation`, the result
    instead names the file and line where `method` is defined.

    Args:
        error: the exception.
        env: the environment that returned a wrong result.
        method: the name of the method that returned the wrong result.
    """
    if isinstance(error, APIViolation):
        return f"{_definition(env, method)}{type(error).__name__}: {error}"
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_own(frames):
        frames = frames.tb_next
    if error.__cause__ is not None or error.__context__ is not None:
        return "".join(traceback.format_exception(type(error), error, frames)).strip()
    # Formatting takes milliseconds. An environment that fails often usually raises the same few
    # exceptions, so their formatted tracebacks are cached.
    lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(frames)]
    key = (type(error), str(error), *lines)
    if key not in _formatted:
        if len(_formatted) >= _MAX_FORMATTED:
            _formatted.clear()
        _formatted[key] = "".join(traceback.format_exception(type(error), error, frames)).strip()
    return _formatted[key]


def _is_own(frames: TracebackType) -> bool:
    return os.path.dirname(os.path.dirname(frames.tb_frame.f_code.co_filename)) == _ROLLOUTS


def _definition(env: Any, method: str) -> str:
    code = getattr(getattr(type(innermost(env)), method, None), "__code__", None)
    if code is None:
        return ""
    where = inspect.getfile(code)
    return f'  File "{where}", line {code.co_firstlineno}, in {code.co_name}\n'


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


def close_env(env: Any, name: str, terminate: bool = False) -> None:
    """Closes an environment or a vector environment.

    If `close()` raises, this function logs the exception and returns. Training can continue,
    because this environment is no longer used.

    Args:
        env: an environment in any state, including one that has raised.
        name: the name of the environment in the log.
        terminate: whether to end the processes of an `AsyncVectorEnv` without closing the
            environments in them. Use this after the vector has raised. The processes of such a
            vector may no longer answer.
    """
    try:
        if terminate and isinstance(env.unwrapped, AsyncVectorEnv):
            env.close(terminate=True)
        else:
            env.close()
    except Exception as error:
        logger.warning("%s: close() raised %s: %s", name, type(error).__name__, error)
        if isinstance(env, VectorEnv):
            env.unwrapped.closed = True  # keeps the finalizer from calling close() again
            if isinstance(env.unwrapped, AsyncVectorEnv):
                for process in env.unwrapped.processes:
                    process.terminate()
