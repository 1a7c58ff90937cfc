"""The effect of each option of `Collector`. The Collectors sample in this process."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from collector_toys import Reach, local_collector, logits_for, pushing_right
from gymnasium.wrappers import NormalizeObservation
from hidden_packages import NEEDED, hide, without_swig
from masked_env import Masked
from toy_envs import AUTORESET, Clock, Drift, make_policy

import polopt
from polopt.collectors.collector import Collector, next_seed
from polopt.collectors.collector_config import CollectorConfig
from polopt.collectors.non_learning import ModulePolicy
from polopt.collectors.resolve_policy import resolve_policy
from polopt.collectors.tensordict import to_tensordict
from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.policies.ppo import PPOPolicy

# ---- policies -----------------------------------------------------------------------------------


def test_a_policy_is_used_as_it_is() -> None:
    policy = make_policy("ppo", Drift())
    collector = local_collector(policy=policy)
    assert collector.policy is policy
    batch = next(collector)
    assert {"advantages", "value_targets", "action_logp"} <= set(batch.columns)
    params = policy.action_params(batch.flat("obs")).reshape(batch["action_dist_inputs"].shape)
    np.testing.assert_allclose(batch["action_dist_inputs"], params, rtol=1e-5)
    policy.learn_on_batch(batch)
    assert next(collector).version == policy.version > 0


@pytest.mark.parametrize("policy", [("ppo", {"gamma": 0.5}), (PPOPolicy, {"gamma": 0.5})])
def test_a_policy_is_made_from_name_or_class(policy: Any) -> None:
    collector = local_collector(policy=policy)
    assert type(collector.policy) is PPOPolicy
    assert collector.policy.config.gamma == 0.5
    assert (
        type(local_collector(policy="ppo").policy)
        is type(local_collector(policy=PPOPolicy).policy)
        is PPOPolicy
    )


def test_a_module_gives_action_parameters() -> None:
    module = logits_for(favourite=2)
    collector = local_collector(policy=module)
    assert (next(collector)["actions"] == 2).all()
    with torch.no_grad():
        module.bias.copy_(torch.tensor([30.0, 0.0, 0.0]))  # as training would do
    assert collector.update_policy_weights_() == 1
    batch = next(collector)
    assert (batch["actions"] == 0).all()
    assert batch.version == 1
    assert "advantages" not in batch


def test_wrong_output_of_a_module_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 3\]; got \[2, 4\]"):
        next(local_collector(policy=torch.nn.Linear(3, 4)))


def test_all_state_of_a_module_travels() -> None:
    def make() -> ModulePolicy:
        norm = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
        env = Drift()
        config = ModulePolicy.config_class(actor=norm)
        return ModulePolicy(env.observation_space, env.action_space, config)

    one, two = make(), make()
    one.module[0].running_mean.fill_(7.0)
    two.set_weights(one.get_weights())
    for name, value in one.module.state_dict().items():
        assert torch.equal(value, two.module.state_dict()[name]), name
    state = one.get_state()
    two.module[0].running_mean.fill_(0.0)
    two.set_state(state)
    assert (two.module[0].running_mean == 7.0).all()
    with pytest.raises(ValueError, match="another network"):
        two.set_weights(one.get_weights()._replace(flat=np.zeros(2, np.float32)))


class KeyedModule(torch.nn.Module):
    """A module with keys, which is called with tensors like `tensordict.nn.TensorDictModule`."""

    def __init__(self, module: Any, in_keys: list[str], out_keys: list[str]) -> None:
        super().__init__()
        self.module = module
        self.in_keys = in_keys
        self.out_keys = out_keys

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)


def fixed(weight: float, size: int = 2) -> torch.nn.Module:
    """Returns a linear module that maps all observations of `Reach` to its bias."""
    layer = torch.nn.Linear(2, size)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.fill_(weight)
    return layer


def test_a_module_that_returns_actions_is_called_with_tensors() -> None:
    for policy in (
        (fixed(2.5), {"outputs": "actions"}),
        KeyedModule(fixed(2.5), ["observation"], ["action"]),
        KeyedModule(lambda obs: (obs, fixed(2.5)(obs)), ["anything"], ["hidden", "action"]),
    ):
        collector = local_collector(Reach, policy)
        assert (next(collector)["actions"] == 2.5).all()
    low = local_collector(Reach, (fixed(-9.0), {"outputs": "actions"}))
    assert (next(low)["rewards"] == -1.0).all(), "clipped to the box"


def test_weights_of_a_module_that_returns_actions_are_sent() -> None:
    module = KeyedModule(fixed(2.5), ["observation"], ["action"])
    collector = local_collector(Reach, module)
    next(collector)
    with torch.no_grad():
        module.module.bias.fill_(0.5)
    assert collector.update_policy_weights_() == 1
    assert (next(collector)["actions"] == 0.5).all()


def test_one_hot_actions_are_those_of_the_space() -> None:
    """`Drift` has the three actions -1, 0 and 1."""
    one_hot = KeyedModule(lambda obs: torch.eye(3)[[2] * len(obs)], ["observation"], ["action"])
    assert (next(local_collector(policy=one_hot))["actions"] == 1).all()
    index = KeyedModule(lambda obs: torch.zeros(len(obs)).long(), ["observation"], ["action"])
    assert (next(local_collector(policy=index))["actions"] == 0).all()


def test_in_keys_are_parts_of_a_dict() -> None:
    seen: list[Any] = []

    def act(z: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        seen.append((z.shape, a.shape))
        return torch.zeros(len(z)).long()

    next(local_collector(Masked, KeyedModule(act, ["z", "a"], ["action"])))
    assert set(seen) == {((2, 2), (2, 2))}
    with pytest.raises(
        ConfigError, match=r"in_keys \['b'\].*Allowed: in_keys from \['a', 'action_mask'"
    ):
        local_collector(Masked, KeyedModule(act, ["b"], ["action"]))


@pytest.mark.parametrize(
    ("in_keys", "out_keys", "said"),
    [
        (["observation"], ["loc"], r"out_keys \['loc'\]. Allowed: out_keys with 'action'"),
        (["a", "b"], ["action"], r"in_keys \['a', 'b'\].*Allowed: one in_key"),
    ],
)
def test_keys_of_a_module_that_do_not_fit_are_refused(
    in_keys: list[str], out_keys: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        local_collector(Reach, KeyedModule(fixed(1.0), in_keys, out_keys))


def test_actions_of_another_shape_are_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"Linear must return actions of shape \[2, 2\]; got \[2, 3\]"
    ):
        next(local_collector(Reach, (fixed(1.0, size=3), {"outputs": "actions"})))


def test_a_tensordict_module_gives_actions() -> None:
    """This is TorchRL's example, with an environment of Gymnasium."""
    tensordict = pytest.importorskip("tensordict.nn")
    module = tensordict.TensorDictModule(fixed(2.5), in_keys=["observation"], out_keys=["action"])
    assert (next(local_collector(Reach, module))["actions"] == 2.5).all()


def test_arguments_of_torchrl_are_options() -> None:
    class SyncDataCollector:
        """Replaces TorchRL's class with the same name."""

    def parse(**options: Any) -> CollectorConfig:
        return CollectorConfig.parse({"frames_per_batch": 200, **options}, "Collector")

    found = parse(
        collector_class=SyncDataCollector,
        collector_kwargs={"device": "meta", "storing_device": "cpu", "max_frames_per_traj": 50},
    )
    assert (found.policy_device, found.storing_device) == ("meta", "cpu")
    assert found.max_frames_per_traj == 50
    both = parse(device=torch.device("meta"))
    assert both.policy_device == both.storing_device == "meta"
    assert parse(device=None, collector_kwargs={"device": None}).policy_device == "cpu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collector_class": Counter}, "'collector_class': got .*num_workers_per_collector"),
        ({"collector_kwargs": [{}, {}]}, "'collector_kwargs': got .*Allowed: one dict for all"),
        ({"collector_kwargs": {"seed": 1}, "seed": 2}, "'seed' is 2, but 1 in collector_kwargs"),
        ({"collector_kwargs": {"sed": 1}}, "unknown key 'sed'"),
        (
            {"collector_kwargs": {"device": "cpu"}, "device": "meta"},
            "'device' is 'meta', but 'cpu'",
        ),
        ({"device": 0}, "'storing_device': got '0'"),
    ],
)
def test_arguments_of_torchrl_without_counterpart_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        local_collector(**options)


def test_a_callable_gives_actions() -> None:
    assert (next(local_collector(policy=pushing_right))["actions"] == 1).all()
    low = local_collector(Reach, lambda obs: np.full((len(obs), 2), -9.0))
    assert (next(low)["rewards"] == -1.0).all(), "clipped to the box"
    with pytest.raises(ValueError, match=r"shape \[2\]; got \[2, 1\]"):
        next(local_collector(policy=lambda obs: np.zeros((len(obs), 1))))


def test_without_a_policy_actions_are_uniform() -> None:
    batch = next(local_collector(frames_per_batch=3000))
    counts = Counter(batch["actions"].reshape(-1).tolist())
    assert set(counts) == {-1, 0, 1}  # the actions that the environment accepts
    assert min(counts.values()) > 900
    box = next(local_collector(Reach, frames_per_batch=3000))["actions"]
    assert box.min() >= -1.0
    assert box.max() <= 3.0
    assert abs(box.mean() - 1.0) < 0.1
    assert abs(box.std() - 4.0 / 12**0.5) < 0.1


def test_policies_that_do_not_learn_predict() -> None:
    env = Drift()
    spaces_of = env.observation_space, env.action_space
    obs = np.zeros((4, 3), np.float32)
    for given in (torch.nn.Linear(3, 3), lambda rows: np.zeros(len(rows), int), None):
        policy_class, options = resolve_policy(given)
        policy = policy_class(*spaces_of, options)
        deterministic = given is not None  # uniform actions have no mode
        actions, state = policy.predict(obs, deterministic=deterministic)
        assert state is None
        assert all(env.action_space.contains(int(action)) for action in actions)
        action, _ = policy.predict(obs[0], deterministic=deterministic)
        assert env.action_space.contains(int(action))
        with pytest.raises(ValueError, match="has no memory"):
            policy.predict(obs, state=np.zeros((4, 1)))


def test_object_that_cannot_act_is_refused() -> None:
    for policy in (3, object, "pp0"):
        with pytest.raises(ConfigError, match="policy"):
            local_collector(policy=policy)
    with pytest.raises(ConfigError, match="gama"):
        local_collector(policy=("ppo", {"gama": 1}))
    for given in ((), ("ppo",), ("ppo", {}, 1), ("ppo", 1), (np.argmax, 1)):
        with pytest.raises(ConfigError, match=r"policy: got \(.*Allowed: a pair \(policy, dict"):
            local_collector(policy=given)


def test_policy_acts_on_policy_device() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert local_collector(policy="a2c", policy_device=device).policy.device.type == device
    with pytest.raises(ConfigError, match="'policy_device': got 'warp'; allowed: names of torch"):
        local_collector(policy="a2c", policy_device="warp")
    with pytest.raises(ConfigError, match="'policy_device': got 'cuda:99', not available here"):
        local_collector(policy="a2c", policy_device="cuda:99")


# ---- exploration --------------------------------------------------------------------------------


def test_exploration_types() -> None:
    policy = make_policy("ppo", Drift())
    best = {
        kind: next(local_collector(policy=policy, exploration_type=kind))
        for kind in ("mode", "deterministic")
    }
    for batch in best.values():
        np.testing.assert_array_equal(batch["actions"], batch["action_dist_inputs"].argmax(-1))
    drawn = next(local_collector(policy=policy, frames_per_batch=300))
    assert (drawn["actions"] != drawn["action_dist_inputs"].argmax(-1)).any()
    with pytest.raises(ConfigError, match="categories have no mean"):
        local_collector(policy=policy, exploration_type="mean")


@pytest.mark.parametrize("squash", [False, True])
def test_the_mean_of_box_actions(squash: bool) -> None:
    options = {"free_log_std": True, "squash_actions": squash}
    policy = make_policy("ppo", Reach(), model=options)
    with torch.no_grad():
        policy.model.policy_head.bias[:] = torch.tensor([0.4, -0.2])
        policy.model.log_std.fill_(0.3)
    collector = local_collector(Reach, policy, exploration_type="mean")
    batch = next(collector)
    taken = policy.dist.to_env(batch["actions"].reshape(-1, 2))
    params = batch.flat("action_dist_inputs")
    noise = np.random.default_rng(0).standard_normal((40_000, 2)).astype(np.float32)
    draws = policy.dist.sample(np.repeat(params[:1], len(noise), 0), noise)
    expected = policy.dist.to_env(draws).mean(0) if squash else 1.0 + 2.0 * params[0, :2]
    np.testing.assert_allclose(taken[0], expected, atol=0.03)
    if squash:
        mode = policy.dist.to_env(policy.dist.sample(params, None))
        assert abs(mode[0] - taken[0]).max() > 0.1, "the mean differs from the mode"


@pytest.mark.parametrize("env", [Drift, Reach])
def test_first_frames_are_random(env: Any) -> None:
    policy = make_policy("ppo", env())
    with torch.no_grad():
        policy.model.policy_head.bias[0] = 30.0
    collector = local_collector(env, policy, init_random_frames=90, frames_per_batch=40)
    batches = [next(collector) for _ in range(5)]
    by_policy = [bool((batch.flat("action_dist_inputs")[:, 0] > 20.0).all()) for batch in batches]
    assert by_policy == [False, False, False, True, True]  # rounded up to whole batches
    first = batches[0]["actions"]
    if env is Drift:
        assert set(first.reshape(-1).tolist()) == {0, 1, 2}
        np.testing.assert_allclose(batches[0]["action_logp"], np.log(1 / 3), rtol=1e-5)
    else:
        given = policy.dist.to_env(first.reshape(-1, 2))
        assert given.min() > -1.0
        assert given.max() < 3.0
        assert given.max() > 2.0


# ---- trajectories -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", AUTORESET)
def test_longest_trajectory(mode: str) -> None:
    """The reward is always 1, and `max_frames_per_traj` truncates episodes after four steps. The
    policy's value is the return of an endless episode, `1 / (1 - gamma)`."""
    gamma = 0.9
    policy = make_policy("a2c", Clock(100), gamma=gamma, model={"fcnet_hiddens": []})
    with torch.no_grad():
        policy.flat.params.zero_()
        policy.model.value_head.bias.fill_(1.0 / (1.0 - gamma))
    collector = local_collector(
        lambda: Clock(100), policy, max_frames_per_traj=4, autoreset_mode=mode, frames_per_batch=40
    )
    batch = next(collector)
    assert set(batch.episodes.lengths) == {4}
    assert not batch["terminated"].any()
    assert batch["truncated"].sum() == len(batch.episodes.lengths) > 4
    # The advantages are 0 if the truncated return is bootstrapped. They are not 0 if the end counts
    # as a termination.
    np.testing.assert_allclose(batch["advantages"], 0.0, atol=1e-4)
    batch.columns["terminated"] = batch["truncated"]
    following = gae.next_values(
        batch, np.full((len(batch.all_obs), 2), 10.0), np.full(len(batch.successor_index), 10.0)
    )
    wrong = gae.advantages(batch, batch["values"], following, gamma, 1.0)
    assert abs(wrong).max() > 1.0


def test_unsupported_trajectory_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_frames_per_traj"):
        local_collector(
            "CartPole-v1", max_frames_per_traj=5, vectorization_mode="vector_entry_point"
        )
    with pytest.raises(ConfigError, match="max_frames_per_traj"):
        local_collector(lambda: gymnasium.make_vec("CartPole-v1", 2), max_frames_per_traj=5)
    batch = next(local_collector("CartPole-v1", max_frames_per_traj=5, frames_per_batch=60))
    assert max(batch.episodes.lengths) == 5


def test_reset_at_each_iter() -> None:
    def times(reset: bool) -> list[int]:
        collector = local_collector(lambda: Clock(100), reset_at_each_iter=reset)
        return [int(next(collector).obs[0, 0].argmax()) for _ in range(3)]

    assert times(True) == [0, 0, 0]
    assert times(False) == [0, 6, 12]


def rows_of(batch: SampleBatch) -> list[list[float]]:
    """Returns the observations of each trajectory, including the observation after its last row."""
    rows = []
    for n in range(batch.shape[1]):
        length = int(batch["valid"][:, n].sum())
        assert batch["valid"][:length, n].all(), "rows of a trajectory are contiguous"
        last = (length - 1) * batch.shape[1] + n
        found = np.flatnonzero(batch.successor_index == last)
        after = batch.successor_obs[found[0]] if len(found) else batch.all_obs[length, n]
        rows.append([*batch.obs[:length, n].argmax(-1).tolist(), int(after.argmax())])
    return rows


@pytest.mark.parametrize("mode", AUTORESET)
def test_trajectories_are_split(mode: str) -> None:
    options = {"autoreset_mode": mode, "frames_per_batch": 16}
    as_list = next(local_collector(lambda: Clock(3), split_trajs="list", **options))
    padded = next(local_collector(lambda: Clock(3), split_trajs=True, **options))
    # Each of the two environments makes 8 steps, and an episode has 3 steps.
    expected = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2]]
    assert [rows_of(part)[0] for part in as_list] == expected * 2
    assert rows_of(padded) == expected * 2
    assert padded.shape == (3, len(expected) * 2)
    assert padded.env_steps == sum(part.env_steps for part in as_list)
    assert {int(part["truncated"].sum()) for part in as_list[:2]} == {1}


def test_environment_that_cannot_be_sent_to_collectors_is_refused() -> None:
    lock = threading.Lock()

    def make() -> Drift:
        with lock:
            return Drift()

    for envs in (make, [Drift, make]):
        with pytest.raises(ConfigError, match=r"key 'create_env_fn': got .*_thread.lock"):
            Collector(envs, num_collectors=2, frames_per_batch=10)
    next(local_collector(make))


@pytest.mark.parametrize("split", ["padded", "list"])
def test_batch_without_valid_rows_has_no_trajectories(split: str) -> None:
    options = {"autoreset_mode": "next_step", "num_envs": 1, "frames_per_batch": 3}
    collector = local_collector(lambda: Clock(3), split_trajs=split, **options)
    first = next(collector)
    collector.stop_batch_early(1)  # the only row is then the reset row of the first episode
    second = next(collector)
    if split == "list":
        assert (len(first), second) == (1, [])
        return
    assert first.env_steps == 3
    assert (second.shape[1], second.env_steps, len(second)) == (0, 0, 0)
    described = [
        [(name, rows.dtype, rows.shape[1:]) for name, rows in batch.iter_rows()]
        for batch in (first, second)
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize("num_envs", [1, 4])
def test_reset_rows_are_made_up_for(num_envs: int) -> None:
    """CartPole has its own vector implementation, in which each reset takes one row."""
    collector = local_collector(
        "CartPole-v1", frames_per_batch=400, num_envs=num_envs, total_frames=1600
    )
    batches = list(collector)
    assert all(400 <= batch.env_steps < 400 + num_envs for batch in batches)
    assert any(not batch["valid"].all() for batch in batches)
    assert len(batches) == 4


# ---- changes to batches -------------------------------------------------------------------------


def test_postproc_gets_each_fragment_and_keeps_frame_counts() -> None:
    def halve(batch: SampleBatch) -> SampleBatch:
        return batch.steps(0, batch.shape[0] // 2)

    collector = local_collector(postproc=halve, total_frames=40)
    batches = list(collector)
    # `halve` leaves 3 of 6 steps, but all 12 frames of a batch count.
    assert [batch.shape for batch in batches] == [(3, 2)] * 4
    assert collector.num_frames == 48
    with pytest.raises(TypeError, match="postproc"):
        next(local_collector(postproc=lambda batch: None))


def test_tensordicts_are_on_storing_device() -> None:
    pytest.importorskip("tensordict")
    batch = next(local_collector(storing_device="meta"))
    assert to_tensordict(batch)["observation"].device.type == "meta"
    assert to_tensordict(batch, "cpu")["observation"].device.type == "cpu"


# ---- environments -------------------------------------------------------------------------------


def _kwargs(**kwargs: Any) -> dict[str, Any]:
    return {"create_env_kwargs": kwargs, "frames_per_batch": 20}


def test_kwargs_reach_the_environment() -> None:
    collector = local_collector(lambda **kwargs: Clock(**kwargs), **_kwargs(length=2))
    with pytest.raises(ConfigError, match="create_env_kwargs"):
        local_collector(lambda **kwargs: Clock(**kwargs), **_kwargs(lengths=2))
    assert set(next(collector).episodes.lengths) == {2}


def test_environments_with_other_spaces_are_refused() -> None:
    with pytest.raises(ConfigError, match="Allowed: environments with the same spaces"):
        Collector([Drift, Reach], frames_per_batch=10)
    with pytest.raises(ConfigError, match="one for each collector"):
        Collector([], frames_per_batch=10)
    with pytest.raises(ConfigError, match="got 2 for 3 collectors"):
        Collector([Drift, Drift], num_collectors=3, frames_per_batch=10)


def test_number_of_environments_is_named_num_envs() -> None:
    said = r"^key 'num_envs': got 3, but the callable in 'create_env_fn' makes .* of 2;"
    with pytest.raises(ConfigError, match=said):
        local_collector(lambda: gymnasium.make_vec("CartPole-v1", 2), num_envs=3)


def test_remote_configs_are_checked() -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_cpus'"):
        Collector([Drift], frames_per_batch=10, remote_configs={"num_cpu": 1})
    with pytest.raises(ConfigError, match="remote_configs"):
        Collector([Drift] * 3, frames_per_batch=10, remote_configs=[{}, {}])


# ---- seeds and state ----------------------------------------------------------------------------


def test_seeds_follow_torchrls_sequence() -> None:
    one, two = local_collector(seed=1), local_collector(seed=2)
    assert next(one).all_obs.tobytes() != next(two).all_obs.tobytes()
    after = [collector.set_seed(7) for collector in (one, two)]
    assert after == [next_seed(next_seed(7))] * 2  # one seed for each of two environments
    a, b = next(one), next(two)
    assert a.all_obs.tobytes() == b.all_obs.tobytes()
    assert (a["actions"] == b["actions"]).all()
    assert (a.obs[0, 0] != a.obs[0, 1]).any()
    assert one.set_seed(7, static_seed=True) == 7
    same = next(one)
    assert (same.obs[0, 0] == same.obs[0, 1]).all()
    assert (same.obs[0, 0] == a.obs[0, 0]).all()


def test_seed_sequence_is_torchrls() -> None:
    utils = pytest.importorskip("torchrl._utils")
    for seed in (0, 1, 12345):
        assert next_seed(seed) == utils.seed_generator(seed)


def test_restored_state_continues_the_episodes() -> None:
    one, two = (local_collector(policy="ppo", seed=seed) for seed in (1, 2))
    for _ in range(3):
        one.policy.learn_on_batch(next(one))
    two.load_state_dict(one.state_dict())
    assert (two.num_frames, two.num_batches) == (36, 3)
    for _ in range(2):
        a, b = next(one), next(two)
        assert a.version == b.version == one.policy.version
        for (_, left), (_, right) in zip(a.iter_rows(), b.iter_rows(), strict=True):
            np.testing.assert_array_equal(left, right)


def test_running_statistics_of_environments_are_saved() -> None:
    class Silent(gymnasium.Wrapper):
        """Hides the methods that save the state of the environment."""

        def get_wrapper_attr(self, name: str) -> Any:
            raise AttributeError(name)

        def has_wrapper_attr(self, name: str) -> bool:
            return False

    def make() -> Any:
        return NormalizeObservation(Silent(Drift()))

    one, two = local_collector(make, seed=1), local_collector(make, seed=2)
    for _ in range(5):
        next(one)
    two.load_state_dict(one.state_dict())
    saved, mine = (each.state_dict()["collectors"]["0"]["statistics"] for each in (one, two))
    assert saved["vector"] == mine["vector"] == []
    for [left], [right] in zip(saved["envs"], mine["envs"], strict=True):
        assert left["count"] == right["count"] > 30.0
        np.testing.assert_array_equal(left["mean"], right["mean"])
        np.testing.assert_array_equal(left["var"], right["var"])
    with pytest.raises(ValueError, match="running statistics"):
        local_collector(Drift).load_state_dict(one.state_dict())


def test_state_is_tensors_and_json() -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            for part in value.values():
                check(part)
        elif isinstance(value, list):
            for part in value:
                check(part)
        else:
            kinds = (torch.Tensor, np.ndarray, int, float, str, type(None), np.generic)
            assert isinstance(value, kinds), value

    collector = local_collector(policy="ppo")
    next(collector)
    check(collector.state_dict())


# ---- record and rerun ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["record_to", "rerun_of"])
def test_record_without_a_seed_or_workers_is_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    with pytest.raises(ConfigError, match=r"'seed': got None\. Allowed with record_to"):
        local_collector(seed=None, num_collectors=1, **{key: path})
    with pytest.raises(
        ConfigError, match=rf"'{key}': .*num_collectors=0\. Allowed: num_collectors of"
    ):
        local_collector(**{key: path})
    with pytest.raises(
        ConfigError, match=r"'rerun_of': got .* together with record_to\. Allowed: only one"
    ):
        local_collector(num_collectors=1, record_to=path, rerun_of=path)


def test_a_record_is_a_new_file(tmp_path: Path) -> None:
    """A path that exists is refused before any actor starts."""
    with pytest.raises(ConfigError, match=r"'record_to': got .*, which exists\. Allowed: a new"):
        local_collector(num_collectors=1, record_to=tmp_path)


def test_rerun_of_a_missing_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        local_collector(num_collectors=1, rerun_of=tmp_path / "run.jsonl.gz")


def test_collector_names_only_options_that_it_has() -> None:
    with pytest.raises(ConfigError) as caught:
        polopt.Collector("CartPole-v1", n_steps=3, frames_per_batch=8)
    assert "rollout_fragment_length" not in str(caught.value)
    with pytest.raises(ConfigError, match="CleanRL: 'kl_stop': learning stops"):
        polopt.Collector("CartPole-v1", ("ppo", {"target_kl": 1}), frames_per_batch=8)


@pytest.mark.parametrize(("module", "env", "said"), NEEDED)
@pytest.mark.parametrize("num_collectors", [0, 2])
def test_missing_package_is_named(
    module: str, env: str, said: str, num_collectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, module)
    with pytest.raises(ConfigError) as caught:
        polopt.Collector(env, num_collectors=num_collectors, frames_per_batch=8)
    assert without_swig(caught.value) == said
