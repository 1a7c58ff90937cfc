"""Attaches gradient workers, which sample with workers of their own, and the scheme of a run."""

from __future__ import annotations

from typing import Any

from polopt.common.add_ons import AddOn, RunListener
from polopt.metrics.number import Number


class Collectors(AddOn):
    """Starts gradient workers if a run asks for workers below its workers."""

    numbers = tuple(
        Number(
            f"optimizer/scheme_{part}",
            "",
            f"the {part} of the optimizer in the [matrix of schemes](schemes.md#the-matrix), or "
            "`unspecified` for an optimizer that does not derive from an optimizer of polopt",
            "text",
        )
        for part in ("collection", "gradients", "update")
    )

    def worker_set(self, config: Any) -> type[Any] | None:
        if config.rollout.num_workers_below == 0:
            return None
        from polopt.collectors.gradient_worker import GradientWorkerSet

        return GradientWorkerSet

    def follow(self, trainer: Any) -> RunListener:
        return _Run(trainer)


class _Run(RunListener):
    """Adds PyTorchRL's terms for the scheme of a run to its results."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def extend(self, result: dict[str, Any]) -> None:
        from polopt.collectors.scheme import scheme_of

        scheme = scheme_of(self._trainer.optimizer)._asdict()
        result["optimizer"] |= {f"scheme_{part}": value for part, value in scheme.items()}


ADD_ON = Collectors()
