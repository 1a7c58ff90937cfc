"""The policies of docs/write-a-policy.md train as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from source_tree import ROOT

BLOCKS = re.findall(
    r"^```python\n(.*?)^```$",
    (ROOT / "docs" / "write-a-policy.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
CHECK = """
learner = result["learners"]["default_policy"]
assert result["num_env_steps_sampled_lifetime"] > 0, result
assert learner["grad_norm"] > 0.0, learner
assert type(trainer.get_policy()).__name__ == {name!r}
print("trained", learner["mean_kl_loss"])
"""


def run(tmp_path: Path, script: str) -> str:
    for block in BLOCKS:
        if file := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / file.group(1)).write_text(block)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_printed_loss_trains(tmp_path: Path) -> None:
    (script,) = (block for block in BLOCKS if "import behaviour_a2c" in block)
    script = script.replace("trainer.stop()", CHECK.format(name="BehaviourA2C"))
    assert "trained" in run(tmp_path, script)


def test_printed_replay_policy_learns(tmp_path: Path) -> None:
    """Random actions have a mean return of about 22, and the errors of `errors_of` are those of
    `add_gradient`."""
    (script,) = (block for block in BLOCKS if "import munchausen_dqn" in block)
    check = """
import numpy as np

policy = trainer.get_policy()
rows = trainer.optimizer.buffer.sample(16)
_, errors = policy.backward(rows)
np.testing.assert_allclose(policy.errors_of(rows), errors, rtol=1e-4, atol=1e-5)
trainer.stop()
"""
    printed = run(tmp_path, script.replace("trainer.stop()", check)).split()
    assert len(printed) == 12
    assert float(printed[-1]) > 40.0


def test_printed_network_trains(tmp_path: Path) -> None:
    options = {"policy": "normalised_a2c", "optimizer": "sync_samples"}
    config = {"env": "CartPole-v1", "num_workers": 0, **options}
    script = f"""
import polopt
import normalised_a2c

trainer = polopt.PolicyOptimizerTrainer({config})
result = trainer.train()
assert "LayerNorm" in str(trainer.get_policy().model)
{CHECK.format(name="NormalisedA2C")}
"""
    assert "trained" in run(tmp_path, script)
