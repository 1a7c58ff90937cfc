"""Trains badly configured runs, and prints the findings of the diagnosis for each run.

    python tests/unit/dashboards/badly_configured_runs.py RESULTS_DIR --only NAME ...
    polopt report RESULTS_DIR/NAME --figures FIGURES      # draws the figures

Trains one run after another on CartPole-v1 with one seed. `--seconds` is the training time of each
run, without its start-up. `--tuned` trains the tuned examples instead, in which the diagnosis
should find nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import ray
import yaml
from ray import tune

import polopt
from polopt.common.weights import Gradients
from polopt.dashboards.data.diagnosis import diagnose
from polopt.dashboards.data.run_results import read_results
from polopt.policies.a2c import A2CPolicy
from polopt.trainers.presets import PRESETS

ROOT = Path(__file__).parents[3]
CORES = len(os.sched_getaffinity(0))


class Toy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A CartPole-v1 that can be slow, scale its rewards, and raise errors.

    Args:
        context: the config of the environment. Each step takes `step_s` seconds longer. If
            `one_slow` is true, this delay is ten times as long in worker 3. `reward` is the factor
            on the rewards. `raises` is the probability that a step raises.
    """

    def __init__(self, context: Any) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        slow = context.get("one_slow", False) and context.worker_index == 3
        self._step_s = context.get("step_s", 0.0) * (10.0 if slow else 1.0)
        self._reward = context.get("reward", 1.0)
        self._raises = context.get("raises", 0.0)
        self._rng = np.random.default_rng(context.worker_index)

    def step(self, action: Any) -> Any:
        if self._step_s:
            time.sleep(self._step_s)
        if self._raises and self._rng.random() < self._raises:
            raise RuntimeError("boom")
        observation, reward, *rest = super().step(action)
        return (observation, self._reward * float(reward), *rest)


class SlowLearner(A2CPolicy):
    """An A2C policy whose updates take 5 ms longer, so that the driver cannot keep up with its
    workers on any machine."""

    def apply_gradients(self, gradients: Gradients, lr_scale: float = 1.0) -> dict[str, float]:
        time.sleep(0.005)
        return super().apply_gradients(gradients, lr_scale)


polopt.register_policy("slow_learner", SlowLearner)


@dataclass(frozen=True)
class Bad:
    """A badly configured run.

    Attributes:
        preset: name of the preset that trains.
        rule: name of the diagnosis rule that should find the cause.
        config: config of the run.
        burners: number of other processes during the run, each of which keeps one core busy.
    """

    preset: str
    rule: str
    config: dict[str, Any] = field(default_factory=dict)
    burners: int = 0


ONE_SLOW = {"num_workers": 4, "env_config": {"step_s": 0.001, "one_slow": True}}
LARGE = {"model": {"fcnet_hiddens": [256, 256]}}
RUNS: dict[str, Bad] = {
    "slow_a3c": Bad("A3C", "slow-worker", ONE_SLOW),
    "slow_ppo": Bad("SyncPPO", "slow-worker", {**ONE_SLOW, "rollout_fragment_length": 32}),
    "slow_ddppo": Bad(
        "DDPPO",
        "slow-worker",
        {**ONE_SLOW, "rollout_fragment_length": 32, "optimizer": {
            "name": "decentralized_allreduce", "fraction_workers": 1.0}},
    ),
    "lr_x100": Bad("SyncPPO", "update-size", {"lr": 0.1}),
    "batch_of_8": Bad("A3C", "small-updates", {"rollout_fragment_length": 8}),
    "entropy_collapse": Bad("SyncPPO", "deterministic", {"lr": 0.03, "entropy_coeff": 0.0}),
    "reward_x1e4": Bad("SyncPPO", "value-loss", {"env_config": {"reward": 1e4}}),
    "no_reward": Bad("SyncPPO", "no-reward", {"env_config": {"reward": 0.0}}),
    "env_raises": Bad("A3C", "env-faults", {"env_config": {"raises": 0.01}}),
    "many_workers": Bad("A3C", "too-many-workers", {"num_workers": 2 * CORES}),
    "driver_busy": Bad(
        "PolicyOptimizerTrainer", "driver-busy",
        {"optimizer": "async_gradients", "policy": "slow_learner"},
    ),
    "weights_dominate": Bad(
        "A3C", "weights-dominate", {**LARGE, "num_workers": 4, "rollout_fragment_length": 2}
    ),
    "allreduce": Bad(
        "DDPPO", "allreduce-dominates",
        {**LARGE, "num_workers": 4, "sgd_minibatch_size": 16, "rollout_fragment_length": 32},
    ),
    "busy_machine": Bad("SyncPPO", "machine-busy", burners=4 * CORES),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results_dir", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--tuned", action="store_true")
    args = parser.parse_args()
    ray.init(
        num_cpus=4 * CORES + 8, include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    runs = _tuned() if args.tuned else RUNS
    for name, bad in runs.items():
        if args.only and name not in args.only:
            continue
        with burning(bad.burners):
            path = train(bad, args.results_dir / name, args.seconds)
        found = {finding.rule: finding for finding in diagnose(read_results(path / "result.json"))}
        print(json.dumps({"run": name, "expected": bad.rule, "found": bad.rule in found}))
        for finding in found.values():
            print(f"    {finding.rule}: {finding.text}; {finding.change}", flush=True)


def _tuned() -> dict[str, Bad]:
    paths = sorted((ROOT / "tuned_examples").glob("*.yaml"))
    examples = {path.stem: yaml.safe_load(path.read_text()) for path in paths}
    return {name: Bad(each["run"], "", each["config"]) for name, each in examples.items()}


@contextmanager
def burning(number: int) -> Any:
    """Keeps `number` cores busy until the block ends."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_burn, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _burn() -> None:
    # Ray's workers run at this low priority, too. At a higher priority, these processes would leave
    # the workers almost no CPU time.
    os.nice(15)
    while True:
        sum(range(1000))


def config_of(bad: Bad) -> dict[str, Any]:
    """Returns the complete config of a run."""
    config = {"env": Toy, "num_workers": 2, "num_envs_per_worker": 1, "seed": 0}
    config |= {"min_time_s_per_iteration": 0.25, "min_sample_timesteps_per_iteration": 300}
    return config | bad.config


def train(bad: Bad, folder: Path, seconds: float) -> Path:
    """Trains one run, and returns its directory."""
    run_config = tune.RunConfig(
        storage_path=str(folder.resolve()), stop={"optimizer/training_s": seconds}, verbose=0
    )
    tuner = tune.Tuner(PRESETS[bad.preset], param_space=config_of(bad), run_config=run_config)
    grid = tuner.fit()
    assert not grid.errors, grid.errors
    return Path(grid[0].path)


if __name__ == "__main__":
    main()
