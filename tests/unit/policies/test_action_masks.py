"""Actions that a mask does not allow have the probability 0 in acting, losses and exports."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty_envs import guarded, num_faults
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from masked_env import (
    ACTIONS,
    Masked,
    MaskedVector,
    every_kind,
    is_allowed,
    masked_rows,
    observations,
    random_masks,
    sizes,
)
from masked_policies import SMALL, masked_policy
from policy_helpers import FakeEnv, every_policy
from torch import Tensor, nn
from toy_envs import AUTORESET, make_policy, make_sampler

from polopt.common.action_mask import MASKED_LOGIT
from polopt.common.config import ConfigError
from polopt.policies.distributions.make_distribution import make_distribution
from polopt.policies.networks import actor_critics
from polopt.policies.networks.network import Network
from polopt.policies.policy import Policy
from polopt.rollouts.envs.env_errors import EnvironmentFailedError
from polopt.rollouts.sampling.sampler_faults import SamplerFaults

every_mode = pytest.mark.parametrize("mode", AUTORESET)


def spread(policy: Policy) -> Policy:
    """Makes the logits of the policy differ by several units."""
    noise = torch.randn(policy.flat.params.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        policy.flat.params.add_(noise)
    return policy


def allowed_logits(logits: Tensor, mask: np.ndarray, kind: str) -> list[Tensor]:
    """Returns the logits of the allowed categories of one row, with a tensor for each component of
    a MultiDiscrete action."""
    parts = logits.split(sizes(ACTIONS[kind]))
    masks = torch.as_tensor(mask).bool().split(sizes(ACTIONS[kind]))
    return [part[allowed] for part, allowed in zip(parts, masks, strict=True)]


def check_closed_forms(kind: str) -> None:
    """Entropy, KL and log-probability belong to the distribution over allowed actions."""
    policy, other = spread(masked_policy(kind)), masked_policy(kind)
    obs, masks = masked_rows(kind)
    batch = torch.as_tensor(obs)
    logits, old = policy.model.network(policy.model._rest(batch))[0], other.model(batch)[0]
    params, dist = policy.model(batch)[0], policy.dist
    entropy, kl = dist.entropy(params), dist.kl(old, params)
    every = all_actions(kind)
    by_action = torch.stack([dist.log_prob(params, a.expand(len(obs), *a.shape)) for a in every])
    probability = by_action.exp()
    for n, mask in enumerate(masks):
        own = [
            torch.distributions.Categorical(logits=p) for p in allowed_logits(logits[n], mask, kind)
        ]
        before = [
            torch.distributions.Categorical(logits=p) for p in allowed_logits(old[n], mask, kind)
        ]
        torch.testing.assert_close(entropy[n], sum(one.entropy() for one in own))
        pairs = zip(before, own, strict=True)
        expected = sum(torch.distributions.kl_divergence(b, o) for b, o in pairs)
        torch.testing.assert_close(kl[n], expected, rtol=1e-4, atol=1e-5)
        permitted = torch.tensor([allows(mask, a, kind) for a in every])
        assert probability[~permitted, n].eq(0.0).all(), "not exactly 0"
        torch.testing.assert_close(probability[permitted, n].sum(), torch.tensor(1.0))
        joint = (
            own[0].logits if len(own) == 1 else (own[0].logits[:, None] + own[1].logits).flatten()
        )
        torch.testing.assert_close(by_action[permitted, n], joint)


def all_actions(kind: str) -> list[Tensor]:
    if kind == "discrete":
        return [torch.tensor(i) for i in range(4)]
    return [torch.tensor([i, j]) for i in range(2) for j in range(3)]


def allows(mask: np.ndarray, action: Tensor, kind: str) -> bool:
    starts = [0] if kind == "discrete" else [0, 2]
    return bool(mask[np.array(starts) + np.atleast_1d(action.numpy())].all())


@every_kind
def test_terms_equal_distributions_over_allowed_actions(kind: str) -> None:
    check_closed_forms(kind)


@every_kind
@pytest.mark.parametrize("logit", [-5.0, -np.inf, 0.0])
def test_another_masked_logit_is_wrong(
    kind: str, logit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_critics, "MASKED_LOGIT", logit)
    with pytest.raises(AssertionError):
        check_closed_forms(kind)


@every_kind
@every_policy
def test_masked_logits_have_no_gradient(name: str, kind: str) -> None:
    """The logits of actions that no observation of a batch allows have the gradient 0. The losses
    are finite."""
    vector = guarded([lambda: Masked(kind)] * 3, "same_step")
    policy = make_policy(name, vector, model=SMALL, num_sgd_iter=2, lr=0.1, entropy_coeff=0.1)
    sampler = make_sampler(vector, policy, 16)
    batch = policy.encode_batch(policy.postprocess(sampler.sample()))
    place = policy.mask.place
    batch.all_obs[..., place.start] = 0.0
    never = batch["actions"] == 0 if kind == "discrete" else batch["actions"][..., 0] == 0
    batch["valid"][never] = False
    batch["action_dist_inputs"][..., 0] = MASKED_LOGIT
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients = policy.compute_gradients(batch)
    assert np.isfinite(gradients.flat).all()
    head = policy.model.network.policy_head
    assert head.weight.grad[0].eq(0.0).all()
    assert head.bias.grad[0] == 0.0
    assert head.bias.grad[-3:].ne(0.0).all()
    stats = policy.learn_on_batch(batch)
    assert np.isfinite(list(stats.values())).all()
    assert np.isfinite(policy.get_weights().flat).all()


@every_kind
def test_network_does_not_see_the_mask(kind: str) -> None:
    policy = spread(masked_policy(kind))
    obs, _ = masked_rows(kind, 1)
    rest = np.repeat(obs, 2, axis=0)
    rest[1, policy.mask.place] = 1.0
    values = policy.value(rest)
    assert values[0] == values[1]
    first, second = policy.action_params(rest)
    assert (first[first != MASKED_LOGIT] == second[first != MASKED_LOGIT]).all()
    rest[1, 0] += 1.0
    assert policy.value(rest)[1] != values[0]


# ---- acting -------------------------------------------------------------------------------------


@every_kind
@every_mode
def test_sampled_actions_are_allowed(kind: str, mode: str) -> None:
    """The environment `Masked` raises an error for other actions. The last observation of an
    episode allows no action, which is not a fault."""
    vector = guarded([lambda: Masked(kind)] * 4, mode)
    sampler = make_sampler(vector, masked_policy(kind), 50)
    for options in ({}, {"uniform": True}, {"explore": False}):
        batch = sampler.sample(**options)
        assert num_faults(batch.faults, "raised") == 0
        assert set(batch.episodes.lengths) == {5}


@every_kind
@pytest.mark.parametrize("name", ["ppo", "appo"])
def test_policies_with_memory_have_the_mask(kind: str, name: str) -> None:
    vector = guarded([lambda: Masked(kind)] * 4, "next_step")
    memory = {**SMALL, "use_lstm": True, "lstm_cell_size": 4}
    policy = make_policy(name, vector, model=memory, lr=0.1)
    sampler = make_sampler(vector, policy, 20)
    for _ in range(3):
        batch = sampler.sample()
        assert num_faults(batch.faults, "raised") == 0
        masks = policy.encode_batch(batch).obs[:, :, policy.mask.place]
        logits = policy.dist_inputs(batch)
        np.testing.assert_array_equal(logits == np.float32(MASKED_LOGIT), masks == 0.0)
        stats = policy.learn_on_batch(policy.postprocess(batch))
        assert np.isfinite(list(stats.values())).all()


def test_masks_and_images_keep_their_values_in_normalisation() -> None:
    """Normalisation changes neither uint8 images nor masks. It changes only columns 0 and 1, the
    values of the key `a`."""

    class Painted(Masked):
        def __init__(self) -> None:
            super().__init__()
            parts = dict(self.observation_space.spaces)
            parts["image"] = spaces.Box(0, 255, (3, 3, 1), np.uint8)
            self.observation_space = spaces.Dict(parts)

        def observe(self) -> dict[str, Any]:
            image = self.np_random.integers(0, 256, (3, 3, 1), dtype=np.uint8)
            return {**super().observe(), "image": image}

    vector = guarded([Painted] * 2, "same_step")
    policy = make_policy("ppo", vector, model=SMALL, normalize_observations=True)
    sampler = make_sampler(vector, policy, 20)
    batch = sampler.sample()
    policy.normalizer.moments = policy.normalizer.moments_of(batch, batch["rewards"])
    seen = policy.normalizer.observations(batch.flat("obs"))
    raw = policy.encode_batch(batch).flat("obs")
    numeric = [name for name in range(raw.shape[1]) if (seen[:, name] != raw[:, name]).any()]
    space = policy.encoder.space
    assert [len(numeric), *space.spaces] == [2, "a", "action_mask", "image", "z"]
    assert numeric == [0, 1]
    batch = policy.postprocess(sampler.sample())
    assert num_faults(batch.faults, "raised") == 0
    assert np.isfinite(list(policy.learn_on_batch(batch).values())).all()


@every_kind
def test_uniform_actions_are_uniform_over_allowed_ones(kind: str) -> None:
    policy = masked_policy(kind)
    obs, masks = masked_rows(kind, 1)
    rows = np.repeat(obs, 20_000, axis=0)
    logits = policy.mask.masked(0.0, rows)
    params, actions = policy.dist.random_allowed(np.random.default_rng(0), logits)
    permitted = [a for a in all_actions(kind) if allows(masks[0], a, kind)]
    assert len(permitted) > 1
    for action in permitted:
        share = (actions.reshape(len(rows), -1) == action.numpy()).all(axis=-1).mean()
        assert share == pytest.approx(1.0 / len(permitted), abs=0.02)
    log_prob = policy.dist.log_prob(torch.as_tensor(params), torch.as_tensor(actions))
    torch.testing.assert_close(log_prob.exp(), torch.full((len(rows),), 1.0 / len(permitted)))


@every_kind
def test_predict_applies_the_mask(kind: str) -> None:
    policy, space = spread(masked_policy(kind)), observations(ACTIONS[kind])
    rng = np.random.default_rng(0)
    for mask in random_masks(ACTIONS[kind], rng, 30):
        observation = {**space.sample(), "action_mask": mask}
        for deterministic in (True, False):
            action, _ = policy.predict(observation, deterministic=deterministic, rng=rng)
            assert is_allowed(ACTIONS[kind], mask, action)
    observation["action_mask"] = np.zeros_like(mask)
    with pytest.raises(ValueError, match="allows none of the"):
        policy.predict(observation)
    with pytest.raises(ValueError, match="values 0 and 1; got"):
        policy.predict({**observation, "action_mask": mask + 2})


@every_kind
def test_onnx_model_applies_the_mask(kind: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    policy = spread(masked_policy(kind))
    policy.export_onnx(tmp_path / "policy.onnx")
    session = runtime.InferenceSession(str(tmp_path / "policy.onnx"))
    rng = np.random.default_rng(0)
    masks = random_masks(ACTIONS[kind], rng, 20)
    batch = {
        "a": rng.normal(size=(20, 2)).astype(np.float32),
        "action_mask": masks,
        "z": rng.integers(2, size=20),
    }
    feed = {f"observations.{key}": value for key, value in batch.items()}
    actions, _ = session.run(["actions", "action_dist_inputs"], feed)
    np.testing.assert_array_equal(actions, policy.predict(batch)[0])
    for mask, action in zip(masks, actions, strict=True):
        assert is_allowed(ACTIONS[kind], mask, action)


@every_kind
def test_network_of_a_subclass_has_the_mask(kind: str) -> None:
    """`make_network` of a plugin may ignore masks. The network then gets whole observations, and
    the policy masks the outputs."""
    actions = ACTIONS[kind]

    class Plugin(type(masked_policy(kind))):  # type: ignore[misc]
        def make_network(self) -> Any:
            return PlainNetwork(self.encoder.shape[0], self.dist.num_params)

    policy = Plugin(observations(actions), actions, Plugin.config_class.parse({}))
    obs, masks = masked_rows(kind)
    params = policy.action_params(obs)
    np.testing.assert_array_equal(params == np.float32(MASKED_LOGIT), masks == 0)


class PlainNetwork(Network):
    """A linear network over the whole observation."""

    def __init__(self, size: int, num_params: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, num_params + 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(obs)
        return out[:, :-1], out[:, -1]


# ---- detection ----------------------------------------------------------------------------------

MASKS = [
    spaces.MultiBinary(4),
    spaces.Box(0, 1, (4,), np.int8),
    spaces.Box(0.0, 1.0, (4,), np.float32),
    spaces.Box(0, 1, (4,), np.bool_),
]


@pytest.mark.parametrize("space", MASKS, ids=str)
def test_every_kind_of_mask_is_found(space: Space[Any]) -> None:
    actions = ACTIONS["discrete"]
    env = FakeEnv(observations(actions, space), actions)
    policy = make_policy("a2c", env, model=SMALL)
    observation = {"a": np.zeros(2, np.float32), "z": 0}
    observation["action_mask"] = np.array([0, 0, 1, 0], space.dtype)
    assert policy.predict(observation)[0] == 1  # the third action, because actions begin at -1


@pytest.mark.parametrize(
    ("space", "actions", "allowed"),
    [
        (spaces.MultiBinary(3), ACTIONS["discrete"], r"MultiBinary\(4\), or a Box of shape \(4,\)"),
        (spaces.MultiBinary([2, 2]), ACTIONS["discrete"], "MultiBinary"),
        (spaces.MultiBinary(6), ACTIONS["multi"], r"MultiBinary\(5\)"),
        (spaces.Discrete(4), ACTIONS["discrete"], r"MultiBinary\(4\)"),
        (spaces.MultiBinary(2), spaces.Box(-1.0, 1.0, (2,)), "a mask for Discrete and MultiD"),
    ],
)
def test_mask_that_does_not_fit_is_refused(space: Any, actions: Any, allowed: str) -> None:
    whole = spaces.Dict(action_mask=space, rest=spaces.Discrete(2))
    with pytest.raises(ConfigError, match=rf"'action_mask': got .*{allowed}"):
        make_policy("a2c", FakeEnv(whole, actions))


def test_mask_alone_is_refused() -> None:
    whole = spaces.Dict(action_mask=spaces.MultiBinary(4))
    with pytest.raises(ConfigError, match="no other key"):
        make_policy("a2c", FakeEnv(whole, ACTIONS["discrete"]))


def test_mask_in_an_inner_dict_is_an_observation() -> None:
    inner = observations(ACTIONS["discrete"])
    policy = make_policy("a2c", FakeEnv(spaces.Dict(inner=inner), ACTIONS["discrete"]))
    assert policy.mask is None


# ---- wrong masks --------------------------------------------------------------------------------

WRONG = {"none": 0.0, "half": 0.5, "two": 2.0, "nan": np.nan}


@every_mode
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_mask_is_a_fault_of_the_environment(mode: str, wrong: str) -> None:
    """The first environment returns a wrong mask in the second step of each episode. This discards
    the episode, as an exception in this step would do."""
    vector = guarded([lambda: Masked(wrong=WRONG[wrong]), Masked9], mode)
    sampler = make_sampler(vector, make_policy("a2c", vector, model=SMALL), 20)
    batch = sampler.sample()
    lost = ~batch["valid"][:, 0]
    assert num_faults(batch.faults, "raised") == 10 == lost.sum()
    np.testing.assert_array_equal(np.flatnonzero(lost), np.arange(1, 20, 2))
    assert set(batch.episodes.lengths) <= {9}, "only the second environment completes episodes"
    assert "the action mask" in batch.faults["raised"].message
    assert "in step() at step 2 of its episode" in batch.faults["raised"].message


class Masked9(Masked):
    """Has the spaces of `Masked`, correct masks, and longer episodes."""

    length = 9

    def __init__(self) -> None:
        super().__init__(wrong=1.0)

    def observe(self) -> dict[str, Any]:
        observation = super().observe()
        self.mask[:] = observation["action_mask"]
        return observation


def test_wrong_mask_of_every_reset_ends_with_one_error() -> None:
    class AlwaysWrong(Masked):
        def observe(self) -> dict[str, Any]:
            return {**super().observe(), "action_mask": np.zeros(4, np.int8)}

    vector = guarded([AlwaysWrong], "same_step", limit=3)
    with pytest.raises(EnvironmentFailedError, match="allows none of the 4 choices"):
        make_sampler(vector, make_policy("a2c", vector), 5)


@pytest.mark.parametrize("wrong", [None, 0.0, np.nan])
def test_wrong_mask_of_a_vector_implementation_is_a_fault(wrong: float | None) -> None:
    vector = MaskedVector(wrong)
    policy = make_policy("a2c", vector, model=SMALL)
    sampler = make_sampler(vector, policy, 12)
    sampler.faults = SamplerFaults(lambda: MaskedVector(wrong), max_failures=20)
    sampler.faults.mask = policy.mask
    batch = sampler.sample()
    # Of the 12 rows of an environment, 2 are reset rows. With wrong masks, every second row is lost
    # in both environments, and the vector is replaced 6 times.
    assert num_faults(batch.faults, "raised") == (0 if wrong is None else 6)
    assert batch["valid"].sum() == (20 if wrong is None else 12)


class Masked2(Masked9):
    """Has episodes of two steps, and correct masks."""

    length = 2


@pytest.mark.parametrize("mode", ["same_step", "disabled"])
def test_lost_step_ends_no_episode(mode: str) -> None:
    """In every second step, an episode of the first environment ends, and the mask of the second
    environment is wrong. The whole vector is then replaced, so this step has no last observation.
    """

    def make() -> SyncVectorEnv:
        makers = [Masked2, lambda: Masked(wrong=0.0)]
        return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode.upper()])

    vector = make()
    policy = make_policy("a2c", vector, model=SMALL)
    sampler = make_sampler(vector, policy, 8)
    sampler.faults = SamplerFaults(make, max_failures=20)
    sampler.faults.mask = policy.mask
    batch = sampler.sample()
    assert num_faults(batch.faults, "raised") == 4
    assert not batch["terminated"].any()
    assert not len(batch.successor_index)
    np.testing.assert_array_equal(batch["valid"], [[t % 2 == 0] * 2 for t in range(8)])


def test_random_allowed_returns_the_given_logits() -> None:
    dist = make_distribution(ACTIONS["multi"])
    logits = np.zeros((3, 5), np.float32)
    params, actions = dist.random_allowed(np.random.default_rng(0), logits)
    assert params is logits
    assert actions.shape == (3, 2)
