"""Tests of evaluation during training: its whole episodes, the version that it names, and the best
checkpoint."""

from __future__ import annotations

import contextlib
import math
import shutil
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import ray
import torch
from checkpoint_helpers import SMALL, trainer
from fakes import FakeWorkerSet, worker_config
from faulty_envs import crashing_cartpole
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation
from pyarrow import fs
from sampling_helpers import every_mode
from simulated_channel import of_process
from toy_envs import Drift, GlobalRandom, make_policy, make_sampler, sync_clocks

import polopt
from polopt.common.config import ConfigError
from polopt.common.faults import non_finite_values
from polopt.common.weights import Weights
from polopt.metrics.record import Record
from polopt.rollouts import ray_session
from polopt.rollouts.ray_session import attach_or_start
from polopt.rollouts.seeds import evaluation_seeds, worker_seeds
from polopt.rollouts.transport.channel import Started
from polopt.rollouts.workers.worker_handle import ProcessState
from polopt.trainers import best_checkpoint
from polopt.trainers import evaluation as evaluating
from polopt.trainers.best_checkpoint import BestCheckpoint
from polopt.trainers.checkpoints import CheckpointError, read_checkpoint
from polopt.trainers.evaluation import Evaluation, evaluation_config
from polopt.trainers.experiment import Experiment
from polopt.trainers.find_checkpoint import find_checkpoint
from polopt.trainers.play_episodes import WholeEpisodes, shares
from polopt.trainers.trainer import PolicyOptimizerTrainer
from polopt.trainers.trainer_config import TrainerConfig
from polopt.trainers.tune_trial import RunContext


def returns(playing: WholeEpisodes) -> list[float]:
    while not playing.done:
        playing.play()
    return [episode.episode_return for episode in playing.episodes]


# ---- whole episodes ---------------------------------------------------------------------------


def test_shares_differ_by_one_at_most() -> None:
    assert shares(10, 4) == [3, 3, 2, 2]
    assert shares(2, 3) == [1, 1, 0]
    assert sum(shares(1001, 7)) == 1001


@every_mode
@pytest.mark.parametrize("fragment", [1, 3, 40])
def test_short_episodes_do_not_bias_the_mean(mode: str, fragment: int) -> None:
    env = sync_clocks([2, 30], "terminated", mode)
    sampler = make_sampler(env, make_policy("a2c", env), fragment)
    # The first four episodes that end all have a return of 2.
    assert sorted(returns(WholeEpisodes(sampler, 4))) == [2, 2, 30, 30]


@every_mode
def test_no_more_episodes_are_used_than_asked_for(mode: str) -> None:
    env = sync_clocks([2, 3, 5], "truncated", mode)
    sampler = make_sampler(env, make_policy("a2c", env), 64)
    assert sorted(returns(WholeEpisodes(sampler, 5))) == [2, 2, 3, 3, 5]


class BadNumbers(gymnasium.Env[np.ndarray, int]):
    """An environment with episodes of 4 steps. The first episode has a reward of NaN."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        self.episode += 1
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        reward = math.nan if self.episode == 0 else 1.0
        return np.zeros(1, np.float32), reward, self.time == 4, False, {}


@pytest.mark.parametrize("fragment", [3, 10])
def test_episodes_that_are_not_finite_are_played_again(fragment: int) -> None:
    env = SyncVectorEnv([BadNumbers, BadNumbers], autoreset_mode=AutoresetMode.SAME_STEP)
    sampler = make_sampler(env, make_policy("a2c", env), fragment)
    playing = WholeEpisodes(sampler, 3)
    assert "reward" in non_finite_values(playing.play())
    assert returns(playing) == [4.0, 4.0, 4.0]


# ---- seeds ------------------------------------------------------------------------------------


def test_seeds_of_evaluation_are_its_own() -> None:
    every = [worker_seeds(0, index, restart, 3) for index in range(4) for restart in range(3)]
    every += [evaluation_seeds(0, number, index, 3) for number in range(4) for index in range(3)]
    drawn = [seed for seeds in every for seed in seeds.envs]
    assert len(set(drawn)) == len(drawn)
    assert evaluation_seeds(0, 2, 1, 3).envs == evaluation_seeds(0, 2, 1, 3).envs


# ---- in the driver ----------------------------------------------------------------------------


class FewActions(GlobalRandom):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(3)


@pytest.mark.parametrize("env", [Drift, FewActions, "CartPole-v1"])
def test_evaluation_does_not_change_training(env: Any) -> None:
    """Evaluation environments that draw from the global generators do not change training
    either."""
    runs = []
    for options in ({}, {"evaluation_interval": 1, "evaluation_duration": 3}):
        made = trainer(env=env, **options)
        results = [made.train() for _ in range(4)]
        runs.append((made.get_policy().get_weights().flat, results))
        made.stop()
    (alone, without), (beside, with_) = runs
    np.testing.assert_array_equal(alone, beside)
    for one, other in zip(without, with_, strict=True):
        assert one["num_env_steps_sampled_lifetime"] == other["num_env_steps_sampled_lifetime"]
        one_mean, other_mean = (r["env_runners"]["episode_return_mean"] for r in (one, other))
        np.testing.assert_equal(one_mean, other_mean)
        assert "evaluation" not in one


def test_result_names_the_version_that_was_evaluated() -> None:
    made = trainer(evaluation_interval=2, evaluation_duration=5)
    results = [made.train() for _ in range(5)]
    blocks = [result["evaluation"] for result in results]
    counts = [block["env_runners"]["num_episodes"] for block in blocks]
    assert counts == [0, 5, 0, 5, 0]
    means = [block["env_runners"]["episode_return_mean"] for block in blocks]
    assert [math.isnan(mean) for mean in means] == [True, False, True, False, True]
    assert [block["num_evaluations"] for block in blocks] == [0, 1, 1, 2, 2]
    updates = [result["optimizer"]["num_updates"] for result in results]
    versions = [block["policy_version"] for block in blocks]
    assert versions == [0, updates[1], updates[1], updates[3], updates[3]]
    steps = [result["num_env_steps_sampled_lifetime"] for result in results]
    assert [b["policy_env_steps"] for b in blocks] == [0, steps[1], steps[1], steps[3], steps[3]]
    assert all(block.keys() == blocks[0].keys() for block in blocks)
    made.stop()


def test_evaluation_takes_the_mode_unless_it_explores() -> None:
    def mean(**options: Any) -> float:
        made = trainer(evaluation_interval=1, **options)
        seen: list[Any] = []
        sample = made.evaluation.workers.local.sampler.sample  # type: ignore[union-attr]
        made.evaluation.workers.local.sampler.sample = (  # type: ignore[union-attr]
            lambda explore, steps: seen.append(explore) or sample(explore, steps)  # type: ignore[func-returns-value]
        )
        made.train()
        made.stop()
        (explore,) = set(seen)
        return explore  # type: ignore[no-any-return]

    assert mean() is False
    assert mean(evaluation_config={"explore": True}) is True


def test_restored_run_continues_its_intervals(tmp_path: Path) -> None:
    made = trainer(evaluation_interval=3, evaluation_duration=2)
    made.train(), made.train()
    made.save(str(tmp_path / "c"))
    straight = [made.train()["evaluation"] for _ in range(4)]
    made.stop()
    again = trainer(evaluation_interval=3, evaluation_duration=2)
    again.restore(str(tmp_path / "c"))
    continued = [again.train()["evaluation"] for _ in range(4)]
    again.stop()
    assert [block["num_evaluations"] for block in continued] == [1, 1, 1, 2]
    for one, other in zip(straight, continued, strict=True):
        assert one["num_evaluations"] == other["num_evaluations"]
        assert one["env_runners"]["num_episodes"] == other["env_runners"]["num_episodes"]


class Endless(Drift):
    def step(self, action: int) -> Any:
        return *super().step(action)[:2], False, False, {}


def test_stop_request_ends_an_evaluation_that_goes_on(tmp_path: Path) -> None:
    """The episodes of this environment do not end. The stop is requested before the evaluation
    begins."""
    made = trainer(env=Endless, evaluation_interval=1)
    made._command = RunContext(tmp_path, tmp_path)
    made._command.stop_file.touch()
    result = made.train()
    assert result["evaluation"]["num_evaluations"] == 0
    made.stop()


def normalized() -> Any:
    return NormalizeObservation(gymnasium.make("CartPole-v1"))


def test_evaluation_normalises_as_training_and_freezes() -> None:
    made = trainer(env=normalized, evaluation_interval=1)
    made.train()
    trained = made.workers.local.sampler.env.envs
    mean = sum(env.env.obs_rms.mean * env.env.obs_rms.count for env in trained)
    mean /= sum(env.env.obs_rms.count for env in trained)
    evaluated = made.evaluation.workers.local.sampler.env.envs  # type: ignore[union-attr]
    for env in evaluated:
        np.testing.assert_allclose(env.env.obs_rms.mean, mean, rtol=1e-6)
        assert not env.env.update_running_mean
    assert all(env.env.update_running_mean for env in trained)
    made.stop()


# ---- beside training --------------------------------------------------------------------------


class NotSaved:
    """A `BestCheckpoint` that writes no files."""

    def offer(self, mean: float, version: int, state: Any) -> None: ...

    def restore(self) -> None: ...

    def report(self) -> dict[str, float]:
        return {}


def beside(
    env: Any = Drift, episodes: int = 3, num_workers: int = 2, best: Any = None, **rollout: Any
) -> tuple[Evaluation, FakeWorkerSet]:
    """Returns an evaluation with fake workers."""
    config = TrainerConfig(
        evaluation_interval=1, evaluation_duration=episodes, evaluation_num_workers=num_workers
    )
    own = evaluation_config(config, worker_config(env=env, rollout=rollout))
    workers = FakeWorkerSet(own, meanwhile="Training goes on.")
    return Evaluation(config, workers, best or NotSaved()), workers


def weights_of(workers: FakeWorkerSet, version: int, value: float = 0.0) -> Weights:
    flat = workers.local.get_weights().flat
    return Weights(np.full_like(flat, value), version, 100 * version, {})


def finish(evaluation: Evaluation) -> None:
    for _ in range(100):
        if evaluation.poll():
            return
    raise AssertionError("the evaluation does not end")


def test_poll_does_not_wait_for_workers() -> None:
    evaluation, workers = beside()
    evaluation.begin(weights_of(workers, 7), {"of": 7}, [])
    workers.transport.script = of_process("evaluation worker 1")
    assert not evaluation.poll()
    assert evaluation.report()["num_evaluations"] == 0
    for channel in workers.channels:
        channel.finish()
    finish(evaluation)
    last = evaluation.last
    assert last is not None
    assert (last.policy_version, last.policy_env_steps, last.state) == (7, 700, {"of": 7})
    assert len(last.episodes.returns) == 3


def test_dead_worker_is_replaced_and_plays_the_same_again() -> None:
    played = []
    for dies in (False, True):
        evaluation, workers = beside(episodes=4)
        evaluation.begin(weights_of(workers, 1), {}, [])
        if dies:
            workers.channels[1].die()
        for _ in range(3):
            for channel in workers.channels:
                channel.finish()
            if evaluation.poll():
                break
        assert evaluation.last is not None
        played.append(evaluation.last.episodes.returns)
        faults = evaluation.report()["fault_tolerance"]
        assert faults["num_remote_worker_restarts"] == faults["num_worker_deaths"] == dies
    assert played[0] == played[1]


def test_death_of_evaluation_worker_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    evaluation, workers = beside()
    evaluation.begin(weights_of(workers, 1), {}, [])
    workers.channels[0].die()
    evaluation.poll()
    assert "evaluation worker 1 failed (death) and is replaced" in caplog.text


def test_missing_evaluation_workers_are_named_as_such(caplog: pytest.LogCaptureFixture) -> None:
    evaluation, workers = beside()
    for worker in workers.remote:
        worker.to(ProcessState.STARTING)
        workers.starting[worker.channel.reply(Started())] = worker
    workers.transport.unplaced = {"evaluation worker 1", "evaluation worker 2"}
    evaluation.begin(weights_of(workers, 1), {}, [])
    workers.clock.now_s += 10.0
    assert not evaluation.poll()
    (record,) = caplog.records
    message = record.getMessage()
    assert "Ray has no resources yet for evaluation workers 1, 2: each needs CPU 0.5" in message
    assert message.endswith("Training goes on.")
    for _ in range(30):
        workers.clock.now_s += 1000.0
        assert not evaluation.poll()
    faults = evaluation.report()["fault_tolerance"]
    assert faults["num_worker_hangs"] == 0, "Training goes on, however long"


@pytest.mark.parametrize(
    ("num_cpus", "said"),
    [
        (4.0, []),
        (
            5.0,
            [
                "the run with its evaluation workers requests 5 CPU while Ray has 4; training goes "
                "on, but no evaluation ends until Ray has 1 more CPU. To evaluate now, request less"
            ],
        ),
        (7.0, ["the run requests 7 CPU while Ray has 4; it starts once Ray has more."]),
    ],
)
def test_warning_tells_whether_training_waits_for_cpus(
    num_cpus: float,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: None)
    attach_or_start(num_cpus, 3, evaluation_cpus=2.0)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(said)
    assert all(start in message for start, message in zip(said, messages, strict=True))


@pytest.mark.parametrize(("num_processes", "warns"), [(8, False), (9, True), (50, True)])
def test_many_more_processes_than_cores_are_a_warning(
    num_processes: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`num_workers=50` started 42 processes on two cores, with Ray's warnings only."""
    monkeypatch.setattr(ray_session, "_warned_at", {})
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 100.0})
    monkeypatch.setattr(ray.util, "get_current_placement_group", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for _ in range(2):
        attach_or_start(float(num_processes), num_processes)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warns
    assert not warns or f"starts {num_processes} worker processes, but this machine" in messages[0]


def test_duration_is_of_the_worker_that_played_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The duration does not depend on when the driver takes the replies."""
    seconds = {"sample": 2.0, "other": 0.5}
    monkeypatch.setattr(Record, "end", lambda self, *_: setattr(self, "seconds", seconds))
    monkeypatch.setattr(evaluating, "_CALL_SHARE", 0.0)  # each call ends after one fragment
    evaluation, workers = beside(rollout_fragment_length=2)
    for number in range(3):
        before = [len(channel.calls) for channel in workers.channels]
        evaluation.begin(weights_of(workers, number), {}, [])
        for _ in range(100):
            for channel in workers.channels:
                channel.finish()
            if evaluation.poll():
                break
        called = [
            sum(name == "play_part" for name, _ in channel.calls[start:])
            for channel, start in zip(workers.channels, before, strict=True)
        ]
        assert max(called) > 1
        assert evaluation.report()["duration_s"] == 2.5 * max(called)


def test_due_evaluation_waits_for_the_one_under_way() -> None:
    evaluation, workers = beside()
    assert evaluation.is_due(1)
    evaluation.begin(weights_of(workers, 1), {}, [])
    assert not evaluation.is_due(2)
    assert not evaluation.is_due(3)
    for channel in workers.channels:
        channel.finish()
    finish(evaluation)
    assert evaluation.is_due(4), "it was due in iterations 2 and 3, and runs once"
    evaluation.begin(weights_of(workers, 4), {}, [])
    assert not evaluation.due


def test_evaluation_under_way_is_due_again_after_a_restore() -> None:
    evaluation, workers = beside()
    evaluation.begin(weights_of(workers, 1), {}, [])
    state = evaluation.get_state()
    assert state == {"num_begun": 0, "num_evaluations": 0, "due": True}
    again, _ = beside()
    again.set_state(state)
    assert again.is_due(10**6 + 1)


def test_faults_of_evaluation_environments_are_counted() -> None:
    evaluation, workers = beside(env=crashing_cartpole, env_config={"p_crash": 0.05}, num_workers=1)
    evaluation.begin(weights_of(workers, 1), {}, [])
    workers.channels[0].finish()
    finish(evaluation)
    assert evaluation.report()["fault_tolerance"]["num_env_faults"] > 0
    assert len(evaluation.last.episodes.returns) == 3  # type: ignore[union-attr]


# ---- the best checkpoint ----------------------------------------------------------------------


def test_best_checkpoint_is_the_version_that_was_evaluated() -> None:
    """When the evaluation ends, training has already changed the weights."""
    made = trainer()
    best = BestCheckpoint(fs.LocalFileSystem(), made.logdir)
    evaluation, workers = beside(env="CartPole-v1", num_workers=1, best=best)
    made._run.evaluation = evaluation
    made.train()
    evaluated = made.get_policy().get_weights()
    made.train()
    workers.channels[0].finish()
    result = made.train()
    assert made.get_policy().version > evaluated.version
    block = result["evaluation"]
    assert block["policy_version"] == block["best_policy_version"] == evaluated.version
    loaded = polopt.load(Path(made.logdir) / "best_checkpoint")
    assert loaded.version == evaluated.version
    np.testing.assert_array_equal(loaded.get_weights().flat, evaluated.flat)
    made.stop()


def test_only_a_better_evaluation_replaces_the_best(tmp_path: Path) -> None:
    best = BestCheckpoint(fs.LocalFileSystem(), str(tmp_path))
    for version, mean in enumerate([3.0, 2.0, 3.0, 5.0, 4.0]):
        best.offer(mean, version, {"version": version, "params": torch.zeros(2)})
    assert best.report() == {"best_episode_return_mean": 5.0, "best_policy_version": 3}
    saved = read_checkpoint(tmp_path / "best_checkpoint")
    assert saved["version"] == 3
    assert saved["best"]["episode_return_mean"] == 5.0


def test_evaluation_without_a_mean_is_never_the_best(tmp_path: Path) -> None:
    best = BestCheckpoint(fs.LocalFileSystem(), str(tmp_path))
    best.offer(math.nan, 1, {})
    assert best.score is None
    best.offer(-2.0, 2, {})
    best.offer(math.nan, 3, {})
    assert best.report() == {"best_episode_return_mean": -2.0, "best_policy_version": 2}


def test_score_is_that_of_the_files(tmp_path: Path) -> None:
    best = BestCheckpoint(fs.LocalFileSystem(), str(tmp_path / "one"))
    best.offer(3.0, 1, {})
    again, other = (
        BestCheckpoint(fs.LocalFileSystem(), str(tmp_path / name)) for name in ("one", "other")
    )
    again.restore()
    other.restore()
    assert (again.score, other.score) == (best.score, None)
    shutil.rmtree(tmp_path / "one" / "best_checkpoint")
    again.restore()
    assert again.score is None
    again.offer(1.0, 2, {})
    assert read_checkpoint(tmp_path / "one" / "best_checkpoint")["best"]["policy_version"] == 2


class Killed(BaseException):
    pass


@pytest.mark.parametrize("cloud", [False, True], ids=["local", "cloud"])
@pytest.mark.parametrize("kill_at", range(1, 12))
def test_kill_at_any_moment_leaves_a_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int, cloud: bool
) -> None:
    """The process is killed before one of the calls that change files."""
    local: Any = fs.LocalFileSystem()
    calls = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == kill_at:
                raise Killed
            return function(*args, **kwargs)

        return call

    # `BestCheckpoint` does not move directories in a file system of this class.
    filesystem = fs.SubTreeFileSystem("/", local) if cloud else local
    best = BestCheckpoint(filesystem, str(tmp_path))
    best.offer(1.0, 1, {"params": torch.zeros(2)})
    monkeypatch.setattr(best_checkpoint.fs, "copy_files", counted(fs.copy_files))
    for name in ("_delete", "_put_in_place"):
        monkeypatch.setattr(BestCheckpoint, name, counted(getattr(BestCheckpoint, name)))
    with contextlib.suppress(Killed):
        best.offer(2.0, 2, {"params": torch.ones(2)})
    monkeypatch.undo()
    found = read_checkpoint(find_checkpoint(tmp_path))
    assert found["best"]["policy_version"] in (1, 2)
    again = BestCheckpoint(filesystem, str(tmp_path))
    again.restore()
    assert again.score is not None
    saved = read_checkpoint(tmp_path / "best_checkpoint")
    assert saved["best"] == again.score._asdict()
    assert saved["params"].sum() == (0.0 if again.score.policy_version == 1 else 2.0)
    again.offer(0.5, 3, {})
    again.offer(3.0, 4, {})
    assert read_checkpoint(tmp_path / "best_checkpoint")["best"]["policy_version"] == 4
    assert not (tmp_path / "best_checkpoint.new").exists()


def test_best_that_cannot_be_written_names_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(best_checkpoint.fs, "copy_files", full)
    with pytest.raises(CheckpointError, match=r"best_checkpoint cannot be written: No space left"):
        BestCheckpoint(fs.LocalFileSystem(), str(tmp_path)).offer(1.0, 1, {})


def test_best_checkpoint_can_be_restored(tmp_path: Path) -> None:
    made = trainer(evaluation_interval=2, evaluation_duration=2)
    made.train(), made.train()
    steps = made.optimizer.metrics.num_env_steps_sampled
    best = Path(made.logdir) / "best_checkpoint"
    made.stop()
    again = trainer()
    again.restore(str(best))
    assert again.iteration == 2
    assert again.optimizer.metrics.num_env_steps_sampled == steps
    again.train()
    again.stop()


def test_newest_checkpoint_is_found_before_the_best(tmp_path: Path) -> None:
    options = {**SMALL, "evaluation_interval": 1, "evaluation_duration": 1}
    made = PolicyOptimizerTrainer(options, log_dir=tmp_path)
    made.train()
    made.save(str(tmp_path / "checkpoint_000000"))
    made.train()
    made.stop()
    assert (tmp_path / "best_checkpoint" / "manifest.json").exists()
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoint_000000"
    assert find_checkpoint(tmp_path / "best_checkpoint") == tmp_path / "best_checkpoint"


# ---- environments -----------------------------------------------------------------------------


class Market(Drift):
    """An environment whose episodes do not end. The reward of each step depends on the part of the
    data."""

    made: ClassVar[list[tuple[bool, int, int, int]]] = []

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        place = config.worker_index, config.vector_index, config.num_workers
        self.made.append((config.in_evaluation, *place))
        self.reward = {"train": 1.0, "test": 100.0}[config["data"]["split"]]
        self.reward *= config["data"]["scale"]

    def step(self, action: Any) -> Any:
        observation, *_ = super().step(action)
        return observation, self.reward, False, False, {}


def market(**options: Any) -> PolicyOptimizerTrainer:
    Market.made.clear()
    config = {"data": {"split": "train", "scale": 2}}
    evaluated = {"evaluation_interval": 1, "evaluation_duration": 2, "max_frames_per_traj": 5}
    return trainer(env=Market, env_config=config, **evaluated, **options)


def mean_return(result: dict[str, Any]) -> float:
    mean: float = result["env_runners"]["episode_return_mean"]
    return mean


def test_evaluation_has_options_of_its_own() -> None:
    test_part = {"env_config": {"data": {"split": "test"}}, "max_frames_per_traj": 3}
    made = market(evaluation_config={**test_part, "num_envs_per_worker": 1})
    result = made.train()
    # The return is the number of steps, times the reward of the part, times the scale.
    assert mean_return(result) == 5 * 1 * 2
    assert mean_return(result["evaluation"]) == 3 * 100 * 2
    assert made.evaluation is not None
    assert made.evaluation.workers.local.get_sampler().env.num_envs == 1
    made.stop()


def test_evaluation_may_have_another_environment() -> None:
    made = trainer(
        env="CartPole-v1",
        evaluation_interval=1,
        evaluation_duration=2,
        evaluation_config={"env": "CartPole-v0", "env_config": {"max_episode_steps": 4}},
    )
    assert made.train()["evaluation"]["env_runners"]["episode_len_mean"] == 4
    made.stop()


def test_environments_of_training_and_evaluation_are_told_apart() -> None:
    made = market()
    made.train()
    made.stop()
    probe, *others = Market.made
    assert probe == (False, 0, 0, 0)  # closed before the others are made
    assert sorted(others) == [(False, 0, 0, 0), (False, 0, 1, 0), (True, 1, 0, 0), (True, 1, 1, 0)]


def test_evaluation_is_checked_before_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))

    def refused(**evaluation: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            market(evaluation_config=evaluation, num_workers=2)
        return str(caught.value)

    said = refused(env="Acrobot-v1")
    assert "key 'evaluation_config.env': 'Acrobot-v1' cannot be made" in said
    assert "evaluation_config.env_config" in said
    said = refused(env=lambda config: gymnasium.make("Acrobot-v1"))
    assert "has the observation space" in said
    assert "Allowed: the same space as in training" in said
    assert "cannot be made" in refused(env_config={"data": {"split": "nowhere"}})
    assert "did you mean 'CartPole-v1'" in refused(env="Cartpole-v1")


# ---- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evaluation_interval": 0}, "evaluation_interval"),
        (
            {"evaluation_interval": 1, "evaluation_duration": 2, "evaluation_num_workers": 3},
            "got 3 with evaluation_duration=2",
        ),
        ({"evaluation_num_workers": 1}, "got 1 without evaluation_interval"),
        ({"evaluation_interval": 1, "evaluation_config": {"explor": True}}, "explore"),
        (
            {"evaluation_config": {"lr": 0.1}},
            "unknown key 'evaluation_config.lr'. Allowed: .*env_config",
        ),
        ({"evaluation_config": {"num_worker": 2}}, "Allowed: .*num_envs_per_worker"),
        ({"evaluation_config": "test"}, "evaluation_config"),
        (
            {
                "evaluation_interval": 1,
                "optimizer": "decentralized_allreduce",
                "keep_local_weights_in_sync": False,
            },
            "'keep_local_weights_in_sync': got False with evaluation_interval",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Experiment.parse({"env": "CartPole-v1", **options}, {})


def test_workers_of_evaluation_are_requested_of_tune() -> None:
    config = {
        **SMALL,
        "num_workers": 2,
        "num_cpus_per_worker": 0.5,
        "num_gpus_per_worker": 0.25,
        "evaluation_interval": 1,
        "evaluation_num_workers": 3,
    }
    request = PolicyOptimizerTrainer.default_resource_request(config)
    assert request.required_resources == {"CPU": 1.0 + 2 * 0.5 + 3 * 0.5, "GPU": 0.5}
    assert Experiment.parse(config, {}).num_remote_processes == 5


# ---- memory and normalisation -----------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"model": {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 8}},
        {"normalize_observations": True, "normalize_rewards": True},
    ],
)
def test_evaluation_acts_as_predict(options: dict[str, Any]) -> None:
    """Evaluation uses memory, which begins anew with each episode, and the moments of training.
    Returns are not normalised."""
    options |= {"vectorization_mode": "sync", "evaluation_interval": 2, "evaluation_duration": 6}
    made = trainer(**options)
    made.train()
    seeds = evaluation_seeds(5, 0, 0, 2).envs
    block = made.train()["evaluation"]
    policy = made.get_policy()
    assert block["policy_version"] == policy.version
    expected = []
    for seed in seeds:
        env = gymnasium.make("CartPole-v1")
        for episode in range(3):
            observation, _ = env.reset(seed=seed if episode == 0 else None)
            state, total, over = None, 0.0, False
            while not over:
                action, state = policy.predict(observation, state)
                observation, reward, terminated, truncated, _ = env.step(int(action))
                total, over = total + float(reward), terminated or truncated
            expected.append(total)
    last = made.evaluation.last  # type: ignore[union-attr]
    assert sorted(last.episodes.returns) == sorted(expected)  # type: ignore[union-attr]
    made.stop()
