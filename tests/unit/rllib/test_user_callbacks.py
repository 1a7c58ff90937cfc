"""Callbacks that are written for RLlib, in runs of the builders."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from polopt import rllib
from polopt.common.config import ConfigError
from polopt.policies.policy import Policy
from polopt.rllib.user_callbacks import (
    CallbackEpisode,
    RLlibCallback,
    as_polopt_callbacks,
    make_multi_callbacks,
)

SEEN: list[Any] = []


def run(builder: Any, callbacks: Any, env: Any = "CartPole-v1", **options: Any) -> Any:
    """Returns an algorithm in this process, after one iteration, and its result."""
    config = {"env": env, "num_workers": 0, "num_envs_per_worker": 2, "seed": 1, **options}
    config |= {"min_time_s_per_iteration": 0}
    algo = builder.from_dict({**config, "callbacks": callbacks}).build()
    return algo, algo.train()


class Everything(rllib.DefaultCallbacks):
    """As RLlib's example `custom_metrics_and_callbacks.py`, with checks."""

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        SEEN.append(("init", algorithm.iteration))

    def on_create_policy(self, *, policy_id: Any, policy: Any) -> None:
        SEEN.append(("policy", policy_id))

    def on_sub_environment_created(
        self, *, worker: Any, sub_environment: Any, env_context: Any, env_index: Any, **kwargs: Any
    ) -> None:
        SEEN.append(("sub", env_index, env_context.vector_index, worker.worker_index))
        assert sub_environment.unwrapped.spec.id == "CartPole-v1"

    def on_episode_start(
        self,
        *,
        worker: Any,
        base_env: Any,
        policies: Any,
        episode: Any,
        env_index: Any,
        **kwargs: Any,
    ) -> None:
        assert episode.length == 0
        env = base_env.get_sub_environments()[env_index]
        np.testing.assert_allclose(env.unwrapped.state, episode.last_observation_for(), rtol=1e-5)
        assert np.abs(episode.last_observation_for()).max() <= 0.05
        assert policies["default_policy"] is worker.get_policy().viewed
        episode.user_data["angles"] = []
        episode.hist_data["angles"] = []
        episode.custom_metrics["trajectories"] = 0

    def on_episode_step(
        self, *, worker: Any, base_env: Any, episode: Any, env_index: Any, **kwargs: Any
    ) -> None:
        state = base_env.get_sub_environments()[env_index].unwrapped.state
        np.testing.assert_allclose(state, episode.last_observation_for(), rtol=1e-5)
        assert episode.last_action_for() in (0, 1)
        assert episode.get_rewards(-1) == 1.0
        episode.user_data["angles"].append(state[2])

    def on_episode_end(self, *, worker: Any, base_env: Any, episode: Any, **kwargs: Any) -> None:
        assert len(episode.user_data["angles"]) == episode.length
        assert episode.agent_rewards == {("agent0", "default_policy"): episode.total_reward}
        episode.hist_data["angles"] = episode.user_data["angles"]
        SEEN.append(("id", episode.episode_id))

    def on_postprocess_trajectory(
        self,
        *,
        worker: Any,
        episode: Any,
        agent_id: Any,
        policy_id: Any,
        policies: Any,
        postprocessed_batch: Any,
        original_batches: Any,
        **kwargs: Any,
    ) -> None:
        assert (agent_id, policy_id) == ("agent0", "default_policy")
        assert not postprocessed_batch["dones"][:-1].any()
        episode.custom_metrics["trajectories"] += 1
        postprocessed_batch["advantages"] = np.full_like(postprocessed_batch["advantages"], 3.0)

    def on_sample_end(self, *, worker: Any, samples: Any, **kwargs: Any) -> None:
        assert samples.count == len(samples["rewards"])
        SEEN.append(("advantages", set(samples["advantages"].tolist())))

    def on_learn_on_batch(
        self, *, policy: Any, train_batch: Any, result: Any, **kwargs: Any
    ) -> None:
        result["rows"] = len(train_batch["obs"])
        train_batch["value_targets"] = train_batch["value_targets"] * 0.0

    def on_evaluate_start(self, *, algorithm: Any, **kwargs: Any) -> None:
        SEEN.append("evaluate")

    def on_evaluate_end(self, *, algorithm: Any, evaluation_metrics: Any, **kwargs: Any) -> None:
        assert evaluation_metrics["evaluation"]["episode_reward_mean"] > 5.0
        evaluation_metrics["mine"] = 1.0

    def on_checkpoint_loaded(self, *, algorithm: Any, **kwargs: Any) -> None:
        SEEN.append("loaded")

    def on_train_result(
        self, *, algorithm: Any, result: Any, metrics_logger: Any, **kwargs: Any
    ) -> None:
        assert result["evaluation"]["mine"] == 1.0
        metrics_logger.log_value(("mine", "iteration"), algorithm.iteration + 1)


def test_each_method_is_called_with_what_rllib_passes(tmp_path: Path) -> None:
    SEEN.clear()
    options = {"train_batch_size": 300, "evaluation_interval": 1, "evaluation_num_episodes": 1}
    options["evaluation_duration"] = options.pop("evaluation_num_episodes")
    algo, result = run(rllib.PPOConfig, Everything, rollout_fragment_length=150, **options)
    algo.restore(algo.save(str(tmp_path)))
    algo.stop()
    assert SEEN[:4] == [
        ("policy", "default_policy"),
        ("init", 0),
        ("sub", 0, 0, 0),
        ("sub", 1, 1, 0),
    ]
    assert ("advantages", {3.0}) in SEEN
    assert "evaluate" in SEEN
    assert SEEN[-1] == "loaded"
    numbers = [event[1] for event in SEEN if event[0] == "id"]
    assert len(set(numbers)) == len(numbers) > 2
    metrics = result["env_runners"]["custom_metrics"]
    assert metrics["trajectories_min"] == 1.0
    assert -0.3 < metrics["angles_min"] < metrics["angles_mean"] < metrics["angles_max"] < 0.3
    learner = result["learners"]["default_policy"]
    assert learner["rows"] == 300.0
    assert learner["vf_target_mean"] == 0.0
    assert result["mine"] == {"iteration": 1.0}


def test_trajectories_of_an_episode_that_spans_fragments() -> None:
    class Trajectories(rllib.DefaultCallbacks):
        def on_episode_start(self, *, episode: Any, **kwargs: Any) -> None:
            episode.custom_metrics["rows"] = 0

        def on_postprocess_trajectory(
            self, *, episode: Any, postprocessed_batch: Any, **kwargs: Any
        ) -> None:
            episode.custom_metrics["rows"] += len(postprocessed_batch["rewards"])

        def on_episode_end(self, *, episode: Any, **kwargs: Any) -> None:
            episode.custom_metrics["length"] = episode.length

    algo, result = run(
        rllib.PPOConfig, Trajectories, rollout_fragment_length=5, train_batch_size=200
    )
    algo.stop()
    metrics = result["env_runners"]["custom_metrics"]
    for kind in ("mean", "min", "max"):
        assert metrics[f"rows_{kind}"] == metrics[f"length_{kind}"] > 5


class Batches(rllib.DefaultCallbacks):
    def on_learn_on_batch(self, *, policy: Any, train_batch: Any, result: Any) -> None:
        SEEN.append(len(train_batch["rewards"]))
        result["rows"] = SEEN[-1]


@pytest.mark.parametrize("builder", [rllib.DQNConfig, rllib.A2CConfig])
def test_learning_is_observed(builder: Any) -> None:
    SEEN.clear()
    options = {"min_sample_timesteps_per_iteration": 100}
    if builder is rllib.DQNConfig:
        options |= {"learning_starts": 40, "train_batch_size": 16}
    algo, result = run(builder, Batches, rollout_fragment_length=20, **options)
    algo.stop()
    rows = 16 if builder is rllib.DQNConfig else max(SEEN)
    assert set(SEEN[1:]) <= set(range(rows - 10, rows + 1))
    assert result["learners"]["default_policy"]["rows"] == pytest.approx(rows, abs=10)


def test_gradients_are_observed_once() -> None:
    """As in A3C, whose workers compute them."""
    algo, _ = run(rllib.A2CConfig, Batches, rollout_fragment_length=20)
    policy, batch = algo.workers.local.policy, algo.workers.local.next_batch()
    for compute in (
        policy.compute_gradients,
        lambda batch: next(policy.minibatch_gradients(batch)),
        lambda batch: next(Policy.minibatch_gradients(policy, batch)),
    ):
        SEEN.clear()
        assert compute(batch).stats["rows"] == batch.agent_steps
        assert [batch.agent_steps] == SEEN
    algo.stop()


def test_functions_of_rllib_0_8_get_one_dict() -> None:
    def on_episode_end(info: dict[str, Any]) -> None:
        info["episode"].custom_metrics["length"] = info["episode"].length
        assert len(info["env"].get_sub_environments()) == 2

    def on_train_result(info: dict[str, Any]) -> None:
        info["result"]["of"] = repr(info["trainer"])[:3]

    functions = {
        "on_episode_start": lambda info: info["episode"].user_data.update(begun=True),
        "on_episode_end": on_episode_end,
        "on_train_result": on_train_result,
        "on_sample_end": None,
    }
    algo, result = run(rllib.PPOConfig, functions, train_batch_size=200)
    algo.stop()
    assert result["env_runners"]["custom_metrics"]["length_mean"] > 5.0
    assert result["of"] == "PPO"
    assert as_polopt_callbacks({}) is None
    with pytest.raises(ConfigError, match="'on_episod_end', which polopt does not call"):
        as_polopt_callbacks({"on_episod_end": print})


def test_several_classes_are_called_in_turn() -> None:
    class First(RLlibCallback):
        def on_train_result(self, *, result: Any, **kwargs: Any) -> None:
            result.setdefault("order", []).append("first")

    class Second(First):
        def on_train_result(self, *, result: Any, **kwargs: Any) -> None:
            result.setdefault("order", []).append("second")

    callbacks: Any = as_polopt_callbacks(make_multi_callbacks((First, Second)))()
    result: dict[str, Any] = {}
    callbacks.on_train_result(trainer=None, result=result)
    assert result["order"] == ["first", "second"]


def test_method_that_is_not_defined_is_not_called() -> None:
    class OnlyResults(RLlibCallback):
        def on_train_result(self, **kwargs: Any) -> None: ...

    cls = as_polopt_callbacks(OnlyResults)
    assert [name for name in vars(cls) if name.startswith("on_")] == ["on_train_result"]
    algo, _ = run(rllib.PPOConfig, OnlyResults, train_batch_size=32)
    assert algo.workers.local.sampler.steps is None
    algo.stop()


def test_episode_created_after_the_reset_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Created(RLlibCallback):
        def on_episode_created(self, **kwargs: Any) -> None: ...

    with caplog.at_level(logging.WARNING, "polopt"):
        as_polopt_callbacks(Created)
    assert "on_episode_created is called after the reset" in caplog.text


def test_episode_knows_the_last_two_rewards_of_each_agent() -> None:
    data: dict[str, Any] = {}

    def after(steps: int, **returns: float) -> CallbackEpisode:
        total, done = sum(returns.values()), SimpleNamespace(terminated=False, done=False)
        episode = SimpleNamespace(**vars(done), data=data, env_index=0, episode_return=total)
        episode.agent_returns, episode.agent_policies = returns, {}
        episode.episode_len, episode.reward = steps, 9.0
        return CallbackEpisode(cast(Any, episode))

    one = after(1, a=1.0, b=2.0)
    assert [one.last_reward_for("a"), one.last_reward_for("b"), one.prev_reward_for("a")] == [
        1,
        2,
        0,
    ]
    after(2, a=1.5, b=6.0)
    three = after(3, a=8.5, b=6.0)
    again = after(3, a=8.5, b=6.0)  # at the end of the episode, after the last step
    for episode in (three, again):
        assert [episode.last_reward_for(agent) for agent in "ab"] == [7.0, 0.0]
        assert [episode.prev_reward_for(agent) for agent in "ab"] == [0.5, 4.0]
    skipped = after(7, a=9.0, b=6.0)
    with pytest.raises(AttributeError, match="keeps them if the callbacks define on_episode_step"):
        skipped.last_reward_for("a")
