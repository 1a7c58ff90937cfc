"""`close_env`: closes an environment that may fail to close."""

from __future__ import annotations

import logging
from typing import Any

from gymnasium.vector import AsyncVectorEnv, VectorEnv

logger = logging.getLogger("polopt")


def close_env(env: Any, name: str, terminate: bool = False) -> None:
    """Closes an environment or a vector environment. Logs an exception of `close()` and continues:
    the results of the environment are complete, and a new one does not depend on it.

    Args:
        env: in any state, also after an exception.
        name: of the environment, for the log.
        terminate: end the processes of an `AsyncVectorEnv` without closing the environments there.
            For one that has raised, and may not answer.
    """
    try:
        if terminate and isinstance(env.unwrapped, AsyncVectorEnv):
            env.close(terminate=True)
        else:
            env.close()
    except Exception as error:
        logger.warning("%s: close() raised %s: %s", name, type(error).__name__, error)
        if isinstance(env, VectorEnv):
            env.unwrapped.closed = True  # or its finalizer calls close() again
            if isinstance(env.unwrapped, AsyncVectorEnv):
                for process in env.unwrapped.processes:
                    process.terminate()
