"""Tests of the command line: errors, `list`, `--help` and `evaluate`. No test in this file starts
Ray."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from command_helpers import SMALL, error_of, polopt
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation

import polopt as package
from polopt.command_line import evaluate_command, tune_run
from polopt.command_line.examples import example_names
from polopt.command_line.names import name_on_command_line
from polopt.common.config import ConfigError
from polopt.common.episodes import Episode
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers import play_episodes
from polopt.trainers.checkpoints import read_checkpoint, write_checkpoint
from polopt.trainers.experiment import Experiment
from polopt.trainers.find_checkpoint import find_checkpoint
from polopt.trainers.play_episodes import restore_env_statistics
from polopt.trainers.presets import PRESETS
from polopt.trainers.results import look_up
from polopt.trainers.saved_policy import policy_of
from polopt.trainers.trainer import PolicyOptimizerTrainer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a checkpoint of a trainer without workers, in directories with Tune's names."""
    path = tmp_path_factory.mktemp("results") / "experiment" / "trial" / "checkpoint_000000"
    trainer = PolicyOptimizerTrainer(SMALL)
    trainer.train()
    trainer.save(str(path))
    trainer.stop()
    return path


# Gymnasium's vector environments raise in `__del__` if their constructor raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cartpole_a3c", "gama=0.9"], "unknown key 'gama'; did you mean 'gamma'?"),
        (
            ["cartpole_a3c", "train_batch_size=9"],
            "an option of optimizer 'async_replay', 'async_samples'",
        ),
        (["cartpole_a3c", "lr=fast"], "key 'lr': got 'fast'"),
        (["cartpole_a3c", "num_workers=0"], "'async_gradients' with num_workers=0"),
        (["cartpole_a3c", "lr"], "'lr'. Allowed: key=value"),
        (["cartpole_a3c", "model.=1"], "Allowed: key=value"),
        (["cartpole_a3c", "lr=1", "lr.x=2"], "key 'lr': got {'x': 2}"),
        (["cartpole_a3c", "lr=[[0,1]"], "line 1: expected ',' or ']'"),
        (["cartpole_a3c", "stop=3"], "stop.KEY=limit"),
        (["cartpole_a3c", "stop.training_iteration=soon"], "got 'soon'; allowed: a number"),
        (["cartpole_a3c", "stop.training_iteration=yes"], "got True; allowed: a number"),
        (["cartpole_a3c", "stop.training_iteration=.nan"], "got nan; allowed: a finite number"),
        (["cartpole_a3c", "stop.training_iteration=.inf"], "got inf; allowed: a finite number"),
        (["cartpole_a3c", "stop.traning_iteration=3"], "did you mean 'training_iteration'?"),
        (["cartpole_a3c", "run=A3"], "did you mean 'A3C'?"),
        (["cartpole_a3c", "env=Cartpole-v1"], "did you mean 'CartPole-v1'?"),
        (["cartpole_a3c", "env_config.no_such=1"], "'no_such'"),
        (["cartpole_a3c", "--restore", "/no/such"], "no such directory: /no/such"),
        (["cartpole_a3c", "run=PPO"], "key 'run': got 'PPO'. PPO is 'SyncPPO' here"),
        (["PPO", "env=CartPole-v1"], "a preset or a file. PPO is 'SyncPPO' here. 'DDPPO' and"),
        (["ppo"], "a preset or a file. PPO is 'SyncPPO' here. "),
        (["DDPG"], "a preset or a file. DDPG is 'TD3' with"),
        (["R2D2"], "a preset or a file. polopt has no R2D2. It has A2C"),
        (["foo"], "'foo' is not a tuned example, a preset or a file. Examples: "),
        (["cartpole_a3d"], "did you mean 'cartpole_a3c'?"),
        (["nowhere.yaml"], "no such file: nowhere.yaml"),
        (["A3C"], "key 'env' is missing"),
        (
            ["cartpole_a3c", "num_workers=100000"],
            "100,000 worker processes need at least 10,000 GB",
        ),
        (["cartpole_ppo", "num_gpus=1"], "key 'num_gpus': got 1, but torch finds no GPU"),
        (
            ["cartpole_a3c", "stop.episode_reward_mean=3"],
            "result key 'episode_reward_mean' is now 'env_runners/episode_return_mean'",
        ),
    ],
)
def test_train_refuses(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    assert said in error_of(polopt("train", *arguments))


def test_address_without_a_cluster_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as reserved:  # bound to a port, but not listening
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was asked"))
        said = error_of(polopt("train", "cartpole_a3c"))
    assert f"no Ray answers at '{address}': " in said
    assert "RAY_ADDRESS" in said


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another server answers there, with b'HTTP/1.1 '"),
        (b"", "a server accepts connections there and closes them"),
        (None, "a server accepts connections there, but sent nothing for 0.5 s"),
    ],
)
def test_address_of_another_server_is_one_error(
    answer: bytes | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polopt.rollouts.ray_session._CONNECT_S", 0.5)
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was asked"))
    ended = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1024)
            if answer is not None:
                connection.sendall(answer)
            else:
                ended.wait(20.0)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20.0)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        server = threading.Thread(target=serve, daemon=True)
        server.start()
        said = error_of(polopt("train", "cartpole_a3c"))
        ended.set()
        server.join(20.0)
    assert f"no Ray answers at '{address}': {problem}. Set RAY_ADDRESS" in said


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.yaml", "run: [", "x.yaml, line 1"),
        ("x.yaml", "- 1", "a mapping with 'run' and 'config'"),
        ("x.yaml", "config: {}", "key 'run' is missing. Give the name of a preset"),
        ("x.py", "config = {}", "key 'run' is missing. Give the name of a preset"),
        ("x.yaml", "run: A3C\nconfg: {}", "did you mean 'config'?"),
        ("x.yaml", "run: A3C\nconfig: 3", "key 'config': got 3"),
        ("x.yaml", "run: A3C\nstop: {training_iteration: yes}", "allowed: a number"),
        ("x.yaml", "run: A3C\nstop: {training_iteration: .nan}", "allowed: a finite number"),
        ("x.py", "run = 'A3C'\nconfig = {'env': 1/0}", "ZeroDivisionError: division by zero"),
        ("x.py", "def", "SyntaxError"),
    ],
)
def test_train_refuses_files(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    assert said in error_of(polopt("train", tmp_path / name))


def test_list_describes_every_name() -> None:
    result = polopt("list")
    assert result.exit_code == 0
    names = [*PRESETS, *OPTIMIZERS.names(), *POLICIES.names(), *example_names()]
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines() if line[:2] == "  "]
    described = {words[0] for words in lines if len(words) == 2}
    assert described == set(names)


def test_evaluate_plays_episodes(checkpoint: Path) -> None:
    results = [
        polopt("evaluate", path, "--episodes", 3, "--seed", 1, "--stochastic")
        for path in (checkpoint, checkpoint.parents[1])  # the checkpoint, and a directory above it
    ]
    for result in results:
        assert result.exit_code == 0, result.output
        assert str(checkpoint) in result.stdout
        assert "return" in result.stdout
        assert "(3 episodes)" in result.stdout
    assert results[0].stdout == results[1].stdout  # the seed has an effect


def test_evaluation_is_reproducible(checkpoint: Path) -> None:
    state, experiment = evaluate_command.load(checkpoint)
    policy = policy_of(state, checkpoint)
    with play_episodes.environment(experiment.rollout) as env:
        play_episodes.check_env_fits(policy, env)
        played = play_episodes.play(policy, env, 4, seed=0)
        again = play_episodes.play(policy, env, 4, seed=0)
    assert played == again
    assert [e.episode_return for e in played] == [
        e.episode_len for e in played
    ]  # CartPole gives a reward of 1 for each step
    assert evaluate_command.summary([1.0, 3.0]) == "mean 2.00  std 1.00  min 1.00  max 3.00"


def test_refused_vector_environment_is_closed() -> None:
    made = [SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")])]
    rollout = RolloutConfig.parse({"env": lambda config: made[0]})
    with (
        pytest.raises(ConfigError, match="is a vector environment"),
        play_episodes.environment(rollout),
    ):
        pass
    assert made[0].closed


def normalized_cartpole(config: Any = None) -> Any:
    return NormalizeObservation(gymnasium.make("CartPole-v1"))


def test_evaluate_normalises_observations_as_in_training(tmp_path: Path) -> None:
    trainer = PolicyOptimizerTrainer({**SMALL, "env": normalized_cartpole})
    trainer.train()
    trainer.save(str(tmp_path / "c"))
    [saved] = [one["statistics"] for one in trainer.optimizer.worker_states().values()]
    trainer.stop()
    state, experiment = evaluate_command.load(tmp_path / "c", f"{__name__}:normalized_cartpole")
    with play_episodes.environment(experiment.rollout) as env:
        policy = policy_of(state, tmp_path / "c")
        play_episodes.check_env_fits(policy, env)
        restore_env_statistics(state, env)
        observation, _ = env.reset(seed=7)
        play_episodes.play(policy, env, 2, seed=0)
        assert env.obs_rms.count == pytest.approx(sum(e[0]["count"] for e in saved["envs"]))
        again, _ = env.reset(seed=7)
    np.testing.assert_array_equal(observation, again)  # evaluation does not change the statistics
    options = ["evaluate", tmp_path / "c", "--episodes", 2, "--seed", 1, "--env"]
    played = polopt(*options, f"{__name__}:normalized_cartpole")
    assert played.exit_code == 0, played.output
    assert "do not fit the wrappers of the environment" in error_of(polopt(*options, "CartPole-v1"))


def test_evaluate_takes_the_newest_whole_checkpoint(checkpoint: Path, tmp_path: Path) -> None:

    for number, name in enumerate(("a", "b", "c")):
        shutil.copytree(checkpoint, tmp_path / name)
        os.utime(tmp_path / name / "manifest.json", (number, number))
    assert find_checkpoint(tmp_path) == tmp_path / "c"
    (tmp_path / "c" / "tensors.safetensors").write_bytes(b"")
    (tmp_path / "b" / "manifest.json").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "a"
    assert "is damaged" in error_of(polopt("evaluate", tmp_path / "c"))


def callable_env(config: Any) -> Any:
    return gymnasium.make("CartPole-v1")


def test_evaluate_on_a_named_callable(checkpoint: Path, tmp_path: Path) -> None:
    trainer = PolicyOptimizerTrainer({**SMALL, "env": callable_env})
    trainer.save(str(tmp_path / "c"))
    trainer.stop()
    assert "--env module:callable" in error_of(polopt("evaluate", tmp_path / "c"))
    named = polopt("evaluate", tmp_path / "c", "--episodes", 1, "--env", f"{__name__}:callable_env")
    assert named.exit_code == 0, named.output


class Endless(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        pass

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, False, False, {}


def played_endless(folder: Path, *arguments: object, **options: Any) -> list[str]:
    """Returns the lines about episodes and the summary of an evaluation. Each step takes one
    second."""
    trainer = PolicyOptimizerTrainer({**SMALL, "env": Endless, **options})
    trainer.save(str(folder / "c"))
    trainer.stop()
    named = ["--env", f"{__name__}:Endless", "--episodes", 2]
    played = polopt("evaluate", folder / "c", *arguments, *named)
    assert played.exit_code == 0, played.output
    return played.stdout.splitlines()[1:]


def test_evaluate_prints_the_returns_of_several_policies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = Episode(0, 3.0, 5, True, {}, {}, agent_returns={"x": 1.0, "y": 2.0})
    for policies in ({"x": "a", "y": "a"}, {"x": "a", "y": "b"}):
        evaluate_command.say_policies([one._replace(agent_policies=policies)] * 2)
    assert capsys.readouterr().out.splitlines() == [
        "  a         mean 1.00  std 0.00  min 1.00  max 1.00  (2 episodes)",
        "  b         mean 2.00  std 0.00  min 2.00  max 2.00  (2 episodes)",
    ]


def test_evaluate_prints_each_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr(play_episodes, "time", seconds)
    lines = played_endless(tmp_path, "max_frames_per_traj=25")
    assert lines[:6] == [
        "episode 1   has not ended after 10 steps (10 s). max_frames_per_traj=STEPS limits the "
        "length of episodes",
        "episode 1   has not ended after 20 steps (20 s). max_frames_per_traj=STEPS limits the "
        "length of episodes",
        "episode 1   return 25.00  length 25",
        *(line.replace("episode 1", "episode 2") for line in lines[:3]),
    ]
    assert lines[6].startswith("return      mean 25.00")


def test_evaluate_bounds_episodes_as_training_does(tmp_path: Path) -> None:
    assert "mean 7.00" in played_endless(tmp_path, max_frames_per_traj=7)[2]
    of_evaluation = {"evaluation_config": {"max_frames_per_traj": 5}}
    assert "mean 5.00" in played_endless(tmp_path, max_frames_per_traj=7, **of_evaluation)[2]
    given = played_endless(tmp_path, "max_frames_per_traj=3", **of_evaluation)
    assert "mean 3.00" in given[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--env", "Acrobot-v1"], "The environment has observation space"),
        (["--env", "CartPol-v1"], "did you mean 'CartPole-v1'?"),
        (["--env", "no_such_module:make"], "No module named 'no_such_module'"),
    ],
)
def test_evaluate_refuses(checkpoint: Path, arguments: list[str], said: str) -> None:
    assert said in error_of(polopt("evaluate", checkpoint, *arguments))


def test_module_that_is_no_python_is_one_error(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("half.py").write_text("def")
    for env in ("half:make", "half.py:make"):
        assert "invalid syntax" in error_of(polopt("evaluate", checkpoint, "--env", env))


def test_evaluate_refuses_other_directories(tmp_path: Path) -> None:
    assert "no complete checkpoint" in error_of(polopt("evaluate", tmp_path))
    assert "no such directory" in error_of(polopt("evaluate", tmp_path / "gone"))


def test_video_needs_moviepy(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = error_of(polopt("evaluate", checkpoint, "--video", tmp_path))
    assert "pip install moviepy" in said


def test_evaluate_does_not_import_a_module_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evilmod.py").write_text("import pathlib\npathlib.Path('went_off').touch()\n")
    monkeypatch.chdir(tmp_path)
    trainer = PolicyOptimizerTrainer(SMALL)
    foreign = {**SMALL, "env": "evilmod:Evil-v0"}
    trainer._run.experiment = trainer.experiment.parse(foreign, {})
    trainer.save(str(tmp_path / "c"))
    trainer.stop()
    assert "--env evilmod:Evil-v0" in error_of(polopt("evaluate", tmp_path / "c"))
    assert not Path("went_off").exists()
    assert "Evil" in error_of(polopt("evaluate", tmp_path / "c", "--env", "evilmod:Evil-v0"))
    assert Path("went_off").exists(), "the module does execute once the user names it"


def test_registered_id_of_a_checkpoint_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id is registered without the module that precedes it in the checkpoint."""
    (tmp_path / "badcart.py").write_text("import pathlib\npathlib.Path('went_off').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    trainer = PolicyOptimizerTrainer(SMALL)
    foreign = {**SMALL, "env": "badcart:CartPole-v1"}
    trainer._run.experiment = trainer.experiment.parse(foreign, {})
    trainer.save(str(tmp_path / "c"))
    trainer.stop()
    played = polopt("evaluate", tmp_path / "c", "--episodes", 1)
    assert played.exit_code == 0, played.output
    assert not Path("went_off").exists()
    named = polopt("evaluate", tmp_path / "c", "--episodes", 1, "--env", "badcart:CartPole-v1")
    assert named.exit_code == 0, named.output
    assert Path("went_off").exists(), "the module does execute once the user names it"


@pytest.mark.parametrize("env", ["GymV21Environment-v0", "any:GymV26Environment-v0"])
def test_checkpoint_makes_no_environment_of_its_options(tmp_path: Path, env: str) -> None:
    trainer = PolicyOptimizerTrainer(SMALL)
    options = {"env": env, "env_config": {"env_id": "evilmod:Evil-v0"}}
    trainer._run.experiment = trainer.experiment.parse({**SMALL, **options}, {})
    trainer.save(str(tmp_path / "c"))
    trainer.stop()
    said = error_of(polopt("evaluate", tmp_path / "c"))
    assert "imports a module that env_config names" in said


def test_evaluate_uses_no_module_of_the_current_directory(checkpoint: Path, tmp_path: Path) -> None:
    """The current directory may contain an untrusted user's results."""
    for name in ("torch", "numpy", "gymnasium", "pygame", "moviepy"):
        (tmp_path / f"{name}.py").write_text("import os\nos.mkdir('went_off')\n")
    script = Path(sys.executable).with_name("polopt")
    command = [script, "evaluate", checkpoint, "--episodes", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "went_off").exists()


def test_evaluate_finds_callables_of_files(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "sub" / "my env.py"
    file.parent.mkdir()
    file.write_text("import gymnasium\ndef make(): return gymnasium.make('CartPole-v1')\n")
    options = ["--episodes", 1, "--env"]
    assert polopt("evaluate", checkpoint, *options, f"{file}:make").exit_code == 0
    said = error_of(polopt("evaluate", checkpoint, *options, f"{file}:nothing"))
    assert "does not define 'nothing'" in said
    file.write_text("import gymnasium\n\ndef make(): pass\nundefined\n")
    said = error_of(polopt("evaluate", checkpoint, *options, f"{file}:make"))
    assert f"{file} raised NameError: name 'undefined' is not defined ({file}, line 4)" in said


def test_restore_of_another_network_fails_before_ray(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    changes = ["env=CartPole-v1", "model.fcnet_hiddens=[9,9]"]
    said = error_of(polopt("train", "SyncPPO", *changes, "--restore", checkpoint))
    assert "fcnet_hiddens: checkpoint (8,), config (9, 9)" in said
    assert len(said) < 350 + len(str(checkpoint))


@pytest.mark.parametrize(
    ("saved_with", "changes", "said"),
    [
        ({}, ["normalize_observations=true"], "that normalises observations"),
        ({"normalize_observations": True}, [], "must be of a policy that normalises nothing"),
        ({}, ["normalize_rewards=true"], "that normalises rewards"),
        ({}, ["torch_optimizer=rmsprop"], "rmsprop"),
        ({"model": {"fcnet_hiddens": [8], "use_lstm": True}}, [], "use_lstm: checkpoint True"),
        ({"env": normalized_cartpole}, [], "environments keep 0 running statistics (none); got 1"),
    ],
)
def test_unfit_checkpoint_is_refused_before_a_process_starts(
    saved_with: dict[str, Any],
    changes: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    trainer = PolicyOptimizerTrainer({**SMALL, **saved_with})
    trainer.train()
    trainer.save(str(tmp_path / "c"))
    trainer.stop()
    config = ["env=CartPole-v1", "model.fcnet_hiddens=[8]", "vectorization_mode=sync", *changes]
    refused = polopt("train", "SyncPPO", *config, "--restore", tmp_path / "c")
    assert said in error_of(refused)


@pytest.mark.parametrize("field", ["episodes", "restore_count", "num_updates"])
def test_checkpoint_without_a_field_is_refused_before_a_process_starts(
    field: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    state = read_checkpoint(checkpoint)
    del state["optimizer"][field]
    write_checkpoint(tmp_path / "c", state)
    config = ["env=CartPole-v1", "model.fcnet_hiddens=[8]"]
    said = error_of(polopt("train", "SyncPPO", *config, "--restore", tmp_path / "c"))
    assert f"does not fit: KeyError: '{field}'" in said


@pytest.mark.parametrize("kind", ["a file", "a missing mount"])
def test_unusable_results_directory_is_one_error(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    results = tmp_path / "results" if kind == "a file" else Path("/proc/polopt")
    if kind == "a file":
        results.touch()
    said = error_of(polopt("train", "cartpole_a3c", "--results-dir", results))
    assert f"--results-dir {results}: " in said


def test_custom_metric_that_is_not_there_yet_is_nan() -> None:
    result = {"env_runners": {"custom_metrics": {"won_mean": 0.5}, "episode_return_mean": 3}}
    assert look_up(result, "env_runners/custom_metrics/won_mean") == 0.5
    for path in ("env_runners/custom_metrics/lost_mean", "evaluation/env_runners/custom_metrics/x"):
        assert math.isnan(look_up(result, path))
    with pytest.raises(ConfigError, match="results have no key"):
        look_up(result, "env_runners/episode_return_max")


def test_names_on_the_command_line() -> None:
    assert name_on_command_line("CartPole-v1") == ""
    assert name_on_command_line("mygame:Game-v0") == "mygame:Game-v0"
    assert name_on_command_line(torch.nn.Linear) == "torch.nn.modules.linear:Linear"
    assert name_on_command_line(lambda config: None) is None
    spec = gymnasium.spec("CartPole-v1")
    assert name_on_command_line(spec) == "CartPole-v1"
    assert name_on_command_line(dataclasses.replace(spec, max_episode_steps=7)) is None


PLUGINS = """
from polopt.optimizers.sync_samples import SyncSamples
from polopt.policies.a2c import A2CPolicy


class Own(A2CPolicy):
    "A policy of a module."


class Waits(SyncSamples):
    "An optimizer of a module."
"""


def test_next_command_names_the_policy_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed command failed: the checkpoint names a class that a new process cannot find."""
    (tmp_path / "own_plugins.py").write_text(PLUGINS)
    monkeypatch.syspath_prepend(tmp_path)
    options = {"env": "CartPole-v1", "optimizer": "sync_samples", "num_workers": 0}
    own = Experiment.parse({**options, "policy": "own_plugins:Own"}, {})
    command = tune_run._next_step(tmp_path / "checkpoint", own)
    assert command.endswith(f"--policy {tmp_path / 'own_plugins.py'}:Own")
    built_in = Experiment.parse({**options, "policy": "a2c"}, {})
    assert "--policy" not in tune_run._next_step(tmp_path / "checkpoint", built_in)
    local = type("Local", (own.policy_class,), {})
    said = tune_run._next_step(tmp_path, Experiment.parse({**options, "policy": local}, {}))
    assert said.startswith("polopt evaluate needs --policy, but the command line cannot name")


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("own_plugins:Own", "entropy_coeff = 0.01"),
        ("own_plugins.py:Waits", "train_batch_size = None"),
        ("polopt.trainers.presets:DQN", "buffer_size = 50000"),
    ],
)
def test_options_of_a_class_of_a_module_are_listed(
    name: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_plugins.py").write_text(PLUGINS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_plugins", raising=False)
    done = polopt("list", name)
    assert done.exit_code == 0, done.output
    assert option in done.output.splitlines()
    assert "and not a preset, an optimizer or a policy" in error_of(polopt("list", "os:path"))


# ---- the command itself -----------------------------------------------------------------------


def test_version_is_that_of_the_package() -> None:
    result = polopt("--version")
    assert (result.exit_code, result.stdout) == (0, f"polopt {package.__version__}\n")


def test_module_is_the_command() -> None:
    for arguments, said in ((["--version"], "polopt "), (["--help"], "Usage: polopt [OPTIONS]")):
        command = [sys.executable, "-X", "importtime", "-m", "polopt", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout[: len(said)].lstrip()) == (0, said)
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert "typer" in imported
        assert {"ray", "torch"} & imported == set()


def test_shell_completes_commands() -> None:
    def run(*arguments: str, **variables: str) -> str:
        command = [sys.executable, "-m", "polopt", *arguments]
        environment = {**os.environ, **variables}
        return subprocess.check_output(command, env=environment, text=True, timeout=60)

    assert "--install-completion" in run("--help")
    assert "_POLOPT_COMPLETE=complete_bash" in run(_POLOPT_COMPLETE="source_bash")
    words = {"COMP_WORDS": "polopt ev", "COMP_CWORD": "1"}
    assert run(_POLOPT_COMPLETE="complete_bash", **words).split() == ["evaluate"]


@pytest.mark.parametrize(
    ("started", "on_path", "program"),
    [
        ("/venv/bin/polopt", "/venv/bin/polopt", ["polopt"]),
        (".venv/bin/polopt", None, [".venv/bin/polopt"]),
        ("/venv/bin/polopt", "/other/bin/polopt", ["/venv/bin/polopt"]),
        ("/src/polopt/__main__.py", None, [sys.executable, "-m", "polopt"]),
        ("/src/polopt/__main__.py", "/other/bin/polopt", [sys.executable, "-m", "polopt"]),
        ("-c", f"{Path(sys.executable).parent}/polopt", ["polopt"]),
        ("/src/polopt/__main__.py", f"{Path(sys.executable).parent}/polopt", ["polopt"]),
    ],
)
def test_next_command_starts_this_polopt_again(
    started: str, on_path: str | None, program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [started])
    monkeypatch.setattr(shutil, "which", lambda name: on_path)
    assert tune_run.program() == program


def test_restore_alone_takes_changes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    monkeypatch.setattr(tune_run, "run", lambda plan, *_: planned.append(plan))
    assert polopt("train", "--restore", checkpoint).exit_code == 0
    assert polopt("train", "lr=0.5", "gamma=0.5", "--restore", checkpoint).exit_code == 0
    saved, changed = (plan.experiment.policy for plan in planned)
    assert [plan.restore for plan in planned] == [checkpoint] * 2
    assert (changed.lr, changed.gamma) == (0.5, 0.5)
    assert saved.model_copy(update={"lr": 0.5, "gamma": 0.5}) == changed
    assert "nothing to train" in error_of(polopt("train"))
