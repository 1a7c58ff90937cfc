"""Errors and warnings of environments, and tracebacks without polopt's own frames."""

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
_formatted: dict[Any, str] = {}  # formatted tracebacks by exception and code positions
_MAX_FORMATTED = 20
_warned: set[tuple[type, str]] = set()
_MOST_QUOTED = 300


class EnvironmentFailedError(RuntimeError):
    """An environment fails repeatedly. The message names it, its worker and its step, and ends with
    the environment's own traceback."""


class EnvironmentAPIError(EnvironmentFailedError):
    """An environment breaks Gymnasium's API. The message says how. Every worker would fail alike,
    so the run ends without restarts."""


class APIViolation(TypeError):
    """A result of an environment that Gymnasium's API does not allow."""


def warn_without(owner: Any, name: str, problem: Exception | str, without: str) -> None:
    """Logs that the run goes on without something that it takes from an environment: once in each
    process for a class and a name.

    Args:
        owner: environment, wrapper or part of one. The warning names its class.
        name: method or attribute.
        problem: what is wrong with it.
        without: what is different now.
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
    """The environment in all wrappers, for messages. The argument itself if `unwrapped` raises."""
    try:
        return env.unwrapped
    except Exception:  # a user's property may raise anything
        return env


def described(error: BaseException) -> str:
    """Type and text of an exception, or the line that raised it, if it has no text. Says what to do
    about a wrapper of Gymnasium that refuses the mode of the vector which it wraps: up to Gymnasium
    1.3 by an assertion without a text, later by a ValueError."""
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
    """Names the current thread for messages about an environment that raised, and says what helps
    an environment that works in the main thread only. Empty in the main thread."""
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    return (
        f" (in the thread {thread.name!r}; an environment that works only in the main thread, or "
        "in the thread that made it, needs a process of its own: num_workers or num_collectors of "
        "1 or more)"
    )


def traceback_of(error: BaseException, env: Any = None, method: str = "step") -> str:
    """The traceback of an exception, beginning in the environment's own code. An `APIViolation` is
    not raised there, so its text names the place where `method` is defined.

    Args:
        error: the exception. Its leading frames in `polopt.rollouts` are left out.
        env: the environment that returned a wrong result.
        method: name of the method that returned it.
    """
    if isinstance(error, APIViolation):
        return f"{_definition(env, method)}{type(error).__name__}: {error}"
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_own(frames):
        frames = frames.tb_next
    if error.__cause__ is not None or error.__context__ is not None:
        return "".join(traceback.format_exception(type(error), error, frames)).strip()
    # Formatting takes milliseconds, and an environment that fails often fails in few ways.
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
