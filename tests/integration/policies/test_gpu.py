"""Learners, workers and all-reduce on a GPU give the results of the CPU. These tests need a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import make_optimizer, pid_of, worker_config
from gpu_helpers import SMALL, devices_of
from gymnasium import spaces
from policy_helpers import MODELS, FakeEnv, every_model, every_policy, make_batch, moved
from rank_helpers import LEARNING, learned_state, on_ranks
from ray import tune
from replay_helpers import replay_policy, shaken, transitions
from toy_envs import POLICIES as ON_POLICY
from waiting import wait_until

import polopt
from polopt.common.config import ConfigError
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.sync_samples import SyncSamples
from polopt.policies.dqn import DQNPolicy
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.workers.worker_set import WorkerSet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")

#: With a smaller epsilon, the first step of Adam has nearly the same size for every gradient. The
#: rounding of a gradient near 0 would then decide on the direction of the step.
SMOOTH = {"adam_epsilon": 1e-2, "rmsprop_epsilon": 1e-2, "fast_cpu": False}
SGD = {"num_sgd_iter": 2, "sgd_minibatch_size": 8, "lr": 1e-2, "kl_coeff": 0.2}
REPLAY = {"learning_starts": 32, "train_batch_size": 16, "buffer_size": 1000}
PRESETS: dict[str, dict[str, Any]] = {
    "A3C": {"num_workers": 2},
    "A2C": {"num_workers": 2, "train_batch_size": 32},
    "SyncPPO": {"num_workers": 2, "train_batch_size": 64, **SGD},
    "IMPALA": {"num_workers": 2, "train_batch_size": 32},
    "APPO": {"num_workers": 2, "train_batch_size": 32},
    "PQN": {"num_workers": 0},
    "DQN": {"num_workers": 2, **REPLAY},
    "ApexDQN": {"num_workers": 2, "num_replay_shards": 1, **REPLAY},
    "SAC": {"env": "Pendulum-v1", "num_workers": 0, **REPLAY},
    "TD3": {"env": "Pendulum-v1", "num_workers": 0, **REPLAY},
}


@pytest.fixture(autouse=True)
def exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, cuDNN rounds the inputs of convolutions to 10 bits of mantissa (TF32)."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def on_gpu(policy: Any) -> Any:
    """Returns a policy on the GPU with the class, options, state and seed of `policy`."""
    made = type(policy)(
        policy.encoder.space, policy.action_space, policy.config, seed=0, device="cuda"
    )
    made.set_state(policy.get_state())
    assert made.flat.params.device.type == "cuda"
    return made


def assert_learns_as_on_cpu(on_cpu: Any, batches: list[Any]) -> None:
    """Both policies learn from the same batches. Their weights and statistics must stay equal."""
    policies = [on_cpu, on_gpu(on_cpu)]
    before = on_cpu.get_weights().flat
    for batch in batches:
        stats = [policy.learn_on_batch(batch) for policy in policies]
        assert stats[0].keys() == stats[1].keys()
        for key, value in stats[0].items():
            np.testing.assert_allclose(stats[1][key], value, rtol=2e-3, atol=2e-5, err_msg=key)
    expected, found = (policy.get_weights().flat for policy in policies)
    step = np.abs(expected - before).max()
    assert step > 0.0
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=0.02 * step)
    assert policies[0].version == policies[1].version > 0
    assert policies[0].progress == policies[1].progress


@every_policy
@every_model
def test_policies_learn_as_on_the_cpu(name: str, key: str) -> None:
    observations, actions, model = MODELS[key]
    cls = ON_POLICY[name]
    options = {"model": model, "grad_clip": 0.5, **SMOOTH}
    options |= {k: v for k, v in SGD.items() if k in cls.config_class.model_fields}
    options["lr"] = 1e-3
    env = FakeEnv(observations, actions)
    config = cls.config_class.parse(options)
    policy = cls(env.observation_space, env.action_space, config, seed=1)
    batches = [make_batch(policy, 8, 4, seed) for seed in range(2)]
    # With weights as far away as those of `moved`, ratios of probabilities amplify rounding.
    policy.flat.params.data.add_(0.02 * torch.randn_like(policy.flat.params))
    assert_learns_as_on_cpu(policy, batches)


@pytest.mark.parametrize("torch_optimizer", ["adam", "rmsprop"])
def test_torch_optimizers_take_the_steps_of_the_cpu(torch_optimizer: str) -> None:
    cls = POLICIES.get("ppo")
    config = cls.config_class.parse(
        {
            "torch_optimizer": torch_optimizer,
            "normalize_observations": True,
            **SGD,
            **SMOOTH,
        }
    )
    policy = cls(spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), config, seed=1)
    assert_learns_as_on_cpu(moved(policy), [make_batch(policy, 8, 4, seed) for seed in range(3)])


def test_memory_learns_as_on_the_cpu() -> None:
    cls = POLICIES.get("ppo")
    model = {"use_lstm": True, "lstm_cell_size": 6, "fcnet_hiddens": [8]}
    config = cls.config_class.parse({"model": model, **SMOOTH})
    policy = cls(spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), config, seed=1)
    assert_learns_as_on_cpu(moved(policy), [make_batch(policy, 8, 4, seed) for seed in range(2)])


@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
@pytest.mark.parametrize("normalizes", [False, True])
def test_replay_policies_learn_as_on_the_cpu(name: str, normalizes: bool) -> None:
    policy = replay_policy(name, normalize_observations=normalizes, **SMOOTH)
    shaken(policy)
    rows = [transitions(policy, 32, seed) for seed in range(4)]
    assert_learns_as_on_cpu(policy, rows)
    other = on_gpu(policy)
    one, two = (each.td_errors(rows[0]) for each in (policy, other))
    np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-4)


def both_ways(name: str, **options: Any) -> tuple[Any, Any]:
    """Returns equal policies on the GPU that learn with and without CUDA graphs."""
    policy = shaken(replay_policy(name, **options))
    made = []
    for fast in (True, False):
        config = policy.config.model_copy(update={"fast_gpu": fast})
        spaces_of = (policy.encoder.space, policy.action_space)
        made.append(type(policy)(*spaces_of, config, seed=0, device="cuda"))
        made[-1].set_state(policy.get_state())
    return made[0], made[1]


def assert_learn_the_same(one: Any, other: Any, updates: int = 7, sizes: Any = (32,)) -> None:
    for update in range(updates):
        rows = transitions(one, sizes[update % len(sizes)], update)
        (stats, errors), (expected, expected_errors) = (
            policy.learn_on_transitions(rows) for policy in (one, other)
        )
        assert stats.keys() == expected.keys()
        np.testing.assert_allclose([*stats.values()], [*expected.values()], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(errors, expected_errors, rtol=1e-5, atol=1e-6)
    weights = [policy.get_weights().flat for policy in (one, other)]
    np.testing.assert_allclose(*weights, rtol=1e-5, atol=1e-6)
    assert one.shuffle.bit_generator.state == other.shuffle.bit_generator.state


def graphs_of(policy: Any) -> dict[Any, Any]:
    """The recorded gradients of a policy."""
    assert policy.learns_with == "CUDA graphs"
    graphs: dict[Any, Any] = policy._faster_backward.active().__self__._graphs
    return graphs


@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
@pytest.mark.parametrize("key", ["mlp", "mask", "image", "normalised"])
def test_cuda_graphs_learn_as_without_graphs(name: str, key: str) -> None:
    options: dict[str, Any] = {}
    if key == "image":
        model = {"conv_filters": [[4, 3, 2]], "post_fcnet_hiddens": [8]}
        options = {"observation_space": spaces.Box(0, 255, (7, 9, 2), np.uint8), "model": model}
    elif key == "mask":
        if name != "dqn":
            pytest.skip("continuous actions have no mask")
        mask = {"action_mask": spaces.MultiBinary(3), "x": spaces.Box(-1.0, 1.0, (3,))}
        options = {"observation_space": spaces.Dict(mask)}
    elif key == "normalised":
        options = {"normalize_observations": True}
    one, other = both_ways(name, **options)
    assert_learn_the_same(one, other, sizes=(32, 32, 16))
    kinds = 2 if name == "td3" else 1  # with and without an update of the actor
    assert len(graphs_of(one)) == 2 * kinds
    assert other.learns_with == "torch (fast_gpu is False)"


def test_cuda_graphs_follow_new_weights_and_options() -> None:
    one, other = both_ways("sac")
    assert_learn_the_same(one, other)
    (recorded,) = graphs_of(one).values()
    flat = one.get_weights().flat * np.float32(0.5)
    for policy in (one, other):
        policy.flat.set_params(flat)
        policy.set_option("target_entropy", 3.0)
        policy.set_option("tau", 0.5)
    assert_learn_the_same(one, other)
    (again,) = graphs_of(one).values()
    assert again is not recorded  # the new target of the entropy is in a new recording


@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_cuda_graphs_with_infinite_rewards_and_read_only_rows(name: str) -> None:
    one, other = both_ways(name)
    rows = transitions(one)
    rewards = rows.rewards.copy()
    rewards[3] = np.inf
    rewards.flags.writeable = False
    for policy in (one, other):
        policy.learn_on_transitions(rows)
        stats, errors = policy.learn_on_transitions(rows._replace(rewards=rewards))
        assert "grad_norm" not in stats  # the update is skipped
        assert errors[3] == 0.0
        policy.version += 1  # as weights of another learner do
    assert_learn_the_same(one, other)


def test_recording_keeps_the_gradient() -> None:
    one, other = both_ways("sac")
    for policy in (one, other):
        policy.flat.zero_grads()
        for size in (32, 16):
            policy.backward(policy.normalized(transitions(policy, size)))
    np.testing.assert_allclose(one.flat.get_grads(), other.flat.get_grads(), rtol=1e-4, atol=1e-6)


class FollowsClock(DQNPolicy):
    """Scales its loss by a number that Python counts. A graph would repeat the first number."""

    calls = 0

    def loss(self, rows: Any) -> Any:
        self.calls += 1
        loss, errors, stats = super().loss(rows)
        return loss * self.calls, errors, stats


class AsksTheGpu(FollowsClock):
    """Copies a number to the CPU, which a graph cannot do."""

    graph_members = ("loss", "targets")

    def add_gradient(self, rows: Any) -> Any:
        assert float(rows.weights.sum()) >= 0.0
        return super().add_gradient(rows)


def test_overridden_loss_learns_without_graphs() -> None:
    made = replay_policy("dqn")
    policy = FollowsClock(made.encoder.space, made.action_space, made.config, device="cuda")
    assert policy.learns_with == "torch (FollowsClock changes loss)"
    rows = transitions(policy)
    norms = [policy.learn_on_batch(rows)["grad_norm"] for _ in range(3)]
    assert norms[2] > 2.0 * norms[0] > 0.0


def test_gradient_that_cannot_be_recorded_is_computed_without_graphs(caplog: Any) -> None:
    made = replay_policy("dqn")
    policy = AsksTheGpu(made.encoder.space, made.action_space, made.config, device="cuda")
    rows = transitions(policy)
    before = policy.get_weights().flat
    for _ in range(2):
        assert policy.learn_on_batch(rows)["grad_norm"] > 0.0
    assert caplog.text.count("AsksTheGpu learns without further CUDA graphs") == 1
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(1, device="cuda").isfinite()
    assert_learn_the_same(*both_ways("dqn"))  # another policy records after the failure
    assert np.isfinite(policy.get_weights().flat).all()
    assert (policy.get_weights().flat != before).any()


@every_model
def test_acting_gives_the_outputs_of_the_cpu(key: str) -> None:
    observations, actions, model = MODELS[key]
    cls = POLICIES.get("ppo")
    policy = moved(cls(observations, actions, cls.config_class.parse({"model": model}), seed=1))
    other = on_gpu(policy)
    observations.seed(0)
    obs = np.stack([policy.encoder.space.sample() for _ in range(7)])
    for method in ("action_params", "value"):
        one, two = (getattr(each, method)(obs) for each in (policy, other))
        assert isinstance(two, np.ndarray)
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)


def tensors_in(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state
    return (
        [found for value in values for found in tensors_in(value)]
        if isinstance(state, dict | list | tuple)
        else []
    )


@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_state_from_a_gpu_has_no_tensor_on_the_gpu(name: str) -> None:
    box = spaces.Box(-1.0, 1.0, (2,))
    cls = POLICIES.get(name)
    policy = cls(spaces.Box(-9.0, 9.0, (4,)), box, cls.config_class.parse({}), device="cuda")
    batch = transitions(policy) if name == "sac" else make_batch(policy)
    policy.learn_on_batch(batch)
    found = tensors_in(policy.get_state())
    assert found
    assert all(tensor.device.type == "cpu" for tensor in found)
    assert isinstance(policy.get_weights().flat, np.ndarray)


@pytest.mark.parametrize("name", PRESETS)
def test_learner_on_a_gpu_trains_and_its_checkpoint_continues_on_a_cpu(
    ray_session: None, tmp_path: Path, name: str
) -> None:
    config = {"env": "CartPole-v1", **SMALL, **PRESETS[name], "num_gpus": 1}
    preset = getattr(polopt, name)
    trainer = preset(config)
    try:
        policy = trainer.get_policy()
        for _ in range(20):
            result = trainer.train()
            if policy.version > 0:
                break
        assert policy.device.type == policy.flat.params.device.type == "cuda"
        assert policy.version > 0
        learned = result["learners"]["default_policy"]
        assert all(np.isfinite(v) for k, v in learned.items() if isinstance(v, float)), learned
        assert result["optimizer"]["machine"]["driver_gpu_memory_bytes"] > 0
        trainer.save_checkpoint(str(tmp_path))
        on_cpu = preset.from_checkpoint(str(tmp_path), num_gpus=0)
        try:
            assert on_cpu.get_policy().device.type == "cpu"
            np.testing.assert_array_equal(
                on_cpu.get_policy().get_weights().flat, policy.get_weights().flat
            )
            before = on_cpu.get_policy().version
            for _ in range(20):  # a replay buffer that was not saved fills first
                on_cpu.train()
                if on_cpu.get_policy().version > before:
                    break
            assert on_cpu.get_policy().version > before
        finally:
            on_cpu.stop()
        loaded = polopt.load(str(tmp_path))
        space = policy.encoder.space
        space.seed(0)
        for _ in range(3):
            obs = space.sample()
            one, two = (np.asarray(each.predict(obs)[0]) for each in (policy, loaded))
            np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-4)
    finally:
        trainer.stop()


@pytest.mark.parametrize("name", ["A3C", "SyncPPO", "IMPALA", "DQN"])
def test_workers_on_a_gpu_sample(ray_session: None, name: str) -> None:
    config = {"env": "CartPole-v1", **SMALL, **PRESETS[name], "num_gpus_per_worker": 0.4}
    trainer = getattr(polopt, name)(config)
    try:
        for _ in range(2):
            result = trainer.train()
        assert devices_of(trainer.optimizer.workers.remote) == ["cuda", "cuda"]
        assert trainer.get_policy().device.type == "cpu"
        workers = result["optimizer"]["workers"]
        assert all(size > 0 for size in workers["gpu_memory_bytes"].values())
    finally:
        trainer.stop()


@pytest.fixture
def gpu_workers(ray_session: None) -> Iterator[Callable[..., WorkerSet]]:
    """Returns a function that makes workers with PPO on the GPU. They are stopped after the test,
    so that they return their parts of the GPU."""
    made = []

    def make(num_workers: int, num_gpus: float, kind: type[WorkerSet] = WorkerSet) -> WorkerSet:
        rollout = {"num_workers": num_workers, "num_gpus_per_worker": num_gpus}
        config = worker_config("ppo", rollout=rollout, **{**LEARNING, "num_sgd_iter": 2})
        made.append(kind(dataclasses.replace(config, device="cuda")))
        return made[-1]

    yield make
    for workers in made:
        workers.stop()


@pytest.mark.parametrize("backend", ["auto", "socket", "gloo"])
def test_ranks_that_share_a_gpu_keep_equal_weights(
    gpu_workers: Any, compare_every_round: None, backend: str
) -> None:
    optimizer = make_optimizer(DecentralizedAllReduce, gpu_workers(2, 0.4), backend=backend)
    for _ in range(3):
        result = optimizer.step()
    assert result.updates > 0
    states = on_ranks(optimizer, learned_state)
    assert states[0] == states[1]
    assert devices_of(optimizer.group.ranks) == ["cuda", "cuda"]
    assert optimizer.group.backend == ("socket" if backend == "auto" else backend)


def test_nccl_sums_for_a_rank_with_its_own_gpu(gpu_workers: Any, compare_every_round: None) -> None:
    optimizer = make_optimizer(DecentralizedAllReduce, gpu_workers(1, 1.0))
    for _ in range(3):
        result = optimizer.step()
    assert result.updates > 0
    assert optimizer.group.backend == "nccl"


def test_killed_worker_on_a_gpu_is_replaced(gpu_workers: Any) -> None:
    workers = gpu_workers(2, 0.4)
    optimizer = make_optimizer(SyncSamples, workers, train_batch_size=30)
    optimizer.step()
    os.kill(pid_of(workers.remote[0]), signal.SIGKILL)
    wait_until(lambda: optimizer.step() and workers.faults.num_restarts == 1, limit_s=90.0)
    wait_until(lambda: optimizer.step() and len(workers.up()) == 2, limit_s=90.0)
    assert devices_of(workers.remote) == ["cuda", "cuda"]


def test_tune_gives_the_trial_its_gpu(ray_session: None, tmp_path: Path) -> None:
    config = {"env": "CartPole-v1", **SMALL, **PRESETS["SyncPPO"], "num_gpus": 1}
    results = tune.Tuner(
        polopt.SyncPPO,
        param_space=config,
        run_config=tune.RunConfig(
            stop={"training_iteration": 1}, storage_path=str(tmp_path), verbose=0
        ),
    ).fit()
    assert not results.errors
    assert results[0].metrics["optimizer"]["machine"]["driver_gpu_memory_bytes"] > 0


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnxruntime", "onnxscript")),
    reason="onnxruntime or onnxscript is not installed",
)
def test_onnx_model_of_a_policy_on_a_gpu(tmp_path: Path) -> None:
    cls = POLICIES.get("ppo")
    config = cls.config_class.parse({"model": {"fcnet_hiddens": [8]}})
    policy = moved(cls(spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), config, seed=1))
    paths = []
    for each, name in ((policy, "cpu"), (on_gpu(policy), "gpu")):
        paths.append(tmp_path / f"{name}.onnx")
        each.export_onnx(str(paths[-1]))
    import onnxruntime

    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    outputs = []
    for path in paths:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {session.get_inputs()[0].name: obs})[0])
    np.testing.assert_array_equal(*outputs)


def test_nccl_is_refused_for_ranks_that_share_a_gpu() -> None:
    with pytest.raises(ConfigError, match="backend"):
        polopt.DDPPO({"env": "CartPole-v1", "backend": "nccl", "num_gpus_per_worker": 0.4})
