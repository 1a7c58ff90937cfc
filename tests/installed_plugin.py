"""Installs a package with a policy and an optimizer of a third party, and runs Python with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "thirdparty"
version = "1"

[project.entry-points."polopt.policies"]
scaled_policy = "thirdparty:ScaledPolicy"

[project.entry-points."polopt.optimizers"]
repeated_samples = "thirdparty:RepeatedSamples"
broken = "no_such_module:Broken"
"""
MODULE = '''
"""A policy and an optimizer of a third party."""

import polopt
import pydantic
from polopt.optimizers.sync_samples import SyncSamples, SyncSamplesConfig
from polopt.policies.a2c import A2CConfig, A2CPolicy


class ScaledConfig(A2CConfig):
    loss_scale: float = pydantic.Field(2.0, gt=0.0)


class ScaledPolicy(A2CPolicy):
    """A2C with a scaled loss."""

    config_class = ScaledConfig

    def loss(self, rows):
        loss, stats = super().loss(rows)
        return self.config.loss_scale * loss, stats


class RepeatedSamplesConfig(SyncSamplesConfig):
    rounds: int = pydantic.Field(1, ge=1)


class RepeatedSamples(SyncSamples):
    """Reports the number of its rounds."""

    name = "repeated_samples"
    config_class = RepeatedSamplesConfig
    tab = polopt.Tab(
        "How busy the driver is.",
        (polopt.Plot("lag", "Lag", "A help.", "updates", {"mean": "optimizer/policy_lag/mean"}),),
    )

    def step(self):
        for _ in range(self.config.rounds):
            result = super().step()
        return result

    def extra_stats(self):
        return {**super().extra_stats(), "rounds": self.config.rounds}
'''


def install_plugin(folder: Path) -> Path:
    """Installs the package with pip in a directory outside of the virtual environment. Returns this
    directory."""
    source, target = folder / "source", folder / "target"
    source.mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "thirdparty.py").write_text(MODULE)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--no-index", "--no-build-isolation", "--no-deps", "--target", target, source],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return target


def with_plugin(installed: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
