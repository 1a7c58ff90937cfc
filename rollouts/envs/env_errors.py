"""Errors and warnings about environments, and tracebacks without polopt's own frames."""

from __future__ import annotations

import inspect
import logging
import os
import threading
import traceback
from types import TracebackType
from typing import Any

from gymnasium.vector import AutoresetMode, VectorWrapper

logger = logging.getLogger("polopt")
_ROLLOUTS = os.path.dirname(os.path.dirname(__file__))
_formatted: dict[Any, str] = {}  # maps exceptions and their code positions to tracebacks
_MAX_FORMATTED = 20
_warned: set[tuple[type, str]] = set()
_MOST_QUOTED = 300


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
