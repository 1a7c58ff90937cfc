"""The contract of a policy holds for policies outside of the actor-critic family, too."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from learner_threads import on_threads
from policy_helpers import FakeEnv, fixed_gradient, make_batch, small_policy
from torch import nn
from toy_envs import random_batch

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Transitions
from polopt.common.weights import Gradients
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.acting_policy import ActingPolicy
from polopt.policies.actor_critic import ActorCriticPolicy
from polopt.policies.fragment_policy import MinibatchGradients
from polopt.policies.learning.flat_parameters import FlatParameters, Segment
from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.learning.weight_updater import WeightUpdater
from polopt.policies.network_policy import NetworkPolicy
from polopt.policies.policy import Policy
from polopt.trainers.experiment import Experiment
from polopt.trainers.trainer import PolicyOptimizerTrainer


class Reinforce(Policy):
    """Learns a linear network from log-probabilities times rewards of single steps."""

    def make_segments(self) -> dict[str, Segment]:
        size = int(np.prod(self.encoder.shape))
        return {"network": Segment(nn.Linear(size, self.dist.num_params))}

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return self.model(torch.as_tensor(obs.reshape(len(obs), -1))).numpy()

    def compute_gradients(self, batch: SampleBatch) -> Gradients:
        obs, actions, rewards = (
            torch.as_tensor(batch.flat(name)) for name in ("obs", "actions", "rewards")
        )
        self.flat.zero_grads()
        loss = -(self.dist.log_prob(self.model(obs), actions) * rewards).mean()
        loss.backward()
        stats = {"policy_loss": loss.item()}
        return Gradients(self.flat.get_grads(), self.version, len(obs), stats)


def make_reinforce(seed: int = 0, **options: Any) -> Reinforce:
    env = FakeEnv(spaces.Box(-9.0, 9.0, (2,)), spaces.Discrete(3))
    config = PolicyConfig.parse(options)
    return Reinforce(env.observation_space, env.action_space, config, seed=seed)


def test_policy_without_critic_trains_and_resumes(tmp_path: Path) -> None:
    config = {
        "env": "CartPole-v1",
        "policy": Reinforce,
        "optimizer": "sync_samples",
        "num_workers": 0,
        "rollout_fragment_length": 16,
        "min_sample_timesteps_per_iteration": 64,
        "seed": 1,
    }
    trainer, other = PolicyOptimizerTrainer(config), PolicyOptimizerTrainer(config)
    result = trainer.train()
    assert result["learners"]["default_policy"]["grad_norm"] > 0.0
    assert result["optimizer"]["rows_per_update"] == 16 * 8  # steps, environments
    trainer.save_checkpoint(str(tmp_path))
    other.load_checkpoint(str(tmp_path))
    weights = [made.get_policy().get_weights() for made in (trainer, other)]
    np.testing.assert_array_equal(weights[0].flat, weights[1].flat)
    assert weights[0][1:] == weights[1][1:]
    assert weights[0].version > 0
    trainer.stop()
    other.stop()


def test_policy_without_minibatches_gives_one_gradient() -> None:
    policy = make_reinforce()
    batch = make_batch(policy)
    gradients = MinibatchGradients(policy, batch)
    only = gradients.next_gradients()
    assert (only.new_rows, only.ends_rollout) == (only.rows, True)
    np.testing.assert_array_equal(only.flat, policy.compute_gradients(batch).flat)
    assert gradients.done
    with pytest.raises(ValueError, match="all minibatches"):
        gradients.next_gradients()


class Regression(Policy):
    """Learns to predict rewards from observations. It learns from batches of a replay buffer with
    its own `learn_on_batch`, and does not define `compute_gradients`."""

    learns_from = Transitions

    def make_segments(self) -> dict[str, Segment]:
        return {"network": Segment(nn.Linear(2, self.dist.num_params))}

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return self.model(torch.as_tensor(obs)).numpy()

    def learn_on_batch(self, batch: Transitions, reducer: Any = None) -> dict[str, float]:
        self.flat.zero_grads()
        predicted = self.model(torch.as_tensor(batch.obs))[:, 0]
        loss = (predicted - torch.as_tensor(batch.rewards)).square().mean()
        loss.backward()
        self.progress.gradient_rows = batch.num_rows
        return {"vf_loss": loss.item(), **self.apply_flat()}


def test_policy_may_learn_from_other_batches_and_give_no_gradients() -> None:
    env = FakeEnv(spaces.Box(-9.0, 9.0, (2,)), spaces.Discrete(3))
    policy = Regression(env.observation_space, env.action_space, PolicyConfig(lr=0.05))
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(32, 2)).astype(np.float32)
    ones = np.ones(32, np.float32)
    rows = Transitions(
        obs, np.zeros(32, np.int64), obs @ np.float32([2, -1]), ones, obs, ones, np.arange(32)
    )
    losses = [policy.learn_on_batch(rows)["vf_loss"] for _ in range(300)]
    assert losses[-1] < 1e-3 < losses[0]
    assert (policy.version, policy.progress.rows_applied) == (300, 300 * 32)
    for ask in (policy.compute_gradients, lambda rows: next(policy.minibatch_gradients(rows))):
        with pytest.raises(NotImplementedError, match="Regression cannot compute gradients"):
            ask(rows)


class LearnsAlone(Reinforce):
    """Defines `learn_on_batch`, but not `compute_gradients`."""

    compute_gradients = Policy.compute_gradients

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        self.apply_gradients(Reinforce.compute_gradients(self, batch))
        return {}


class AppliesGradients(PolicyOptimizer):
    """A strategy of a user. Its workers compute gradients."""

    needs_gradients = True

    def step(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("optimizer", ["async_gradients", "sync_gradients", AppliesGradients])
def test_policy_without_gradients_is_refused_before_an_actor_starts(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray must not start"))
    monkeypatch.setattr("polopt.trainers.run.Run._start", lambda *_: pytest.fail("started"))
    config = {"env": "CartPole-v1", "optimizer": optimizer, "num_workers": 1}
    with pytest.raises(
        ConfigError,
        match=r"defines neither minibatch_gradients nor compute_gradients.*'sync_samples'",
    ):
        PolicyOptimizerTrainer({**config, "policy": LearnsAlone})
    for policy in (Reinforce, Halves, "a2c"):
        Experiment.parse({**config, "policy": policy}, {})


@pytest.mark.parametrize("optimizer", ["sync_samples", "async_samples", "decentralized_allreduce"])
def test_policy_without_gradients_fits_where_none_are_sent(optimizer: str) -> None:
    config = {"env": "CartPole-v1", "optimizer": optimizer, "num_workers": 1}
    assert Experiment.parse({**config, "policy": LearnsAlone}, {}).policy_class is LearnsAlone


def halves_of(batch: SampleBatch) -> list[SampleBatch]:
    """Splits a batch of three environments into the first environment and the other two."""
    return [batch.select(np.array([0])), batch.select(np.array([1, 2]))]


def test_policy_with_gradients_learns_alone_and_together() -> None:
    """Several learners make the same update as one learner with the rows of all of them."""
    alone, learners = make_reinforce(), [make_reinforce(), make_reinforce()]
    batch = random_batch(alone, 8, 3, np.random.default_rng(1))
    stats = alone.learn_on_batch(batch)
    together = on_threads(
        [
            functools.partial(learner.learn_on_batch, half)
            for learner, half in zip(learners, halves_of(batch), strict=True)
        ]
    )
    for learner, own in zip(learners, together, strict=True):
        np.testing.assert_allclose(
            learner.get_weights().flat, alone.get_weights().flat, rtol=0.0, atol=1e-6
        )
        assert (learner.version, learner.progress.rows_applied) == (1, 24)
        assert own["policy_loss"] == pytest.approx(stats["policy_loss"], rel=1e-5)
    none = batch.select(np.array([], dtype=np.int64))
    assert (alone.learn_on_batch(none), alone.version) == ({}, 1)


class Halves(Reinforce):
    """Yields the gradients of the first and the second half of a batch, and then both again."""

    def minibatch_gradients(self, batch: SampleBatch) -> Iterator[Gradients]:
        halves = np.array_split(np.arange(batch.shape[1]), 2)
        for time, half in itertools.product(range(2), range(2)):
            gradients = self.compute_gradients(batch.select(halves[half]))
            new_rows = gradients.rows if time == 0 else 0
            yield gradients._replace(new_rows=new_rows, ends_rollout=(time, half) == (1, 1))


def test_policy_may_yield_several_gradients_per_batch() -> None:
    env = FakeEnv(spaces.Box(-9.0, 9.0, (2,)), spaces.Discrete(3))
    policy = Halves(env.observation_space, env.action_space, PolicyConfig())
    batch = make_batch(policy)
    batch.version = 3
    rollout, found = MinibatchGradients(policy, batch), []
    while not rollout.done:
        found.append(rollout.next_gradients())
        policy.apply_gradients(found[-1])  # the next gradient uses the new weights
    assert [gradients.version for gradients in found] == [0, 1, 2, 3]
    assert [gradients.new_rows for gradients in found] == [12, 12, 0, 0]
    assert [gradients.ends_rollout for gradients in found] == [False, False, False, True]
    assert {gradients.acted for gradients in found} == {3}


#: The members of a policy that samplers, workers and a Collector need.
ACTS = {
    "make_distribution", "make_normalizer", "to_act_on", "encode_batch", "action_params", "act",
    "compute_actions", "predict",
    "act_in_torch", "postprocess", "get_weights", "set_weights", "get_state", "set_state",
    "state_size", "samples_uniformly",
}  # fmt: skip
#: The other members that strategies need.
LEARNS = {
    "config_class", "learns_from", "numbers", "further_statistics", "count_parameters",
    "make_segments", "act_as", "export_onnx", "add_moments", "resting", "compute_gradients",
    "gives_gradients", "minibatch_gradients", "check_gradients", "learns_with", "statistic_keys",
    "learn_on_batch", "apply_gradients", "apply_flat", "on_update", "set_option", "check_network",
}  # fmt: skip
#: Further members of a policy that acts with a network of polopt. They need no value function.
NETWORK = {
    "loss", "make_network", "masked", "make_backend", "normalized", "dist_inputs", "log_prob",
}  # fmt: skip


def public_names(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def test_contract_has_nothing_of_a_family() -> None:
    """Advantages, value targets, epochs and KL belong to the actor-critic family. If you add a name
    to the lists above, every family of policies must have it."""
    assert public_names(ActingPolicy) == ACTS
    own = public_names(Policy) - ACTS
    assert own == LEARNS
    assert Policy.__abstractmethods__ == {"make_segments", "action_params"}
    assert issubclass(ActorCriticPolicy, ActingPolicy)
    assert public_names(NetworkPolicy) - ACTS - LEARNS == NETWORK


def test_families_have_their_own_fixed_options() -> None:
    policy = make_reinforce()
    policy.set_option("lr", 0.5)
    assert policy.config.lr == 0.5
    with pytest.raises(ConfigError, match="'model' cannot be changed"):
        policy.set_option("model", {})
    assert not [name for name in PolicyConfig.fixed if name not in PolicyConfig.model_fields]
    with pytest.raises(ConfigError, match="'normalize_rewards' cannot be changed"):
        small_policy("a2c").set_option("normalize_rewards", True)


# ---- segments ---------------------------------------------------------------------------------


def modules() -> dict[str, Segment]:
    torch.manual_seed(0)
    actor, critic = nn.Linear(3, 2), nn.Linear(3, 1)
    target = Segment(copy.deepcopy(actor), copy_of="actor")
    return {"target": target, "actor": Segment(actor), "critic": Segment(critic)}


def test_copy_has_no_gradient_and_follows_its_segment() -> None:
    segments = modules()
    flat = FlatParameters(segments)
    assert flat.segments == {"actor": slice(0, 8), "critic": slice(8, 12), "target": slice(12, 20)}
    assert (len(flat.params), len(flat.grads)) == (20, 12)
    target, actor = segments["target"].module, segments["actor"].module
    assert not any(p.requires_grad or p.grad is not None for p in target.parameters())
    before = target.weight.clone()
    with torch.no_grad():
        flat.params[:12] += 1.0
    assert torch.equal(target.weight, before)
    flat.refresh_copies()
    assert torch.equal(target.weight, actor.weight)
    assert torch.equal(target.bias, actor.bias)


def test_copy_moves_by_a_fraction_of_the_distance() -> None:
    flat = FlatParameters(modules())
    rng = np.random.default_rng(0)
    flat.set_params(rng.normal(size=20).astype(np.float32))
    before = flat.get_params().astype(np.float64)
    flat.refresh_copies(0.1)
    after = flat.get_params()
    np.testing.assert_array_equal(after[:12], before[:12])
    moved = before[12:] + 0.1 * (before[:8] - before[12:])
    np.testing.assert_allclose(after[12:], moved, rtol=1e-6, atol=1e-7)
    assert np.abs(after[12:] - before[12:]).min() > 1e-4

    before[12:] = np.inf  # a whole move does not compute with the old values
    flat.set_params(before.astype(np.float32))
    flat.refresh_copies()
    np.testing.assert_array_equal(flat.get_params()[12:], after[:8])


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_each_segment_has_its_own_torch_optimizer(name: str) -> None:
    config = PolicyConfig(torch_optimizer=name, grad_clip=1.0)
    split, whole = FlatParameters(modules()), FlatParameters({"network": Segment(both())})
    updaters = [WeightUpdater(split, config), WeightUpdater(whole, config)]
    for seed in range(3):
        gradient = np.random.default_rng(seed).normal(size=12).astype(np.float32)
        for flat, updater in zip((split, whole), updaters, strict=True):
            flat.set_grads(gradient)
            updater.apply(0, 1.0)
    np.testing.assert_array_equal(split.get_params()[:12], whole.get_params())
    states = updaters[0].get_state()[name]
    assert states.keys() == {"actor", "critic"}
    assert int(states["critic"]["step"]) == 3
    resumed = WeightUpdater(split, config)
    resumed.set_state({name: {"actor": states["actor"]}})
    assert int(resumed.get_state()[name]["actor"]["step"]) == 3
    assert resumed.get_state()[name]["critic"] == {}


def both() -> nn.Module:
    segments = modules()
    return nn.ModuleList([segments["actor"].module, segments["critic"].module])


def test_state_without_a_copy_restores_it_from_its_segment() -> None:
    flat, without = FlatParameters(modules()), modules()
    del without["target"]
    saved = FlatParameters(without)
    with torch.no_grad():
        saved.params += 1.0
    restored = flat.params_of(saved.get_state())
    np.testing.assert_array_equal(restored[:12], saved.get_params())
    np.testing.assert_array_equal(restored[12:], saved.get_params()[:8])
    with torch.no_grad():
        flat.params[12:] = 7.0
    # If only the state has a copy, the copy is ignored.
    np.testing.assert_array_equal(saved.params_of(flat.get_state()), flat.get_params()[:12])


@pytest.mark.parametrize(
    "places", [{"actor": [0, 8]}, {"actor": [0, 8], "critic": [8, 11]}, {"actor": [0, 99]}]
)
def test_state_with_other_segments_is_refused(places: dict[str, list[int]]) -> None:
    flat = FlatParameters(modules())
    state = flat.get_state() | {"segments": places}
    with pytest.raises(ValueError, match=r"parameters of segment .* another network"):
        flat.params_of(state)


def test_only_applied_updates_are_announced() -> None:
    versions: list[int] = []

    class Recording(Reinforce):
        def on_update(self) -> None:
            versions.append(self.version)

    env = FakeEnv(spaces.Box(-9.0, 9.0, (2,)), spaces.Discrete(3))
    policy = Recording(env.observation_space, env.action_space, PolicyConfig())
    policy.apply_gradients(fixed_gradient(policy))
    bad = fixed_gradient(policy)
    bad.flat[0] = np.nan
    policy.apply_gradients(bad)
    policy.apply_gradients(fixed_gradient(policy))
    assert versions == [1, 2]
