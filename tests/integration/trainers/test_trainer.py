"""Tests of the trainer in Ray Tune, with four presets: results, restoring, schedulers and
resources."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import ray
import torch
from fakes import pid_of
from ray import tune
from ray.tune.utils.util import validate_save_restore
from toy_envs import Clock

import polopt
from polopt.trainers.presets import A2C, A3C, DDPPO, PRESETS, SyncPPO
from polopt.trainers.results import check_stop_key, result_keys
from polopt.trainers.trainer import PolicyOptimizerTrainer

#: Options for one worker and a few steps.
TINY: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 1,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 16,
    "min_sample_timesteps_per_iteration": 64,
    "num_sgd_iter": 1,
    "model": {"fcnet_hiddens": [8]},
    "seed": 1,
}
FOUR = [A3C, A2C, SyncPPO, DDPPO]
#: A2C and SyncPPO have the same optimizer, so the usual tests have one of them.
usual_presets = pytest.mark.parametrize(
    "preset", [A3C, pytest.param(A2C, marks=pytest.mark.slow), SyncPPO, DDPPO]
)
OPTIMIZERS = ["async_gradients", "sync_samples", "decentralized_allreduce"]


def tiny(preset: type[PolicyOptimizerTrainer], **changes: Any) -> dict[str, Any]:
    """Returns `TINY` for a preset, with short steps of AsyncGradients."""
    own = {"grads_per_step": 2} if preset is A3C else {}
    return {**TINY, **own, **changes}


def smallest(preset: type[PolicyOptimizerTrainer]) -> dict[str, Any]:
    """Returns `tiny` without workers if the preset allows this, because each worker takes seconds
    to start."""
    return tiny(preset, num_workers=1 if preset in (A3C, DDPPO) else 0)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "0")


def run_config(tmp_path: Path, iterations: int = 2, **options: Any) -> tune.RunConfig:
    return tune.RunConfig(
        storage_path=str(tmp_path),
        stop={"training_iteration": iterations},
        verbose=0,
        **options,
    )


def paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}"


PROMISED = {
    "episode_return_mean",
    *(f"env_runners/episode_return_{part}" for part in ("mean", "min", "max")),
    "env_runners/episode_len_mean",
    "env_runners/num_episodes_lifetime",
    "env_runners/num_env_steps_sampled",
    "env_runners/num_env_steps_sampled_lifetime",
    "num_env_steps_sampled_lifetime",
    "training_iteration",
    *(
        f"{block}/default_policy/{key}"
        for block in ("learners", "info/learner")
        for key in (
            "policy_loss",
            "vf_loss",
            "entropy",
            "total_loss",
            "mean_kl_loss",
            "clip_fraction",
            "vf_explained_var",
            "vf_predicted_mean",
            "vf_target_mean",
            "grad_norm",
            "default_optimizer_learning_rate",
        )
    ),
    "timers/training_iteration",
    "fault_tolerance/num_healthy_workers",
    "fault_tolerance/num_remote_worker_restarts",
    "optimizer/name",
    "optimizer/num_env_steps_sampled",
    "optimizer/num_env_steps_trained",
    "optimizer/num_updates",
    "optimizer/env_steps_per_s",
    *(f"optimizer/policy_lag/{part}" for part in ("mean", "max", "histogram")),
}
PHASES = {
    A3C: ("wait", "apply", "dispatch"),
    A2C: ("broadcast", "sample", "learn"),
    SyncPPO: ("broadcast", "sample", "learn"),
    DDPPO: ("sample", "learn", "allreduce"),
}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("preset", FOUR)
def test_every_result_has_the_same_keys(preset: type[PolicyOptimizerTrainer]) -> None:
    trainer = preset(tiny(preset))
    results = [trainer.train() for _ in range(3)]
    action = trainer.compute_single_action(torch.zeros(4).numpy())
    assert int(action) in (0, 1)
    trainer.stop()
    first = set(paths(results[0]))
    # `PROMISED` contains neither the keys that only Tune adds, nor the copy of the config.
    assert first >= PROMISED
    assert first >= {f"optimizer/{phase}_time_ms" for phase in PHASES[preset]}
    assert first >= set(result_keys()), "a result has all keys for stop conditions"
    for key in PROMISED:
        check_stop_key(key)
    for later in results[1:]:
        assert set(paths(later)) == first
        assert next(iter(later)) == "episode_return_mean", "Tune's table shows the first keys"
        assert later["episode_return_mean"] == later["env_runners"]["episode_return_mean"]
    steps = [result["num_env_steps_sampled_lifetime"] for result in results]
    assert steps[0] >= 64
    assert steps == sorted(set(steps))
    assert results[0]["optimizer"]["name"] == preset.preset["optimizer"]
    assert results[0]["fault_tolerance"]["num_healthy_workers"] == 1


@pytest.mark.usefixtures("ray_session")
@usual_presets
def test_ray_validates_save_and_restore(preset: type[PolicyOptimizerTrainer]) -> None:
    assert validate_save_restore(preset, smallest(preset))


@pytest.mark.usefixtures("ray_session")
@usual_presets
def test_tune_run_by_name(preset: type[PolicyOptimizerTrainer], tmp_path: Path) -> None:
    from ray.rllib.utils.test_utils import check_learning_achieved  # a slow import

    polopt.register()
    analysis = tune.run(
        preset.__name__,
        config=smallest(preset),
        stop={"env_runners/episode_return_mean": 9.0, "training_iteration": 50},
        storage_path=str(tmp_path),
        verbose=0,
    )
    grid = tune.ResultGrid(analysis)
    check_learning_achieved(grid, 9.0)
    with pytest.raises(ValueError, match="not reached"):
        check_learning_achieved(grid, 501.0)
    columns = set(grid.get_dataframe().columns)
    assert columns >= {"env_runners/episode_return_mean", "optimizer/policy_lag/mean"}
    # Tune's CSV logger takes its columns from the first result.
    header = next(tmp_path.glob("*/*/progress.csv")).read_text().partition("\n")[0].split(",")
    assert set(header) >= PROMISED


@pytest.mark.usefixtures("ray_session")
def test_grid_search_over_optimizers_is_one_experiment(tmp_path: Path) -> None:
    grid = tune.Tuner(
        tune.with_resources(PolicyOptimizerTrainer, tune.PlacementGroupFactory([{"CPU": 1}] * 2)),
        param_space={**TINY, "policy": "ppo", "optimizer": tune.grid_search(OPTIMIZERS)},
        run_config=run_config(
            tmp_path, checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True)
        ),
    ).fit()
    assert not grid.errors
    metrics = [result.metrics for result in grid]
    assert [m["optimizer"]["name"] for m in metrics if m] == OPTIMIZERS
    blocks = [set(paths(m["env_runners"])) | set(paths(m["learners"])) for m in metrics if m]
    assert blocks[0] == blocks[1] == blocks[2]
    # Each trainer restores checkpoints of the others.
    for result, preset in zip(grid, (DDPPO, A3C, A2C), strict=True):
        assert result.checkpoint is not None
        sampled = result.metrics["num_env_steps_sampled_lifetime"]  # type: ignore[index]
        trainer = preset(tiny(preset, policy=preset.preset["policy"]))
        trainer.restore(result.checkpoint.path)
        assert trainer.train()["num_env_steps_sampled_lifetime"] > sampled
        trainer.stop()


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_reset_config_reuses_processes(optimizer: str) -> None:
    trainer = PolicyOptimizerTrainer({**TINY, "optimizer": optimizer})
    trainer.train()
    pids = [pid_of(worker) for worker in trainer.workers.remote]
    short = {"name": "async_gradients", "grads_per_step": 2}
    changed = {**TINY, "optimizer": short, "policy": "a2c", "lr": 0.5, "gamma": 0.5}
    assert trainer.reset_config(changed)
    assert trainer.experiment.policy.gamma == 0.5
    result = trainer.train()
    assert [pid_of(worker) for worker in trainer.workers.remote] == pids
    assert result["training_iteration"] == 2
    assert 64 <= result["num_env_steps_sampled_lifetime"] < 128  # the count starts at 0 again
    assert result["learners"]["default_policy"]["default_optimizer_learning_rate"] == 0.5
    # Another number of workers needs other processes.
    assert trainer.reset_config({**changed, "optimizer": "sync_samples", "num_workers": 0})
    assert trainer.workers.remote == []
    trainer.train()
    trainer.stop()


@pytest.mark.usefixtures("ray_session")
def test_asha_with_reused_actors(tmp_path: Path) -> None:
    metric = "env_runners/episode_return_mean"
    grid = tune.Tuner(
        SyncPPO,
        param_space=tiny(SyncPPO, lr=tune.grid_search([1e-4, 1e-3, 1e-2])),
        tune_config=tune.TuneConfig(
            metric=metric,
            mode="max",
            scheduler=tune.schedulers.ASHAScheduler(max_t=4, grace_period=1, reduction_factor=2),
            reuse_actors=True,
            max_concurrent_trials=1,
        ),
        run_config=run_config(tmp_path, 4),
    ).fit()
    assert not grid.errors
    iterations = [result.metrics["training_iteration"] for result in grid]  # type: ignore[index]
    assert max(iterations) == 4
    assert grid.get_best_result().metrics


@pytest.mark.slow  # tests of dashboards, of several policies and of docs/examples run PBT, too
@pytest.mark.usefixtures("ray_session")
def test_population_based_training(tmp_path: Path) -> None:
    grid = tune.Tuner(
        A2C,
        param_space=tiny(A2C, num_workers=0, lr=tune.grid_search([1e-7, 1e-2])),
        tune_config=tune.TuneConfig(
            metric="num_env_steps_sampled_lifetime",
            mode="max",
            scheduler=tune.schedulers.PopulationBasedTraining(
                time_attr="training_iteration",
                perturbation_interval=1,
                quantile_fraction=0.5,
                hyperparam_mutations={"lr": [1e-3, 1e-2]},
            ),
            reuse_actors=True,
        ),
        run_config=run_config(tmp_path, 3),
    ).fit()
    assert not grid.errors
    assert all(result.metrics["training_iteration"] == 3 for result in grid)  # type: ignore[index]


class ClockOfLength(Clock):
    """An environment whose return is the option `length`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config["length"], longest=64)


def sweep_of_lengths(
    scheduler: tune.schedulers.TrialScheduler, first_steps: int, tmp_path: Path
) -> dict[int, tuple[int, float]]:
    """Runs trials one after the other. In each trial, the return of an episode is its length. The
    trial with the longest episodes runs last.

    Returns:
        for each length, the number of iterations and the last return.
    """
    lengths = tune.grid_search([{"length": length} for length in (4, 8, 16, 64)])
    steps = {"min_sample_timesteps_per_iteration": first_steps, "rollout_fragment_length": 8}
    grid = tune.Tuner(
        SyncPPO,
        param_space=tiny(SyncPPO, num_workers=0, env=ClockOfLength, env_config=lengths, **steps),
        tune_config=tune.TuneConfig(
            metric="episode_return_mean",
            mode="max",
            scheduler=scheduler,
            reuse_actors=True,
            max_concurrent_trials=1,
        ),
        run_config=run_config(tmp_path, 8),
    ).fit()
    assert not grid.errors
    rows = [trial.metrics or {} for trial in grid]
    last = [(row["training_iteration"], row["episode_return_mean"]) for row in rows]
    return {row["config"]["env_config"]["length"]: one for row, one in zip(rows, last, strict=True)}


@pytest.mark.usefixtures("ray_session")
def test_median_rule_stops_a_trial_without_an_episode_in_its_first_result(tmp_path: Path) -> None:
    def median() -> tune.schedulers.MedianStoppingRule:
        return tune.schedulers.MedianStoppingRule(
            time_attr="training_iteration", grace_period=6, min_samples_required=2
        )

    asha = tune.schedulers.ASHAScheduler(
        time_attr="training_iteration", max_t=8, grace_period=1, reduction_factor=2
    )
    # In results of 16 steps of each of 2 environments, the longest episode ends in the fourth
    # result.
    stopped = sweep_of_lengths(median(), 32, tmp_path / "median")
    assert stopped[64] == (6, 64.0), "stopped by the rule although its return is the highest"
    kept = sweep_of_lengths(asha, 32, tmp_path / "asha")
    assert kept[64] == (8, 64.0)
    # The docs give this formula: 2 environments times 64 steps.
    first_has_a_return = sweep_of_lengths(median(), 2 * 64, tmp_path / "longer")
    assert first_has_a_return[64] == (8, 64.0)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("steps", "best"), [(32, 8.0), (2 * 64, 64.0)])
def test_episodes_longer_than_the_perturbation_interval_never_end(
    steps: int, best: float, tmp_path: Path
) -> None:
    # Trials are paused after 32 steps (2 results of 16 steps) of each environment. An episode has
    # 64 steps.
    lengths = tune.grid_search([{"length": length} for length in (8, 64)])
    size = {"min_sample_timesteps_per_iteration": steps, "rollout_fragment_length": 8}
    grid = tune.Tuner(
        SyncPPO,
        param_space=tiny(SyncPPO, num_workers=0, env=ClockOfLength, env_config=lengths, **size),
        tune_config=tune.TuneConfig(
            metric="episode_return_mean",
            mode="max",
            scheduler=tune.schedulers.PopulationBasedTraining(
                time_attr="training_iteration",
                perturbation_interval=2,
                synch=True,
                hyperparam_mutations={"lr": [1e-3, 1e-2]},
            ),
            reuse_actors=True,
        ),
        run_config=run_config(tmp_path, 4),
    ).fit()
    assert not grid.errors
    assert (grid.get_best_result().metrics or {})["episode_return_mean"] == best


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("steps", "warned"), [(32, True), (128, False)])
def test_first_result_without_a_return_says_what_to_set(
    steps: int, warned: bool, tmp_path: Path
) -> None:
    said = tmp_path / "warnings"

    class Logged(SyncPPO):
        def setup(self, config: dict[str, Any], **options: Any) -> None:
            logging.getLogger("polopt").addHandler(logging.FileHandler(said))
            super().setup(config, **options)

    (trial,) = tune.Tuner(
        Logged,
        param_space=tiny(
            SyncPPO,
            num_workers=0,
            env=ClockOfLength,
            env_config={"length": 64},
            min_sample_timesteps_per_iteration=steps,
        ),
        run_config=run_config(tmp_path, 3),
    ).fit()
    assert trial.error is None
    lines = said.read_text().splitlines()
    assert len(lines) == warned
    if warned:
        assert f"no episode has ended in the first {steps} environment steps" in lines[0]
        assert "min_sample_timesteps_per_iteration" in lines[0]
        assert "max_frames_per_traj" in lines[0]


class FailsOnce(A2C):
    """A trainer that raises in the third iteration unless the file `repaired` exists."""

    def step(self) -> dict[str, Any]:
        if self.iteration == 2 and not Path(self.config["env_config"]["repaired"]).exists():
            raise RuntimeError("failed once")
        return super().step()


def make_cartpole(repaired: str = "") -> Any:
    return gymnasium.make("CartPole-v1")


@pytest.mark.usefixtures("ray_session")
def test_tuner_restore_resumes_a_failed_trial(tmp_path: Path) -> None:
    repaired = tmp_path / "repaired"
    space = tiny(A2C, num_workers=0, env=make_cartpole, env_config={"repaired": str(repaired)})
    tuner = tune.Tuner(
        FailsOnce,
        param_space=space,
        run_config=run_config(
            tmp_path, 4, name="x", checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1)
        ),
    )
    (failed,) = tuner.fit()
    assert "failed once" in str(failed.error)
    repaired.touch()
    restored = tune.Tuner.restore(
        str(tmp_path / "x"), FailsOnce, param_space=space, resume_errored=True
    )
    (finished,) = restored.fit()
    assert finished.error is None
    assert finished.metrics is not None
    assert finished.metrics["training_iteration"] == 4
    assert finished.metrics["num_env_steps_sampled_lifetime"] == 4 * 64


@pytest.mark.usefixtures("ray_session")
def test_checkpoints_read_from_disk_have_their_results(tmp_path: Path) -> None:
    every = tune.CheckpointConfig(checkpoint_frequency=2)
    (finished,) = tune.Tuner(
        A2C,
        param_space=tiny(A2C, num_workers=0),
        run_config=run_config(tmp_path, 4, checkpoint_config=every),
    ).fit()
    read = tune.Result.from_path(finished.path)
    assert [m["training_iteration"] for _, m in read.best_checkpoints] == [2, 4]
    for checkpoint, metrics in read.best_checkpoints:
        assert metrics["checkpoint_dir_name"] == Path(checkpoint.path).name


class KillsTrialOnce(tune.Callback):
    """A callback that kills the process of a trial after the fourth result."""

    killed = False

    def on_trial_result(self, result: dict[str, Any], **info: Any) -> None:
        if result["training_iteration"] == 4 and not self.killed:
            self.killed = True
            os.kill(result["pid"], signal.SIGKILL)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("setting", ["period", "num_to_keep"])
def test_retry_by_tune_keeps_rows_that_were_copied(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without these settings, Tune copies the results after the second checkpoint. The retry
    # continues from the third checkpoint, and loses row 3.
    if setting == "period":
        monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "0")
    kept = 1 if setting == "num_to_keep" else 2
    callback = KillsTrialOnce()
    (trial,) = tune.Tuner(
        SyncPPO,
        param_space=tiny(SyncPPO, num_workers=0, min_time_s_per_iteration=0.5),
        run_config=run_config(
            tmp_path,
            6,
            callbacks=[callback],
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=kept),
        ),
    ).fit()
    assert callback.killed
    assert trial.error is None
    lines = Path(trial.path, "result.json").read_text().splitlines()
    iterations = [json.loads(line)["training_iteration"] for line in lines]
    assert sorted(set(iterations)) == [1, 2, 3, 4, 5, 6]


class ReadsLevel(gymnasium.Wrapper):  # type: ignore[type-arg]
    """An environment that reads a file by its relative path, either when it is made or at each
    reset."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.when = config["when"]
        if self.when == "init":
            Path("level.txt").read_text()

    def reset(self, **options: Any) -> Any:
        if self.when == "reset":
            Path("level.txt").read_text()
        return super().reset(**options)


def trial_with_relative_path(when: str, num_workers: int, tmp_path: Path) -> tune.Result:
    """Runs a trial whose environment reads `level.txt`. The file is in the current directory, and
    not in the directory of the trial, to which Tune changes."""
    level = Path("level.txt")
    assert not level.exists()
    level.write_text("easy")
    try:
        (trial,) = tune.Tuner(
            SyncPPO,
            param_space=tiny(
                SyncPPO, num_workers=num_workers, env=ReadsLevel, env_config={"when": when}
            ),
            run_config=run_config(tmp_path, 1),
        ).fit()
    finally:
        level.unlink()
    return trial


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_environments_are_made_in_the_users_directory(num_workers: int, tmp_path: Path) -> None:
    assert trial_with_relative_path("init", num_workers, tmp_path).error is None


@pytest.mark.usefixtures("ray_session")
def test_file_that_only_the_users_directory_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = str(trial_with_relative_path("reset", 0, tmp_path).error)
    assert (
        f"'level.txt' was looked up in the directory of the trial instead of {Path.cwd()}" in error
    )
    assert "RAY_CHDIR_TO_TRIAL_DIR=0" in error
    monkeypatch.setenv("RAY_CHDIR_TO_TRIAL_DIR", "0")  # Tune passes the variable to trials
    assert trial_with_relative_path("reset", 0, tmp_path).error is None


def test_tune_reserves_driver_and_workers() -> None:
    config = tiny(
        SyncPPO,
        num_workers=2,
        num_gpus=0.5,
        num_cpus_per_worker=0.5,
        custom_resources_per_worker={"seat": 1.0},
        memory_per_worker=1000,
    )
    worker = {"CPU": 0.5, "memory": 1000, "seat": 1.0}
    assert SyncPPO.default_resource_request(config).bundles == [
        {"CPU": 1.0, "GPU": 0.5},
        worker,
        worker,
    ]
    local_only = SyncPPO.default_resource_request(tiny(SyncPPO, num_workers=0))
    assert local_only.bundles == [{"CPU": 1.0}]
    light = tiny(SyncPPO, num_cpus_for_driver=0, num_cpus_per_worker=0)
    assert SyncPPO.default_resource_request(light).required_resources == {"CPU": 0.001}


_ALONE = """
import ray
from polopt import PRESET
config = CONFIG
trainer = PRESET(config)
assert ray.is_initialized() == (config["num_workers"] > 0)
result = trainer.train()
assert result["num_env_steps_sampled_lifetime"] >= 64
import numpy
print(trainer.compute_single_action(numpy.zeros(4, numpy.float32)))
trainer.stop()
"""


@pytest.mark.parametrize(("preset", "num_workers"), [(DDPPO, 1), (SyncPPO, 0)])
def test_trainer_without_tune(preset: type[PolicyOptimizerTrainer], num_workers: int) -> None:
    """Without `ray.init` and without workers, the trainer does not start Ray."""
    script = _ALONE.replace("PRESET", preset.__name__)
    script = script.replace("CONFIG", repr(tiny(preset, num_workers=num_workers)))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] in ("0", "1")


def test_presets_are_registered_by_name() -> None:
    from ray.tune.registry import get_trainable_cls

    polopt.register()
    for name, preset in PRESETS.items():
        assert get_trainable_cls(name).__name__ == preset.__name__


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("given", [{"gama": 0.9}, {"env": None}, {"lr": -1}])
def test_tuner_with_resources_refuses_bad_config_early(
    given: dict[str, Any], tmp_path: Path
) -> None:
    """`tune.with_resources` replaces the method with which Tune would find a bad config."""
    trainable = tune.with_resources(A2C, tune.PlacementGroupFactory([{"CPU": 1}]))
    tuner = tune.Tuner(trainable, param_space={**TINY, **given}, run_config=run_config(tmp_path, 1))
    with pytest.raises(Exception, match=f"key '{next(iter(given))}'") as caught:
        tuner.fit()
    assert "actor" not in str(caught.value).lower()
    assert len(str(caught.value)) < 500


@pytest.mark.usefixtures("ray_session")
def test_sigterm_does_not_interrupt_the_end_of_a_trial(tmp_path: Path) -> None:
    """When the driver exits, Ray sends SIGTERM to trials that are still closing their
    environments."""
    closed = tmp_path / "closed"

    class KilledInClose(gymnasium.Wrapper):  # type: ignore[type-arg]
        def close(self) -> None:
            if os.environ.get("IN_TRIAL"):
                os.kill(os.getpid(), signal.SIGTERM)
                closed.touch()
            super().close()

    class Trial(A2C):
        def cleanup(self) -> None:
            os.environ["IN_TRIAL"] = "1"
            super().cleanup()

    def make() -> Any:
        return KilledInClose(gymnasium.make("CartPole-v1"))

    trial = ray.remote(Trial).remote(tiny(A2C, num_workers=0, env=make))
    ray.get(trial.train.remote())
    ray.get(trial.stop.remote())
    assert closed.exists()
    ray.kill(trial)


TRAIN_ONCE = """
import sys
from polopt.trainers.trainer import PolicyOptimizerTrainer
for fast_cpu in (True, False):
    trainer = PolicyOptimizerTrainer({"fast_cpu": fast_cpu, **CONFIG})
    assert trainer.train()["training_iteration"] == 1
    trainer.stop()
assert "torch._dynamo" not in sys.modules
"""


def test_training_imports_no_compiler() -> None:
    """Training does not import torch's compiler, because this takes seconds."""
    config = {**TINY, "num_workers": 0, "optimizer": "sync_samples", "policy": "ppo"}
    script = TRAIN_ONCE.replace("CONFIG", repr(config))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
