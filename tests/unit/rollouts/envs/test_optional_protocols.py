"""The methods and attributes that polopt uses beyond Gymnasium's API are optional. If one of them
cannot be used, training continues, and one warning names it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from checkpoint_helpers import trainer
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import NormalizeObservation
from sampling_helpers import assert_same, every_mode
from toy_envs import Drift, make_policy, make_sampler

from polopt import Callbacks, Episode
from polopt.rollouts.envs import env_errors
from polopt.rollouts.envs.env_sources import own_copy
from polopt.rollouts.envs.env_state import (
    get_env_statistics,
    merge_env_statistics,
    set_env_statistics,
    set_evaluation_statistics,
)
from polopt.trainers.checkpoints import read_checkpoint, write_checkpoint


@pytest.fixture(autouse=True)
def _warn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_errors, "_warned", set())


class Stateless(gymnasium.Env[np.ndarray, int]):
    observation_space = spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.random(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return np.full(2, self.time, np.float32), 1.0, self.time >= 5, False, {}


def with_state(get: Any, restore: Any = None) -> type[Stateless]:
    """Makes a class with `get` and `restore` as the methods of the protocol. The default of
    `restore` does nothing."""

    class Stated(Stateless):
        get_checkpoint_state = get
        set_checkpoint_state = restore or (lambda self, state: None)

    return Stated


def raises(*_: Any) -> Any:
    raise NotImplementedError("not here")


def vector(make: Callable[[], Any], mode: str = "same_step") -> SyncVectorEnv:
    return SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode[mode.upper()])


class Proxy(Stateless):
    """An environment like a proxy of a server. `unwrapped`, and each attribute that the class
    lacks, raise an error."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the server has no {name}")

    unwrapped = property(raises)  # type: ignore[assignment]


@every_mode
def test_environment_whose_attributes_raise(mode: str, tmp_path: Path) -> None:
    made = trainer(env=Proxy, autoreset_mode=mode, evaluation_interval=1, evaluation_duration=2)
    result = made.train()
    made.save(str(tmp_path))
    made.restore(str(tmp_path))
    made.train()
    made.stop()
    assert result["fault_tolerance"]["num_env_faults"] == 0


UNUSABLE: dict[str, Any] = {
    "other arguments": lambda self, agent: 3,
    "object": lambda self: SimpleNamespace(time=1),
    "keys": lambda self: {SimpleNamespace: 1.0},
    "array of objects": lambda self: np.array([{}, None]),
    "contains itself": lambda self: (lambda one: one.append(one) or one)([]),
    "raises": raises,
    "property": property(lambda self: np.zeros(2)),
    "property that raises": property(raises),
    "attribute": 3,
    "class method": classmethod(lambda cls, more: more),
}


@pytest.mark.parametrize("get", UNUSABLE.values(), ids=UNUSABLE)
def test_state_that_cannot_be_saved_is_left_out(
    get: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = with_state(get)
    made = trainer(env=env)
    made.train()
    made.save(str(tmp_path))
    made.train()
    again = trainer(env=env)
    again.restore(str(tmp_path))
    again.train()
    made.stop()
    again.stop()
    warnings = [record.getMessage() for record in caplog.records if record.name == "polopt"]
    assert len(warnings) == 1
    assert "with_state.<locals>.Stated.get_checkpoint_state" in warnings[0]
    assert "The run goes on without it" in warnings[0]


def test_unsupported_array_is_named_with_its_path(caplog: pytest.LogCaptureFixture) -> None:
    env = vector(with_state(lambda self: {"a": [np.array([None])]}))
    assert make_sampler(env, make_policy("a2c", env), 5).get_state() is None
    assert "got a NumPy array of object at 'a[0]', which is not plain data" in caplog.text


def test_state_without_the_method_that_restores_it(caplog: pytest.LogCaptureFixture) -> None:
    class Half(Stateless):
        def get_checkpoint_state(self) -> int:
            return 3

    env = vector(Half)
    assert make_sampler(env, make_policy("a2c", env), 5).get_state() is None
    assert "Half.set_checkpoint_state cannot be used" in caplog.text


def test_generic_names_are_not_called(caplog: pytest.LogCaptureFixture) -> None:
    class Own(Stateless):
        get_state = set_state = raises
        obs = state = "own"

    class OwnVector(SyncVectorEnv):
        get_state = set_state = raises

    for env in (vector(Own), OwnVector([Stateless] * 2)):
        assert make_sampler(env, make_policy("a2c", env), 5).get_state() is None
    assert not caplog.records


def test_plain_state_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    state = {
        "arrays": [np.arange(6).reshape(2, 3)[:, ::-1], np.float32(2.5), np.array(3)],
        "tuple": (1, "two", None, True, float("inf")),
        "tensor": torch.ones(2, requires_grad=True) * 2,
        "random": Stateless().np_random.bit_generator.state,
        "other": [b"\x00\xff", {1, 2}, {0: 1.0, (1, 2): "x"}, np.datetime64("2020-01-01"), 1j],
        "foreign": np.ones(2, ">f4"),
    }
    got: list[Any] = []
    env = vector(with_state(lambda self: state, lambda self, saved: got.append(saved)))
    sampler = make_sampler(env, make_policy("a2c", env), 5)
    saved = sampler.get_state()
    assert saved is not None
    write_checkpoint(tmp_path, saved)
    sampler.set_state(read_checkpoint(tmp_path))
    assert len(got) == 2
    assert got[0]["arrays"][0].tolist() == [[2, 1, 0], [5, 4, 3]]
    assert got[0]["arrays"][1:] == [2.5, 3]
    assert type(got[0]["arrays"][1]) is np.float32
    assert got[0]["tuple"] == state["tuple"]
    assert got[0]["other"] == state["other"]
    assert got[0]["foreign"].dtype == ">f4"
    assert got[0]["tensor"].tolist() == [2.0, 2.0]
    assert got[0]["random"] == state["random"]


@every_mode
@pytest.mark.parametrize("restore", [raises, lambda self, one, other: None, 3, None])
def test_environments_that_cannot_be_restored_begin_new_episodes(
    restore: Any, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Restoring fails in the second of two environments, or the environments have no such method
    (`restore` is None)."""

    class Half(Drift):
        """An environment whose state only the first of two instances can restore."""

        def set_checkpoint_state(self, state: Any) -> None:
            super().set_checkpoint_state(state)
            if self is env.envs[1]:
                (lambda: restore(self, state))()

    source = vector(Drift, mode)
    policy = make_policy("a2c", source)
    saving = make_sampler(source, policy, 7, seed=3)
    saving.sample()
    saved = saving.get_state()
    assert saved is not None
    env = vector(Half if restore is not None else Stateless, mode)
    policy = make_policy("a2c", env)
    sampler = make_sampler(env, policy, 7, seed=1)
    sampler.sample()
    sampler.set_state(saved)
    batch = sampler.sample()
    assert batch.episodes.lengths == [] or max(batch.episodes.lengths) <= 7
    assert batch["valid"][0].all()  # no reset row is left from before the restore
    assert len(caplog.records) == 1
    kind = "Half" if restore is not None else "Stateless"
    assert f"{kind}.set_checkpoint_state() cannot be used" in caplog.text


def test_state_of_a_vector_of_ones_own() -> None:
    class Own(SyncVectorEnv):
        def get_checkpoint_state(self) -> list[Any]:
            return [env.unwrapped.get_checkpoint_state() for env in self.envs]

        def set_checkpoint_state(self, state: list[Any]) -> None:
            for env, own in zip(self.envs, state, strict=True):
                env.unwrapped.set_checkpoint_state(own)

    def make() -> VectorEnv[Any, Any, Any]:
        return Own([Drift] * 2, autoreset_mode=AutoresetMode.SAME_STEP)

    policy = make_policy("a2c", make())
    one, other = (make_sampler(make(), policy, 5, seed=seed) for seed in (1, 2))
    one.sample()
    state = one.get_state()
    assert state is not None
    assert "vector" in state["env"]
    other.set_state(state)
    assert_same(one.sample(), other.sample())


# ---- running statistics of wrappers --------------------------------------------------------------


class Keeps(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper with attributes that have the names of running statistics."""

    def __init__(self, env: Any, **attributes: Any) -> None:
        super().__init__(env)
        vars(self).update(attributes)


def moments(**parts: Any) -> Any:
    return SimpleNamespace(**{"mean": np.zeros(2), "var": np.ones(2), "count": 1.0, **parts})


NO_STATISTICS: dict[str, Any] = {
    "dict": {"a": 1.0},
    "None": None,
    "number": 1.0,
    "array": np.zeros(2),
    "other object": SimpleNamespace(n=1, mean=np.zeros(2), std=np.ones(2)),
    "class": SimpleNamespace,
    "other shape": moments(var=np.ones(3)),
    "text": moments(mean="a", var="b"),
    "no mean yet": moments(mean=None),
    "count": moments(count=float("nan")),
}


@pytest.mark.parametrize("value", NO_STATISTICS.values(), ids=NO_STATISTICS)
@pytest.mark.parametrize("name", ["obs_rms", "return_rms"])
def test_attributes_that_are_no_running_statistics(
    name: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make(config: Any) -> Keeps:
        return Keeps(Stateless(), **{name: value})

    made = trainer(env=make, evaluation_interval=1, evaluation_duration=2)
    made.train()
    made.save(str(tmp_path))
    again = trainer(env=make)
    again.restore(str(tmp_path))
    again.train()
    made.stop()
    again.stop()
    warnings = [record.getMessage() for record in caplog.records if record.name == "polopt"]
    assert len(warnings) == 1
    assert f"Keeps.{name} cannot be used" in warnings[0]


@pytest.mark.parametrize("of", [np.asarray, torch.as_tensor])
def test_running_statistics_of_ones_own(of: Any) -> None:
    def make(mean: float, count: float) -> SyncVectorEnv:
        values = {"mean": of([mean, 0.0]), "var": of([1.0, 2.0]), "count": of(count)}
        return vector(lambda: Keeps(Stateless(), obs_rms=SimpleNamespace(**values)))

    source, target = make(3.0, 5.0), make(0.0, 0.0)
    set_env_statistics(target, get_env_statistics(source))
    found = target.envs[1].obs_rms
    assert type(found.mean) is type(of([0.0]))
    assert (found.mean.tolist(), found.var.tolist()) == ([3.0, 0.0], [1.0, 2.0])
    assert float(found.count) == 5.0


def test_statistics_that_cannot_be_set(caplog: pytest.LogCaptureFixture) -> None:
    class Fixed:
        mean = property(lambda self: np.zeros(2))
        var, count = np.ones(2), 4.0

    env = vector(lambda: Keeps(Stateless(), obs_rms=Fixed()))
    set_env_statistics(env, get_env_statistics(env))
    assert "Fixed.obs_rms cannot be used" in caplog.text


def test_statistics_of_environments_that_have_not_begun() -> None:
    """Some environments may create their statistics later than others, and all counts are 0."""
    late = Keeps(Stateless(), obs_rms=None)
    env = vector(lambda: Keeps(Stateless(), obs_rms=moments(count=0.0)))
    env.envs = (env.envs[0], late)
    together = merge_env_statistics([get_env_statistics(env)] * 2)
    assert together["envs"][0][0]["mean"].tolist() == [0.0, 0.0]
    set_env_statistics(env, together)
    assert late.obs_rms is None


def test_statistics_that_raise_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    class Busy:
        var, count, asked = np.ones(2), 4.0, 0

        @property
        def mean(self) -> np.ndarray:
            self.asked += 1
            if self.asked % 2 == 0:
                raise TimeoutError("the server is busy")
            return np.zeros(2)

    env = vector(lambda: Keeps(Stateless(), obs_rms=Busy()))
    assert len(get_env_statistics(env)["envs"][0]) == 1
    assert get_env_statistics(env) == {}
    assert "Keeps.obs_rms cannot be used (TimeoutError" in caplog.text


def test_flag_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    class Frozen(Keeps):
        update_running_mean = property(raises)

    env = Frozen(Stateless(), obs_rms=moments())
    set_evaluation_statistics(env, [get_env_statistics(vector(lambda: env))])
    assert "Frozen.update_running_mean cannot be used" in caplog.text


def test_method_with_the_name_of_gymnasiums_flag_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Updates(Keeps):
        def update_running_mean(self, observation: Any) -> str:
            return "called"

    env = Updates(Stateless(), obs_rms=moments())
    set_evaluation_statistics(env, [get_env_statistics(vector(lambda: env))])
    assert env.update_running_mean(None) == "called"
    assert "Updates.update_running_mean cannot be used" in caplog.text


def test_gymnasiums_wrappers_are_frozen_in_evaluation() -> None:
    env = NormalizeObservation(Stateless())
    env.reset(seed=1)
    set_evaluation_statistics(env, [get_env_statistics(vector(lambda: env))])
    assert env.update_running_mean is False


def test_unwrapped_and_step_counters_of_ones_own() -> None:
    class Simulator(Stateless):
        """An environment whose `unwrapped` is another object. Its wrapper has a step counter."""

        unwrapped = property(lambda self: SimpleNamespace())  # type: ignore[assignment]
        get_checkpoint_state = lambda self: self.time  # noqa: E731
        set_checkpoint_state = lambda self, state: None  # noqa: E731

    env = vector(lambda: Keeps(Simulator(), _elapsed_steps={"a": object()}))
    sampler = make_sampler(env, make_policy("a2c", env), 5)
    assert sampler.get_statistics() == {}
    state = sampler.get_state()
    assert state is not None
    assert state["env"]["elapsed"] == [[], []]


# ---- infos for callbacks -------------------------------------------------------------------------


def generator() -> Any:
    yield 1


INFOS: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "file": lambda: Path(__file__).open("rb"),  # noqa: SIM115
    "generator": generator,
    "module": lambda: np,
    "graph": lambda: torch.ones(2, requires_grad=True) * 2,
    "nested": lambda: {"all": [threading.Lock()]},
    "raises": lambda: type("Raises", (), {"__deepcopy__": raises, "__reduce_ex__": raises})(),
}


class Tells(Stateless):
    """An environment whose infos contain an object that cannot be copied, and a list that the
    environment changes later."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.kind = config["kind"]
        self.object = INFOS[self.kind]()
        self.times: list[int] = []

    def reset(self, **arguments: Any) -> tuple[np.ndarray, dict]:
        self.times.clear()
        return super().reset(**arguments)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        self.times.append(self.time)
        info = {"object": self.object, "times": self.times, 3: "three"}
        return (*result[:4], info | {"both": {"object": self.object, "times": self.times}})


ENDED: list[Episode] = []


class Listens(Callbacks):
    def on_episode_end(self, *, episode: Episode, worker: Any) -> None:
        ENDED.append(episode)


@every_mode
@pytest.mark.parametrize("kind", INFOS)
def test_infos_that_cannot_be_copied_cost_no_episode(kind: str, mode: str) -> None:
    ENDED.clear()
    made = trainer(env=Tells, env_config={"kind": kind}, callbacks=Listens, autoreset_mode=mode)
    result = made.train()
    made.stop()
    assert result["fault_tolerance"]["num_env_faults"] == 0
    assert len(ENDED) == result["env_runners"]["num_episodes"] > 4
    assert result["env_runners"]["episode_return_mean"] == 5.0
    for episode in ENDED:
        assert episode.info["times"] == episode.info["both"]["times"] == [1, 2, 3, 4, 5]
        assert episode.info[3] == "three"
        assert {"object", "both"} <= episode.info.keys()


def test_infos_of_a_process_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    ENDED.clear()
    made = trainer(
        env=Tells, env_config={"kind": "lock"}, callbacks=Listens, vectorization_mode="async"
    )
    result = made.train()
    made.stop()
    assert result["fault_tolerance"]["num_env_faults"] == 0
    assert len(ENDED) == result["env_runners"]["num_episodes"] > 4
    for episode in ENDED:
        assert episode.info == {"times": [1, 2, 3, 4, 5], 3: "three"}


class LazyInfo(dict[str, Any]):
    """Computes its values when they are read, which fails."""

    def keys(self) -> Any:
        raise RuntimeError("the simulator has gone on")

    __iter__ = items = keys  # type: ignore[assignment]


@pytest.mark.parametrize("vectorization_mode", ["sync", "async"])
@pytest.mark.parametrize("method", ["on_episode_end", "on_episode_step"])
def test_info_that_cannot_be_read_costs_no_episode(method: str, vectorization_mode: str) -> None:
    class Lazy(Stateless):
        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            return (*super().step(action)[:4], LazyInfo(time=self.time))

    class Reads(Callbacks):
        times: list[int] = []  # noqa: RUF012 - of all instances

    setattr(Reads, method, lambda self, *, episode, worker: self.times.append(episode.info["time"]))
    made = trainer(env=Lazy, callbacks=Reads, vectorization_mode=vectorization_mode)
    result = made.train()
    made.stop()
    assert result["fault_tolerance"]["num_env_faults"] == 0
    assert Reads.times.count(5) == result["env_runners"]["num_episodes"] > 4


class OwnVector(SyncVectorEnv):
    """A vector environment that returns infos in the form of other packages."""

    infos: Any = None

    def step(self, actions: Any) -> Any:
        *result, infos = super().step(actions)
        return (*result, {**infos, **self.infos})


@pytest.mark.parametrize(
    "infos",
    [
        {"final_info": np.array([{"a": 1}, None], dtype=object)},
        {"final_info": None},
        {"final_info": {"score": np.array([threading.Lock(), None]), "_score": 3, 4: np.ones(2)}},
        {"final_info": {"score": np.array([1.0, 2.0]), "_score": np.array([], bool)}},
    ],
)
def test_infos_of_vectors_of_other_packages(infos: dict[str, Any]) -> None:
    def make(config: Any) -> OwnVector:
        env = OwnVector([Stateless] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
        env.infos = infos
        return env

    ENDED.clear()
    made = trainer(env=make, callbacks=Listens)
    result = made.train()
    made.stop()
    assert result["fault_tolerance"]["num_env_faults"] == 0
    assert len(ENDED) == result["env_runners"]["num_episodes"] > 4


def test_own_copy_shares_only_what_cannot_be_copied() -> None:
    lock = threading.Lock()
    inner = {"deep": [2], "lock": lock}
    value: dict[str, Any] = {"lock": lock, "list": [1, inner], "pair": (lock, [3])}
    value["self"] = value
    copied = own_copy(value)
    assert copied["lock"] is copied["list"][1]["lock"] is copied["pair"][0] is lock
    copied["list"][1]["deep"].append(4)
    copied["pair"][1].append(5)
    assert value["list"][1]["deep"] == [2]
    assert value["pair"][1] == [3]
    assert copied["self"] is copied
