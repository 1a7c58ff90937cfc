"""Action distributions equal `torch.distributions`, and environments get valid actions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch import distributions as td

from polopt.common.config import ConfigError
from polopt.policies.distributions.action_distribution import ActionDistribution
from polopt.policies.distributions.categorical import Categorical, MultiCategorical
from polopt.policies.distributions.gaussians import DiagGaussian, SquashedGaussian
from polopt.policies.distributions.make_distribution import make_distribution

ROWS = 50
BOX = spaces.Box(np.array([-2.0, 0.0, 1.0], np.float32), np.array([2.0, 0.5, 4.0], np.float32))
SPACES = {
    "discrete": (spaces.Discrete(5), False),
    "offset": (spaces.Discrete(3, start=-1), False),
    "multi": (spaces.MultiDiscrete([2, 3, 4]), False),
    "grid": (spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, -1], [0, 5]]), False),
    "clipped": (BOX, False),
    "squashed": (BOX, True),
    "matrix": (spaces.Box(-1.0, 2.0, (2, 3), np.float64), False),
    "squashed matrix": (spaces.Box(-1.0, 2.0, (2, 3), np.float64), True),
}
every_space = pytest.mark.parametrize("key", SPACES)


def dist_of(key: str) -> ActionDistribution:
    return make_distribution(*SPACES[key])


def params_for(dist: ActionDistribution, seed: int, scale: float = 0.8) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (scale * rng.normal(size=(ROWS, dist.num_params))).astype(np.float32)


def reference(key: str, params: Tensor) -> td.Distribution:
    """Returns torch's distribution of the stored actions. For a squashed Gaussian, these are the
    actions before squashing."""
    space, _ = SPACES[key]
    if isinstance(space, spaces.Discrete):
        return td.Categorical(logits=params)
    if isinstance(space, spaces.Box):
        mean, log_std = params.chunk(2, dim=-1)
        return td.Independent(td.Normal(mean, log_std.exp()), 1)
    raise AssertionError(key)


def parts(key: str, params: Tensor) -> list[td.Categorical]:
    """Returns the distribution of each component of a MultiDiscrete space. torch has no
    distribution of the whole space."""
    sizes = SPACES[key][0].nvec.reshape(-1).tolist()
    return [td.Categorical(logits=logits) for logits in params.split(sizes, dim=-1)]


@pytest.mark.parametrize("key", ["discrete", "offset", "clipped", "matrix"])
def test_equals_torch_distributions(key: str) -> None:
    dist = dist_of(key)
    old, new = (torch.from_numpy(params_for(dist, seed)) for seed in (0, 1))
    noise = dist.draw_noise(np.random.default_rng(2), ROWS)
    actions = torch.from_numpy(dist.sample(old.numpy(), noise))
    expected = reference(key, new)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(dist.log_prob(new, actions), expected.log_prob(actions), **close)
    torch.testing.assert_close(dist.entropy(new), expected.entropy(), **close)
    kl = td.kl_divergence(reference(key, old), expected)
    torch.testing.assert_close(dist.kl(old, new), kl, **close)


@pytest.mark.parametrize("key", ["multi", "grid"])
def test_multi_discrete_is_sum_of_components(key: str) -> None:
    dist = dist_of(key)
    old, new = (torch.from_numpy(params_for(dist, seed)) for seed in (0, 1))
    noise = dist.draw_noise(np.random.default_rng(2), ROWS)
    actions = torch.from_numpy(dist.sample(old.numpy(), noise))
    log_prob = sum(p.log_prob(actions[:, i]) for i, p in enumerate(parts(key, new)))
    entropy = sum(p.entropy() for p in parts(key, new))
    kl = sum(td.kl_divergence(p, q) for p, q in zip(parts(key, old), parts(key, new), strict=True))
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(dist.log_prob(new, actions), log_prob, **close)
    torch.testing.assert_close(dist.entropy(new), entropy, **close)
    torch.testing.assert_close(dist.kl(old, new), kl, **close)


@pytest.mark.filterwarnings("error")
def test_fixed_dimension_adds_nothing_to_a_squashed_density() -> None:
    """The first component of the actions is constant, because its bounds are equal."""
    free = spaces.Box(-3.0, 2.0, (1,), np.float32)
    fixed = spaces.Box(np.array([1.0, -3.0], np.float32), np.array([1.0, 2.0], np.float32))
    alone, both = make_distribution(free, True), make_distribution(fixed, True)
    params, actions = torch.tensor([[0.3, 0.2]]), torch.tensor([[0.7]])
    # The density of the first component before squashing.
    of_normal = td.Normal(0.1, 0.4).log_prob(torch.tensor(0.5))
    found = both.log_prob(
        torch.tensor([[0.1, 0.3, math.log(0.4), 0.2]]), torch.tensor([[0.5, 0.7]])
    )
    of_tanh = torch.tensor(1.0 - math.tanh(0.5) ** 2).log()
    torch.testing.assert_close(found - alone.log_prob(params, actions), (of_normal - of_tanh)[None])


def test_squashed_density_equals_transformed_density() -> None:
    dist = dist_of("squashed")
    old, new = (torch.from_numpy(params_for(dist, seed)) for seed in (0, 1))
    actions = dist.sample(old.numpy(), dist.draw_noise(np.random.default_rng(2), ROWS))
    low, high = torch.from_numpy(BOX.low).double(), torch.from_numpy(BOX.high).double()
    mean, log_std = new.double().chunk(2, dim=-1)
    squashed = td.TransformedDistribution(
        td.Independent(td.Normal(mean, log_std.exp()), 1),
        [td.TanhTransform(cache_size=1), td.AffineTransform((low + high) / 2, (high - low) / 2, 1)],
    )
    in_box = squashed.transforms[1](squashed.transforms[0](torch.from_numpy(actions).double()))
    log_prob = dist.log_prob(new, torch.from_numpy(actions))
    torch.testing.assert_close(log_prob.double(), squashed.log_prob(in_box), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dist.to_env(actions), in_box.numpy(), rtol=1e-4, atol=1e-5)
    # Squashing does not change a KL divergence.
    kl = td.kl_divergence(reference("squashed", old), reference("squashed", new))
    torch.testing.assert_close(dist.kl(old, new), kl, rtol=1e-4, atol=1e-5)


def test_squashed_density_is_finite_for_large_actions() -> None:
    dist = dist_of("squashed")
    params = torch.zeros(2, dist.num_params)
    actions = torch.tensor([[40.0, -40.0, 0.0], [-90.0, 90.0, 90.0]])
    assert dist.log_prob(params, actions).isfinite().all()


@pytest.mark.parametrize("key", ["discrete", "multi"])
def test_sample_frequencies_equal_probabilities(key: str) -> None:
    dist, draws = dist_of(key), 40_000
    params = params_for(dist, 3)[:1]
    noise = dist.draw_noise(np.random.default_rng(4), draws)
    actions = dist.sample(np.repeat(params, draws, axis=0), noise).reshape(draws, -1)
    components = [reference(key, torch.from_numpy(params))] if key == "discrete" else None
    for i, component in enumerate(components or parts(key, torch.from_numpy(params))):
        expected = component.probs[0].numpy()
        counts = np.bincount(actions[:, i], minlength=len(expected))
        # Five standard deviations of a frequency.
        np.testing.assert_allclose(counts / draws, expected, atol=5 * 0.5 / draws**0.5)


def test_gaussian_moments() -> None:
    dist, draws = dist_of("clipped"), 40_000
    params = params_for(dist, 3)[:1]
    noise = dist.draw_noise(np.random.default_rng(4), draws)
    actions = dist.sample(np.repeat(params, draws, axis=0), noise)
    mean, std = params[0, :3], np.exp(params[0, 3:])
    assert (np.abs(actions.mean(0) - mean) < 5 * std / draws**0.5).all()
    np.testing.assert_allclose(actions.std(0), std, rtol=0.02)
    np.testing.assert_allclose(np.corrcoef(actions.T), np.eye(3), atol=0.03)


@every_space
def test_sample_without_noise_is_the_mode(key: str) -> None:
    dist = dist_of(key)
    params = params_for(dist, 5)
    mode = dist.sample(params, None)
    assert mode.shape == (ROWS, *dist.action_shape)
    assert mode.dtype == dist.action_dtype
    if isinstance(dist, DiagGaussian):
        np.testing.assert_array_equal(mode, params[:, : dist.num_params // 2])
        assert not np.shares_memory(mode, params)
        return
    noise = dist.draw_noise(np.random.default_rng(6), ROWS)
    tensors = [torch.from_numpy(a) for a in (params, mode, dist.sample(params, noise))]
    best = dist.log_prob(tensors[0], tensors[1])
    assert (best >= dist.log_prob(tensors[0], tensors[2])).all()
    assert (best > dist.log_prob(tensors[0], tensors[2])).any()


@every_space
def test_environment_gets_actions_of_its_space(key: str) -> None:
    space, _ = SPACES[key]
    dist = dist_of(key)
    params = params_for(dist, 7, scale=3.0)  # far over the bounds
    noise = dist.draw_noise(np.random.default_rng(8), ROWS)
    actions = dist.sample(params, noise)
    assert actions.shape == (ROWS, *dist.action_shape)
    assert actions.dtype == dist.action_dtype
    given = dist.to_env(actions)
    assert given.shape == (ROWS, *space.shape)
    for action in given:
        assert space.contains(action if space.shape else np.int64(action))


def test_offsets_are_added() -> None:
    assert dist_of("offset").to_env(np.array([0, 2])).tolist() == [-1, 1]
    grid = dist_of("grid").to_env(np.array([[0, 0, 0, 0], [1, 2, 3, 1]]))
    assert grid.tolist() == [[[1, -1], [0, 5]], [[2, 1], [3, 6]]]


def test_clipped_or_squashed_to_the_box() -> None:
    actions = np.array([[-9.0, 0.25, 2.0], [9.0, -9.0, 9.0]], np.float32)
    clipped = dist_of("clipped").to_env(actions)
    np.testing.assert_allclose(clipped, [[-2.0, 0.25, 2.0], [2.0, 0.0, 4.0]])
    assert clipped.dtype == np.float32
    middle = dist_of("squashed").to_env(np.zeros((1, 3), np.float32))
    np.testing.assert_allclose(middle, [[0.0, 0.25, 2.5]])
    assert dist_of("matrix").to_env(np.zeros((1, 6), np.float32)).dtype == np.float64


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_bounds_hold_in_the_precision_of_the_space(squash: bool, dtype: type) -> None:
    # 0.1 rounds up in float32, so an action that is clipped to this bound is outside of a float64
    # box.
    space = spaces.Box(-0.1, 0.1, (2,), dtype)
    given = make_distribution(space, squash).to_env(np.array([[50.0, -50.0]], np.float32))
    assert space.contains(given[0])
    np.testing.assert_array_equal(given[0], [space.high[0], space.low[1]])


def test_half_open_box_is_clipped_on_one_side() -> None:
    dist = make_distribution(spaces.Box(0.0, np.inf, (1,), np.float32))
    assert dist.to_env(np.array([[-3.0], [3e8]], np.float32)).tolist() == [[0.0], [3e8]]


def test_density_of_a_mapped_action_equals_scaled_density_of_the_policy() -> None:
    """For an action `a` of the policy, the environment gets `middle + half width * a`. So the
    density of the environment's action is the density of `a`, divided by the half widths. The half
    widths do not depend on the parameters, so ratios, KL and gradients are the same for both
    actions."""
    low, high = np.array([-2.0, 0.0, 300.0]), np.array([2.0, 0.5, 500.0])
    dist = make_distribution(spaces.Box(low, high, dtype=np.float64), normalize_actions=True)
    old, new = (torch.from_numpy(params_for(dist, seed)).double() for seed in (0, 1))
    actions = dist.sample(0.1 * old.numpy(), 0.1 * dist.draw_noise(np.random.default_rng(2), ROWS))
    assert np.abs(actions).max() < 1.0  # nothing is clipped
    given = torch.from_numpy(dist.to_env(actions))
    middle, half = torch.tensor([0.0, 0.25, 400.0]), torch.tensor([2.0, 0.25, 100.0])

    def in_box(params: Tensor) -> td.Distribution:
        mean, log_std = params.chunk(2, dim=-1)
        return td.Independent(td.Normal(middle + half * mean, half * log_std.exp()), 1)

    close = {"rtol": 1e-9, "atol": 1e-9}
    log_width = half.double().log().sum()
    for params in (old, new):
        density = dist.log_prob(params, torch.from_numpy(actions)) - log_width
        torch.testing.assert_close(density, in_box(params).log_prob(given), **close)
        entropy = dist.entropy(params) + log_width
        torch.testing.assert_close(entropy, in_box(params).entropy(), **close)
    kl = td.kl_divergence(in_box(old), in_box(new))
    torch.testing.assert_close(dist.kl(old, new), kl, **close)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_actions_are_mapped_where_both_bounds_are_finite(dtype: Any) -> None:
    low = np.array([300.0, -np.inf, 0.0, -np.inf, -0.01, 5.0, -1.0])
    high = np.array([500.0, np.inf, np.inf, 7.0, 0.01, 5.0, 1.0])
    space = spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)
    dist = make_distribution(space, normalize_actions=True)
    half = np.array([0.5] * 7, np.float32)
    wanted = [450.0, 0.5, 0.5, 0.5, 0.005, 5.0, 0.5]
    far = np.full(7, 50.0, np.float32)
    highest, lowest = [500.0, 50.0, 50.0, 7.0, 0.01, 5.0, 1.0], [300, -50, 0, -50, -0.01, 5, -1]
    for actions, expected in ((half, wanted), (far, highest), (-far, lowest)):
        given = dist.to_env(actions[None])[0]
        np.testing.assert_allclose(given, np.array(expected, dtype), rtol=1e-6)
        assert space.contains(given)
        params = torch.from_numpy(np.concatenate([actions, actions])[None])
        np.testing.assert_allclose(dist.mode_for_env(params)[0].numpy(), given, rtol=1e-6)
    free = make_distribution(space, normalize_actions=True, clip_actions=False)
    expected = [500.0, -50.0, -50.0, 50.0, 0.01, 5.0, 1.0]  # only mapped dimensions are clipped
    ends = np.array([50.0, -50.0, -50.0, 50.0, 50.0, 50.0, 50.0], np.float32)
    np.testing.assert_allclose(free.to_env(ends[None])[0], np.array(expected, dtype))
    plain = make_distribution(space, clip_actions=False)
    np.testing.assert_array_equal(plain.to_env(ends[None])[0], ends.astype(dtype))


def test_the_largest_box_is_mapped_without_overflow() -> None:
    for dtype in (np.float32, np.float64):
        most = np.finfo(dtype).max
        dist = make_distribution(spaces.Box(-most, most, (1,), dtype), normalize_actions=True)
        ends = dist.to_env(np.array([[1.0], [0.0], [-1.0]], np.float32))
        assert ends[:, 0].tolist() == [most, 0.0, -most]


def test_uniform_actions_are_uniform_over_the_box_once_mapped() -> None:
    space = spaces.Box(300.0, 500.0, (2,), np.float32)
    for options in ({"normalize_actions": True}, {}, {"squash_actions": True}):
        dist = make_distribution(space, **options)
        given = dist.to_env(dist.random(np.random.default_rng(0), 4000).reshape(-1, 2))
        counts = np.histogram(given, bins=10, range=(300.0, 500.0))[0]  # of 8,000 values
        assert counts.min() > 650, options
        assert counts.max() < 950, options


def test_squashed_actions_are_mapped_once() -> None:
    one, both = (make_distribution(BOX, True, normalize) for normalize in (False, True))
    actions = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    np.testing.assert_array_equal(one.to_env(actions), both.to_env(actions))


@pytest.mark.parametrize(
    ("key", "family"),
    [
        ("discrete", Categorical),
        ("multi", MultiCategorical),
        ("clipped", DiagGaussian),
        ("squashed", SquashedGaussian),
    ],
)
def test_space_chooses_the_family(key: str, family: type) -> None:
    assert type(dist_of(key)) is family


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiBinary(3),
        spaces.Text(5),
        spaces.Box(0, 255, (2,), np.uint8),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Dict(a=spaces.Discrete(2)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_unsupported_space_error_names_the_space(space: spaces.Space[Any]) -> None:
    with pytest.raises(ConfigError) as error:
        make_distribution(space)
    assert str(space) in str(error.value)
    assert "Discrete, MultiDiscrete, Box" in str(error.value)


@pytest.mark.parametrize("bounds", [(-np.inf, np.inf), (0.0, np.inf), (-np.inf, 1.0)])
def test_unbounded_box_cannot_be_squashed(bounds: tuple[float, float]) -> None:
    space = spaces.Box(*bounds, (2,), np.float32)
    with pytest.raises(ConfigError, match="'squash_actions'") as error:
        make_distribution(space, squash_actions=True)
    assert str(space) in str(error.value)
    make_distribution(space, squash_actions=False)
