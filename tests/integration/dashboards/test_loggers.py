"""Tests that Tune's loggers accept the results of every optimizer: JSON, CSV, TensorBoard, W&B and
MLflow."""

from __future__ import annotations

import csv
import json
import logging
import re
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ray import tune
from ray.tune.search.basic_variant import BasicVariantGenerator

import polopt
from polopt.dashboards.data.prometheus import metrics_of, series_of
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.trainers.numbers import numbers_of

#: Each optimizer with the policy of one preset. A2C and SyncPPO report the same block.
SCHEMES = {
    "async_gradients": "a3c",
    "sync_gradients": "a3c",
    "sync_samples": "a2c",
    "async_samples": "ppo",
    "decentralized_allreduce": "ppo",
    "sync_replay": "dqn",
    "async_replay": "dqn",
}
every_optimizer = pytest.mark.parametrize("optimizer", SCHEMES)


class Logged(NamedTuple):
    """The trial of one optimizer.

    Attributes:
        folder: directory of the trial's result files.
        trial_id: Tune's id of the trial.
        result: the last result.
    """

    folder: Path
    trial_id: str
    result: dict[str, Any]


class Warnings(logging.Handler):
    """Collects warnings of Ray."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train(folder: Path, callbacks: list[tune.Callback]) -> tuple[dict[str, Logged], list[str]]:
    """Runs two iterations with each optimizer. Returns the trials and the warnings."""
    points = [{"optimizer": name, "policy": policy} for name, policy in SCHEMES.items()]
    config = {
        "env": "CartPole-v1",
        "optimizer": tune.choice(list(SCHEMES)),
        "policy": tune.choice(["a2c", "a3c", "ppo", "dqn"]),
        "num_workers": 1,
        "rollout_fragment_length": 16,
        "min_sample_timesteps_per_iteration": 200,
        "evaluation_interval": 1,
        "evaluation_duration": 1,
        "model": {"fcnet_hiddens": [8]},
    }
    handler = Warnings()
    logging.getLogger("ray").addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            grid = tune.Tuner(
                polopt.PolicyOptimizerTrainer,
                param_space=config,
                tune_config=tune.TuneConfig(
                    num_samples=len(points),
                    reuse_actors=True,
                    search_alg=BasicVariantGenerator(points, max_concurrent=1),
                ),
                run_config=tune.RunConfig(
                    name="loggers",
                    storage_path=str(folder),
                    stop={"training_iteration": 2},
                    callbacks=callbacks,
                    verbose=0,
                ),
            ).fit()
    finally:
        logging.getLogger("ray").removeHandler(handler)
    assert not grid.errors
    trials = {
        trial.metrics["optimizer"]["name"]: Logged(
            Path(trial.path), trial.metrics["trial_id"], trial.metrics
        )
        for trial in grid
    }
    assert set(trials) == set(SCHEMES)
    return trials, [*handler.messages, *(str(warning.message) for warning in caught)]


@pytest.fixture(scope="module")
def logged(
    ray_session: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Logged], list[str]]:
    """Returns trials with the default loggers and the TensorBoard layout."""
    return train(tmp_path_factory.mktemp("loggers"), [polopt.TensorBoardLayout()])


def flat(result: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of a nested dict by path."""
    leaves: dict[str, Any] = {}
    for key, value in result.items():
        leaves |= (
            flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
        )
    return leaves


def optimizer_numbers(result: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers in the block `optimizer/` by path."""
    numbers = {
        path: value
        for path, value in flat({"optimizer": result["optimizer"]}).items()
        if isinstance(value, int | float)
    }
    assert len(numbers) > 40
    return numbers


def events(folder: Path) -> Iterator[Any]:
    """Yields the events in TensorBoard's files, in the order in which TensorBoard reads the
    files."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        # Each event has a length (8 bytes), its checksum (4), the data, and their checksum (4).
        while data:
            size = int.from_bytes(data[:8], "little")
            yield Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]


def wandb_records(path: Path) -> Iterator[Any]:
    """Yields the records of a W&B file. This is a log in the format of LevelDB, whose blocks of 32
    KiB contain parts of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    # W&B's header has 7 bytes, and so has the header of each part.
    data, record, at = path.read_bytes(), b"", 7
    while at < len(data):
        if (left := 2**15 - at % 2**15) < 7:  # padding, because another header does not fit
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)  # after the checksum
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # a whole record, or its last part
            yield Record.FromString(record)
            record = b""


@every_optimizer
def test_each_metric_of_prometheus_has_a_result_key(logged: Any, optimizer: str) -> None:
    paths = set(flat(logged[0][optimizer].result))
    numbers = numbers_of(OPTIMIZERS.get(optimizer))
    exported = {found[0] for path in paths if (found := series_of(numbers, path))}
    assert metrics_of(numbers).keys() - exported == set()


@every_optimizer
def test_layout_shows_scalars_that_the_run_writes(logged: Any, optimizer: str) -> None:
    from tensorboardX.proto.layout_pb2 import Layout

    scalars: set[str] = set()
    layouts = []
    for number, event in enumerate(events(logged[0][optimizer].folder)):
        for value in event.summary.value:
            if value.tag == "custom_scalars__config__":
                layouts.append(Layout.FromString(value.tensor.string_val[0]))
                assert number == 1, "the layout is in the file that TensorBoard reads first"
            elif value.HasField("simple_value"):
                scalars.add(value.tag)
    (layout,) = layouts
    tags = [
        tag for group in layout.category for chart in group.chart for tag in chart.multiline.tag
    ]
    assert len(tags) > 15
    # TensorBoard gets no NaN. A statistic is NaN if the policy does not compute it, or before the
    # first update.
    result = flat(logged[0][optimizer].result).items()
    scalars |= {f"ray/tune/{key}" for key, value in result if value != value}
    assert [tag for tag in tags if not any(re.search(tag, scalar) for scalar in scalars)] == []
    assert not any("per_worker" in scalar for scalar in scalars)


@every_optimizer
def test_files_hold_each_worker(logged: Any, optimizer: str) -> None:
    folder = logged[0][optimizer].folder
    rows = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    for row in rows:
        workers = row["optimizer"]["workers"]["per_worker"]
        assert [worker["index"] for worker in workers] == [1]
    with (folder / "progress.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows) == 2
    assert "idle_share" in table[1]["optimizer/workers/per_worker"]
    assert float(table[1]["optimizer/driver/share/other"]) == pytest.approx(
        rows[1]["optimizer"]["driver"]["share"]["other"]
    )


def test_loggers_do_not_warn(logged: Any) -> None:
    about_logging = re.compile("tbx|tensorboard|csv|json|invalid value", re.IGNORECASE)
    assert [message for message in logged[1] if about_logging.search(message)] == []


def test_mlflow_takes_every_optimizer(ray_session: None, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the extra polopt[trackers] is not installed")
    from ray.air.integrations.mlflow import MLflowLoggerCallback

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    trials, _ = train(tmp_path, [MLflowLoggerCallback(tracking_uri=uri, experiment_name="polopt")])
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("polopt")
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"] * len(SCHEMES)
    stored = {run.data.params["optimizer"]: run.data.metrics for run in runs}
    for name, trial in trials.items():
        numbers = optimizer_numbers(trial.result)
        assert {path: stored[name][path] for path in numbers} == pytest.approx(numbers)


def test_wandb_takes_every_optimizer(
    ray_session: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra polopt[trackers] is not installed")
    from ray.air.integrations.wandb import WandbLoggerCallback

    monkeypatch.setenv("WANDB_MODE", "offline")  # needs no API key
    callback = WandbLoggerCallback(project="polopt", mode="offline", dir=str(tmp_path))
    trials, _ = train(tmp_path, [callback])
    for trial in trials.values():
        (file,) = tmp_path.glob(f"wandb/offline-run-*{trial.trial_id}/*.wandb")
        records = list(wandb_records(file))
        kinds = [record.WhichOneof("record_type") for record in records]
        assert kinds.count("history") == 2, (trial.trial_id, kinds)
        *_, last = (record.history for record in records if record.HasField("history"))
        stored = {item.key or "/".join(item.nested_key): item.value_json for item in last.item}
        numbers = optimizer_numbers(trial.result)
        assert {path: json.loads(stored[path]) for path in numbers} == pytest.approx(numbers)
