"""Predicts rates of training, writes them down, and then measures them.

    python benchmarks/predicted_rates.py                       # all that is missing
    python benchmarks/predicted_rates.py --only A3C constant   # some cases
    python benchmarks/predicted_rates.py --page                # only writes the page

The cases come in stages. A stage first predicts its cases and stores the predictions in
`benchmarks/results/predicted_rates.jsonl`, and then measures the same cases with real workers. The
whole takes about 22 minutes. The script may be stopped at any time: each stage that is complete is
worth as much as it would be alone, and a case that the file contains is not repeated.

The script ends if other programs use the machine, and says so. A case during which they did is
repeated by the next run. If the model has changed since a prediction (`MODEL`), or if the
calibration was shorter than now (`CALIBRATION_S`), both the prediction and the measurement are
repeated. The file keeps the earlier ones, and the page gives their errors.

Environments sleep, so that two cores are enough for 16 workers: for a constant time, for an
exponential time, or for a heavy-tailed (lognormal) time, all with the same mean. In the stage
`short`, fragments are so short that the rate saturates within 16 workers (the knee). HalfCheetah-v5
computes, so it runs with at most as many workers as two cores can serve. It is left out if MuJoCo
is not installed. The page is `docs/plan.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import re
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import ray
from about import about
from quiet import QUIET_CORES, is_good, wait_until_quiet, watching_others
from stored_runs import between, read_runs, write_runs

import polopt

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/predicted_rates.jsonl"
PAGE = ROOT / "docs/plan.md"
PLUGINS = ROOT / "docs/write-an-optimizer.md"
#: The number of the model of simulations. Increase it if predictions change.
MODEL = 3
#: Seconds of a calibration. The default of `polopt simulate` is 40. Where some steps take much
#: longer than others, the mean of the few steps of a short calibration says little.
CALIBRATION_S = {"exponential": 10.0, "heavy": 20.0}
SHORT_S = 3.0
#: Mean duration of a step of a sleeping environment, and the most that one step sleeps.
MEAN_S, MOST_S = 0.002, 0.2
#: Shape of the lognormal sleep. The standard deviation is 1.8 times the mean.
SIGMA = 1.2
CHEETAH = "HalfCheetah-v5"
#: The stages, in the order of their value for the page, and their numbers of workers, in the order
#: in which they are measured.
STAGES: dict[str, tuple[int, ...]] = {
    "constant": (8, 16, 4),
    "heavy": (8, 16, 4),
    "exponential": (8, 16, 4),
    "short": (1, 2, 4, 8, 16),
    CHEETAH: (1, 2),
}
#: Options of all cases.
COMMON: dict[str, Any] = {"num_envs_per_worker": 1, "rollout_fragment_length": 10}
_REPLAY = {"buffer_size": 20_000, "learning_starts": 500}
#: The strategies: experiment and options.
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "async_gradients": ("A3C", {}),
    "sync_gradients": (
        "PolicyOptimizerTrainer",
        {"optimizer": "sync_gradients", "policy": "a2c", "grads_per_step": 32},
    ),
    "sync_samples": ("A2C", {}),
    "async_samples": ("IMPALA", {"train_batch_size": 40}),
    "decentralized_allreduce": ("DDPPO", {"num_sgd_iter": 2}),
    "sync_replay": ("DQN", {**_REPLAY, "training_intensity": 1.0}),
    "async_replay": (
        "ApexDQN",
        {**_REPLAY, "training_intensity": 1.0, "num_replay_shards": 1, "train_batch_size": 64},
    ),
    "local_sgd": ("PolicyOptimizerTrainer", {"optimizer": "local_sgd", "policy": "a2c"}),
    "elastic_averaging": (
        "PolicyOptimizerTrainer",
        {"optimizer": "elastic_averaging", "policy": "a2c"},
    ),
}
#: The strategies of the stage `short`.
KNEES = ("async_gradients", "sync_samples", "async_samples")
#: The strategies that differ for HalfCheetah, which has continuous actions.
CHEETAHS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync_samples": ("SyncPPO", {"train_batch_size": 500}),
    "sync_replay": ("SAC", {"buffer_size": 20_000, "learning_starts": 500}),
    "async_replay": (
        "PolicyOptimizerTrainer",
        {
            "optimizer": "async_replay",
            "policy": "sac",
            **_REPLAY,
            "training_intensity": 64.0,
            "num_replay_shards": 1,
            "train_batch_size": 64,
        },
    ),
}
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


class Sleeping(gymnasium.Env[np.ndarray, int]):
    """Sleeps in each step. The time has the mean `MEAN_S`.

    Args:
        sleep: the distribution of the time.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, sleep: str = "constant") -> None:
        self.sleep = sleep
        self.steps = 0
        self.generator = np.random.default_rng(int.from_bytes(os.urandom(8), "big"))

    def duration_s(self) -> float:
        """Draws the time of one step."""
        if self.sleep == "constant":
            return MEAN_S
        if self.sleep == "exponential":
            return float(self.generator.exponential(MEAN_S))
        return min(MOST_S, float(self.generator.lognormal(np.log(MEAN_S) - SIGMA**2 / 2, SIGMA)))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, Any]:
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(self.duration_s())
        self.steps += 1
        return np.zeros(4, np.float32), 1.0, self.steps == 500, False, {}


gymnasium.register("Sleeping-v0", entry_point=Sleeping)


def make_sleeping(config: Any) -> Sleeping:
    """Returns an environment for the options `env_config`."""
    return Sleeping(config["sleep"])


def register_plugins() -> None:
    """Runs the code of the two plugins that the documentation prints."""
    for block in re.findall(r"```python\n(.*?)```", PLUGINS.read_text(), re.DOTALL):
        for name in ("local_sgd", "elastic_averaging"):
            if f'register_optimizer("{name}"' in block:
                exec(compile(block, PLUGINS.name, "exec"), {"__name__": f"page_with_{name}"})


def experiment_of(strategy: str, stage: str) -> tuple[str, dict[str, Any]]:
    """Returns the preset of a case, and its options without the number of workers."""
    if stage == CHEETAH:
        preset, own = CHEETAHS.get(strategy, STRATEGIES[strategy])
        return preset, {"env": CHEETAH, **COMMON, **own, "rollout_fragment_length": 50}
    preset, own = STRATEGIES[strategy]
    sleep, length = ("constant", 2) if stage == "short" else (stage, 10)
    env = {"env": make_sleeping, "env_config": {"sleep": sleep}}
    return preset, {**env, **COMMON, **own, "rollout_fragment_length": length}


def strategies_of(stage: str) -> list[str]:
    """Returns the strategies of a stage."""
    if stage == CHEETAH:
        return [name for name in STRATEGIES if name not in ("local_sgd", "elastic_averaging")]
    return list(KNEES) if stage == "short" else list(STRATEGIES)


def chosen_strategies(stage: str, only: list[str]) -> list[str]:
    """Returns the strategies of a stage that `only` names, by the name of a strategy, of its
    preset, or of a stage. Without the name of a strategy, returns all of them, and so on."""
    if any(word in STAGES for word in only) and stage not in only:
        return []
    words = [word for word in only if word not in STAGES]
    names = strategies_of(stage)
    return [n for n in names if not words or n in words or experiment_of(n, stage)[0] in words]


def key(kind: str, strategy: str, stage: str, workers: int) -> str:
    """Returns the name of a stored entry."""
    return f"{kind} {strategy} {stage} {workers}"


def to_predict(store: dict[str, Any], strategy: str, stage: str, workers: list[int]) -> list[int]:
    """Returns the numbers of workers that need a prediction of the present kind."""
    said = {count: store.get(key("predicted", strategy, stage, count)) for count in workers}
    return [n for n, one in said.items() if not is_good(one) or kind_of(one) != kind_at(stage)]


def kind_of(said: dict[str, Any]) -> tuple[int, float]:
    """The model of a stored prediction, and the seconds of its calibration."""
    return said.get("model", 1), said.get("calibration_s", SHORT_S)


def kind_at(stage: str) -> tuple[int, float]:
    """The same for predictions that are made now."""
    return MODEL, CALIBRATION_S.get(stage, SHORT_S)


def put_prediction(store: dict[str, Any], case: tuple[str, str, int], new: dict[str, Any]) -> None:
    """Stores a prediction. Keeps the earlier pair of the case if an earlier model predicted it, or
    after a shorter calibration. In any case, the earlier measurement does not belong to the new
    prediction."""
    said, found = key("predicted", *case), key("measured", *case)
    old, run = store.pop(said, None), store.pop(found, None)
    if old is not None and run is not None and kind_of(old) != kind_of(new):
        store[f"earlier {said}"], store[f"earlier {found}"] = old, run
    store[said] = new


def predict_stage(
    store: dict[str, Any], stage: str, chosen: list[str], workers: list[int], options: Any
) -> None:
    """Makes the predictions of a stage that are missing, and stores each of them."""
    earlier: dict[bool, Any] = {}
    for strategy in chosen:
        wanted = to_predict(store, strategy, stage, workers)
        if not wanted:
            continue
        if not options.busy:
            wait_until_quiet(options.patience_s)
        # Only the calibration of this strategy measures an all-reduce.
        reduces = strategy == "decentralized_allreduce"
        preset, given = experiment_of(strategy, stage)
        with watching_others() as others:
            forecast = polopt.predict(
                preset,
                {**given, "num_workers": 2},
                workers=sorted({1, *wanted}),
                seconds=CALIBRATION_S.get(stage, SHORT_S),
                repeats=3,
                budget_s=0.4,
                earlier=earlier.get(reduces),
            )
        earlier.setdefault(reduces, forecast)
        one = forecast.predictions[0].env_steps_per_s
        for prediction in forecast.predictions:
            if prediction.workers not in wanted:
                continue
            new = {
                "rate": round(prediction.env_steps_per_s, 1),
                "low": round(prediction.low, 1),
                "high": round(prediction.high, 1),
                "one_worker": round(one, 1),
                "lag": round(prediction.policy_lag, 2),
                "bottleneck": prediction.bottleneck,
                "model": MODEL,
                "calibration_s": CALIBRATION_S.get(stage, SHORT_S),
                "others": others.cores,
                "at": round(time.time()),
            }
            put_prediction(store, (strategy, stage, prediction.workers), new)
            print("predicted", strategy, stage, prediction.workers, new["rate"], flush=True)
        write_runs(options.store, store)


def measure_stage(
    store: dict[str, Any],
    stage: str,
    chosen: list[str],
    workers: list[int],
    options: Any,
    trainers: dict[int, Any],
) -> None:
    """Measures what is missing in a stage. The processes of a trainer serve all cases with its
    number of workers, and wait meanwhile."""
    for count in workers:
        for strategy in chosen:
            name = key("measured", strategy, stage, count)
            said = key("predicted", strategy, stage, count)
            if is_good(store.get(name)) or said not in store:
                continue
            preset, given = experiment_of(strategy, stage)
            config = {
                **given,
                "num_workers": count,
                "num_cpus_per_worker": 0.1,
                "min_sample_timesteps_per_iteration": 0,
                "min_time_s_per_iteration": 0.5,
                **({} if preset == "PolicyOptimizerTrainer" else {"preset": preset}),
            }
            try:
                if count in trainers:
                    trainers[count].reset_config(config)
                else:
                    trainers[count] = polopt.PolicyOptimizerTrainer(config)
                store[name] = measured(trainers[count], options.measure_s)
            except Exception as error:  # one case that fails must not end the others
                print(name, "failed:", error, flush=True)
                with contextlib.suppress(Exception):
                    trainers.pop(count).stop()
                continue
            print(name, store[name]["rate"], flush=True)
            write_runs(options.store, store)
            others = store[name]["others"]
            if not options.busy and others is not None and others > QUIET_CORES:
                wait_until_quiet(options.patience_s)


def measured(trainer: Any, seconds: float, warm_up: int = 2) -> dict[str, Any]:
    """Measures the rate of a trainer, once it has learned and given `warm_up` more results."""

    def train() -> tuple[float, int, float]:
        result = trainer.train()
        block = result["optimizer"]
        lag = block["policy_lag"]["mean"]
        steps = result["num_env_steps_sampled_lifetime"]
        return time.monotonic(), steps, lag if block["num_updates"] else -1.0

    until_s = time.monotonic() + 60.0
    while train()[2] < 0.0:  # until the first update
        if time.monotonic() > until_s:
            raise RuntimeError("no update within a minute")
    for _ in range(warm_up):
        train()
    began_s, before, _ = train()
    lags, parts = [], []
    last_s, last = began_s, before
    with watching_others() as others:
        while last_s - began_s < seconds:
            now_s, steps, lag = train()
            lags.append(lag)
            parts.append((steps - last) / (now_s - last_s))
            last_s, last = now_s, steps
    if last == before:
        raise RuntimeError(f"no step was counted within {seconds:g} s")
    error = statistics.stdev(parts) / len(parts) ** 0.5 if len(parts) > 1 else 0.0
    return {
        "rate": round((last - before) / (last_s - began_s), 1),
        "error": round(error, 1),
        "lag": round(statistics.fmean(lags), 2),
        "others": others.cores,
        "at": round(time.time()),
    }


class Pair(NamedTuple):
    """A prediction and its measurement.

    Attributes:
        strategy, stage, workers: the case.
        said: the stored prediction.
        found: the stored measurement.
    """

    strategy: str
    stage: str
    workers: int
    said: dict[str, Any]
    found: dict[str, Any]

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return float(self.said["rate"] / self.found["rate"] - 1.0)

    @property
    def naive_error(self) -> float:
        """The relative error of the rate of one worker times the number of workers."""
        return float(self.said["one_worker"] * self.workers / self.found["rate"] - 1.0)


def pairs_of(store: dict[str, Any], prefix: str = "") -> list[Pair]:
    """Returns the cases that were predicted and measured, in the order of the page."""
    found = []
    for stage, counts in STAGES.items():
        for strategy in strategies_of(stage):
            for count in sorted(counts):
                said, run = (
                    store.get(prefix + key(kind, strategy, stage, count))
                    for kind in ("predicted", "measured")
                )
                if said is not None and run is not None:
                    found.append(Pair(strategy, stage, count, said, run))
    return found


def errors_of(pairs: list[Pair]) -> str:
    """Returns the errors of pairs, as cells of a table."""
    errors = [abs(pair.error) for pair in pairs]
    naive = [abs(pair.naive_error) for pair in pairs]
    within = sum(error <= 0.15 for error in errors)
    inside = sum(pair.said["low"] <= pair.found["rate"] <= pair.said["high"] for pair in pairs)
    return (
        f"{len(pairs)} | {statistics.median(errors):.1%} | {max(errors):.0%} | {within} | {inside} "
        f"| {statistics.median(naive):.1%} | {max(naive):.0%}"
    )


def knee(rates: dict[int, float]) -> float | None:
    """Returns the number of workers at which the rate saturates: where the line of one worker meets
    the highest rate. None if the last doubling still gains a quarter."""
    counts = sorted(rates)
    if len(counts) < 2 or rates[counts[-1]] >= 1.25 * rates[counts[-2]]:
        return None
    return max(rates.values()) / (rates[counts[0]] / counts[0])


def knees(pairs: list[Pair]) -> list[str]:
    """Returns the lines of the table of knees."""
    lines = []
    for strategy in KNEES:
        own = [pair for pair in pairs if (pair.strategy, pair.stage) == (strategy, "short")]
        if len(own) < len(STAGES["short"]):
            continue
        said = knee({pair.workers: pair.said["rate"] for pair in own})
        found = knee({pair.workers: pair.found["rate"] for pair in own})
        cells = [f"{one:.1f}" if one else f"above {own[-1].workers}" for one in (said, found)]
        lines.append(f"| `{strategy}` | {cells[0]} | {cells[1]} |")
    return lines


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the lines of the stored results."""
    return between(text, BEGIN, END, table(store))


def table(store: dict[str, Any]) -> list[str]:
    """Returns the lines of the page: the errors, the knees, and every prediction beside its
    measurement."""
    pairs = pairs_of(store)
    if not pairs:
        return ["No run was measured yet."]
    total = sum(len(strategies_of(stage)) * len(counts) for stage, counts in STAGES.items())
    old = sum(kind_of(pair.said) != kind_at(pair.stage) for pair in pairs)
    of_old = (
        f" {old} of them were predicted by an earlier model, or after a shorter calibration."
        if old
        else ""
    )
    lines = [
        f"{len(pairs)} of {total} cases were measured.{of_old}",
        "",
        "| environment | cases | median error | worst | within 15% | inside the interval | median "
        "error of one worker's rate times N | worst |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for stage in STAGES:
        own = [pair for pair in pairs if pair.stage == stage]
        lines += [f"| {stage} | {errors_of(own)} |"] if own else []
    lines.append(f"| all | {errors_of(pairs)} |")
    earlier = pairs_of(store, "earlier ")
    if earlier:
        lines.append(
            f"| all, with an earlier model or a shorter calibration | {errors_of(earlier)} |"
        )
    found = knees(pairs)
    if found:
        lines += [
            "",
            "| strategy, `short` | predicted knee (workers) | measured |",
            "|---|---:|---:|",
        ]
        lines += found
    lines += [
        "",
        "| strategy | environment | workers | predicted steps/s | measured | error | predicted lag "
        "| measured lag | predicted bottleneck |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for pair in pairs:
        said, run = pair.said, pair.found
        busy = "" if is_good(said) and is_good(run) else " (other programs ran)"
        lines.append(
            f"| `{pair.strategy}` | {pair.stage} | {pair.workers} | {said['rate']:,.0f} "
            f"[{said['low']:,.0f}, {said['high']:,.0f}] | {run['rate']:,.0f}{busy} | "
            f"{pair.error:+.0%} | {said['lag']:.1f} | {run['lag']:.1f} | {said['bottleneck']} |"
        )
    about_run = store.get("about", {})
    return [*lines, "", ", ".join(f"{one} {of}" for one, of in sorted(about_run.items())) + "."]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="strategies, presets and stages")
    parser.add_argument("--workers", type=int, nargs="*", help="only these numbers of workers")
    parser.add_argument("--measure-s", type=float, default=3.5)
    parser.add_argument("--patience-s", type=float, default=60.0, help="wait for a quiet machine")
    parser.add_argument("--busy", action="store_true", help="also run if other programs run")
    parser.add_argument("--store", type=Path, default=STORE)
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    store = read_runs(options.store)
    if not options.page:
        register_plugins()
        ray.init(num_cpus=64, log_to_driver=False, logging_level=logging.ERROR)
        store["about"] = about()
        trainers: dict[int, Any] = {}
        try:
            for stage, counts in STAGES.items():
                chosen = chosen_strategies(stage, options.only)
                if stage == CHEETAH and importlib.util.find_spec("mujoco") is None:
                    print(f"{stage} is left out, because MuJoCo is not installed", flush=True)
                    continue
                workers = [n for n in counts if options.workers is None or n in options.workers]
                predict_stage(store, stage, chosen, workers, options)
                measure_stage(store, stage, chosen, workers, options, trainers)
        finally:
            write_runs(options.store, store)
            for trainer in trainers.values():
                trainer.stop()
    if options.store == STORE:
        PAGE.write_text(page(store, PAGE.read_text()))


if __name__ == "__main__":
    main()
