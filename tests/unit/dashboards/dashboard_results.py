"""Writes result files like the files of Tune and polopt, with made-up numbers.

`python tests/unit/dashboards/dashboard_results.py DIR --trials 100 --iterations 10000` writes a
large directory.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

from polopt.dashboards.data.tab import TAB_FILE
from polopt.metrics.worker_times import SPREAD_KEYS

#: The phases of the driver that each optimizer reports.
PHASES = {
    "async_gradients": ("wait", "apply", "dispatch"),
    "sync_gradients": ("wait", "apply", "dispatch"),
    "sync_samples": ("broadcast", "sample", "learn"),
    "async_samples": ("broadcast", "sample", "learn"),
    "decentralized_allreduce": ("group", "sample", "learn"),
}
#: The preset of each optimizer.
PRESETS = {
    "async_gradients": "A3C",
    "sync_gradients": "DPPO",
    "sync_samples": "SyncPPO",
    "async_samples": "IMPALA",
    "decentralized_allreduce": "DDPPO",
}
PARTS = ("sample", "gradient", "learn", "allreduce", "skew", "idle")
_SPEEDS = {"async_gradients": 900, "sync_gradients": 700, "sync_samples": 1000}
_LEARNING_STEPS = {"async_gradients": 40_000, "sync_samples": 25_000, "async_samples": 30_000}


def row(optimizer: str, iteration: int, rng: random.Random, **options: Any) -> dict[str, Any]:
    """Returns one row of a result file.

    Args:
        optimizer: name of the optimizer in results.
        iteration: number of the iteration. The first is 1.
        rng: generator of the noise.
        **options: All are optional. `config`, `done` and `startup_s` are values of the row.
            `num_workers` is the number of workers. `slow` > 0 makes the first worker slower. The
            mean return approaches `level`. If `new_keys` is False, the row lacks the shares of
            time, counts and actions that only newer versions report. `deaths` and `env_faults`
            are the iterations in which these faults happen. `evaluated` has `(mean return,
            environment steps of the policy)` by iteration. `action_sizes` are the numbers of
            categories of discrete actions. `action_dimensions` is the size of a Box.
    """
    workers = options.get("num_workers", 2)
    steps_per_iteration = _SPEEDS.get(optimizer, 800)
    steps, seconds = iteration * steps_per_iteration, iteration * 0.5
    startup_s = options.get("startup_s", 3.0)
    progress = 1.0 - math.exp(-steps / _LEARNING_STEPS.get(optimizer, 35_000))
    level = options.get("level", 480.0) * (1.0 if iteration > 1 else 0.05)
    reward = max(9.0, level * progress + rng.gauss(0.0, 12.0))
    slow = options.get("slow", 0.0)
    block = {
        "name": optimizer,
        "num_env_steps_sampled": steps,
        "num_env_steps_trained": steps,
        "num_updates": iteration * 40,
        "num_skipped_updates": iteration // 40,
        "env_steps_per_s": steps_per_iteration * 2 * rng.uniform(0.9, 1.1),
        "updates_per_s": 80.0 * rng.uniform(0.9, 1.1),
        "startup_s": startup_s,
        "training_s": seconds,
        "interval_s": 0.5 + startup_s * (iteration == 1),
        **{key: _lag(optimizer, rng) for key in _LAGS},
        **{f"{phase}_time_ms": rng.uniform(2, 9) for phase in PHASES[optimizer]},
        **_strategy_numbers(optimizer, iteration, workers, rng),
    }
    if options.get("new_keys", True):
        block.update(_shares(optimizer, workers, rng, slow))
        if iteration == 1:
            startup = startup_s / (startup_s + 0.5)
            share = {phase: v * (1 - startup) for phase, v in block["driver"]["share"].items()}
            block["driver"] = {**block["driver"], "share": {**share, "startup": startup}}
        block.update(_counts(optimizer, iteration, rng))
        block["actions"] = _actions(iteration, options)
    evaluation: dict[str, Any] = {}
    if "evaluated" in options:
        mean, at = options["evaluated"].get(iteration, (math.nan, 0))
        block_ = {"env_runners": {"episode_return_mean": mean}, "policy_env_steps": at}
        evaluation = {"evaluation": block_}
    return {
        **evaluation,
        "env_runners": {
            **_distribution("episode_return", reward, new=iteration > 1),
            **_distribution("episode_len", reward, new=iteration > 1),
            "num_episodes": 5,
        },
        "num_env_steps_sampled_lifetime": steps,
        "num_env_steps_sampled_per_second": block["env_steps_per_s"],
        "learners": {"default_policy": _learner(iteration, rng)},
        "fault_tolerance": _faults(iteration, options),
        "optimizer": block,
        "done": options.get("done", False),
        "training_iteration": iteration,
        "time_this_iter_s": 0.5,
        "time_total_s": seconds + startup_s,
        "timestamp": int(time.time()),
        "config": options.get("config", {}),
    }


def _distribution(name: str, mean: float, new: bool) -> dict[str, Any]:
    """Returns statistics of episodes around a mean. They are NaN before the first episode."""
    parts = {"min": 0.5, "p5": 0.6, "p25": 0.85, "p50": 1.02, "p75": 1.1, "p95": 1.18, "max": 1.2}
    counts = [index * (3 if index < 14 else 1) % 11 if new else 0 for index in range(20)]
    known = {f"{name}_{part}": mean * part_ if new else math.nan for part, part_ in parts.items()}
    return {
        f"{name}_mean": mean if new else math.nan,
        **known,
        f"{name}_histogram": counts,
    }


def _actions(iteration: int, options: dict[str, Any]) -> dict[str, Any]:
    """Returns statistics of the actions of a Box, or the counts of categories.

    The share of the last category rises with the iteration.
    """
    if dimensions := options.get("action_dimensions"):
        mean = [index + 0.01 * iteration for index in range(dimensions)]
        return {"mean": mean, "std": [1.0 / (1.0 + 0.01 * iteration)] * dimensions}
    sizes = options.get("action_sizes", (2,))
    bins = {str(part): [100] * size for part, size in enumerate(sizes)}
    for counts in bins.values():
        counts[-1] += 10 * iteration
    return {"histogram": bins}


_LAGS = ("policy_lag", "policy_lag_rollouts", "gradient_lag", "gradient_lag_rollouts")


def _lag(optimizer: str, rng: random.Random) -> dict[str, Any]:
    histogram = [0] * 17
    for _ in range(40):
        lag = min(16, int(rng.expovariate(0.7))) if optimizer.startswith("async") else 0
        histogram[lag] += 1
    mean = sum(i * count for i, count in enumerate(histogram)) / 40
    return {
        "mean": mean,
        "max": max(i for i, c in enumerate(histogram) if c),
        "histogram": histogram,
    }


def _split(weights: dict[str, float], rng: random.Random) -> dict[str, float]:
    noisy = {key: weight * rng.uniform(0.9, 1.1) for key, weight in weights.items()}
    total = sum(noisy.values())
    return {key: value / total for key, value in noisy.items()}


def _shares(optimizer: str, workers: int, rng: random.Random, slow: float) -> dict[str, Any]:
    first, second, third = PHASES[optimizer]
    driver = _split(
        {first: 0.5 + slow, second: 0.3, third: 0.15, "report": 0.05, "other": 0.02}, rng
    )
    driver["startup"] = 0.0
    allreduce = optimizer == "decentralized_allreduce"
    parts = _split(
        {
            "sample": 0.5,
            "gradient": 0.3 if "gradients" in optimizer else 0.0,
            "learn": 0.2 if allreduce else 0.0,
            "allreduce": 0.12 if allreduce else 0.0,
            "skew": 0.05 + slow if allreduce else 0.0,
            "idle": 0.1,
        },
        rng,
    )
    if workers == 0:  # the driver samples
        parts = {**dict.fromkeys(parts, 0.0), "sample": 1.0}
    per_worker = [
        {
            "index": index + (workers > 0),
            "env_steps_per_s": 800 * rng.uniform(0.9, 1.1) / (1 + 4 * slow * (index == 0)),
            "env_steps_per_sampling_s": 950 * rng.uniform(0.9, 1.1) / (1 + 4 * slow * (index == 0)),
            "idle_share": parts["idle"] * rng.uniform(0.8, 1.2),
            "gradients_per_s": 20.0 * rng.uniform(0.9, 1.1) / (1 + 4 * slow * (index == 0)),
            "cpus": rng.uniform(0.5, 1.0),
            "memory_bytes": 3e8 + 1e5 * rng.random(),
            "gpu_share": 0.0,
            "gpu_memory_bytes": 0,
        }
        for index in range(max(workers, 1))
    ]
    times = {phase: rng.uniform(2, 9) for phase in (first, second, third, "report")}
    worker_times = {part: rng.uniform(1, 5) for part in PARTS}
    return {
        "transport": "socket",
        "driver": {
            "share": driver,
            "p50_ms": times,
            "p99_ms": {phase: 3 * value for phase, value in times.items()},
        },
        "workers": {
            "share": parts,
            "p50_ms": worker_times,
            "p99_ms": {part: 2 * value for part, value in worker_times.items()},
            **{key: _spread([worker[key] for worker in per_worker]) for key in SPREAD_KEYS},
            "per_worker": per_worker,
        },
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}


def _counts(optimizer: str, iteration: int, rng: random.Random) -> dict[str, Any]:
    gradients = 40 * iteration if "gradients" in optimizer else 0
    return {
        "num_bytes_sent": iteration * 1_000_000,
        "num_bytes_received": iteration * 1_500_000,
        "num_events_recorded": 0,
        "machine": {
            "cpu_share": 0.7,
            "num_cpus": 16,
            "load_1m": 4.0,
            "driver_cpus": rng.uniform(0.3, 0.9),
            "driver_memory_bytes": 5e8,
            "driver_gpu_share": 0.0,
            "driver_gpu_memory_bytes": 0,
        },
        "rows_per_update": 20.0 if gradients else 128.0,
        "requests_in_flight": {"mean": rng.uniform(1, 2), "max": 2},
        "num_gradients_accepted": gradients,
        "num_gradients_stale": gradients // 20,
        "num_gradients_skipped": gradients // 400,
    }


def _strategy_numbers(
    optimizer: str, iteration: int, workers: int, rng: random.Random
) -> dict[str, Any]:
    if "samples" in optimizer:
        return {
            "num_early_stopped": iteration // 6,
            "sample_peak_throughput": 3000 * rng.uniform(0.95, 1.05),
            "learn_peak_throughput": 4000 * rng.uniform(0.95, 1.05),
            "num_batches": iteration * 4,
            "num_fragments_waiting": iteration * 7,
        }
    if "allreduce" in optimizer:
        return {
            "num_rounds": iteration * 4,
            "num_broken_rounds": iteration // 30,
            "num_early_stopped": iteration,
            "num_checksums": iteration // 4,
            "num_resynchronized": 0,
            "num_ranks": workers - (iteration % 30 == 0),
            "allreduce_time_ms": rng.uniform(2, 4),
            "skew_time_ms": rng.uniform(0.5, 2),
        }
    return {"num_gradients": 40 * iteration, "num_stale_gradients": 2 * iteration}


def _learner(iteration: int, rng: random.Random) -> dict[str, float]:
    return {
        "policy_loss": -0.02 + rng.gauss(0, 0.01),
        "vf_loss": 5.0 / (1 + 0.02 * iteration) + rng.random(),
        "entropy": 0.69 * math.exp(-iteration / 200),
        "total_loss": 1.0 + rng.gauss(0, 0.1),
        "mean_kl_loss": abs(rng.gauss(0.01, 0.004)),
        "clip_fraction": abs(rng.gauss(0.1, 0.02)),
        "vf_explained_var": min(1.0, 0.4 + iteration / 300),
        "vf_predicted_mean": 20.0 + iteration + math.sin(iteration),
        "vf_target_mean": 22.0 + iteration,
        "grad_norm": 1.0 + rng.random(),
        "default_optimizer_learning_rate": 2e-3 * max(0.1, 1 - iteration / 300),
    }


def _faults(iteration: int, options: dict[str, Any]) -> dict[str, Any]:
    deaths = sum(iteration >= at for at in options.get("deaths", ()))
    env_faults = sum(iteration >= at for at in options.get("env_faults", ()))
    return {
        "num_healthy_workers": options.get("num_workers", 2),
        "num_remote_worker_restarts": deaths,
        "num_worker_deaths": deaths,
        "last_death": "The actor died: <b>SIGKILL</b>" if deaths else "",
        "num_env_faults": env_faults,
        "last_env_fault": "ValueError: reward" if env_faults else "",
        "num_non_finite": 0,
        "last_non_finite": "",
    }


def write_trial(
    experiment: Path, optimizer: str, seed: int, iterations: int, **options: Any
) -> Path:
    """Writes `params.json` and `result.json` of one trial, and returns the trial's directory.

    Args:
        experiment: directory of the experiment.
        optimizer: name of the optimizer in results.
        seed: seed of the config and of the noise.
        iterations: number of rows.
        **options: the options of `row`, and the following. If `tab` is False, the file of the
            optimizer's tab is not written. `params` are further keys of the config. `first` is the
            number of the first iteration. If `finished` is False, the last row does not end the
            run. `preset` is the name of the trainable.
    """
    rng = random.Random(f"{optimizer} {seed} {options.get('first', 1)}")
    config = {"env": "CartPole-v1", "num_workers": options.get("num_workers", 2), "lr": 0.002}
    config |= {"seed": seed, **options.get("params", {})}
    trainable = options.get("preset") or PRESETS[optimizer]
    number = random.Random(f"{trainable} {seed} {options.get('params')}").randrange(16**5)
    folder = experiment / f"{trainable}_{number:05x}_00000_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(config))
    if options.get("tab", True):
        (folder / TAB_FILE).write_text(_tab(optimizer))
    last = options.get("first", 1) + iterations - 1
    with (folder / "result.json").open("a") as file:
        for iteration in range(options.get("first", 1), last + 1):
            done = iteration == last and options.get("finished", True)
            line = row(optimizer, iteration, rng, **options, config=config, done=done)
            file.write(json.dumps(line) + "\n")
    return folder


@cache
def _tab(optimizer: str) -> str:
    """Returns the text of the file in which the trainer declares the tab of the optimizer."""
    from polopt.dashboards.tab_file import tab_of
    from polopt.optimizers.optimizer_registry import OPTIMIZERS

    numbers = _strategy_numbers(optimizer, 1, 1, random.Random(0))
    numbers = {key: 0 for key in numbers if not key.endswith("_time_ms")}
    return tab_of(OPTIMIZERS.get(optimizer), numbers).to_json()


def write_state(
    experiment: Path,
    trials: dict[str, dict[str, Any]],
    session: str = "2026-01-01_00-00-00",
    **o: Any,
) -> Path:
    """Writes the state of an experiment as Tune does, and returns the path of the file.

    Args:
        experiment: directory in which the file is written. It is the directory of the experiment,
            or the local directory from which Tune copies files to the experiment.
        trials: the state of each trial, such as its `status`, by the name of its directory.
        session: the time at which the run began, as it is in the name of the file.
        **o: All are optional. `directory` is the directory of the experiment, if it is not
            `experiment`. `scheduler` is the scheduler in `tuner.pkl`. `stopper` is the stopper in
            the state.
    """
    directory = o.get("directory", experiment)
    storage = {"experiment_dir_name": directory.name, "storage_fs_path": str(directory.parent)}
    saved = [
        {
            "trial_id": f"{number:05x}_00000",
            "relative_logdir": name,
            "config": {"env": "CartPole-v1"},
            "stopping_criterion": {},
            "storage": _pickled(storage),
            **state,
        }
        for number, (name, state) in enumerate(trials.items())
    ]
    runner = {"_stopper": _pickled(o["stopper"])} if "stopper" in o else {}
    content = {
        "trial_data": [[json.dumps(state), json.dumps({"last_result": {}})] for state in saved],
        "runner_data": runner,
        "stats": {},
    }
    experiment.mkdir(parents=True, exist_ok=True)
    file = experiment / f"experiment_state-{session}.json"
    file.write_text(json.dumps(content))
    if "scheduler" in o:
        state = {"_tune_config": {"mode": None, "scheduler": o["scheduler"]}}
        (experiment / "tuner.pkl").write_bytes(pickle.dumps(state))
    return file


def _pickled(value: Any) -> dict[str, str]:
    return {"_type": "CLOUDPICKLE_FALLBACK", "value": pickle.dumps(value).hex()}


def write_examples(root: Path, seeds: int = 5, iterations: int = 60) -> Path:
    """Writes an experiment with `seeds` runs of every optimizer in `PHASES`, and returns its
    directory."""
    for optimizer in PHASES:
        for seed in range(seeds):
            write_trial(
                root, optimizer, seed, iterations, level=440.0 + 8 * seed, deaths=(20 + seed,)
            )
    return root


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=2000)
    arguments = parser.parse_args()
    for number in range(arguments.trials):
        optimizer = list(PHASES)[number % len(PHASES)]
        write_trial(arguments.directory, optimizer, number, arguments.iterations, num_workers=8)


if __name__ == "__main__":
    _main()
