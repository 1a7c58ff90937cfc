"""The command line, as a user types it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import yaml
from typer.testing import CliRunner, Result

from polopt.common.config import ConfigError
from polopt.trainers import catalogue, evaluation
from polopt.trainers.checkpoints import read_checkpoint
from polopt.trainers.cli import app, main
from polopt.trainers.examples import apply_changes, example_names, load_example, merge
from polopt.trainers.presets import PRESETS
from polopt.trainers.trainer import PolicyOptimizerTrainer
from polopt.trainers.yaml_reader import read_yaml

POLOPT = [sys.executable, "-m", "polopt.trainers.cli"]
SMALL = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 32,
    "model": {"fcnet_hiddens": [8]},
    "seed": 5,
}


def polopt(*arguments: object) -> Result:
    """The command in this process; Ray must not start."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def told(result: Result, code: int = 2) -> str:
    """The one line that a refused command wrote."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a trainer with no workers, where Tune would have put it."""
    path = tmp_path_factory.mktemp("results") / "experiment" / "trial" / "checkpoint_000000"
    trainer = PolicyOptimizerTrainer(SMALL)
    trainer.train()
    trainer.save(str(path))
    trainer.stop()
    return path


# ---- files and changes ----------------------------------------------------------------------


def test_every_installed_example_is_one_that_trains() -> None:
    from polopt.trainers.planning import plan

    assert "cartpole_a3c" in example_names()
    for name in example_names():
        planned = plan(name, [])
        assert planned.example.description
        assert planned.example.stop


def test_yaml_reads_numbers_as_people_write_them() -> None:
    assert read_yaml("[1e-3, 1e6, -2E+3, 1.5, 3, 1_000]", "x") == [0.001, 1e6, -2e3, 1.5, 3, 1000]
    assert read_yaml("{lr: 1e-3, id: e5, date: 1-2}", "x") == {
        "lr": 0.001,
        "id": "e5",
        "date": "1-2",
    }
    with pytest.raises(ConfigError, match=r"x, line 2: key 'a' is given twice"):
        read_yaml("a: 1\na: 2", "x")
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        read_yaml("!!python/object/apply:os.getcwd []", "x")


def test_changes_go_where_their_dots_say() -> None:
    example, changes = apply_changes(
        load_example("cartpole_a3c"),
        [
            "lr=1e-4",
            "model.fcnet_hiddens=[32,32]",
            "env_config.x={y: 1}",
            "run=A2C",
            "stop.env_runners/episode_return_mean=100",
            "stop.num_env_steps_sampled_lifetime=null",
        ],
    )
    assert example.run == "A2C"
    assert example.stop == {"env_runners/episode_return_mean": 100}
    assert changes == {
        "lr": 0.0001,
        "model": {"fcnet_hiddens": [32, 32]},
        "env_config": {"x": {"y": 1}},
    }
    base = {"model": {"fcnet_activation": "relu"}, "optimizer": "sync_samples", "lr": 1}
    assert merge(base, {**changes, "optimizer": {"train_batch_size": 5}}) == {
        "model": {"fcnet_activation": "relu", "fcnet_hiddens": [32, 32]},
        "optimizer": {"name": "sync_samples", "train_batch_size": 5},
        "env_config": {"x": {"y": 1}},
        "lr": 0.0001,
    }


def test_a_change_by_another_name_of_the_key_comes_first() -> None:
    from polopt.trainers.planning import plan

    assert plan("cartpole_a3c", ["num_env_runners=1"]).experiment.rollout.num_workers == 1


def test_python_file_with_variables_or_a_function(tmp_path: Path) -> None:
    (tmp_path / "variables.py").write_text(
        '"""What it is.\n\nMore."""\nimport gymnasium\n'
        "def make(): return gymnasium.make('CartPole-v1')\n"
        "preset = 'SyncPPO'\nconfig = {'env': make}\nstop = {'training_iteration': 1}\n"
    )
    example = load_example(str(tmp_path / "variables.py"))
    assert (example.name, example.run, example.description) == (
        "variables",
        "SyncPPO",
        "What it is.",
    )
    assert callable(example.config["env"])
    (tmp_path / "function.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass D:\n    x: int = 1\n"
        "def experiment(): return {'run': 'A2C', 'config': {'num_workers': D().x}}\n"
    )
    assert load_example(str(tmp_path / "function.py")).config == {"num_workers": 1}


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cartpole_a3c", "gama=0.9"], "unknown key 'gama'; did you mean 'gamma'?"),
        (["cartpole_a3c", "train_batch_size=9"], "an option of optimizer 'sync_samples'"),
        (["cartpole_a3c", "lr=fast"], "key 'lr': got 'fast'"),
        (["cartpole_a3c", "num_workers=0"], "'async_gradients' with num_workers=0"),
        (["cartpole_a3c", "lr"], "'lr': allowed: key=value"),
        (["cartpole_a3c", "model.=1"], "allowed: key=value"),
        (["cartpole_a3c", "lr=1", "lr.x=2"], "another one gives 'lr' a value"),
        (["cartpole_a3c", "lr=[[0,1]"], "line 1: expected ',' or ']'"),
        (["cartpole_a3c", "stop=3"], "stop.KEY=limit"),
        (["cartpole_a3c", "stop.training_iteration=soon"], "allowed: a number"),
        (["cartpole_a3c", "stop.traning_iteration=3"], "did you mean 'training_iteration'?"),
        (["cartpole_a3c", "run=A3"], "did you mean 'A3C'?"),
        (["cartpole_a3c", "env=Cartpole-v1"], "did you mean 'CartPole-v1'?"),
        (["cartpole_a3c", "env_config.no_such=1"], "'no_such'"),
        (["cartpole_a3c", "--restore", "/no/such"], "no such directory: /no/such"),
        (["cartpole_a3d"], "did you mean 'cartpole_a3c'?"),
        (["nowhere.yaml"], "no such file: nowhere.yaml"),
        (["A3C"], "key 'env' is missing"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_train_refuses(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    assert said in told(polopt("train", *arguments))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.yaml", "run: [", "x.yaml, line 1"),
        ("x.yaml", "- 1", "a mapping with 'run' and 'config'"),
        ("x.yaml", "config: {}", "key 'run': got None"),
        ("x.yaml", "run: A3C\nconfg: {}", "did you mean 'config'?"),
        ("x.yaml", "run: A3C\nconfig: 3", "key 'config': got 3"),
        ("x.yaml", "run: A3C\nstop: {training_iteration: yes}", "allowed: a number"),
        ("x.py", "run = 'A3C'\nconfig = {'env': 1/0}", "ZeroDivisionError: division by zero"),
        ("x.py", "def", "SyntaxError"),
    ],
)
def test_train_refuses_files(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    assert said in told(polopt("train", tmp_path / name))


# ---- list and help --------------------------------------------------------------------------


def test_list_names_all_there_is_with_a_line_each() -> None:
    result = polopt("list")
    assert result.exit_code == 0
    assert set(catalogue.presets()) == set(PRESETS)
    for kind, entries in catalogue.catalogue().items():
        assert f"{kind}\n" in result.stdout
        for name, description in entries.items():
            assert description
            assert f"  {name} " in result.stdout
            assert description in result.stdout


def test_help_and_list_load_neither_ray_nor_torch() -> None:
    script = "import sys; from polopt.trainers.cli import app; app(['list'], standalone_mode=False)"
    script += "; assert not {'ray', 'torch', 'gymnasium'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True)
    console_script = Path(sys.executable).with_name("polopt")
    for command in ([str(console_script)], POLOPT):
        done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert all(name in done.stdout for name in ("train", "evaluate", "list"))
    assert callable(main)


# ---- evaluate -------------------------------------------------------------------------------


def test_evaluate_plays_episodes(checkpoint: Path) -> None:
    results = [
        polopt("evaluate", path, "--episodes", 3, "--seed", 1, "--stochastic")
        for path in (checkpoint, checkpoint.parents[1])  # itself, and the newest below
    ]
    for result in results:
        assert result.exit_code == 0, result.output
        assert str(checkpoint) in result.stdout
        assert "return" in result.stdout
        assert "(3 episodes)" in result.stdout
    assert results[0].stdout == results[1].stdout  # the seed holds


def test_evaluation_counts_what_was_played(checkpoint: Path) -> None:
    state, experiment = evaluation.load(checkpoint)
    with evaluation.environment(experiment) as env:
        policy = evaluation.make_policy(experiment, state, env)
        played = evaluation.play(policy, env, 4, seed=0)
        again = evaluation.play(policy, env, 4, seed=0)
    assert played == again
    assert played.returns == played.lengths  # CartPole gives 1 a step
    assert evaluation.summary([1.0, 3.0]) == "mean 2.00  std 1.00  min 1.00  max 3.00"


def test_evaluate_takes_the_newest_whole_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    import shutil

    for number, name in enumerate(("a", "b", "c")):
        shutil.copytree(checkpoint, tmp_path / name)
        os.utime(tmp_path / name / "manifest.json", (number, number))
    assert evaluation.find_checkpoint(tmp_path) == tmp_path / "c"
    (tmp_path / "c" / "tensors.pt").write_bytes(b"")
    (tmp_path / "b" / "manifest.json").unlink()
    assert evaluation.find_checkpoint(tmp_path) == tmp_path / "a"
    assert "is damaged" in told(polopt("evaluate", tmp_path / "c"))


def callable_env(config: Any) -> Any:
    return gymnasium.make("CartPole-v1")


def test_evaluate_on_a_named_callable(checkpoint: Path, tmp_path: Path) -> None:
    trainer = PolicyOptimizerTrainer({**SMALL, "env": callable_env})
    trainer.save(str(tmp_path / "c"))
    trainer.stop()
    assert "--env module:callable" in told(polopt("evaluate", tmp_path / "c"))
    named = polopt("evaluate", tmp_path / "c", "--episodes", 1, "--env", "test_cli:callable_env")
    assert named.exit_code == 0, named.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--env", "Acrobot-v1"], "does not fit observation space"),
        (["--env", "CartPol-v1"], "did you mean 'CartPole-v1'?"),
        (["--env", "no_such_module:make"], "No module named 'no_such_module'"),
    ],
)
def test_evaluate_refuses(checkpoint: Path, arguments: list[str], said: str) -> None:
    assert said in told(polopt("evaluate", checkpoint, *arguments))


def test_evaluate_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert "no complete checkpoint" in told(polopt("evaluate", tmp_path))
    assert "no such directory" in told(polopt("evaluate", tmp_path / "gone"))


def test_video_needs_moviepy(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = told(polopt("evaluate", checkpoint, "--video", tmp_path))
    assert "pip install moviepy" in said


# ---- train ----------------------------------------------------------------------------------


def test_train_from_yaml_then_evaluate(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text(yaml.dump({"run": "A2C", "config": SMALL}))
    command = [*POLOPT, "train", str(config), "--results-dir", str(tmp_path / "results")]
    done = subprocess.run(
        [*command, "stop.training_iteration=3"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # Ray and Tune keep their noise to themselves
    lines = done.stdout.splitlines()
    assert lines[0] == "mine: A2C on CartPole-v1"
    assert [line.partition("  ")[0] for line in lines if line.startswith("iteration")] == [
        "iteration 1",
        "iteration 2",
        "iteration 3",
    ]
    saved = Path(line_of(lines, "checkpoint"))
    assert (saved / "manifest.json").exists()
    assert (Path(line_of(lines, "results")) / "progress.csv").exists()
    next_command = shlex.split(line_of(lines, "next"))
    assert next_command[:2] == ["polopt", "evaluate"]
    assert polopt(*next_command[1:], "--episodes", 1).exit_code == 0


def test_restored_run_saves_on_ctrl_c_and_a_crash_tells_why(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Two runs at once, which takes half the time."""
    (tmp_path / "crash.py").write_text(
        "import gymnasium\n"
        "class Crash(gymnasium.Wrapper):\n"
        "    def step(self, action): raise ValueError('no more')\n"
        "def make(): return Crash(gymnasium.make('CartPole-v1'))\n"
        "run = 'A2C'\n"
        f"config = {{**{SMALL!r}, 'env': make}}\n"
    )
    (tmp_path / "endless.yaml").write_text(yaml.dump({"run": "A2C", "config": SMALL}))
    restore = ["--restore", str(checkpoint.parents[1])]
    crash, endless = (
        subprocess.Popen(
            [*POLOPT, "train", *arguments, "--results-dir", str(tmp_path / "results")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for arguments in ([tmp_path / "crash.py"], [tmp_path / "endless.yaml", *restore])
    )
    killer = threading.Timer(100, endless.kill)
    killer.start()
    assert endless.stdout is not None
    seen: list[str] = []
    while not (seen and seen[-1].startswith("iteration 3")):
        seen.append(endless.stdout.readline())
        assert seen[-1], "it ended by itself"
    before = read_checkpoint(checkpoint)["optimizer"]["num_env_steps_sampled"]
    steps = [int(line.split()[4]) for line in seen if line.startswith("iteration")]
    assert [number > before + 32 * i for i, number in enumerate(steps)] == [True] * 3
    os.killpg(endless.pid, signal.SIGINT)  # as a terminal does, to everything in the foreground
    out, err = endless.communicate()
    killer.cancel()
    assert endless.returncode == 130, err
    assert err == ""
    assert "stopping after this iteration" in out
    saved = line_of(out.splitlines(), "checkpoint")
    result = polopt("evaluate", saved, "--episodes", 1)
    assert result.exit_code == 0, result.output

    out, err = crash.communicate(timeout=100)
    assert crash.returncode == 1
    assert err.startswith("error: ValueError: no more (traceback: ")
    assert "Traceback" not in out + err


def line_of(lines: list[str], name: str) -> str:
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return line.removeprefix(name).strip()
