"""Policies with memory act, learn and store states like a plain LSTM that reads each episode from
its first observation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from faulty_envs import CrashingClock, guarded
from gymnasium import spaces
from learner_threads import assert_together_equals_alone
from policy_helpers import FakeEnv, small_policy
from torch import Tensor, nn
from toy_envs import AUTORESET, Clock, Drift, make_policy, make_sampler, random_batch, sync_clocks

import polopt
from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.policies.fragment_policy import MinibatchGradients
from polopt.policies.policy import Policy
from polopt.rollouts.envs.fast_sync_vector_env import FastSyncVectorEnv
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.worker_sampler import join_in_time

CELLS, HIDDEN, GAMMA = 5, 6, 0.9
MODEL: dict[str, Any] = {"use_lstm": True, "lstm_cell_size": CELLS, "fcnet_hiddens": [HIDDEN]}
every_mode = pytest.mark.parametrize("mode", AUTORESET)
every_name = pytest.mark.parametrize("name", ["a2c", "ppo", "impala", "appo", "decoupled_ppo"])
apart_or_shared = pytest.mark.parametrize("shared", [False, True])


def clocks(mode: str, crashing: bool = False) -> Any:
    if not crashing:
        return sync_clocks([3, 4, 7], "truncated", mode)
    makers = [lambda: CrashingClock(2, 7), lambda: CrashingClock(10**6, 7, 4)]
    return guarded(makers, mode, FastSyncVectorEnv)


def with_memory(env: Any, name: str = "a2c", shared: bool = False, **options: Any) -> Policy:
    model = {**MODEL, "vf_share_layers": shared}
    return make_policy(name, env, model=model, gamma=GAMMA, **options)


class PlainLSTM:
    """Computes the outputs of a policy's network with the formulas of an LSTM. `read` takes one
    observation of one environment at a time."""

    def __init__(self, policy: Any) -> None:
        self.network = policy.model
        self.forget()

    def forget(self) -> None:
        self.state = [torch.zeros(2, CELLS), torch.zeros(2, CELLS)]

    def read(self, obs: np.ndarray) -> tuple[Tensor, Tensor]:
        """Reads an observation. Returns distribution parameters `[P]` and the value `[]`."""
        net = self.network
        x = torch.as_tensor(obs).float().reshape(1, -1)
        outputs = []
        branches = ((net.policy_trunk, net.policy_memory), (net.value_trunk, net.value_memory))
        for i, (trunk, memory) in enumerate(branches):
            cells = memory.cells
            hidden, cell = self.state[i]
            gates = (
                trunk(x)[0] @ cells.weight_ih_l0.T
                + cells.bias_ih_l0
                + hidden @ cells.weight_hh_l0.T
                + cells.bias_hh_l0
            )
            enter, forget, new, leave = gates.chunk(4)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            hidden = torch.sigmoid(leave) * torch.tanh(cell)
            self.state[i] = torch.stack([hidden, cell])
            outputs.append(hidden)
        return net.policy_head(outputs[0]), net.value_head(outputs[1])[0]

    def peek(self, obs: np.ndarray) -> Tensor:
        """Returns the value `[]` of an observation, and does not change the memory."""
        kept = list(self.state)
        value = self.read(obs)[1]
        self.state = kept
        return value


def sampled(policy: Policy, env: Any, length: int, count: int) -> list[SampleBatch]:
    sampler = make_sampler(env, policy, length)
    try:
        return [sampler.sample() for _ in range(count)]
    finally:
        sampler.close()


def begins(obs: np.ndarray) -> bool:
    """Returns whether a clock shows the time 0. It does so only at the start of an episode."""
    return bool(obs[0] == 1.0)


def expected(policy: Policy, batches: list[SampleBatch], env: int) -> dict[str, list[Any]]:
    """Computes the distribution parameters of each row of one environment, the value of its
    observation, and the value of its next observation (`following`)."""
    plain = PlainLSTM(policy)
    result: dict[str, list[Any]] = {"params": [], "values": [], "following": []}
    with torch.no_grad():
        for batch in map(policy.encode_batch, batches):
            apart = dict(zip(batch.successor_index.tolist(), batch.successor_obs, strict=True))
            for t in range(batch.shape[0]):
                if begins(batch.all_obs[t, env]):
                    plain.forget()
                params, value = plain.read(batch.all_obs[t, env])
                after = apart.get(t * batch.shape[1] + env, batch.all_obs[t + 1, env])
                result["params"].append(params.numpy())
                result["values"].append(float(value))
                result["following"].append(float(plain.peek(after)))
    return result


def check(policy: Any, batches: list[SampleBatch]) -> None:
    for env in range(batches[0].shape[1]):
        wanted = expected(policy, batches, env)
        acted = np.concatenate([batch["action_dist_inputs"][:, env] for batch in batches])
        np.testing.assert_allclose(acted, wanted["params"], rtol=1e-4, atol=1e-6)
        learned = np.concatenate([policy.dist_inputs(batch)[:, env] for batch in batches])
        np.testing.assert_allclose(learned, wanted["params"], rtol=1e-4, atol=1e-6)
        pairs = [policy.state_values(batch) for batch in batches]
        values = np.concatenate([values[:, env] for values, _ in pairs])
        np.testing.assert_allclose(values, wanted["values"], rtol=1e-4, atol=1e-6)
        valid = np.concatenate([batch["valid"][:, env] for batch in batches])
        following = np.concatenate([following[:, env] for _, following in pairs])
        np.testing.assert_allclose(
            following[valid], np.array(wanted["following"])[valid], rtol=1e-4, atol=1e-6
        )


@every_mode
@apart_or_shared
@pytest.mark.parametrize("crashing", [False, True])
@pytest.mark.parametrize("length", [1, 4, 11])
def test_memory_reads_each_episode_from_its_start(
    mode: str, shared: bool, crashing: bool, length: int
) -> None:
    env = clocks(mode, crashing)
    policy = with_memory(env, shared=shared)
    batches = sampled(policy, env, length, -(-30 // length))
    if crashing:
        assert not all(batch["valid"].all() for batch in batches)
    check(policy, batches)


WRONG = {
    "episodes do not reset": lambda batch: dataclasses.replace(
        batch, successor_index=batch.successor_index[:0], successor_obs=batch.successor_obs[:0]
    ),
    "a fragment begins without memory": lambda batch: dataclasses.replace(
        batch, per_env={"state": np.zeros_like(batch.per_env["state"])}
    ),
    "memory of another environment": lambda batch: dataclasses.replace(
        batch, per_env={"state": batch.per_env["state"][::-1].copy()}
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_memory_is_detected(wrong: str) -> None:
    env = clocks("same_step")
    policy = with_memory(env)
    batches = [WRONG[wrong](batch) for batch in sampled(policy, env, 5, 4)]
    with pytest.raises(AssertionError, match="Not equal"):
        check(policy, batches)


@every_mode
def test_missing_reset_of_memory_is_detected(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VectorSampler, "_begins", lambda *_: np.zeros(3, dtype=bool))
    env = clocks(mode)
    policy = with_memory(env)
    with pytest.raises(AssertionError, match="Not equal"):
        check(policy, sampled(policy, env, 5, 4))


def test_new_episodes_forget() -> None:
    env = clocks("next_step")
    policy = with_memory(env)
    sampler = make_sampler(env, policy, 2)
    sampler.sample()
    sampler.reset_some(np.array([True, False, True]))
    sampler.leave_gap()
    state = sampler.sample().per_env["state"]
    assert (state[[0, 2]] == 0.0).all()
    assert (state[1] != 0.0).any()
    sampler.reset()
    assert (sampler.sample().per_env["state"] == 0.0).all()
    sampler.close()


def test_uniform_actions_leave_memory_empty() -> None:
    env = clocks("next_step")
    policy = with_memory(env)
    sampler = make_sampler(env, policy, 4)
    assert not sampler.sample(uniform=True).per_env["state"].any()
    assert not sampler.sample().per_env["state"].any()
    sampler.close()


def test_saved_sampler_keeps_memory() -> None:
    def drifts() -> Any:
        return FastSyncVectorEnv([Drift, Drift])

    policy = with_memory(drifts())
    one, other = (make_sampler(drifts(), policy, 5, seed=seed) for seed in (0, 1))
    one.sample()
    saved = one.get_state()
    assert saved is not None
    other.set_state(saved)
    first, second = one.sample(), other.sample()
    assert first.per_env["state"].any()
    np.testing.assert_array_equal(first.per_env["state"], second.per_env["state"])
    np.testing.assert_array_equal(first["action_dist_inputs"], second["action_dist_inputs"])
    del saved["memory"]  # as in states of earlier versions
    other.set_state(saved)
    assert not other.sample().per_env["state"].any()


# ---- batches -------------------------------------------------------------------------------------


@every_mode
def test_padded_and_joined_batches_keep_memory(mode: str) -> None:
    env = clocks(mode)
    policy: Any = with_memory(env)
    sampler = make_sampler(env, policy, 5)
    sampler.sample()
    short, rest, long = sampler.sample(steps=4), sampler.sample(steps=3), sampler.sample(steps=9)
    sampler.close()
    both = SampleBatch.concat([short, long])
    for part, columns in ((short, slice(0, 3)), (long, slice(3, 6))):
        steps = part.shape[0]
        for whole, alone in zip(policy.state_values(both), policy.state_values(part), strict=True):
            np.testing.assert_allclose(whole[:steps, columns], alone, rtol=1e-5, atol=1e-6)
        params = policy.dist_inputs(both)[:steps, columns]
        np.testing.assert_allclose(params, part["action_dist_inputs"], rtol=1e-5, atol=1e-6)
    joined = join_in_time(short, rest)
    acted = np.concatenate([short["action_dist_inputs"], rest["action_dist_inputs"]])
    np.testing.assert_allclose(policy.dist_inputs(joined), acted, rtol=1e-5, atol=1e-6)
    short.version, long.version = 3, 5
    both = SampleBatch.concat([short, long])
    both.device = "meta"
    picked = both.select(np.array([4, 0]))
    assert picked.device == both.steps(0, 2).device == "meta"
    assert picked.versions.tolist() == [5, 3]
    wanted = policy.dist_inputs(both)[:, [4, 0]]
    np.testing.assert_allclose(policy.dist_inputs(picked), wanted, rtol=1e-5, atol=1e-6)


def test_later_steps_have_no_stored_memory() -> None:
    env = clocks("next_step")
    (batch,) = sampled(with_memory(env), env, 6, 1)
    assert "state" in batch.steps(0, 3).per_env
    assert "state" not in batch.steps(2, 4).per_env


# ---- learning ------------------------------------------------------------------------------------


def plain_gradient(policy: Any, batch: SampleBatch) -> np.ndarray:
    """Computes the gradient of A2C's loss row by row."""
    starts = gae.episode_starts(batch)
    params, values, picked = [], [], []
    for env in range(batch.shape[1]):
        plain = PlainLSTM(policy)
        sizes = batch.per_env["state"][env].reshape(2, 2, CELLS)
        plain.state = [torch.as_tensor(part) for part in sizes]
        for t in range(batch.shape[0]):
            if starts[t, env]:
                plain.forget()
            row_params, value = plain.read(batch.all_obs[t, env])
            if batch["valid"][t, env]:
                params.append(row_params)
                values.append(value)
                picked.append((t, env))
    t, n = np.array(picked).T
    columns = {name: torch.as_tensor(batch[name][t, n]) for name in policy.loss_columns}
    all_params, all_values = torch.stack(params), torch.stack(values)
    log_prob = policy.dist.log_prob(all_params, columns["actions"])
    loss = -(log_prob * columns["advantages"]).mean()
    loss = loss + 0.25 * (all_values - columns["value_targets"]).square().mean()
    loss = loss - 0.01 * policy.dist.entropy(all_params).mean()
    policy.flat.zero_grads()
    loss.backward()
    return policy.flat.get_grads()


def memory_policy(name: str, seed: int = 0, **options: Any) -> Policy:
    return small_policy(name, seed, model=MODEL, **options)


def test_gradient_goes_back_through_time() -> None:
    policy = memory_policy("a2c")
    batch = random_batch(policy, 7, 4, np.random.default_rng(2), valid_share=0.8)
    gradient = policy.compute_gradients(batch).flat
    assert np.abs(gradient).max() > 1e-3
    np.testing.assert_allclose(gradient, plain_gradient(policy, batch), rtol=1e-4, atol=1e-7)
    batch.per_env["state"] *= 0.0
    assert not np.allclose(policy.compute_gradients(batch).flat, gradient, rtol=1e-3)


@every_name
def test_minibatches_of_sequences_hold_each_row_once(name: str) -> None:
    policy: Any = memory_policy(name, num_sgd_iter=1, sgd_minibatch_size=9)
    batch = random_batch(policy, 7, 5, np.random.default_rng(3), valid_share=0.8)
    minibatches = MinibatchGradients(policy, batch)
    parts = []
    while not minibatches.done:
        parts.append(minibatches.next_gradients())
    assert len(parts) == 4
    total = sum(part.rows for part in parts)
    assert total == batch.env_steps
    if name == "ppo":  # PPO standardises advantages over the whole batch
        mean = sum(part.flat * (part.rows / total) for part in parts)
        whole = policy.compute_gradients(batch).flat
        np.testing.assert_allclose(mean, whole, rtol=1e-3, atol=1e-6)


@every_name
def test_minibatch_gradients_with_memory_equal_learning(name: str) -> None:
    options = {"num_sgd_iter": 2, "sgd_minibatch_size": 9}
    learning, applying = memory_policy(name, **options), memory_policy(name, **options)
    batch = random_batch(learning, 7, 4, np.random.default_rng(3))
    learning.learn_on_batch(batch)
    minibatches = MinibatchGradients(applying, batch)
    while not minibatches.done:
        applying.apply_gradients(minibatches.next_gradients())
    np.testing.assert_array_equal(applying.get_weights().flat, learning.get_weights().flat)


@every_name
def test_several_learners_with_memory_equal_one(name: str) -> None:
    assert_together_equals_alone(name, (1.0, 0.5), model=MODEL)


def test_batch_without_environments_is_no_update() -> None:
    policy: Any = memory_policy("impala")
    batch = random_batch(policy, 4, 3, np.random.default_rng(0)).select(np.zeros(0, dtype=int))
    assert policy.dist_inputs(batch).shape == (4, 0, 3)
    assert policy.learn_on_batch(batch) == {}


class Cells(nn.Module):
    """The network of `MODEL`, with an LSTM as a user would write it, for one step at a time."""

    def __init__(self, observations: Any, actions: Any, num_params: int) -> None:
        super().__init__()
        size = spaces.utils.flatdim(observations)
        self.policy_trunk, self.value_trunk = nn.Linear(size, HIDDEN), nn.Linear(size, HIDDEN)
        self.policy_cell, self.value_cell = nn.LSTMCell(HIDDEN, CELLS), nn.LSTMCell(HIDDEN, CELLS)
        self.policy_head, self.value_head = nn.Linear(CELLS, num_params), nn.Linear(CELLS, 1)
        self.state_size = 4 * CELLS

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = state.split(CELLS, dim=1)
        policy = self.policy_cell(torch.tanh(self.policy_trunk(obs)), parts[:2])
        value = self.value_cell(torch.tanh(self.value_trunk(obs)), parts[2:])
        after = torch.cat([*policy, *value], dim=1)
        return self.policy_head(policy[0]), self.value_head(value[0])[:, 0], after


def custom_memory(name: str, like: Any, **options: Any) -> Any:
    """Returns a policy with the network `Cells` and the weights of `like`, a policy with
    `MODEL`."""
    policy: Any = small_policy(name, model={"custom": Cells}, **options)
    there, here = like.model, policy.model.module
    with torch.no_grad():
        for branch in ("policy", "value"):
            trunk = getattr(there, f"{branch}_trunk")[0]
            getattr(here, f"{branch}_trunk").load_state_dict(trunk.state_dict())
            head = getattr(there, f"{branch}_head")
            getattr(here, f"{branch}_head").load_state_dict(head.state_dict())
            cells = getattr(there, f"{branch}_memory").cells.state_dict()
            renamed = {key.removesuffix("_l0"): value for key, value in cells.items()}
            getattr(here, f"{branch}_cell").load_state_dict(renamed)
    policy.flat.refresh_copies()
    return policy


@every_name
def test_custom_memory_learns_as_the_built_in_one(name: str) -> None:
    options = {"num_sgd_iter": 2, "sgd_minibatch_size": 9, "lr": 1e-3}
    built_in = memory_policy(name, **options)
    custom = custom_memory(name, built_in, **options)
    assert custom.state_size == built_in.state_size
    batch = random_batch(built_in, 7, 4, np.random.default_rng(3), valid_share=0.8)
    before = custom.dist_inputs(batch)
    np.testing.assert_allclose(before, built_in.dist_inputs(batch), rtol=1e-4, atol=1e-6)
    for one, other in zip(custom.state_values(batch), built_in.state_values(batch), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    stats = [policy.learn_on_batch(batch) for policy in (custom, built_in)]
    assert stats[0]["grad_norm"] == pytest.approx(stats[1]["grad_norm"], rel=1e-3)
    after = custom.dist_inputs(batch)
    assert np.abs(after - before).max() > 1e-4
    np.testing.assert_allclose(after, built_in.dist_inputs(batch), rtol=1e-2, atol=1e-4)


def test_custom_memory_equals_the_memory_of_the_sampler() -> None:
    env = clocks("next_step")
    policy = make_policy("a2c", env, model={"custom": Cells})
    for batch in sampled(policy, env, 5, 4):
        params: np.ndarray = policy.dist_inputs(batch)  # type: ignore[attr-defined]
        np.testing.assert_allclose(params, batch["action_dist_inputs"], rtol=1e-4, atol=1e-6)


class TwoOutputs(Cells):
    def forward(self, obs: Tensor, state: Tensor) -> Any:
        return super().forward(obs, state)[:2]


class LongMemory(Cells):
    def forward(self, obs: Tensor, state: Tensor) -> Any:
        params, values, after = super().forward(obs, state)
        return params, values, torch.cat([after, after], dim=1)


class NoSize(Cells):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.state_size = (1, CELLS)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (TwoOutputs, r"TwoOutputs.forward returned .* and the memory \[B, 20\]"),
        (LongMemory, r"\[2, 40\] for 2 observations. Allowed: .* the memory \[B, 20\]"),
        (NoSize, r"state_size of NoSize is \(1, 5\). Allowed: a whole number"),
    ],
)
def test_wrong_memory_of_a_custom_network_is_one_error(network: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        small_policy("a2c", model={"custom": network})


# ---- use -----------------------------------------------------------------------------------------


def test_predict_acts_as_in_sampling() -> None:
    env = clocks("same_step")
    policy = with_memory(env)
    sampler = make_sampler(env, policy, 20)
    batch = sampler.sample(explore=False)
    sampler.close()
    state = None
    starts = gae.episode_starts(batch)
    for t in range(20):
        if state is not None:
            state[starts[t]] = 0.0
        times = batch.all_obs[t]
        actions, state = policy.predict(times, state)
        np.testing.assert_array_equal(actions, batch["actions"][t])
    one: Any = None
    for t in range(5):
        action, one = policy.predict(t, one)
        assert np.ndim(action) == 0
        assert one.shape == (policy.state_size,)


def test_state_of_another_shape_is_refused() -> None:
    """The state contains the hidden and cell states of two LSTMs with 5 cells, 20 numbers."""
    policy = with_memory(Clock(3))
    with pytest.raises(ValueError, match=r"state must have shape \[20\]; got \[3, 20\]"):
        policy.predict(0, np.zeros((3, 20)))
    with pytest.raises(ValueError, match=r"state must have shape \[2, 20\]; got \[20\]"):
        policy.predict(np.zeros(2, np.int64), np.zeros(20))
    for state in ({}, "state", [[1.0], [2.0, 3.0]]):
        with pytest.raises(ValueError, match=r"state must be an array of shape \[20\]; got "):
            policy.predict(0, state)
    plain = make_policy("a2c", Clock(3))
    with pytest.raises(ValueError, match="has no memory: state must be None"):
        plain.predict(0, np.zeros(20))


def test_single_action_needs_a_policy_without_memory() -> None:
    trainer = polopt.SyncPPO(env="CartPole-v1", num_workers=0, model=MODEL)
    try:
        with pytest.raises(ValueError, match=r"Use get_policy\(\).predict\(observation, state\)"):
            trainer.compute_single_action(np.zeros(4, np.float32))
    finally:
        trainer.stop()


def test_memory_of_images() -> None:
    space = spaces.Box(0, 255, (3, 8, 8), np.uint8)
    model = {**MODEL, "conv_filters": [[4, 3, 2]], "post_fcnet_hiddens": [6]}
    policy = make_policy("ppo", FakeEnv(space, spaces.Discrete(2)), model=model)
    assert policy.state_size == 2 * CELLS, "convolutions are shared, and so is the memory"
    actions, state = policy.predict(np.zeros((3, *space.shape), np.uint8))
    assert actions.shape == (3,)
    assert state.shape == (3, 2 * CELLS)
