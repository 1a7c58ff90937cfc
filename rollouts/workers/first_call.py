"""`first_call`: exceptions of a worker's first call, which are errors in the user's code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from polopt.rollouts.envs.errors import EnvironmentAPIError, EnvironmentFailedError, traceback_of
from polopt.rollouts.envs.resolving import env_name
from polopt.rollouts.workers.worker_config import WorkerConfig

R = TypeVar("R")


class FirstCallError(RuntimeError):
    """The first call of a worker raised: another worker would raise the same. The message names
    policy and environment, and ends with the user's traceback.

    Args:
        message: policy, environment, and the user's traceback.
        of_environment: the environment raised, not the policy.
    """

    def __init__(self, message: str, of_environment: bool = False) -> None:
        super().__init__(message, of_environment)
        self.of_environment = of_environment

    def __str__(self) -> str:
        return str(self.args[0])


class Worker(Protocol):
    """The part of a worker that `first_call` needs."""

    config: WorkerConfig
    index: int
    has_worked: bool


def first_call(method: Callable[..., R]) -> Callable[..., R]:
    """Decorator for methods of a worker that run the user's environment and policy.

    Until a call has succeeded, exceptions become `FirstCallError`. Replacements are excepted: their
    predecessor may have succeeded.
    """

    @functools.wraps(method)
    def wrapped(worker: Worker, *args: Any, **kwargs: Any) -> R:
        # Exceptions of the local worker reach the user unchanged.
        if worker.has_worked or worker.index == 0 or worker.config.restart_count > 0:
            return method(worker, *args, **kwargs)
        try:
            result = method(worker, *args, **kwargs)
        except (FirstCallError, EnvironmentAPIError):
            raise
        except EnvironmentFailedError as error:
            raise FirstCallError(str(error), of_environment=True) from None
        except Exception as error:
            raise FirstCallError(
                f"the first call of worker {worker.index} failed, with policy "
                f"{policy_name(worker.config)!r} on environment {env_name(worker.config.env)!r}: "
                f"{type(error).__name__}: {error}\n{traceback_of(error)}"
            ) from None
        worker.has_worked = True
        return result

    return wrapped


def policy_name(config: WorkerConfig) -> str:
    """Name of the policy in errors: of its class, or of the callable or module that acts."""
    actor = getattr(config.policy, "actor", None)
    if actor is None:
        return str(config.policy_class.__name__)
    return str(getattr(actor, "__name__", type(actor).__name__))
