"""Tests of trainers, runs and evaluations that are made from a checkpoint alone."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from checkpoint_helpers import SMALL

import polopt
from polopt.common.config import ConfigError
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.workers.snapshots import INLINE_BYTES
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.experiment import Experiment
from polopt.trainers.find_checkpoint import read_or_fall_back
from polopt.trainers.saved_experiment import config_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the results and the checkpoint of two iterations."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    trainer = polopt.SyncPPO(SMALL, log_dir=folder)
    trainer.train()
    trainer.train()
    trainer.save()
    trainer.stop()
    return folder


class ResultWithoutCheckpoint:
    """As a result of Tune whose trial has saved no checkpoint."""

    checkpoint = None
    path = "/nowhere"


@pytest.mark.parametrize("given", [None, ResultWithoutCheckpoint()])
def test_missing_checkpoint_is_one_error(given: Any) -> None:
    for use in (
        lambda: polopt.SyncPPO.from_checkpoint(given),
        lambda: polopt.load(given),
    ):
        with pytest.raises(CheckpointError, match="checkpoint_at_end=True"):
            use()


def flat(trainer: Any) -> np.ndarray:
    return np.array(trainer.get_policy().get_weights().flat)


def test_trainer_from_a_checkpoint_continues_like_a_restored_one(run: Path, tmp_path: Path) -> None:
    whole = polopt.SyncPPO(SMALL)
    whole.restore(next(run.glob("checkpoint_*")))
    whole.train()
    trainer = polopt.SyncPPO.from_checkpoint(run)
    assert trainer.experiment.policy.model.fcnet_hiddens == (8,)
    assert trainer.iteration == 2
    again = trainer.save(str(tmp_path / "again"))  # this trainer has no result yet
    assert repr(again) == f"<checkpoint after iteration 2 in {tmp_path / 'again'}>"
    trainer.train()
    np.testing.assert_array_equal(flat(trainer), flat(whole))
    for one in (trainer, whole):
        one.stop()


def test_changes_replace_saved_options(run: Path) -> None:
    trainer = polopt.SyncPPO.from_checkpoint(
        run, lr=5e-4, num_sgd_iter=3, model={"fcnet_activation": "tanh"}
    )
    policy = trainer.experiment.policy
    assert (policy.lr, policy.num_sgd_iter, policy.model.fcnet_hiddens) == (5e-4, 3, (8,))
    kept = trainer.experiment.rollout.rollout_fragment_length
    assert kept == SMALL["rollout_fragment_length"]
    trainer.stop()


def test_other_optimizer_and_policy_leave_their_options_out(run: Path) -> None:
    trainer = polopt.A2C.from_checkpoint(run)
    assert trainer.experiment.policy_name == "a2c"
    assert trainer.experiment.policy.num_sgd_iter == polopt.ActorCriticConfig().num_sgd_iter
    trainer.stop()
    _, state = read_or_fall_back(next(run.glob("checkpoint_*")))
    changes = {"optimizer": "sync_gradients", "num_workers": 1}
    experiment = Experiment.parse(config_of(state, "checkpoint x", changes, {}), {})
    assert experiment.optimizer_name == "sync_gradients"
    assert experiment.policy_name == "ppo"
    assert experiment.policy.num_sgd_iter == 1


def test_network_of_another_size_is_refused(run: Path) -> None:
    with pytest.raises(CheckpointError, match="does not fit"):
        polopt.SyncPPO.from_checkpoint(run, model={"fcnet_hiddens": [9]})


def test_results_of_the_run_are_continued(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "a"
    shutil.copytree(run, copied)
    trainer = polopt.SyncPPO.from_checkpoint(copied, log_dir=copied)
    trainer.train()
    trainer.stop()
    rows = [json.loads(text) for text in (copied / "result.json").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2, 3]
    with pytest.raises(ConfigError, match="another run"):
        polopt.SyncPPO.from_checkpoint(run, log_dir=copied)


@pytest.mark.parametrize("option", ["env", "evaluation", "custom", "policy", "optimizer", "preset"])
def test_modules_that_only_the_checkpoint_names_are_not_imported(
    option: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    _, state = read_or_fall_back(next(run.glob("checkpoint_*")))
    if option == "env":
        state["config"]["env"] = "hostile:Env-v0"
    elif option == "evaluation":
        state["config"]["evaluation_config"]["env"] = "hostile:Env-v0"
    elif option == "preset":
        state["config"]["preset"] = "hostile:Class"
    elif option in ("policy", "optimizer"):
        state["config"][option]["name"] = "hostile:Class"
    else:
        state["config"]["policy"]["model"][option] = "hostile:Network"
    with pytest.raises(ConfigError, match=r"hostile:.* polopt (imports|does not import) a module"):
        config_of(state, "checkpoint x", {}, {})


def test_option_that_was_removed_does_not_refuse_an_older_checkpoint(run: Path) -> None:
    _, state = read_or_fall_back(next(run.glob("checkpoint_*")))
    options = {"name": "decentralized_allreduce", "backend": "zmq", "checksum_interval": 7}
    state["config"] |= {"optimizer": options, "num_workers": 2}
    experiment = Experiment.parse(config_of(state, "checkpoint x", {}, {}), {})
    assert experiment.optimizer_name == "decentralized_allreduce"
    assert experiment.optimizer.to_dict()["backend"] == "socket"


def test_class_that_the_checkpoint_names_keeps_its_options(run: Path) -> None:
    class Own(PPOPolicy):
        pass

    _, state = read_or_fall_back(next(run.glob("checkpoint_*")))
    state["config"]["policy"] |= {"name": "Own", "lr": 0.5}
    assert config_of(state, "checkpoint x", {"policy": Own}, {})["lr"] == 0.5
    assert "lr" not in config_of(state, "checkpoint x", {"policy": PPOPolicy}, {})


# ---- evaluation -------------------------------------------------------------------------------


def test_trainer_evaluates_without_an_effect_on_training() -> None:
    one, other = polopt.SyncPPO(SMALL), polopt.SyncPPO(SMALL)
    for trainer in (one, other):
        trainer.train()
    random.seed(1)
    before = random.getstate()
    result = one.evaluate(3, seed=5)
    assert len(result.episodes) == 3
    assert random.getstate() == before
    for trainer in (one, other):
        trainer.train()
    np.testing.assert_array_equal(flat(one), flat(other))
    for trainer in (one, other):
        trainer.stop()
    with pytest.raises(RuntimeError, match="stopped"):
        one.evaluate()


def test_trainer_evaluates_in_the_environment_of_evaluation() -> None:
    changes = {"evaluation_config": {"max_frames_per_traj": 3}, "evaluation_duration": 4}
    trainer = polopt.SyncPPO(SMALL, **changes)
    result = trainer.evaluate()
    assert [episode.episode_len for episode in result.episodes] == [3] * 4
    assert len(trainer.evaluate(2).episodes) == 2
    with pytest.raises(ConfigError, match="episodes: got 0"):
        trainer.evaluate(0)
    trainer.stop()


@pytest.mark.parametrize("explore", [False, True])
def test_trainer_evaluates_with_the_actions_of_evaluation(explore: bool) -> None:
    trainer = polopt.SyncPPO(SMALL, evaluation_config={"explore": explore})
    modes, sampled = (trainer.evaluate(3, stochastic=s, seed=1) for s in (False, True))
    assert modes.episodes != sampled.episodes
    assert trainer.evaluate(3, seed=1).episodes == (sampled if explore else modes).episodes
    trainer.stop()


def test_trainer_evaluates_with_the_statistics_of_training() -> None:
    def normalized(config: Any) -> Any:
        return gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))

    trainer = polopt.SyncPPO({**SMALL, "env": normalized})
    trainer.train()
    seen: list[Any] = []
    policy = trainer.get_policy()
    act = policy.act
    policy.act = lambda obs, *rest, **more: (seen.append(obs), act(obs, *rest, **more))[1]  # type: ignore[method-assign]
    trainer.evaluate(1, seed=1)
    trainer.stop()
    # With statistics of its own, the environment would return a first observation close to 0.
    assert np.abs(np.asarray(seen[0], float)).max() > 0.1


def test_large_weights_are_restored_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without workers, no call carries the weights, so they need no store.

    Another test in this process may have started Ray already.
    """
    monkeypatch.setattr("ray.put", lambda *_, **__: pytest.fail("Ray's store was used"))
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    large = {**SMALL, "model": {"fcnet_hiddens": [256, 256]}}
    first = polopt.SyncPPO(large)
    saved = first.save(str(tmp_path / "saved"))
    assert flat(first).nbytes > INLINE_BYTES
    again = polopt.SyncPPO.from_checkpoint(saved)
    np.testing.assert_array_equal(flat(again), flat(first))
    for trainer in (first, again):
        trainer.stop()
