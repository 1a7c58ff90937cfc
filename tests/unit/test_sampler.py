"""Sampling: seeds, episodes across fragments, early stops, saved environments, and where
environments come from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from toy_envs import (
    AUTORESET,
    Clock,
    Drift,
    GlobalRandom,
    make_policy,
    make_sampler,
    sync_clocks,
)

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.policies.a2c import A2C
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.envs.creators import EnvContext, call_creator
from polopt.rollouts.envs.making import autoreset_mode, make_vector_env, probe_spaces
from polopt.rollouts.envs.resolving import resolve_env
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.seeding import worker_seeds
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig

every_mode = pytest.mark.parametrize("mode", AUTORESET)


def assert_same(one: SampleBatch, other: SampleBatch) -> None:
    np.testing.assert_array_equal(one.all_obs, other.all_obs)
    np.testing.assert_array_equal(one.successor_index, other.successor_index)
    np.testing.assert_array_equal(one.successor_obs, other.successor_obs)
    np.testing.assert_array_equal(one.episodes.returns, other.episodes.returns)
    np.testing.assert_array_equal(one.episodes.lengths, other.episodes.lengths)
    assert one.columns.keys() == other.columns.keys()
    for name in one.columns:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def rollout(env: Any = Drift, **options: Any) -> RolloutConfig:
    options = {"num_envs_per_worker": 3, "rollout_fragment_length": 7, **options}
    return RolloutConfig.parse({"env": env, **options})


def worker(
    index: int = 1, seed: int = 0, restart_count: int = 0, env: Any = Drift, **options: Any
) -> RolloutWorker:
    config = rollout(env, **options)
    source = resolve_env(env)
    return RolloutWorker(
        WorkerConfig(
            config,
            source,
            A2C,
            A2C.config_class.parse({"model": {"fcnet_hiddens": [4]}}),
            *probe_spaces(source, config),
            seed=seed,
            restart_count=restart_count,
        ),
        index,
    )


# ---- seeds ------------------------------------------------------------------------------------


def test_every_environment_of_every_worker_has_its_own_seed() -> None:
    every = [
        worker_seeds(seed, index, restart_count, num_envs=4)
        for seed in (0, 1)
        for index in range(4)
        for restart_count in range(3)
    ]
    env_seeds = [seed for seeds in every for seed in seeds.envs]
    assert len(set(env_seeds)) == len(env_seeds) == 2 * 4 * 3 * 4
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in env_seeds)
    draws = {np.random.default_rng(seeds.actions).integers(2**62) for seeds in every}
    assert len(draws) == len(every)
    assert len({seeds.shuffle for seeds in every}) == len(every)


def test_seeds_are_a_function_of_what_they_are_for() -> None:
    one, same = worker_seeds(3, 1, 0, 4), worker_seeds(3, 1, 0, 4)
    assert (one.envs, one.shuffle) == (same.envs, same.shuffle)
    assert one.actions.generate_state(4).tolist() == same.actions.generate_state(4).tolist()
    # More environments leave the seeds of the others, and all other streams, as they are.
    more = worker_seeds(3, 1, 0, 9)
    assert more.envs[:4] == one.envs
    assert more.actions.generate_state(4).tolist() == one.actions.generate_state(4).tolist()


def test_same_seed_gives_the_same_batches() -> None:
    one, same = worker(), worker()
    for _ in range(3):
        assert_same(one.sample(), same.sample())


def test_a_change_of_the_global_generators_changes_nothing() -> None:
    first = worker().sample()
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert_same(worker().sample(), first)


@pytest.mark.parametrize(
    "other", [{"index": 2}, {"seed": 1}, {"restart_count": 1}], ids=lambda o: next(iter(o))
)
def test_other_workers_see_and_do_other_things(other: dict[str, int]) -> None:
    one, another = worker(rollout_fragment_length=40), worker(rollout_fragment_length=40, **other)
    weights = one.get_weights()  # the same policy
    batches = [each.sample(weights) for each in (one, another)]
    assert not np.isclose(batches[0].all_obs[0], batches[1].all_obs[0]).any()
    assert not np.array_equal(batches[0]["actions"], batches[1]["actions"])


def test_actions_differ_where_observations_do_not() -> None:
    # In a clock all observations are alike, so that what differs is drawn for the actions.
    def clocks(config: EnvContext) -> Clock:
        return Clock(100)

    options = {"env": clocks, "rollout_fragment_length": 30}
    batches = [worker(restart_count=i, **options).sample() for i in range(3)]
    actions = [batch["actions"] for batch in batches]
    assert not np.array_equal(actions[0], actions[1])
    assert not np.array_equal(actions[1], actions[2])
    assert not np.array_equal(actions[0][:, 0], actions[0][:, 1])


def test_seeds_arrive() -> None:
    sampler = worker(index=2, seed=7).sampler
    assert sampler is not None
    given = worker_seeds(7, 2, 0, 3).envs
    assert list(sampler.env.get_attr("np_random_seed")) == given  # type: ignore[attr-defined]


def test_environments_of_a_worker_differ() -> None:
    first = worker().sample().all_obs[0]
    assert len(np.unique(first.round(4))) == first.size


def test_workers_start_from_the_same_weights() -> None:
    np.testing.assert_array_equal(
        worker(index=1).get_weights().flat, worker(index=3, restart_count=2).get_weights().flat
    )


def global_random(**options: Any) -> RolloutWorker:
    return worker(env=GlobalRandom, rollout_fragment_length=20, **options)


def test_seed_covers_global_generators_and_spaces() -> None:
    one = global_random()
    first = [one.sample() for _ in range(2)]
    same = global_random()
    for batch in first:
        assert_same(same.sample(), batch)


@pytest.mark.parametrize(
    "other", [{"index": 2}, {"seed": 1}, {"restart_count": 1}], ids=lambda o: next(iter(o))
)
def test_global_generators_differ_between_workers(other: dict[str, int]) -> None:
    one, another = (global_random(**options).sample().all_obs for options in ({}, other))
    assert not np.isclose(one, another).any()


def test_set_seed_covers_global_generators_and_spaces() -> None:
    one = global_random()
    batches = []
    for _ in range(2):
        one.set_seed([5, 6, 7])
        batches.append(one.sample())
    layout = 4  # drawn by the constructor, which does not run again
    np.testing.assert_array_equal(
        batches[0].all_obs[..., :layout], batches[1].all_obs[..., :layout]
    )


@pytest.mark.parametrize("seed", [None, 3])
def test_driver_process_is_seeded_only_by_an_explicit_seed(seed: int | None) -> None:
    np.random.seed(0)  # noqa: NPY002
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    config = rollout(Drift, num_workers=0, seed=seed)
    policy = A2C.config_class.parse({})
    RolloutWorker(WorkerConfig(config, Drift, A2C, policy, *probe_spaces(Drift, config), seed=3), 0)
    assert (np.random.random() == expected) == (seed is None)  # noqa: NPY002


def test_driver_without_environments_is_not_seeded() -> None:
    np.random.seed(0)  # noqa: NPY002
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    worker(index=0, num_workers=2)
    assert np.random.random() == expected  # noqa: NPY002


# ---- fragments --------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("length", [1, 4, 5, 11])
def test_episodes_go_on_across_fragments(mode: str, length: int) -> None:
    env = sync_clocks([3, 5], "terminated", mode)
    sampler = make_sampler(env, make_policy("a2c", env), length)
    reset_row = 1 if mode == "next_step" else 0
    rows = 0
    for _ in range(12):
        batch = sampler.sample()
        ended = []
        for t in range(rows, rows + length):
            ended += [n for n in (3, 5) if t % (n + reset_row) == n - 1]
        assert batch.episodes.lengths.tolist() == ended
        assert batch.episodes.returns.tolist() == ended
        rows += length


@pytest.mark.parametrize("reward", [100.0, np.nan])
def test_what_a_reset_reports_is_no_reward(reward: float) -> None:
    env = sync_clocks([3, 5], "terminated", "next_step")
    step = env.step

    def generous(actions: Any) -> Any:
        resets = env._autoreset_envs.copy()
        obs, rewards, *rest = step(actions)
        rewards[resets] = reward
        return obs, rewards, *rest

    env.step = generous  # type: ignore[method-assign]
    batch = make_sampler(env, make_policy("a2c", env), 20).sample()
    np.testing.assert_array_equal(batch.episodes.returns, batch.episodes.lengths)
    np.testing.assert_array_equal(batch["rewards"], batch["valid"].astype(np.float32))


def test_observations_go_on_across_fragments() -> None:
    env = sync_clocks([5, 7], "truncated", "same_step")
    sampler = make_sampler(env, make_policy("a2c", env), 4)
    batches = [sampler.sample() for _ in range(4)]
    for before, after in itertools.pairwise(batches):
        np.testing.assert_array_equal(after.all_obs[0], before.bootstrap_obs)
    times = np.concatenate([batch.obs.argmax(-1) for batch in batches])
    np.testing.assert_array_equal(times, np.arange(16)[:, None] % [5, 7])


def test_batch_says_what_the_policy_thought_and_the_environment_did() -> None:
    env = SyncVectorEnv([Drift] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    policy = make_policy("a2c", env)
    policy.version = 13
    steps: list[tuple[Any, ...]] = []
    step = env.step

    def spy(actions: Any) -> Any:
        result = step(actions)
        steps.append((actions.copy(), *result[:4]))
        return result

    env.step = spy  # type: ignore[method-assign]
    batch = make_sampler(env, policy, 9).sample()
    assert batch.version == 13
    assert (batch.shape, batch.env_steps) == ((9, 2), 18)
    assert (batch["rewards"].dtype, batch["terminated"].dtype) == (np.float32, bool)
    params = policy.action_params(batch.flat("obs"))
    np.testing.assert_allclose(batch.flat("action_dist_inputs"), params, rtol=1e-4, atol=1e-6)
    for t, (actions, obs, rewards, terminated, truncated) in enumerate(steps):
        np.testing.assert_array_equal(batch["actions"][t] - 1, actions)  # the space starts at -1
        np.testing.assert_array_equal(batch.all_obs[t + 1], obs)
        np.testing.assert_array_equal(batch["rewards"][t], rewards.astype(np.float32))
        np.testing.assert_array_equal(batch["terminated"][t], terminated)
        np.testing.assert_array_equal(batch["truncated"][t], truncated)


def test_without_exploring_the_mode_is_taken() -> None:
    sampler = worker().sampler
    assert sampler is not None
    batch = sampler.sample(explore=False)
    np.testing.assert_array_equal(batch["actions"], batch["action_dist_inputs"].argmax(-1))


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_structured_observations_keep_their_last_ones(mode: str) -> None:
    space = spaces.Dict(time=spaces.Discrete(6), pair=spaces.Tuple([spaces.Discrete(2)] * 2))

    class Structured(Clock):
        def __init__(self, length: int) -> None:
            super().__init__(length)
            self.observation_space = space

        def reset(self, **options: Any) -> Any:
            return self.look(super().reset(**options)[0]), {}

        def step(self, action: int) -> Any:
            time, *rest = super().step(action)
            return self.look(time), *rest

        def look(self, time: int) -> Any:
            return {"time": time, "pair": (time % 2, 1)}

    env = SyncVectorEnv([lambda: Structured(5)] * 2, autoreset_mode=AutoresetMode[mode.upper()])
    batch = make_sampler(env, make_policy("a2c", env), 12).sample()
    finals = batch.all_obs[1:][batch["truncated"]] if mode == "next_step" else batch.successor_obs
    last = spaces.utils.flatten(space, {"time": 5, "pair": (1, 1)})
    np.testing.assert_array_equal(finals, [last] * 4)


# ---- early stops ------------------------------------------------------------------------------


def test_stopped_fragment_is_short_and_the_next_goes_on() -> None:
    whole = worker(rollout_fragment_length=9).sampler
    stopped = worker(rollout_fragment_length=9).sampler
    assert whole is not None
    assert stopped is not None
    stopped.stop_early(4)
    expected, batch = whole.sample(), stopped.sample()
    assert batch.shape == (4, 3)
    for name in ("obs", *batch.columns):
        np.testing.assert_array_equal(batch[name], expected[name][:4])
    after = stopped.sample()
    assert after.shape == (9, 3)  # a stop is for one fragment
    np.testing.assert_array_equal(after.all_obs[0], expected.all_obs[4])


def test_stop_that_comes_while_sampling_keeps_what_is_there() -> None:
    env = sync_clocks([100, 100], "truncated", "same_step")
    sampler = make_sampler(env, make_policy("a2c", env), 10)
    step = env.step

    def step_and_stop(actions: Any) -> Any:
        result = step(actions)
        if env.envs[0].time == 5:
            sampler.stop_early(2)  # less than has been sampled
        return result

    env.step = step_and_stop  # type: ignore[method-assign]
    batch = sampler.sample()
    assert batch.shape == (5, 2)
    assert batch.obs.argmax(-1).tolist() == [[t, t] for t in range(5)]
    assert sampler.sample().obs.argmax(-1)[0].tolist() == [5, 5]


def test_stop_keeps_at_least_one_step_and_can_be_taken_back() -> None:
    sampler = worker().sampler
    assert sampler is not None
    sampler.stop_early(0)
    assert sampler.sample().shape[0] == 1
    sampler.stop_early(2)
    sampler.go_on()
    assert sampler.sample().shape[0] == 7
    sampler.stop_early(99)
    assert sampler.sample().shape[0] == 7


def test_episodes_are_whole_across_stops() -> None:
    env = sync_clocks([5, 5], "truncated", "next_step")
    sampler = make_sampler(env, make_policy("a2c", env), 8)
    lengths: list[int] = []
    steps = rows = 0
    for keep in (1, 3, 8, 2, 2, 8, 1, 8, 8):
        sampler.stop_early(keep)
        batch = sampler.sample()
        lengths += batch.episodes.lengths.tolist()
        steps += batch.env_steps
        rows += 2 * batch.shape[0]
    assert set(lengths) == {5}
    assert steps == rows - 2 * (rows // 2 // 6)


# ---- saved environments -----------------------------------------------------------------------


def plain_data(state: Any) -> Iterator[Any]:
    if isinstance(state, dict):
        assert all(isinstance(key, str) for key in state)
        for value in state.values():
            yield from plain_data(value)
    elif isinstance(state, list):
        for value in state:
            yield from plain_data(value)
    else:
        yield state


def drifts(mode: str, limit: int | None = None) -> SyncVectorEnv:
    def make() -> gymnasium.Env[Any, Any]:
        return Drift() if limit is None else TimeLimit(Drift(), limit)

    return SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode[mode.upper()])


@every_mode
@pytest.mark.parametrize("limit", [None, 4])
@pytest.mark.parametrize("rounds_before", range(4))
def test_saved_environments_go_on_bit_for_bit(
    mode: str, limit: int | None, rounds_before: int
) -> None:
    env = drifts(mode, limit)
    policy = make_policy("a2c", env)
    sampler = make_sampler(env, policy, 5, seed=1)
    for _ in range(rounds_before):
        sampler.sample()
    state = sampler.get_state()
    assert state is not None
    restored = make_sampler(drifts(mode, limit), policy, 5, seed=2)
    restored.sample()
    restored.set_state(state)
    for _ in range(3):
        assert_same(sampler.sample(), restored.sample())


def test_saved_environments_are_arrays_and_plain_data() -> None:
    env = drifts("same_step", 4)
    sampler = make_sampler(env, make_policy("a2c", env), 5)
    sampler.sample()
    state = sampler.get_state()
    for leaf in plain_data(state):
        assert isinstance(leaf, np.ndarray | int | float | str | None)
        assert not isinstance(leaf, np.ndarray) or leaf.dtype != object
    kept = json.dumps(state, default=np.ndarray.tolist)
    sampler.sample()
    assert json.dumps(state, default=np.ndarray.tolist) == kept  # what was saved stays


def test_environments_that_can_not_tell_are_not_saved() -> None:
    env = sync_clocks([3, 4], "truncated", "same_step")
    assert make_sampler(env, make_policy("a2c", env), 5).get_state() is None
    cartpole = gymnasium.make_vec("CartPole-v1", num_envs=2)
    assert make_sampler(cartpole, make_policy("a2c", cartpole), 5).get_state() is None


# ---- where environments come from -------------------------------------------------------------


def test_gymnasium_id_takes_its_own_vector_implementation() -> None:
    source = resolve_env("CartPole-v1")
    env = make_vector_env(source, rollout("CartPole-v1"))
    assert type(env.unwrapped).__name__ == "CartPoleVectorEnv"
    assert env.num_envs == 3
    assert autoreset_mode(env) == AutoresetMode.NEXT_STEP
    # And is the same environment when it is sampled by many.
    observations, actions = probe_spaces(source, rollout("CartPole-v1"))
    assert observations.shape == (4,)
    assert actions == spaces.Discrete(2)


@pytest.mark.parametrize("mode", AUTORESET)
def test_gymnasium_id_around_single_environments(mode: str) -> None:
    config = rollout("CartPole-v1", vectorization_mode="sync", autoreset_mode=mode)
    env = make_vector_env(resolve_env("CartPole-v1"), config)
    assert isinstance(env.unwrapped, SyncVectorEnv)
    assert autoreset_mode(env) == AutoresetMode[mode.upper()]


def test_single_environments_are_reset_in_the_same_step_by_default() -> None:
    for name in ("Acrobot-v1", Drift):
        env = make_vector_env(resolve_env(name), rollout(name))
        assert autoreset_mode(env) == AutoresetMode.SAME_STEP


def test_autoreset_mode_is_that_of_this_environment_and_not_of_the_last_made() -> None:
    # Gymnasium writes the mode into the metadata that the environments' class shares.
    envs = [make_vector_env(Drift, rollout(autoreset_mode=mode)) for mode in AUTORESET]
    assert [autoreset_mode(env) for env in envs] == [AutoresetMode[m.upper()] for m in AUTORESET]


def test_env_config_reaches_a_gymnasium_environment() -> None:
    config = rollout("CartPole-v1", env_config={"max_episode_steps": 3})
    env = make_vector_env(resolve_env("CartPole-v1"), config)
    env.reset(seed=0)
    for _ in range(3):
        _, _, _, truncated, _ = env.step(np.zeros(3, np.int64))
    assert truncated.all()


@pytest.fixture
def registered() -> Iterator[str]:
    name = "polopt-tests/Drift-v0"
    gymnasium.register(name, entry_point=Drift, max_episode_steps=4)
    yield name
    del gymnasium.registry[name]


def test_id_registered_here_works_where_it_is_not_registered(registered: str) -> None:
    source = resolve_env(registered)
    spec = gymnasium.registry.pop(registered)  # as in another process
    try:
        batch = worker_of_source(source).sample()
    finally:
        gymnasium.registry[registered] = spec
    # The time limit of the registration holds.
    assert batch.episodes.lengths.max() == 4


def test_id_of_a_module_that_is_to_be_imported(tmp_path: Path, monkeypatch: Any) -> None:
    name = "polopt-tests/Imported-v0"
    (tmp_path / "registers.py").write_text(
        "import gymnasium\n"
        "entry_point = 'gymnasium.envs.classic_control:CartPoleEnv'\n"
        f"gymnasium.register('{name}', entry_point, max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = resolve_env(f"registers:{name}")
    del gymnasium.registry[name]  # as in a worker, which has not imported the module
    assert worker_of_source(source).sample().episodes.lengths.max() == 5


def test_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"'nowhere:X-v0'; its module .*No module named 'nowhere'"
    ):
        resolve_env("nowhere:X-v0")


def test_callable_attribute_of_a_module_is_the_creator() -> None:
    assert resolve_env("toy_envs:Drift") is Drift


@pytest.mark.parametrize("name", ["CartPole-v9", "Game"])
def test_module_is_not_imported_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "evilmod.py").write_text("Game = dict\nraise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="imported only if the user names it"):
        resolve_env(f"evilmod:{name}", allow_import=False)


def test_registered_id_needs_no_import_of_its_module() -> None:
    source = resolve_env("evilmod:CartPole-v1", allow_import=False)
    assert source == gymnasium.spec("CartPole-v1")


def test_attribute_of_a_loaded_module_is_refused_without_permission() -> None:
    with pytest.raises(ConfigError, match="imported only if the user names it"):
        resolve_env("os:getcwd", allow_import=False)


def worker_of_source(source: Any) -> RolloutWorker:
    config = rollout("unused", rollout_fragment_length=30)
    policy = A2C.config_class.parse({})
    made = WorkerConfig(config, source, A2C, policy, *probe_spaces(source, config), seed=0)
    return RolloutWorker(made, 1)


def test_name_registered_with_tune() -> None:
    from ray.tune.registry import _global_registry, register_env

    register_env("polopt-drift", lambda config: Drift(config))
    try:
        source = resolve_env("polopt-drift")
        config = rollout("polopt-drift", env_config={"speed": 3})
        env = make_vector_env(source, config, worker_index=2)
        assert isinstance(env, SyncVectorEnv)
        assert env.envs[1].unwrapped.context == {"speed": 3}
        assert env.envs[1].unwrapped.context.worker_index == 2
    finally:
        _global_registry.unregister("env_creator", "polopt-drift")


@pytest.mark.parametrize(
    ("given", "near"), [("CartPole-v9", "CartPole-v1"), ("Pendulun-v1", "Pendulum-v1")]
)
def test_unknown_id_names_the_nearest(given: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"key 'env': got '{given}'; did you mean '{near}'"):
        resolve_env(given)


@pytest.mark.parametrize("given", [None, 3, ["CartPole-v1"]])
def test_what_is_no_environment_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"key 'env': got .*allowed: a Gymnasium id"):
        resolve_env(given)


class TakesConfig:
    """Each of these says what it was called with."""

    def __init__(self, config: Any) -> None:
        self.got = config


class TakesKeywords:
    def __init__(self, size: int = 1, speed: float = 0.0) -> None:
        self.got = (size, speed)


class TakesNothing:
    got = "nothing"


CONTEXT = EnvContext({"size": 4, "speed": 2.0}, 3, 1, 5)


@pytest.mark.parametrize(
    ("creator", "got"),
    [
        (TakesConfig, CONTEXT),
        (lambda config: TakesConfig(config), CONTEXT),
        (lambda anything: TakesConfig(anything), CONTEXT),
        (lambda config=None: TakesConfig(config), CONTEXT),
        (lambda env_config=None, *, more=1: TakesConfig(env_config), CONTEXT),
        (TakesKeywords, (4, 2.0)),
        (lambda size=1, speed=0: TakesKeywords(size, speed), (4, 2.0)),
        (lambda **options: TakesConfig(options), dict(CONTEXT)),
        (lambda *, size, speed: TakesKeywords(size, speed), (4, 2.0)),
    ],
)
def test_creator_is_called_as_its_signature_wants(creator: Callable[..., Any], got: Any) -> None:
    assert call_creator(creator, CONTEXT).got == got


@pytest.mark.parametrize("creator", [TakesNothing, lambda: TakesNothing()])
def test_creator_without_parameters_gets_none(creator: Callable[..., Any]) -> None:
    assert call_creator(creator, EnvContext({}, 0, 0, 0)).got == "nothing"


def test_every_environment_knows_where_it_is() -> None:
    config = rollout(Drift, env_config={"a": 1}, num_workers=4)
    env = make_vector_env(Drift, config, worker_index=2)
    assert isinstance(env, SyncVectorEnv)
    for index, each in enumerate(env.envs):
        context = each.unwrapped.context
        assert isinstance(context, dict)
        assert context == {"a": 1}
        assert context is not config.env_config
        place = (context.worker_index, context.vector_index, context.num_workers)
        assert place == (2, index, 4)


@pytest.mark.parametrize(
    ("env", "options", "key"),
    [
        (Drift, {"vectorization_mode": "vector_entry_point"}, "vectorization_mode"),
        ("CartPole-v1", {"autoreset_mode": "same_step"}, "autoreset_mode"),
        (lambda: sync_clocks([3, 4], "truncated", "next_step"), {}, "num_envs_per_worker"),
        (
            lambda: sync_clocks([3, 4, 5], "truncated", "next_step"),
            {"autoreset_mode": "disabled"},
            "autoreset_mode",
        ),
    ],
)
def test_impossible_combination_names_its_key(env: Any, options: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{key}': got .*(allowed|agree)"):
        make_vector_env(resolve_env(env), rollout(env, **options))


def test_callable_may_make_a_vector_environment() -> None:
    def make() -> SyncVectorEnv:
        return sync_clocks([3, 4, 5], "truncated", "disabled")

    env = make_vector_env(make, rollout(make))
    assert autoreset_mode(env) == AutoresetMode.DISABLED
    assert probe_spaces(make, rollout(make)) == (spaces.Discrete(6), spaces.Discrete(2))


# ---- workers ----------------------------------------------------------------------------------


def test_with_no_workers_the_driver_samples_itself() -> None:
    batch = worker(index=0, num_workers=0).sample()
    assert batch.worker_index == 0
    assert {"values", "advantages", "value_targets"} <= batch.columns.keys()


def test_with_workers_the_driver_has_no_environments() -> None:
    driver = worker(index=0, num_workers=2)
    assert driver.sampler is None
    with pytest.raises(RuntimeError, match="worker 0 has no environments"):
        driver.sample()
    assert driver.get_state()["sampler"] is None
    driver.stop()


def test_worker_acts_by_the_weights_it_is_given() -> None:
    each, other = worker(index=1), worker(index=2, seed=9)
    other.policy.version = 5
    gradients, info = each.sample_and_compute_gradients(other.get_weights())
    assert gradients.version == each.policy.version == 5
    assert gradients.rows == info.env_steps == 21
    assert each.checksum() == other.checksum()
    assert each.sample().version == 5


def test_worker_state_goes_on_bit_for_bit() -> None:
    one, other = worker(index=1), worker(index=1, restart_count=1)
    one.policy.learn_on_batch(one.sample())
    other.set_state(one.get_state())
    assert one.checksum() == other.checksum()
    assert_same(one.sample(), other.sample())
    assert one.policy.shuffle.random() == other.policy.shuffle.random()


class Pictures(gymnasium.Env[np.ndarray, int]):
    """Every pixel shows the time."""

    observation_space = spaces.Box(0, 255, (4, 5, 3), np.uint8)
    action_space = spaces.Discrete(2)
    time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        return self.picture(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self.picture(), 1.0, False, self.time == 4, {}

    def picture(self) -> np.ndarray:
        return np.full((4, 5, 3), self.time, np.uint8)


@every_mode
def test_pictures_stay_bytes(mode: str) -> None:
    each = worker(env=Pictures, autoreset_mode=mode)
    batch = each.sample()
    assert batch.all_obs.dtype == batch.successor_obs.dtype == np.uint8
    assert batch.all_obs.shape == (8, 3, 4, 5, 3)
    if mode != "next_step":
        assert (batch.successor_obs == 4).all()
    assert np.isfinite(each.policy.compute_gradients(batch).flat).all()


def test_sampler_closes_its_environments() -> None:
    each = worker()
    assert isinstance(each.sampler, VectorSampler)
    each.stop()
    assert each.sampler.env.closed


def test_a_restored_run_does_not_repeat_the_episodes_it_has_learned_from() -> None:
    first, again, restored = (worker(seed=3) for _ in range(3))
    restored.begin_restored_run(1)
    batches = [made.sample() for made in (first, again, restored)]
    assert np.array_equal(batches[0].all_obs, batches[1].all_obs)
    assert not np.array_equal(batches[0].all_obs[0], batches[2].all_obs[0])
    assert not np.array_equal(batches[0]["actions"], batches[2]["actions"])
    restored.begin_restored_run(0)
    assert np.array_equal(batches[0].all_obs, restored.sample().all_obs)
