"""The files of docs/several-nodes.md: schemas, shell syntax, versions, options and names."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from source_tree import ROOT

from polopt.command_line.examples import apply_changes, load_example

FILES = ROOT / "docs" / "examples" / "several_nodes"
RAY = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)[1]  # type: ignore[index]


def loaded(name: str) -> Any:
    return yaml.safe_load((FILES / name).read_text())


def test_ray_accepts_the_cluster_file() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    config = loaded("ray_cluster.yaml")
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(config, json.loads(schema.read_text()))
    assert not set(config) - set(json.loads(schema.read_text())["properties"])
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["max_workers"] == 2, "one for each address in `worker_ips`"
    assert f"ray[default]=={RAY}" in config["setup_commands"][1]
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    starts = [command for command in commands if " start " in command]
    assert len(starts) == 2
    assert all(command.startswith("RAY_AUTH_MODE=token ") for command in starts)
    assert all(option_is_known(option) for start in starts for option in options_of(start))


def test_rayjob_names_one_version_and_one_image() -> None:
    job = loaded("rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == RAY
    assert cluster["authOptions"] == {"mode": "token"}
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    specs = [pod["template"]["spec"] for pod in pods]
    assert len({spec["containers"][0]["image"] for spec in specs}) == 1
    for spec in specs:
        (mount,), (volume,) = spec["containers"][0]["volumeMounts"], spec["volumes"]
        assert mount["name"] == volume["name"]
        assert mount["mountPath"] in job["spec"]["entrypoint"]
        resources = spec["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]
    assert specs[1]["terminationGracePeriodSeconds"] > 30, "longer than Ray's drain"


def test_syntax_of_the_sbatch_script() -> None:
    script = FILES / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", script], check=True, timeout=60)
    text = script.read_text()
    assert "set -euo pipefail" in text
    assert all(option_is_known(option) for option in options_of(ray_command(text)))


def ray_command(text: str) -> str:
    """Returns the part of the script from `ray symmetric-run` to the command that it runs."""
    found = re.search(r"ray symmetric-run.*?(?= -- )", text.replace("\\\n", ""), re.S)
    assert found
    return found[0]


def options_of(command: str) -> list[str]:
    return re.findall(r"(?<!\S)(--[a-z-]+)", command)


def option_is_known(option: str) -> bool:
    from ray.scripts.scripts import start
    from ray.scripts.symmetric_run import symmetric_run

    return any(option in one.opts for command in (start, symmetric_run) for one in command.params)


@pytest.mark.parametrize("name", ["rayjob.yaml", "train.sbatch", "../../several-nodes.md"])
def test_printed_runs_have_known_options(name: str) -> None:
    text = (FILES / name).read_text().replace("\\\n", "")
    commands = re.findall(r"^(?:[^#\n]*\s)?polopt train (cartpole\S* [^\n`]+)", text, re.M)
    assert commands
    for command in commands:
        example, *words = shlex.split(command)
        if "--results-dir" in words:
            del words[words.index("--results-dir") :]
        assert apply_changes(load_example(example), words)
