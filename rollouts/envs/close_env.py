"""`close_env`: closes an environment that may fail to close."""

from __future__ import annotations

import logging
from typing import Any

from gymnasium.vector import AsyncVectorEnv, VectorEnv

logger = logging.getLogger("polopt")


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
