"""`to_tensordict` uses TorchRL's names, and is exact at episode ends. The tests require
tensordict, and the last tests also require torchrl."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from collector_toys import local_collector
from toy_envs import AUTORESET, Clock, Drift, make_policy, make_sampler, sync_clocks

from polopt.collectors.tensordict import to_tensordict
from polopt.common.sample_batch import SampleBatch

pytest.importorskip("tensordict")


def batch_of(mode: str, ends: str = "truncated") -> SampleBatch:
    env = sync_clocks([3, 5], ends, mode)
    policy = make_policy("ppo", env)
    return policy.postprocess(make_sampler(env, policy, 9).sample())


@pytest.mark.parametrize("mode", AUTORESET)
def test_next_observation_is_the_true_one(mode: str) -> None:
    td = to_tensordict(batch_of(mode))
    assert td.batch_size == (2, 9)
    now = td["observation"].argmax(-1)
    then = td["next", "observation"].argmax(-1)
    mask = td["collector", "mask"]
    assert torch.equal(then[mask], now[mask] + 1), "the true next time, also at the episode end"
    done = td["next", "done"][..., 0]
    assert set(then[0][done[0]].tolist()) == {3}
    assert set(then[1][done[1]].tolist()) == {5}
    # The observation of the next row is wrong, except in autoreset mode `next_step`.
    shifted = torch.cat([now[:, 1:], then[:, -1:]], dim=1)
    assert torch.equal(shifted[mask], now[mask] + 1) == (mode == "next_step")


def test_names_and_shapes() -> None:
    batch = batch_of("same_step", "terminated")
    td = to_tensordict(batch)
    for name in ("reward", "done", "terminated", "truncated"):
        assert td["next", name].shape == (2, 9, 1), name
    assert td["action"].dtype == torch.int64
    for name, column in (("sample_log_prob", "action_logp"), ("action", "actions")):
        np.testing.assert_array_equal(td[name].numpy(), batch[column].T)
    for name, column in (("state_value", "values"), ("advantage", "advantages")):
        np.testing.assert_array_equal(td[name][..., 0].numpy(), batch[column].T)
    assert torch.equal(td["next", "terminated"], td["next", "done"])
    assert not td["next", "truncated"].any()
    assert not td["done"].any()
    ids = td["collector", "traj_ids"]
    assert ids[0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert ids[1].tolist() == [3, 3, 3, 3, 3, 4, 4, 4, 4]


def test_padding_is_masked() -> None:
    part = next(local_collector(lambda: Clock(4), split_trajs=True, frames_per_batch=14))
    td = to_tensordict(part)
    assert td["collector", "mask"].sum() == part.env_steps == 14
    assert td["collector", "mask"].shape == (4, 4)


def clip_ppo_loss(policy: Any) -> Any:
    """Makes TorchRL's loss with the network of a policy of polopt."""
    torchrl = pytest.importorskip("torchrl")
    from tensordict.nn import TensorDictModule
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss

    assert torchrl

    class Actor(torch.nn.Module):
        def forward(self, obs: Any) -> Any:
            return policy.model(obs.reshape(-1, obs.shape[-1]))[0].reshape(*obs.shape[:-1], -1)

    class Critic(torch.nn.Module):
        def forward(self, obs: Any) -> Any:
            return policy.model(obs.reshape(-1, obs.shape[-1]))[1].reshape(*obs.shape[:-1], 1)

    actor = ProbabilisticActor(
        TensorDictModule(Actor(), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(Critic(), in_keys=["observation"])
    loss = ClipPPOLoss(
        actor, critic, entropy_bonus=False, normalize_advantage=False, critic_coeff=None
    )
    loss.set_keys(sample_log_prob="sample_log_prob")
    return loss


def test_torchrl_ppo_loss_accepts_batch() -> None:
    policy = make_policy("ppo", Drift(), gamma=0.9, **{"lambda": 0.8}, entropy_coeff=0.0)
    batch = next(local_collector(policy=policy, frames_per_batch=60))
    td = to_tensordict(batch)
    loss = clip_ppo_loss(policy)
    theirs = float(loss(td)["loss_objective"].detach())
    ours = -float(batch["advantages"].mean())  # at a ratio of 1
    assert theirs == pytest.approx(ours, abs=1e-5)


def test_torchrl_gae_equals_advantages() -> None:
    """TorchRL's GAE on the converted batch equals the advantages of the batch."""
    pytest.importorskip("torchrl")
    from tensordict.nn import TensorDictModule
    from torchrl.objectives.value import GAE

    policy = make_policy("ppo", Drift(), gamma=0.9, **{"lambda": 0.8})

    class Critic(torch.nn.Module):
        def forward(self, obs: Any) -> Any:
            flat = policy.model(obs.reshape(-1, obs.shape[-1]))[1]
            return flat.reshape(*obs.shape[:-1], 1)

    batch = next(local_collector(policy=policy, frames_per_batch=60))
    td = to_tensordict(batch).exclude("state_value", "advantage", "value_target")
    critic = TensorDictModule(Critic(), ["observation"], ["state_value"])
    GAE(gamma=0.9, lmbda=0.8, value_network=critic)(td)
    np.testing.assert_allclose(td["advantage"][..., 0].numpy(), batch["advantages"].T, atol=1e-4)


def test_torchrl_replay_buffer_accepts_batch() -> None:
    data = pytest.importorskip("torchrl.data")
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(100), batch_size=16)
    for batch in local_collector(lambda: Clock(4), frames_per_batch=20, total_frames=60):
        buffer.extend(to_tensordict(batch).reshape(-1))
    assert len(buffer) == 60
    sample = buffer.sample()
    now, then = (td["observation"].argmax(-1) for td in (sample, sample["next"]))
    assert torch.equal(then, now + 1)
