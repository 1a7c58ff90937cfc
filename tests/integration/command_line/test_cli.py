"""Tests of `polopt train` as a process: results, printed commands, signals, modules and
clusters."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray import tune
from source_tree import ROOT
from waiting import wait_until

from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.find_checkpoint import read_or_fall_back
from polopt.trainers.presets import A2C

MODULE = "polopt.command_line.cli"
POLOPT = [sys.executable, "-m", MODULE]
SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 64,
    "model": {"fcnet_hiddens": [8]},
    "seed": 5,
}
GAME = """
from pathlib import Path
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Game(CartPoleEnv):
    def __init__(self, **options):
        assert Path("level.txt").read_text() == "easy"  # relative to the current directory
        super().__init__(**options)

gymnasium.register("Game-v0", Game, max_episode_steps=50)
"""
CALLABLE = """
import beside, polopt
from polopt.optimizers.sync_samples import SyncSamples
from ray import tune
def make(): return beside.make()
class Mine(SyncSamples): pass
polopt.register_optimizer("mine", Mine)
run = "PolicyOptimizerTrainer"
config = {**CONFIG, "env": make, "num_workers": 1, "optimizer": "mine", "policy": "a2c"}
class Count(tune.Callback):
    def on_trial_result(self, **info): open("counted", "a").write("x")
callbacks = [Count()]
"""


@pytest.fixture(scope="module")
def attached(ray_session: None) -> dict[str, str]:
    """Returns the environment variables of a command that attaches to the Ray of the tests. A Ray
    of its own takes the command seconds, and only some tests are about its start and its end."""
    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def train(*arguments: object, cwd: Path, env: dict[str, str] | None = None) -> list[str]:
    """Returns the output lines of a run that ends by itself without an error."""
    command = [*POLOPT, "train", *map(str, arguments), "--results-dir", "results"]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def small(folder: Path, **config: Any) -> str:
    """Writes a file with a small experiment."""
    (folder / "small.yaml").write_text(yaml.dump({"run": "A2C", "config": {**SMALL, **config}}))
    return "small.yaml"


def line_of(lines: list[str], name: str) -> str:
    (line,) = [line for line in lines if line.startswith(f"{name} ")]
    return line.removeprefix(name).strip()


def runs_as_printed(lines: list[str], cwd: Path) -> None:
    command = [*shlex.split(line_of(lines, "next")), "--episodes", "1"]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "(1 episodes)" in done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Returns the directory and the output of a run of four iterations."""
    folder = tmp_path_factory.mktemp("trained")
    changes = ["stop.training_iteration=4", "--checkpoint-every", "1"]
    return folder, train(small(folder), *changes, cwd=folder)


def test_output_is_labelled_lines(trained: tuple[Path, list[str]]) -> None:
    folder, lines = trained
    assert lines[0] == "small: A2C on CartPole-v1"
    results = [line for line in lines if line.startswith("return ")]
    assert len(results) == 4
    assert all("  steps " in line and "  steps/s " in line for line in results)
    assert line_of(lines, "ended") == "training_iteration reached 4 (stop: 4)"
    runs_as_printed(lines, folder)


def test_run_that_a_callback_ends_says_so(tmp_path: Path, attached: dict[str, str]) -> None:
    (tmp_path / "done.py").write_text(
        "import polopt\n"
        "class Done(polopt.Callbacks):\n"
        "    def on_train_result(self, *, trainer, result):\n"
        "        result['done'] = result['training_iteration'] == 2\n"
    )
    lines = train(small(tmp_path, callbacks="done:Done", num_workers=0), cwd=tmp_path, env=attached)
    assert len([line for line in lines if line.startswith("return ")]) == 2
    assert "done=True" in line_of(lines, "ended")


def test_best_evaluation_is_printed_and_evaluated_next(
    tmp_path: Path, attached: dict[str, str]
) -> None:
    evaluation = ["evaluation_interval=1", "evaluation_duration=2", "evaluation_num_workers=1"]
    stop = "stop.evaluation/num_evaluations=1"
    lines = train(small(tmp_path), stop, *evaluation, cwd=tmp_path, env=attached)
    assert any("  evaluation " in line for line in lines)
    best = Path(line_of(lines, "best"))
    assert best == Path(line_of(lines, "results")) / "best_checkpoint"
    state = read_trainer_state(best)
    assert state["best"]["policy_version"] == state["optimizer"]["policy"]["version"]
    assert str(best) in line_of(lines, "next")
    runs_as_printed(lines, tmp_path)


def test_result_of_a_trial_directory_has_its_checkpoints(
    trained: tuple[Path, list[str]],
) -> None:
    folder, lines = trained
    result = tune.Result.from_path(folder / line_of(lines, "results"))
    found = {
        Path(checkpoint.path): metrics["training_iteration"]
        for checkpoint, metrics in result.best_checkpoints
    }
    assert len(found) == 3
    for path, iteration in found.items():
        assert read_trainer_state(path)["training_iteration"] == iteration
    best = result.get_best_checkpoint("training_iteration", "max")
    assert Path(best.path) == folder / line_of(lines, "checkpoint")


def test_trial_directory_has_the_result_files_of_tune(trained: tuple[Path, list[str]]) -> None:
    folder, lines = trained
    results = Path(line_of(lines, "results"))
    assert results.parents[1] == folder / "results"
    written = [json.loads(text) for text in (results / "result.json").read_text().splitlines()]
    assert [result["training_iteration"] for result in written] == [1, 2, 3, 4]
    assert json.loads((results / "params.json").read_text()) == SMALL
    with (results / "progress.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    assert list(results.glob("events.out.tfevents.*"))


def test_newest_three_checkpoints_are_kept(trained: tuple[Path, list[str]]) -> None:
    kept = sorted(Path(line_of(trained[1], "results")).glob("checkpoint_*"))
    assert [read_trainer_state(path)["training_iteration"] for path in kept] == [2, 3, 4]


@pytest.mark.usefixtures("ray_session")
def test_tuner_restores_the_experiment(trained: tuple[Path, list[str]]) -> None:
    _, lines = trained
    experiment = Path(line_of(lines, "results")).parent
    (result,) = tune.Tuner.restore(str(experiment), A2C).get_results()
    assert result.error is None
    assert result.metrics is not None
    assert result.metrics["training_iteration"] == 4
    assert result.checkpoint is not None
    assert result.checkpoint.path == line_of(lines, "checkpoint")


def test_restored_run_continues_the_counters(
    trained: tuple[Path, list[str]], tmp_path: Path, attached: dict[str, str]
) -> None:
    folder, before = trained
    file = folder / "small.yaml"
    options = ["stop.training_iteration=6", "--restore", folder / "results"]
    lines = train(file, *options, cwd=tmp_path, env=attached)
    old, new = (read_trainer_state(line_of(output, "checkpoint")) for output in (before, lines))
    assert (old["training_iteration"], new["training_iteration"]) == (4, 6)
    assert new["time_total_s"] > old["time_total_s"] > 0
    steps = [state["optimizer"]["num_env_steps_sampled"] for state in (old, new)]
    assert steps[1] >= steps[0] + 128  # two iterations of at least 64 steps
    assert len([line for line in lines if line.startswith("return ")]) == 2


def test_module_of_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "mygame.py").write_text(GAME)
    (tmp_path / "level.txt").write_text("easy")
    changes = [f"{key}={json.dumps(SMALL[key])}" for key in SMALL if key != "env"]
    more = ["env=mygame:Game-v0", "num_workers=1", "stop.training_iteration=1"]
    lines = train("SyncPPO", *changes, *more, cwd=tmp_path)  # its workers read a relative path
    assert line_of(lines, "next").endswith("--env mygame:Game-v0")
    runs_as_printed(lines, tmp_path)


def test_python_file_of_another_directory(tmp_path: Path, attached: dict[str, str]) -> None:
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "beside.py").write_text(
        "import gymnasium\ndef make(): return gymnasium.make('CartPole-v1')\n"
    )
    (folder / "mine.py").write_text(CALLABLE.replace("CONFIG", repr(SMALL)))
    lines = train("experiments/mine.py", "stop.training_iteration=2", cwd=tmp_path, env=attached)
    assert (tmp_path / "counted").read_text() == "xx", "the callbacks in the file run"
    runs_as_printed(lines, tmp_path)


def test_failed_run_names_the_error_and_its_file(tmp_path: Path, attached: dict[str, str]) -> None:
    (tmp_path / "crash.py").write_text(
        "import gymnasium\n"
        "class Crash(gymnasium.Wrapper):\n"
        "    def step(self, action): raise ValueError('no more')\n"
        "def make(): return Crash(gymnasium.make('CartPole-v1'))\n"
        f"run = 'A2C'\nconfig = {{**{SMALL!r}, 'env': make}}\n"
    )
    command = [*POLOPT, "train", "crash.py", "--results-dir", "results"]
    done = subprocess.run(
        command, cwd=tmp_path, env=attached, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    traceback = Path(done.stderr.partition("(traceback: ")[2].rstrip(")\n"))
    assert "no more" in traceback.read_text()


FULL = """
import resource
import gymnasium
class Full(gymnasium.Wrapper):  # from its first step on, its process can write no files
    def step(self, action):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        return super().step(action)
def make(): return Full(gymnasium.make("CartPole-v1"))
run = "A2C"
config = {**CONFIG, "env": make}
"""


def test_unwritable_checkpoint_ends_with_one_error(
    tmp_path: Path, attached: dict[str, str]
) -> None:
    (tmp_path / "full.py").write_text(FULL.replace("CONFIG", repr(SMALL)))
    command = [*POLOPT, "train", "full.py", "--results-dir", "results", "--checkpoint-every", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, env=attached, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    found = re.fullmatch(
        r"error: .*checkpoint (\S+) cannot be written: File too large \(traceback: (.+)\)\n",
        done.stderr,
    )
    assert found, done.stderr
    assert not list(Path(found[1]).glob("*")), "no temporary file is left"
    assert "OSError" in Path(found[2]).read_text()


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """Returns the address of a cluster that runs in a separate process. Its head node has no
    CPUs."""
    script = ROOT / "tests" / "chaos_scripts.py"
    with (
        tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder,
        subprocess.Popen(
            [sys.executable, str(script), "two_nodes"],
            # Ray writes the address of the cluster to its temporary directory. In the usual
            # directory, other programs would find this address.
            env={**os.environ, "RAY_TMPDIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
            process.communicate(timeout=60)  # closes standard input, which ends the process
        finally:
            process.kill()


ALIVE = """
import logging, sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL)
assert ray.get(ray.remote(num_cpus=2)(lambda: 5).remote(), timeout=100.0) == 5
"""


def test_trial_on_another_node(tmp_path: Path, two_nodes: str) -> None:
    """The command's node has no CPUs, so Tune places the trial on the other node. The cluster keeps
    running after the command."""
    (tmp_path / "mygame.py").write_text(GAME)
    (tmp_path / "level.txt").write_text("easy")
    env = {**os.environ, "RAY_ADDRESS": two_nodes}
    changes = ["env=mygame:Game-v0", "stop.training_iteration=1"]
    lines = train(small(tmp_path), *changes, cwd=tmp_path, env=env)
    assert Path(line_of(lines, "checkpoint")).is_relative_to(tmp_path / "results")
    subprocess.run([sys.executable, "-c", ALIVE, two_nodes], check=True, timeout=120)


def test_starts_ray_beside_a_running_cluster(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        # `ray start` writes the address of the cluster to this file.
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        env = {**os.environ, "RAY_TMPDIR": folder, "RAY_ADDRESS": ""}
        lines = train(small(tmp_path), "stop.training_iteration=1", cwd=tmp_path, env=env)
    assert line_of(lines, "checkpoint")


HELP = f"""
import runpy, sys
sys.argv[1:] = ["--help"]
try:
    runpy.run_module({MODULE!r}, run_name="__main__")
finally:
    loaded = sorted({{"ray", "torch"}} & sys.modules.keys())
    assert not loaded, loaded
"""


def test_help_imports_neither_ray_nor_torch() -> None:
    command = [sys.executable, "-c", HELP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


# ---- signals ----------------------------------------------------------------------------------

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


def of_session(session: int) -> list[str]:
    """Returns the command lines of the processes in a session that have not ended. A process
    without a command line has been killed, but the kernel has not removed it yet."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # the process has ended
        if int(of) == session and state not in "ZX" and command:
            found.append(command)
    return found


@contextmanager
def endless_run(
    folder: Path, checkpoint_every: int = 1, file: str = "", polopt: list[str] = POLOPT
) -> Iterator[subprocess.Popen[str]]:
    """Starts a run without a limit. The run leads its own session and process group."""
    command = [*polopt, "train", file or small(folder), "--results-dir", "results"]
    with subprocess.Popen(
        [*command, "--checkpoint-every", str(checkpoint_every)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
    # Ray's agents would end by themselves after a minute.
    deadline_s = time.monotonic() + 20
    while left := of_session(process.pid):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


def wait_for_line(process: subprocess.Popen[str], start: str, count: int = 1) -> None:
    assert process.stdout is not None
    for line in iter(process.stdout.readline, ""):
        count -= line.startswith(start)
        if not count:
            return
    pytest.fail(f"ended before {start!r}: {process.communicate()}")


def usual_first(usual: list[Any], others: list[Any]) -> list[Any]:
    """Returns the cases of a test. `make test-slow` runs all cases. Other commands run only the
    cases in `usual`, because each case takes seconds."""
    return [*usual, *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]


@needs_proc
@pytest.mark.parametrize(
    ("number", "target"),
    usual_first(
        # Ctrl-C and a closed terminal signal the process group. A service manager signals one
        # process.
        [(signal.SIGINT, "group"), (signal.SIGTERM, "process")],
        [
            (signal.SIGINT, "process"),
            (signal.SIGTERM, "group"),
            (signal.SIGHUP, "group"),
            (signal.SIGHUP, "process"),
        ],
    ),
)
def test_signal_keeps_a_checkpoint(tmp_path: Path, number: signal.Signals, target: str) -> None:
    # Without periodic checkpoints, only the end of the run saves a checkpoint.
    with endless_run(tmp_path, 10**6 if target == "process" else 1) as process:
        wait_for_line(process, "return ", count=3)
        (os.kill if target == "process" else os.killpg)(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert "Traceback" not in out + err
    if target == "process":
        assert process.returncode == 128 + number, out + err
        assert line_of(out.splitlines(), "ended") == number.name
        state = read_trainer_state(line_of(out.splitlines(), "checkpoint"))
        shown = 3 + sum(line.startswith("return ") for line in out.splitlines())
        assert state["training_iteration"] == shown, "the last iteration is saved"
    else:
        # Ray's processes get the signal, too. If they end first, Ray ends the driver.
        assert process.returncode in (1, 128 + number), out + err
        kept = max((tmp_path / "results").glob("**/checkpoint_*"))
        # The newest checkpoint may be incomplete, so this reads a checkpoint like --restore.
        _, state = read_or_fall_back(kept)
        assert state["training_iteration"] >= 1


def handles_sigterm(process: subprocess.Popen[str]) -> bool:
    return bool(caught_signals(process.pid) >> (signal.SIGTERM - 1) & 1)


def caught_signals(pid: int) -> int:
    """Returns the bits of the signals for which a process has a handler."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("SigCgt:")[2].split()[0], 16)


@needs_proc
@pytest.mark.parametrize(
    ("line", "after_s", "twice"),
    usual_first(
        [
            ("", 0.0, True),  # before the output "starting Ray", so Ray does not start
            ("starting Ray", 0.5, True),
            ("starting workers", 0.0, False),
        ],
        [
            ("", 0.0, False),
            ("", 1.0, True),
            ("starting Ray", 0.0, False),
            ("starting Ray", 0.0, True),
            ("starting Ray", 0.5, False),
            ("starting Ray", 1.5, False),
            ("starting Ray", 1.5, True),
            ("starting workers", 0.0, True),
        ],
    ),
)
def test_sigterm_at_any_moment_of_the_start(
    tmp_path: Path, line: str, after_s: float, twice: bool
) -> None:
    with endless_run(tmp_path) as process:
        if line:
            wait_for_line(process, line)
        else:
            wait_until(lambda: handles_sigterm(process), interval_s=0.001)
        time.sleep(after_s)
        process.send_signal(signal.SIGTERM)
        sent_s = time.monotonic()
        if twice:
            time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert time.monotonic() - sent_s < 8.0, "docs/fault-list.md names this limit"
        left = of_session(process.pid)
    assert process.returncode == 143, out + err
    assert err == ""
    assert left == []
    assert line or after_s or "starting Ray" not in out
    if "checkpoint " not in out:
        assert out.splitlines()[-1] == "stopped before the first result. Nothing was saved"
        assert list((tmp_path / "results").glob("*")) == []


COMPILED = """
import hashlib
from polopt.command_line import signals
signals.GRACE_S, signals.EXIT_S = 0.1, 0.2
handling = signals.StopSignals()
handling.install()
handling.before_exit = lambda: print("abandoned", flush=True)
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour, in which no handler runs
"""
BLOCKED = """
import time
from polopt.command_line import signals
signals.GRACE_S, signals.EXIT_S = 0.1, 0.2
handling = signals.StopSignals()
handling.install()
handling.before_exit = lambda: print("x" * 10**7, flush=True)  # more than a pipe holds
print("ready", flush=True)
while True:
    time.sleep(1.0)
"""


def test_process_in_compiled_code_ends_in_time() -> None:
    command = [sys.executable, "-c", COMPILED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_for_line(process, "ready")
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=60)[0] == "abandoned\n"
            assert process.returncode == 143
        finally:
            process.kill()


def test_process_with_a_full_output_ends_in_time() -> None:
    command = [sys.executable, "-c", BLOCKED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_for_line(process, "ready")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 143, "although nobody reads the output"
        finally:
            process.kill()


STUCK = """
import time
from pathlib import Path
import gymnasium
class Stuck(gymnasium.Wrapper):
    left = 150  # steps of all environments, so the third iteration of 64 steps does not end
    def step(self, action):
        Stuck.left -= 1
        while Stuck.left < 0:
            Path("stuck").touch()
            time.sleep(1.0)
        return super().step(action)
def make(): return Stuck(gymnasium.make("CartPole-v1"))
run = "A2C"
config = {**CONFIG, "env": make}
"""
PATIENT = f"""
from polopt.command_line import signals
signals.GRACE_S = signals.EXIT_S = 600.0
from {MODULE} import main
main()
"""


def wait_for_file(folder: Path, pattern: str) -> None:
    deadline_s = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@needs_proc
def test_second_signal_ends_a_stuck_run_at_once(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK.replace("CONFIG", repr(SMALL)))
    patient = [sys.executable, "-c", PATIENT]
    with endless_run(tmp_path, file="stuck.py", polopt=patient) as process:
        wait_for_file(tmp_path, "stuck")
        process.send_signal(signal.SIGINT)
        wait_for_file(tmp_path, "results/*/stop")  # the first signal has been handled
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert err == ""
    assert read_trainer_state(line_of(out.splitlines(), "checkpoint"))["training_iteration"] == 2


def test_sweep_trains_each_preset_and_names_the_best(
    tmp_path: Path, attached: dict[str, str]
) -> None:
    grid = ["preset={grid_search: [A2C, SyncPPO]}", "lr=tune.loguniform(1e-4, 1e-2)"]
    lines = train(small(tmp_path), *grid, "stop.training_iteration=1", cwd=tmp_path, env=attached)
    assert len([line for line in lines if line.startswith("return ")]) == 2
    folder = Path(line_of(lines, "results"))
    results = [json.loads(file.read_text()) for file in folder.glob("*/result.json")]
    assert {one["config"]["preset"] for one in results} == {"A2C", "SyncPPO"}
    # All presets train with the same learning rate.
    assert len({one["config"]["lr"] for one in results}) == 1
    best, _, label = line_of(lines, "best").partition(" (")
    assert Path(best, "manifest.json").is_file()
    assert label.startswith("lr=")
    state = read_trainer_state(Path(best))
    assert state["config"]["optimizer"]["name"] == "sync_samples"


def test_command_line_trains(tmp_path: Path, attached: dict[str, str]) -> None:
    code = "from polopt.command_line.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "cartpole_ppo", "stop.training_iteration=1"]
    command += ["--results-dir", str(tmp_path)]
    done = subprocess.run(command, env=attached, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.rglob("result.json")
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert [result["training_iteration"] for result in results] == [1]
    assert "Traceback" not in done.stdout + done.stderr
