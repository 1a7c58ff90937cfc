"""A user's callbacks: their arguments, their metrics in results, and their errors."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from checkpoint_helpers import SMALL, trainer
from fakes import FakeWorkerSet, make_optimizer, worker_config
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from sampling_helpers import every_mode
from toy_envs import Clock

import polopt
from polopt import CallbackError, Callbacks, Episode
from polopt.common.config import ConfigError
from polopt.common.plain_data import plain
from polopt.metrics.custom_metrics import CustomMetrics, values_of
from polopt.metrics.record import Record
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.workers.call_runner import CallError
from polopt.rollouts.workers.callbacks import resolve_callbacks
from polopt.trainers import evaluation
from polopt.trainers.experiment import Experiment
from polopt.trainers.trainer import PolicyOptimizerTrainer


class Numbered(gymnasium.Env[np.ndarray, int]):
    """In the environment with vector index i, episode n has n + i + 1 steps with a reward of 1. The
    infos hold the number of the episode, the index of the environment, and the number of the
    step."""

    def __init__(self, config: Any = None) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.index = getattr(config, "vector_index", 0)
        self.episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        self.episode += 1
        self.time = 0
        return np.zeros(1, np.float32), {"number": -1}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        over = self.time == self.episode + self.index + 1
        info = {"number": self.episode, "index": self.index, "at": {"time": self.time}}
        return np.zeros(1, np.float32), 1.0, over and self.episode % 2 == 0, over, info


class Recording(Callbacks):
    """Callbacks that return the number of each episode as a metric."""

    seen: list[tuple[Episode, int, bool]]

    def __init__(self) -> None:
        self.seen = SEEN

    def on_episode_end(self, *, episode: Episode, worker: Any) -> dict[str, float]:
        self.seen.append((episode, worker.index, worker.config.in_evaluation))
        return {"number": episode.info["number"], "even": np.bool_(episode.terminated)}


SEEN: list[tuple[Episode, int, bool]] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    SEEN.clear()


@every_mode
@pytest.mark.parametrize("fragment", [1, 4, 32])
def test_callback_gets_each_episode_with_its_last_infos(mode: str, fragment: int) -> None:
    made = trainer(
        env=Numbered, callbacks=Recording, autoreset_mode=mode, rollout_fragment_length=fragment
    )
    result = made.train()
    made.stop()
    count = result["env_runners"]["num_episodes"]
    assert len(SEEN) == count > 4
    for env_index in (0, 1):
        own = [episode for episode, _, _ in SEEN if episode.env_index == env_index]
        for number, episode in enumerate(own):
            length = number + env_index + 1
            assert (episode.episode_len, episode.episode_return) == (length, float(length))
            assert episode.terminated == (number % 2 == 0)
            expected = {"number": number, "index": env_index, "at": {"time": length}}
            assert episode.info == expected
    assert {(worker, evaluates) for _, worker, evaluates in SEEN} == {(0, False)}


def test_metrics_reach_results_as_mean_min_and_max() -> None:
    made = trainer(env=Numbered, callbacks=Recording)
    before = 0
    for _ in range(3):
        block = made.train()["env_runners"]["custom_metrics"]
        numbers = [episode.info["number"] for episode, _, _ in SEEN[before:]]
        before = len(SEEN)
        assert block["number_mean"] == pytest.approx(np.mean(numbers))
        assert (block["number_min"], block["number_max"]) == (min(numbers), max(numbers))
        kinds = ("mean", "min", "max")
        assert set(block) == {f"{name}_{kind}" for name in ("number", "even") for kind in kinds}
    made.stop()


def test_names_stay_in_results_without_episodes() -> None:
    metrics = CustomMetrics()
    assert metrics.report() == {}
    metrics.add(values_of({"x": 2.0}))
    metrics.add(values_of({"x": 4.0}))
    assert metrics.report() == {"x_mean": 3.0, "x_min": 2.0, "x_max": 4.0}
    assert all(math.isnan(value) for value in metrics.report().values())


def test_metrics_of_workers_are_counted_once() -> None:
    config = worker_config(env=Numbered, rollout={"rollout_fragment_length": 12})
    workers = FakeWorkerSet(with_callbacks(config, Recording))
    optimizer = make_optimizer(SyncSamples, workers)
    optimizer.step()
    optimizer.step()
    values = optimizer.metrics.custom_metrics._values["number"]
    assert values.number == len(SEEN) == optimizer.metrics.episodes.lifetime
    assert values.total == sum(episode.info["number"] for episode, _, _ in SEEN)
    assert {worker for _, worker, _ in SEEN} == {1, 2}


def with_callbacks(config: Any, callbacks: type[Callbacks]) -> Any:
    return dataclasses.replace(config, callbacks=callbacks)


def test_worker_adds_metrics_of_workers_below_it() -> None:
    below, record = Record(), Record()
    below.callback_metrics({"x": 1.0})
    record.callback_metrics({"x": 5.0})
    record.add_below(below)
    values = record.custom_metrics["x"]
    assert (values.number, values.total, values.least, values.largest) == (2, 6.0, 1.0, 5.0)


def test_evaluation_has_custom_metrics_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_CALL_HERE_S", 0.0)  # makes evaluation use many calls
    made = trainer(
        env=Numbered,
        callbacks=Recording,
        evaluation_interval=2,
        evaluation_duration=4,
        rollout_fragment_length=1,
    )
    results = [made.train() for _ in range(2)]
    made.stop()
    numbers = [episode.info["number"] for episode, _, evaluates in SEEN if evaluates]
    assert len(numbers) == 4
    assert "custom_metrics" not in results[0]["evaluation"]["env_runners"]
    block = results[1]["evaluation"]["env_runners"]["custom_metrics"]
    assert block["number_mean"] == pytest.approx(np.mean(numbers))


class OwnVector(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """A user's own vector environment: two environments with episodes of 2 and 3 steps."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self) -> None:
        self.num_envs = 2
        self.single_observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(-1.0, 1.0, (2, 1), np.float32)
        self.action_space = spaces.MultiDiscrete([2, 2])

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.time = np.zeros(2, int)
        return np.zeros((2, 1), np.float32), {}

    def step(self, actions: np.ndarray) -> Any:
        self.time += 1
        over = self.time == np.array([2, 3])
        infos: dict[str, Any] = {}
        if over.any():
            final = {"score": 10.0 * self.time, "_score": over, "rare": np.ones(2), "_rare": ~over}
            infos = {"final_obs": np.full((2, 1), 0.5, np.float32), "final_info": final}
        self.time[over] = 0
        return np.zeros((2, 1), np.float32), np.ones(2), over, np.zeros(2, bool), infos


class Scores(Recording):
    def on_episode_end(self, *, episode: Episode, worker: Any) -> dict[str, float]:
        self.seen.append((episode, 0, False))
        return {"score": float(episode.info["score"])}


def test_infos_of_an_own_vector_implementation() -> None:
    made = trainer(env=OwnVector, callbacks=Scores)
    block = made.train()["env_runners"]["custom_metrics"]
    made.stop()
    assert (block["score_min"], block["score_max"]) == (20.0, 30.0)
    assert {episode.env_index: set(episode.info) for episode, _, _ in SEEN} == {
        0: {"score"},
        1: {"score"},
    }
    # In the mode same-step, the observations of the step already belong to the next episodes.
    assert {float(episode.observation[0]) for episode, _, _ in SEEN} == {0.5}


# ---- steps and samples ------------------------------------------------------------------------


class Stepping(Recording):
    """Callbacks that keep the data of each step in the episode, and in a list for the test."""

    def on_episode_step(self, *, episode: Episode, worker: Any) -> None:
        STEPS.append((episode, worker.config.in_evaluation))
        episode.data.setdefault("times", []).append(episode.info["at"]["time"])


STEPS: list[tuple[Episode, bool]] = []


@every_mode
@pytest.mark.parametrize("fragment", [1, 3, 40])
def test_callback_gets_each_step_once_with_its_infos(mode: str, fragment: int) -> None:
    STEPS.clear()
    made = trainer(
        env=Numbered, callbacks=Stepping, autoreset_mode=mode, rollout_fragment_length=fragment
    )
    made.train()
    result = made.train()
    made.stop()
    assert len(STEPS) == result["num_env_steps_sampled_lifetime"]
    for env_index in (0, 1):
        own = [step for step, _ in STEPS if step.env_index == env_index]
        number, time = 0, 0
        for step in own:
            time += 1
            last = time == number + env_index + 1
            assert (step.episode_len, step.episode_return, step.done) == (time, float(time), last)
            assert step.terminated == (last and number % 2 == 0)
            assert step.info == {"number": number, "index": env_index, "at": {"time": time}}
            number, time = (number + 1, 0) if last else (number, time)
    # Each episode has its own data, although the next episode may begin before `on_episode_end`.
    assert len(SEEN) > 4
    for episode, _, _ in SEEN:
        assert episode.data["times"] == list(range(1, episode.episode_len + 1))


class Counting(Numbered):
    """Observations are the number of the episode and of the step. A global list holds them."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.observation_space = spaces.Box(-1.0, 999.0, (2,), np.float32)

    def observe(self) -> np.ndarray:
        return np.array([self.episode, self.time], np.float32)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict]:
        super().reset(**kwargs)
        return self.observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        _, *others = super().step(action)
        others[-1] = {"action": action}
        return self.observe(), *others  # type: ignore[return-value]


EVENTS: list[tuple[int, str, tuple[float, ...], int]] = []


def note(what: str, episode: Episode) -> None:
    observed = tuple(float(number) for number in episode.observation)
    EVENTS.append((episode.env_index, what, observed, episode.episode_len))


class Starting(Callbacks):
    """Callbacks that only begin and end episodes, or also step."""

    def on_episode_start(self, *, episode: Episode, worker: Any) -> None:
        assert (episode.action, episode.done, episode.data) == (None, False, {})
        episode.data["begun"] = True
        note("start", episode)

    def on_episode_end(self, *, episode: Episode, worker: Any) -> dict[str, Any]:
        assert episode.data["begun"]
        note("end", episode)
        return {"lengths": [1.0, episode.episode_len], "nothing": []}


class StartingAndStepping(Starting):
    def on_episode_step(self, *, episode: Episode, worker: Any) -> None:
        assert (episode.action, episode.reward) == (episode.info["action"], 1.0)
        note("step", episode)


@every_mode
@pytest.mark.parametrize("fragment", [1, 7])
@pytest.mark.parametrize("callbacks", [Starting, StartingAndStepping])
def test_each_episode_starts_before_its_first_step(
    mode: str, fragment: int, callbacks: Any
) -> None:
    EVENTS.clear()
    made = trainer(
        env=Counting, callbacks=callbacks, autoreset_mode=mode, rollout_fragment_length=fragment
    )
    made.train()
    block = made.train()["env_runners"]["custom_metrics"]
    made.stop()
    for env_index in (0, 1):
        own = [event[1:] for event in EVENTS if event[0] == env_index]
        expected: list[Any] = []
        for number in range(len(own)):
            length = number + env_index + 1
            expected.append(("start", (number, 0), 0))
            if callbacks is StartingAndStepping:
                expected += [("step", (number, t), t) for t in range(1, length + 1)]
            expected.append(("end", (number, length), length))
        assert own == expected[: len(own)]
        assert len(own) > 4
    assert block["lengths_min"] == 1.0
    assert block["lengths_max"] > 2.0
    assert "nothing_mean" not in block


def test_episode_after_a_failure_starts_too() -> None:
    class Failing(Counting):
        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            if self.episode == 2 and self.time == 1:
                raise OSError("broken")
            return super().step(action)

    EVENTS.clear()
    made = trainer(env=Failing, callbacks=StartingAndStepping, rollout_fragment_length=4)
    made.train()
    made.stop()
    own = [event[1:] for event in EVENTS if event[0] == 0]
    broken = own.index(("step", (2.0, 1.0), 1))
    assert own[broken + 1] == ("start", (0.0, 0.0), 0)  # of the new environment


def test_callbacks_of_evaluation() -> None:
    events: list[Any] = []

    class Evaluating(Callbacks):
        def on_evaluate_start(self, *, trainer: Any) -> None:
            events.append(("start", trainer.evaluation.num_begun))

        def on_evaluate_end(self, *, trainer: Any, evaluation: dict[str, Any]) -> None:
            events.append(("end", evaluation["num_evaluations"]))
            evaluation["seen"] = True

        def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
            events.append(("result", "seen" in result["evaluation"]))

    made = trainer(env=Numbered, callbacks=Evaluating, evaluation_interval=2, evaluation_duration=1)
    for _ in range(3):
        made.train()
    made.stop()
    assert events == [
        ("result", False),
        *[("start", 0), ("end", 1), ("result", True)],
        ("result", False),
    ]


def test_new_episode_begins_after_an_environment_fails() -> None:
    class Failing(Numbered):
        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            if self.episode == 2 and self.time == 1:
                self.episode += 1
                raise OSError("broken")
            return super().step(action)

    STEPS.clear()
    made = trainer(env=Failing, callbacks=Stepping, rollout_fragment_length=4)
    made.train()
    made.stop()
    for episode, _, _ in SEEN:
        assert len(episode.data["times"]) == episode.episode_len
    assert all(step.episode_len == step.info["at"]["time"] for step, _ in STEPS)


def test_callback_gets_the_steps_of_evaluation() -> None:
    STEPS.clear()
    made = trainer(env=Numbered, callbacks=Stepping, evaluation_interval=1, evaluation_duration=2)
    made.train()
    made.stop()
    assert {evaluates for _, evaluates in STEPS} == {False, True}


class SampleRows(Callbacks):
    def on_sample_end(self, *, worker: Any, samples: Any) -> dict[str, float]:
        assert "advantages" in samples.columns
        return {"rows": samples.shape[0] * samples.shape[1]}


class SampleVectors(Callbacks):
    def on_sample_end(self, *, worker: Any, samples: Any) -> dict[str, float]:
        return {"size": samples.obs.shape[-1], "is_float": samples.obs.dtype == np.float32}


def test_callback_reads_encoded_observations() -> None:
    made = trainer(env=lambda config: Clock(5), callbacks=SampleVectors)
    block = made.train()["env_runners"]["custom_metrics"]
    assert (block["size_mean"], block["is_float_mean"]) == (6.0, 1.0)
    made.stop()


def test_callback_gets_fragments_and_its_metrics_are_reported() -> None:
    made = trainer(callbacks=SampleRows, rollout_fragment_length=8)
    block = made.train()["env_runners"]["custom_metrics"]
    assert (block["rows_mean"], block["rows_max"]) == (16.0, 16.0)
    sampler = made.workers.local.sampler
    assert (sampler.ended, sampler.steps) == (None, None)  # no callback reads these data
    made.stop()


# ---- results ----------------------------------------------------------------------------------


class Changing(Callbacks):
    def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
        result["doubled"] = 2 * result["num_env_steps_sampled_lifetime"]
        assert trainer.iteration + 1 == result["training_iteration"]


def test_callback_may_change_a_result() -> None:
    made = trainer(callbacks=Changing)
    result = made.train()
    made.stop()
    assert result["doubled"] == 2 * result["num_env_steps_sampled_lifetime"]


def test_without_callbacks_nothing_is_kept() -> None:
    made = trainer(env=Numbered)
    assert "custom_metrics" not in made.train()["env_runners"]
    assert made.workers.local.sampler.ended is None
    made.stop()


# ---- errors -----------------------------------------------------------------------------------


class Raising(Callbacks):
    def on_episode_end(self, *, episode: Episode, worker: Any) -> None:
        SEEN.append((episode, worker.index, False))
        raise KeyError("no such info")


class RaisingInStep(Callbacks):
    def on_episode_step(self, *, episode: Episode, worker: Any) -> None:
        raise KeyError("no such info")


class ReturningRows(Callbacks):
    def on_sample_end(self, *, worker: Any, samples: Any) -> Any:
        return samples


class RaisingOnResult(Callbacks):
    def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
        raise ValueError("no such key")


class RaisingAtStart(Callbacks):
    def __init__(self) -> None:
        raise OSError("no such file")

    def on_episode_end(self, *, episode: Episode, worker: Any) -> None: ...


class ReturningText(Callbacks):
    def on_episode_end(self, *, episode: Episode, worker: Any) -> Any:
        return {"won": "yes"}


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        (Raising, r"callback Raising.on_episode_end \(worker 0\) raised KeyError"),
        (RaisingOnResult, r"callback RaisingOnResult.on_train_result \(driver\) raised ValueError"),
        (RaisingAtStart, r"callback RaisingAtStart.__init__ \(worker 0\) raised OSError"),
        (RaisingInStep, r"callback RaisingInStep.on_episode_step \(worker 0\) raised KeyError"),
        (ReturningRows, r"callback ReturningRows.on_sample_end \(worker 0\) returned SampleBatch"),
        (ReturningText, r"ReturningText.on_episode_end \(worker 0\) returned {'won': 'yes'}"),
    ],
)
def test_error_names_the_callback(callbacks: type[Callbacks], said: str) -> None:
    made = trainer(env=Numbered, callbacks=callbacks)
    with pytest.raises(CallbackError, match=said):
        made.train()
    made.stop()


def test_error_in_evaluation_names_the_evaluation_worker() -> None:
    class Picky(Callbacks):
        def on_episode_end(self, *, episode: Episode, worker: Any) -> None:
            assert not worker.config.in_evaluation

    made = trainer(env=Numbered, callbacks=Picky, evaluation_interval=1)
    with pytest.raises(CallbackError, match=r"on_episode_end \(evaluation worker 0\) raised"):
        made.train()
    made.stop()


def test_error_is_no_failure_of_the_worker_and_not_repeated() -> None:
    config = with_callbacks(worker_config(env=Numbered, rollout={"num_workers": 1}), Raising)
    workers = FakeWorkerSet(config)
    optimizer = make_optimizer(SyncSamples, workers)
    said = r"Raising.on_episode_end \(worker 1\) raised KeyError: 'no such info'[\s\S]*test_call"
    with pytest.raises(CallbackError, match=said):
        optimizer.step()
    assert len(SEEN) == 1
    assert len(workers.channels) == 1
    assert not any(workers.faults.counts.values())


def test_error_below_a_gradient_worker_keeps_its_kind() -> None:
    assert CallError.of(CallbackError("x")) == CallError("callback", "x")


# ---- the key ----------------------------------------------------------------------------------


def test_class_is_found_by_its_name() -> None:
    found = resolve_callbacks(f"{__name__}:Changing")
    assert found is not None
    assert found.__name__ == "Changing"
    assert resolve_callbacks(Changing) is Changing
    assert resolve_callbacks(None) is None


@pytest.mark.parametrize("code", ["1 / 0", "def", "raise RuntimeError"])
def test_module_that_raises_on_import_is_one_error(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_on_import.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    said = r"key 'callbacks': got 'raises_on_import:Mine': .*raises_on_import.py, line 1\)"
    with pytest.raises(ConfigError, match=said):
        resolve_callbacks("raises_on_import:Mine")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("Changing", "got 'Changing'. Allowed: a subclass of polopt.Callbacks"),
        ("no_such_module:X", "No module named 'no_such_module'"),
        (f"{__name__}:Nothing", "has no attribute 'Nothing'"),
        (f"{__name__}:Numbered", f"got '{__name__}:Numbered'. Allowed"),
        (Numbered, "Allowed: a subclass of polopt.Callbacks"),
        (Changing(), "Allowed: a subclass of polopt.Callbacks"),
        (3, "got 3. Allowed"),
    ],
)
def test_wrong_callbacks_are_refused(value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PolicyOptimizerTrainer({**SMALL, "callbacks": value})


class OfRLlib(Callbacks):
    def on_algorithm_init(self, **kwargs: Any) -> None:
        raise AssertionError


class Inheriting(OfRLlib):
    on_loss = 3.0  # not a method


@pytest.mark.parametrize("callbacks", [OfRLlib, Inheriting, f"{__name__}:OfRLlib"])
def test_method_that_is_not_called_is_refused(callbacks: Any) -> None:
    said = (
        "has the method 'on_algorithm_init', which polopt does not call. "
        "Allowed: 'on_episode_start', 'on_episode_step', 'on_episode_end', 'on_sample_end', "
        "'on_evaluate_start', 'on_evaluate_end', 'on_train_result'"
    )
    with pytest.raises(ConfigError, match=said):
        PolicyOptimizerTrainer({**SMALL, "callbacks": callbacks})


def test_attribute_that_is_not_a_method_is_allowed() -> None:
    class WithOption(Callbacks):
        on_loss = 3.0

        def one_more(self) -> None: ...

    assert resolve_callbacks(WithOption) is WithOption


def test_class_is_left_out_of_checkpoints() -> None:
    experiment = Experiment.parse({"env": "CartPole-v1", "callbacks": Changing}, {})
    unsaved: dict[str, str] = {}
    config = plain(experiment.to_dict(), unsaved)
    assert "callbacks" not in config
    assert unsaved == {"callbacks": f"{__name__}.Changing"}


class Counts(gymnasium.Env[Any, Any]):
    """Each episode has three steps. `steps` is the number of steps of the current episode."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.steps = 0

    def reset(self, **options: Any) -> Any:
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(1, np.float32), 1.0, self.steps == 3, False, {"steps": self.steps}


class ReadsTheEnvironment(polopt.Callbacks):
    def on_episode_end(self, *, episode: Any, worker: Any) -> dict[str, float]:
        steps = worker.sampler.env.get_attr("steps")[episode.env_index]
        return {"steps": steps, "in_info": episode.info["steps"], "length": episode.episode_len}


@pytest.mark.parametrize("mode", [None, "same_step", "next_step", "disabled"])
@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("fast_cpu", [True, False])
def test_callback_sees_the_environment_at_the_end_of_the_episode(
    mode: str | None, how: str, fast_cpu: bool
) -> None:
    """The fragment goes on after the ends of its episodes."""
    trainer = polopt.A2C(
        env=Counts,
        num_workers=0,
        num_envs_per_worker=2,
        rollout_fragment_length=10,
        min_sample_timesteps_per_iteration=40,
        autoreset_mode=mode,
        vectorization_mode=how,
        fast_cpu=fast_cpu,
        callbacks=ReadsTheEnvironment,
        model={"fcnet_hiddens": [8]},
    )
    metrics = trainer.train()["env_runners"]["custom_metrics"]
    trainer.stop()
    for name in ("steps", "in_info", "length"):
        assert metrics[f"{name}_min"] == metrics[f"{name}_max"] == 3.0, name


def test_callbacks_do_not_change_a_run() -> None:
    """With callbacks, the sampler resets the environments itself."""

    def weights(**options: Any) -> Any:
        trainer = polopt.A2C(
            env="Acrobot-v1",
            seed=3,
            num_workers=0,
            num_envs_per_worker=3,
            rollout_fragment_length=20,
            min_sample_timesteps_per_iteration=600,
            max_frames_per_traj=17,
            model={"fcnet_hiddens": [8]},
            **options,
        )
        trainer.train()
        found = trainer.get_policy().get_weights().flat
        trainer.stop()
        return found

    class Ends(polopt.Callbacks):
        def on_episode_end(self, *, episode: Any, worker: Any) -> None:
            assert episode.episode_len == 17

    np.testing.assert_array_equal(weights(), weights(callbacks=Ends))
