"""The part of a config that JSON can hold, for checkpoints to say what they were trained with."""

from __future__ import annotations

import json
from typing import Any

from polopt.trainers.config import Experiment


def portable_config(experiment: Experiment) -> dict[str, Any]:
    """A flat config that `Experiment.parse` takes back.

    What JSON can not hold (a callable environment) is left out; who restores has to give it.
    """
    flat: dict[str, Any] = {
        **experiment.trainer.to_dict(),
        **experiment.rollout.to_dict(),
        "policy": {"name": experiment.policy_name, **experiment.policy.to_dict()},
        "optimizer": {"name": experiment.optimizer_name, **experiment.optimizer.to_dict()},
    }
    return {key: value for key, value in flat.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
