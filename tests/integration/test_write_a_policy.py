"""The policies of docs/write-a-policy.md train as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
    (script,) = (block for block in BLOCKS if "trainer.train()" in block)
    script = script.replace("trainer.stop()", CHECK.format(name="BehaviourA2C"))
    assert "trained" in run(tmp_path, script)


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
