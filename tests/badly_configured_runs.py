"""Makes the badly configured runs of docs/dashboards.md and prints what the page says of them.

    python tests/badly_configured_runs.py RESULTS_DIR [--seconds 25]
    polopt report RESULTS_DIR/a3c --figures FIGURES      # the pictures; likewise for the others

Trains each run for some seconds, one after another, on CartPole-v1 with one seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
from ray import tune

import polopt


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Each step takes `step_s` more seconds; in worker 2 `slow_step_s`."""

    def __init__(self, context: Any) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        slow = context.worker_index == 2
        self._step_s = context["slow_step_s" if slow else "step_s"]

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)
        return super().step(action)


ONE_SLOW: dict[str, Any] = {
    "env": Slow,
    "env_config": {"step_s": 0.0005, "slow_step_s": 0.004},
    "num_workers": 3,
}
FOUR_LARGE: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 4,
    "model": {"fcnet_hiddens": [256, 256]},
}
#: Directory -> trainables and configs of its trials.
RUNS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "a3c": [
        (
            polopt.A3C,
            {**FOUR_LARGE, "rollout_fragment_length": 2},
        ),
        (
            polopt.PolicyOptimizerTrainer,
            {"env": Slow, "env_config": {"step_s": 0.002, "slow_step_s": 0.002}}
            | {"optimizer": {"name": "async_gradients", "grads_per_step": 10}},
        ),
    ],
    "sync_gradients": [
        (
            polopt.PolicyOptimizerTrainer,
            {**ONE_SLOW, "optimizer": {"name": name, "grads_per_step": 6}},
        )
        for name in ("sync_gradients", "async_gradients")
    ],
    "sync_samples": [(polopt.SyncPPO, {**ONE_SLOW, "rollout_fragment_length": 32})],
    "ddppo": [
        (
            polopt.DDPPO,
            {**FOUR_LARGE, "sgd_minibatch_size": 16, "rollout_fragment_length": 32},
        )
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results_dir", type=Path)
    parser.add_argument("--seconds", type=float, default=25.0)
    args = parser.parse_args()
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    for folder, trials in RUNS.items():
        for trainable, config in trials:
            path = train(trainable, config, args.results_dir / folder, args.seconds)
            print(json.dumps({"run": folder, "trainer": trainable.__name__, **figures(path)}))


def train(trainable: Any, config: dict[str, Any], folder: Path, seconds: float) -> Path:
    """Trains one run; its directory."""
    run_config = tune.RunConfig(
        storage_path=str(folder.resolve()), stop={"time_total_s": seconds}, verbose=0
    )
    space = {"min_sample_timesteps_per_iteration": 300, **config, "seed": 0}
    grid = tune.Tuner(trainable, param_space=space, run_config=run_config).fit()
    return Path(grid[0].path)


def figures(run: Path) -> dict[str, Any]:
    """Means over the results after the first third, in which workers start."""
    rows = [json.loads(row) for row in (run / "result.json").open()]
    blocks = [row["optimizer"] for row in rows[len(rows) // 3 :]]
    shares = {
        f"{whose}/{part}": round(float(np.mean([b[whose]["share"][part] for b in blocks])), 3)
        for whose in ("driver", "workers")
        for part in blocks[0][whose]["share"]
    }
    rates = [
        [each["env_steps_per_s"] for each in block["workers"]["per_worker"]] for block in blocks
    ]
    return {
        "results": len(rows),
        **{key: share for key, share in shares.items() if share},
        "env_steps_per_s of workers": np.mean(rates, axis=0).round().tolist(),
    }


if __name__ == "__main__":
    main()
