"""Tests the strategies of docs/write-an-optimizer.md with fake workers, and checks the public names
that docs/strategy-names.md lists."""

from __future__ import annotations

import ast
import importlib
import inspect
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting_env import CountingDrift, counted_by, made_in
from fakes import FakeTransport, FakeWorkerSet, make_optimizer, worker_config
from plugin_page import PAGE, PLUGINS, plugin
from simulated_channel import (
    SimulatedTicket,
    SimulatedTransport,
    oldest_first,
    shuffled_by,
)

import polopt
from polopt import optimizers
from polopt.dashboards.data.prometheus import metrics_of
from polopt.dashboards.tab_file import tab_of
from polopt.metrics.number import find
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.rollouts.transport.channel import LostProcessError
from polopt.trainers.experiment import Experiment
from polopt.trainers.numbers import numbers_of

DEATH = LostProcessError("the process died")
ROWS = 10  # rows of a fragment of 5 steps of 2 environments
ROUNDS = 2
#: Functions of the plugins that run in workers.
FUNCTIONS = ("learn_alone", "exchange_and_learn")
every_plugin = pytest.mark.parametrize("name", PLUGINS)


def make(name: str, seed: int = 0, env: Any = None, up: bool = True, **options: Any) -> Any:
    """Makes an optimizer with three fake workers, whose calls end in random order."""
    plugin(name)
    fake = FakeTransport()
    fake.script = shuffled_by(seed)
    more = {} if env is None else {"env": env}
    rollout = {"num_workers": 3, **options.pop("rollout", {})}
    workers = FakeWorkerSet(worker_config(rollout=rollout, **more, **options), fake, up=up)
    return make_optimizer(OPTIMIZERS.get(name), workers, local_rounds=ROUNDS)


def own_weights(optimizer: Any) -> list[np.ndarray]:
    return [w.channel.target.get_weights().flat for w in optimizer.workers.remote]


# ---- the algorithms ---------------------------------------------------------------------------


def test_local_sgd_averages_what_workers_have_learned() -> None:
    optimizer = make("local_sgd")
    for channel in optimizer.workers.channels:
        channel.target.clock = time.monotonic  # with the virtual clock, learning would take no time
    for count in range(1, 4):
        result = optimizer.step()
        answers = [channel.values[-1] for channel in optimizer.workers.channels]
        mean = np.mean([weights.flat for weights in answers], axis=0)
        np.testing.assert_array_equal(optimizer.policy.get_weights().flat, mean)
        assert result == (3 * ROUNDS * ROWS, 3 * ROUNDS * ROWS, ROUNDS)
        assert optimizer.policy.version == ROUNDS * count
        assert len({weights.flat.tobytes() for weights in answers}) == 3, "each learns alone"
    stats = optimizer.stats()
    assert stats["num_updates"] == 3 * ROUNDS
    assert stats["workers"]["share"]["learn"] > 0.0
    assert stats["policy_lag"]["max"] == 0


def test_local_sgd_without_remote_workers_learns_in_the_driver() -> None:
    plugin("local_sgd")
    workers = FakeWorkerSet(worker_config(rollout={"num_workers": 0}))
    optimizer = make_optimizer(OPTIMIZERS.get("local_sgd"), workers, local_rounds=ROUNDS)
    before = optimizer.policy.get_weights().flat
    for _ in range(3):
        assert optimizer.step() == (ROUNDS * ROWS, ROUNDS * ROWS, ROUNDS)
    assert optimizer.policy.version == optimizer.metrics.num_updates == 3 * ROUNDS
    assert (optimizer.policy.get_weights().flat != before).any()


def test_elastic_differences_are_conserved_and_draw_workers_together() -> None:
    optimizer = make("elastic_averaging", lr=0.0)
    for _ in range(3):
        optimizer.step()
    optimizer.drain()
    generator = np.random.default_rng(0)
    for worker in optimizer.workers.remote:
        own = worker.channel.target.get_weights()
        noise = generator.normal(size=own.flat.shape).astype(np.float32)
        worker.channel.target.policy.set_weights(own._replace(flat=own.flat + noise))

    def total() -> np.ndarray:
        moves = [reply.value for reply in optimizer.calls.kept]
        return optimizer.policy.get_weights().flat + sum(own_weights(optimizer)) + sum(moves)

    def spread() -> float:
        return float(np.abs(np.diff(own_weights(optimizer), axis=0)).max())

    expected, distance = total(), spread()
    for _ in range(60):
        optimizer.step()
    optimizer.drain()
    np.testing.assert_allclose(total(), expected, atol=1e-4)
    assert spread() < 0.05 * distance
    # The sum contains the center and three workers, whose weights are now nearly equal.
    np.testing.assert_allclose(optimizer.policy.get_weights().flat, expected / 4, atol=0.2)


def test_elastic_workers_keep_their_own_weights() -> None:
    optimizer = make("elastic_averaging", lr=1e-2)
    for _ in range(20):
        assert optimizer.step() == (ROUNDS * ROWS, ROUNDS * ROWS, 1)
        assert optimizer.calls.num_pending == 3, "no worker waits for another one"
    own = own_weights(optimizer)
    assert len({flat.tobytes() for flat in own}) == 3
    assert optimizer.policy.version == 20


def test_elastic_differences_are_those_of_the_paper() -> None:
    optimizer = make("elastic_averaging", lr=1e-2)
    alpha = 0.9 / 3  # the default of `moving_rate`, divided by the number of workers
    center = optimizer.policy.get_weights().flat
    sent: dict[int, list[np.ndarray]] = {1: [], 2: [], 3: []}
    learned: dict[int, list[np.ndarray]] = {1: [], 2: [], 3: []}
    own = dict.fromkeys(sent, center)
    for channel in optimizer.workers.channels:
        learn = channel.target.learn

        def spy(batch: Any, worker: Any = channel.target, learn: Any = learn) -> Any:
            result = learn(batch)
            learned[worker.index].append(worker.get_weights().flat)
            return result

        channel.target.learn = spy
    for _ in range(15):
        optimizer.step()
    optimizer.drain()
    for channel in optimizer.workers.channels:
        index = channel.target.index
        sent[index] = [args[0].flat for _, args in channel.calls]
        for call, moved in enumerate(channel.values):
            np.testing.assert_allclose(moved, alpha * (own[index] - sent[index][call]), atol=1e-6)
            own[index] = learned[index][ROUNDS * (call + 1) - 1]
        assert len(channel.values) > 2


def test_declared_number_of_a_plugin_is_drawn_and_exported() -> None:
    optimizer = make("elastic_averaging", lr=1e-2)
    for _ in range(10):
        optimizer.step()
    cls = type(optimizer)
    number = find(numbers_of(cls), "optimizer/moved")
    assert number is not None
    assert number.meaning == "largest change of a weight in the last exchange"
    assert optimizer.stats()["moved"] > 0.0
    assert number in tab_of(cls).numbers, "the dashboard and the report draw it"
    assert metrics_of(numbers_of(cls))["polopt_moved"].text == number.sentence


# ---- replacement and restore ------------------------------------------------------------------


def test_elastic_replacement_begins_at_the_center() -> None:
    optimizer = make("elastic_averaging", lr=1e-2)
    for _ in range(10):
        optimizer.step()
    optimizer.workers.remote[1].channel.next_error = DEATH
    for _ in range(10):
        optimizer.step()
    assert optimizer.workers.faults.num_restarts == 1
    fresh = optimizer.workers.remote[1].channel
    assert not fresh.values[0].any(), "its weights do not yet differ from the center"
    assert fresh.values[1].any()


@every_plugin
def test_restored_workers_keep_nothing(name: str) -> None:
    optimizer = make(name, lr=1e-2)
    for _ in range(5):
        optimizer.step()
    state = optimizer.get_state()
    saved = optimizer.policy.get_weights()
    for _ in range(5):
        optimizer.step()
    optimizer.set_state(state)
    assert optimizer.calls.idle
    assert all(worker.channel.target.state == {} for worker in optimizer.workers.remote)
    counts = [len(channel.values) for channel in optimizer.workers.channels]
    optimizer.step()
    for channel, before in zip(optimizer.workers.channels, counts, strict=True):
        args = next(args for called, args in channel.calls[before:] if called in FUNCTIONS)
        np.testing.assert_array_equal(args[0].flat, saved.flat)
        assert args[0].version == saved.version
    first = optimizer.workers.channels[0]
    moments = first.target.policy.get_state()["adam"]["network"]
    assert moments["step"].item() == ROUNDS * (len(first.values) - counts[0])


# ---- counts -----------------------------------------------------------------------------------


def counting(folder: Path, **env_config: Any) -> dict[str, Any]:
    return {"env_config": {"folder": str(folder), **env_config}}


@every_plugin
@pytest.mark.parametrize("seed", range(3))
def test_counts_equal_those_of_the_environments(name: str, seed: int, tmp_path: Path) -> None:
    rollout = counting(tmp_path, raise_every=17 + seed, nan_at=23)
    optimizer = make(name, seed, CountingDrift, rollout=rollout)
    for _ in range(20):
        optimizer.step()
        if optimizer.metrics.num_updates % 7 == 0:
            optimizer.drain()
    optimizer.drain()
    made = made_in(tmp_path)
    assert counted_by(optimizer) == made
    assert made.faults > 10
    assert made.nans == 3  # one in each worker
    assert 0 < optimizer.stats()["num_env_steps_discarded"] <= 3 * ROWS
    metrics = optimizer.metrics
    assert metrics.num_env_steps_trained == metrics.num_env_steps_sampled


@every_plugin
@pytest.mark.parametrize("seed", range(3))
def test_counts_lack_only_the_work_of_workers_that_died(
    name: str, seed: int, tmp_path: Path
) -> None:
    optimizer = make(name, seed, CountingDrift, rollout=counting(tmp_path, raise_every=17))
    rng, killed = random.Random(seed), []

    def killing(pending: list[SimulatedTicket]) -> SimulatedTicket:
        """Returns the next call to end. Some processes die after the work and before the reply."""
        ended = rng.choice(pending)
        if rng.random() < 0.2:
            ended.error = DEATH
            killed.append(ended.channel.name)
        return ended

    optimizer.workers.transport.script = killing
    for _ in range(30):
        optimizer.step()
    optimizer.drain()
    counted, made = counted_by(optimizer), made_in(tmp_path)
    assert len(killed) == optimizer.workers.faults.num_restarts > 3
    assert 0 < made.faults - counted.faults < made.faults
    # Each death loses one call. Each row of this call is a step or an exception.
    lost = made.steps - counted.steps + made.faults - counted.faults
    assert lost == len(killed) * ROUNDS * ROWS


@every_plugin
def test_death_on_the_simulated_transport_costs_one_call(name: str, tmp_path: Path) -> None:
    """Runs the strategy with polopt's own worker set, without Ray and without waiting."""
    plugin(name)

    def run(folder: str, dying: int | None) -> Any:
        rng, ended = random.Random(1), 0

        def script(pending: list[SimulatedTicket]) -> SimulatedTicket:
            nonlocal ended
            chosen = rng.choice(pending)
            ended += 1
            if ended == dying:
                chosen.channel.die()
            return chosen

        (tmp_path / folder).mkdir()
        rollout = {"num_workers": 3, **counting(tmp_path / folder)}
        config = worker_config(env=CountingDrift, rollout=rollout, lr=1e-2)
        workers = polopt.WorkerSet(config, transport=SimulatedTransport(script))
        optimizer = make_optimizer(OPTIMIZERS.get(name), workers, local_rounds=ROUNDS)
        for _ in range(12):
            optimizer.step()
        optimizer.drain()
        return optimizer

    whole, killed, again = run("whole", None), run("killed", 9), run("again", 9)
    faults, channels = killed.workers.faults, killed.workers.transport.channels
    assert (faults.num_restarts, faults.counts["death"]) == (1, 1)
    assert [channel.alive for channel in channels].count(False) == len(channels) - 3 == 1
    assert killed.workers.stats()["num_healthy_workers"] == 3
    assert channels[-1].target.policy.version > 0, "the replacement has learned"
    lost = made_in(tmp_path / "killed").steps - counted_by(killed).steps
    assert lost == ROUNDS * ROWS
    assert made_in(tmp_path / "whole").steps == counted_by(whole).steps
    assert killed.workers.clock() == SimulatedTransport().clock(), "nothing waited"
    weights = [optimizer.policy.get_weights().flat for optimizer in (whole, killed, again)]
    np.testing.assert_array_equal(weights[1], weights[2])
    assert (weights[0] != weights[1]).any()


def make_replay(script: Any = oldest_first) -> Any:
    plugin("fragment_replay")
    config = worker_config("impala", rollout={"num_workers": 3}, lr=1e-2)
    workers = polopt.WorkerSet(config, transport=SimulatedTransport(script))
    return make_optimizer(OPTIMIZERS.get("fragment_replay"), workers)


def test_shards_keep_fragments_that_the_driver_does_not_see() -> None:
    optimizer = make_replay()
    for _ in range(6):
        assert optimizer.step() == (3 * ROWS, 3 * ROWS, 1)
    shards = [shard.channel.target for shard in optimizer.shards.remote]
    held = [[fragment.worker_index for fragment in shard.fragments] for shard in shards]
    assert held == [[2] * 6, [1, 3] * 6], "a worker sends its fragments to one shard"
    assert [fragment.version for fragment in shards[0].fragments] == [*range(6)]
    assert optimizer.stats()["policy_lag"]["max"] > 0, "the driver learns from old fragments"
    channels = optimizer.workers.transport.channels
    optimizer.stop()
    assert [channel.alive for channel in channels] == [True] * 3 + [False] * 2
    optimizer.workers.stop()


def test_killed_shard_costs_what_it_holds() -> None:
    drawn = 0

    def script(pending: list[SimulatedTicket]) -> SimulatedTicket:
        nonlocal drawn
        chosen = next((one for one in pending if one is one.channel.start), pending[0])
        if chosen is not chosen.channel.start and chosen.channel.name == "shard 2":
            drawn += 1
            if drawn == 8:
                chosen.channel.die()
        return chosen

    optimizer = make_replay(script)
    replay = optimizer.shards
    assert [optimizer.step().updates for _ in range(4)] == [1] * 4, (
        "the driver learns from the other shard"
    )
    assert (replay.faults.num_restarts, drawn) == (1, 8)
    assert [optimizer.step().updates for _ in range(6)] == [1] * 6
    fragments = replay.remote[1].channel.target.fragments
    assert 0 < len(fragments) <= 12, "the replacement began without fragments"
    assert optimizer.workers.faults.num_restarts == 0


class AlwaysNan(CountingDrift):
    """A wrapper whose rewards are all NaN."""

    def step(self, action: int) -> Any:
        obs, _, *rest = super().step(action)
        return (obs, float("nan"), *rest)


@every_plugin
def test_rewards_that_stay_nan_end_the_run(name: str, tmp_path: Path) -> None:
    optimizer = make(name, env=AlwaysNan, rollout=counting(tmp_path))
    with pytest.raises(polopt.NonFiniteError, match="5 fragments in a row"):
        optimizer.step()


# ---- options ----------------------------------------------------------------------------------


class OwnCheck(polopt.PolicyOptimizer):
    """A strategy whose `check` does not call the base class."""

    name = "own_check"

    @classmethod
    def check(cls, rollout: Any, config: Any) -> None:
        if rollout.num_workers > 8:
            raise polopt.ConfigError("num_workers: at most 8")

    def step(self) -> polopt.StepResult:
        raise AssertionError("not called")


@pytest.mark.parametrize("name", ["elastic_averaging", OwnCheck])
def test_no_workers_is_a_config_error_of_a_plugin(name: Any) -> None:
    plugin("elastic_averaging")
    options = {"env": "CartPole-v1", "optimizer": name, "num_workers": 0}
    with pytest.raises(polopt.ConfigError, match="num_workers=0: this optimizer needs remote"):
        Experiment.parse(options, preset={})


def test_further_checks_of_a_plugin_are_made() -> None:
    options = {"env": "CartPole-v1", "optimizer": OwnCheck, "num_workers": 9}
    with pytest.raises(polopt.ConfigError, match="at most 8"):
        Experiment.parse(options, preset={})


# ---- public names -----------------------------------------------------------------------------

#: The source files of the built-in strategies.
STRATEGIES = [
    path
    for path in sorted(Path(optimizers.__path__[0]).glob("*.py"))
    if path.name not in ("__init__.py", "policy_optimizer.py", "optimizer_registry.py", "scheme.py")
]


def listed_names() -> list[str]:
    """Returns the names in the tables of `docs/strategy-names.md`."""
    text = (PAGE.parent / "strategy-names.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def members(receiver: str) -> set[str]:
    """Returns the listed names of the form `receiver.name`."""
    parts = [name.rpartition(".") for name in listed_names()]
    return {name for owner, _, name in parts if owner == receiver}


def test_listed_names_are_not_repeated() -> None:
    names = listed_names()
    assert len(names) == len(set(names)) > 60


def test_listed_names_exist() -> None:
    optimizer = make("local_sgd")
    worker = optimizer.workers.remote[0]
    optimizer.step()
    owners: dict[str, Any] = {
        "self": optimizer,
        "worker": worker.channel.target,
        "handle": worker,
        "reply": polopt.Reply(worker, print, (), None, None, (0, 0)),
    }
    for name in listed_names():
        first, *path = name.split(".")
        if first == "polopt":
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name
            if module == "polopt":
                assert attribute in polopt.__all__, name
            continue
        owner = owners[first]
        for part in path:
            assert not part.startswith("_")
            assert hasattr(owner, part), name
            owner = getattr(owner, part)


def used_names(path: Path) -> Iterator[tuple[str, str]]:
    """Returns the names of `polopt.rollouts` that a strategy imports, as `("import", full name)`,
    and the attributes of calls and workers that it uses, as `(receiver, attribute)`."""
    receivers = {
        "calls": "self.calls",
        "_calls": "self.calls",
        "workers": "self.workers",
        "_workers": "self.workers",
        "metrics": "self.metrics",
        "worker": "worker",
        "_worker": "worker",
        "reply": "reply",
    }
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("polopt.rollouts"):
            yield from (("import", f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            base = node.value
            name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            if name in receivers:
                yield receivers[name], node.attr


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.stem)
def test_built_in_strategies_use_only_listed_names(path: Path) -> None:
    exported = {
        f"{getattr(polopt, name).__module__}.{name}"
        for name in members("polopt")
        if inspect.isclass(getattr(polopt, name)) or inspect.isfunction(getattr(polopt, name))
    }
    exported |= {"polopt.rollouts.workers.snapshots.WEIGHTS", *listed_names()}
    for receiver, name in used_names(path):
        if receiver == "import":
            assert name in exported
        elif receiver == "worker":  # a worker, or the driver's handle for a worker
            assert name in members("worker") | members("handle")
        else:
            assert name in members(receiver), receiver


def test_a_name_that_is_not_listed_is_found(tmp_path: Path) -> None:
    path = tmp_path / "strategy.py"
    path.write_text(
        "from polopt.rollouts.workers.fault_log import FaultLog\n"
        "def f(self, worker):\n    self.workers.start_call(worker.record)\n"
    )
    found = set(used_names(path))
    assert ("import", "polopt.rollouts.workers.fault_log.FaultLog") in found
    assert {("self.workers", "start_call"), ("worker", "record")} <= found
    assert "start_call" not in members("self.workers")
    assert "record" not in members("worker") | members("handle")
