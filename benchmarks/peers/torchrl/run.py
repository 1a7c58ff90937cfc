"""TorchRL's RayCollector: two collectors of 8 environments each.

    python benchmarks/peers/torchrl/run.py CASE [--seconds 5] [--seed 0]

`benchmarks/collectors_serving.py` has the settings: a `SerialEnv` (TorchRL's fastest option), an
MLP of 64x64 tanh units without values, and batches of 2,000 frames.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import measuring  # first: it starts the clock of start-up

# isort: split
import ray
import torch
from collectors_serving import TorchRL


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """Measures the frames per second."""
    torch.manual_seed(args.seed)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        address="local",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    sync = args.case == "collect-sync"
    collecting = TorchRL({"env": "CartPole-v1", "envs": 8, "sync": sync, "frames": 2000})
    clock = measuring.RateClock(args.seconds)
    frames = 0
    while not clock.tick(frames):
        frames += collecting.next()
    collecting.stop()
    return clock.result()


CASES = {"collect-sync": collect, "collect-async": collect}

if __name__ == "__main__":
    torch.set_num_threads(1)
    measuring.main(__doc__, CASES, ("torchrl", "tensordict", "ray", "torch", "gymnasium"))
