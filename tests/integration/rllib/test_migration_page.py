"""The polopt code of the pages on migration runs as printed. Their tables name keys that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from printed_code import ROOT, blocks_of, run_blocks

from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.trainers.experiment import Experiment
from polopt.trainers.flat_config import aliases_for
from polopt.trainers.presets import PRESETS
from polopt.trainers.trainer_config import TrainerConfig

PAGES = [f"docs/migration{name}.md" for name in ("-rllib", "-rllib-options", "", "-sb3")]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
#: Names in the second column of the tables that are not keys of configs.
OTHERS = {
    "explore",
    "on_episode_step",
    "on_episode_end",
    "on_sample_end",
    "on_train_result",
    "postprocess",
    "predict",
    "state",
}
OTHERS |= {"checkpoint_frequency", "log_dir"}  # options of Tune, and of trainers
OTHERS |= {"hiddens", "use_gae"}  # options of RLlib that the builders take
OTHERS |= {"agent_id", "episode", "worker", "rng"}  # arguments of a mapping
OTHERS |= {"action_mask", "best_checkpoint", "cuda", "cpu", "stop"}
OTHERS |= {*POLICIES.names(), *OPTIMIZERS.names()}
OTHERS |= {"none", "sync", "async", "sequence", "sign"}  # values of options


@pytest.mark.timeout(600)
def test_code_of_polopt_runs_as_printed(tmp_path: Path) -> None:
    own = [block for block in BLOCKS if block.startswith("# polopt\n")]
    outputs, _ = run_blocks(own, tmp_path, num_cpus=4)
    assert len(outputs) == 11
    assert outputs[0].split()[1] == "1000"  # one `train()` is one batch
    assert all(float(text.split()[0]) > 0.0 for text in outputs[:3])  # returns, and agent steps


def test_code_of_the_others_is_python() -> None:
    others = [block for block in BLOCKS if not block.startswith("# polopt\n")]
    assert len(others) == 6
    for block in others:
        ast.parse(block)


def known_keys() -> set[str]:
    experiment = Experiment.parse({"env": "CartPole-v1"}, {})
    model = set(type(experiment.policy.model).model_fields)
    keys = set(experiment.to_dict()) | model | {"train_batch_size"} | set(TrainerConfig.keys())
    keys |= set(experiment.optimizer.to_dict())
    for registry in (POLICIES, OPTIMIZERS):
        keys.update(*(registry.get(name).config_class.keys() for name in registry.names()))
    return keys | set(aliases_for({}, {}))


def test_keys_of_the_tables_exist() -> None:
    texts = {page: (ROOT / page).read_text() for page in PAGES}
    texts["docs/migration.md"] = texts["docs/migration.md"].partition("## From CleanRL")[2]
    lines = [line for text in texts.values() for line in text.splitlines()]
    rows = [line.split(" | ")[1] for line in lines if line.startswith("| ")]
    # A cell has names without a value, such as `lr`, and names with a value, such as `lr=0.1`.
    named = {name for cell in rows for name in re.findall(r"`([a-z][a-z_]*)(?:=[^`]*)?`", cell)}
    assert named - known_keys() - OTHERS == set()
    assert len(named) > 30
    defaults = Experiment.parse({"env": "CartPole-v1"}, PRESETS["SyncPPO"].preset)
    policy, rollout = defaults.policy.to_dict(), defaults.rollout
    assert (rollout.num_workers, rollout.num_envs_per_worker) == (2, 8)
    printed = ("lr", "gamma", "lambda", "sgd_minibatch_size", "num_sgd_iter", "clip_param")
    assert [policy[key] for key in printed] == [1e-3, 0.99, 0.95, 128, 10, 0.2]
    printed = ("vf_loss_coeff", "vf_clip_param", "entropy_coeff", "kl_coeff", "grad_clip")
    assert [policy[key] for key in printed] == [0.25, None, 0.01, 0.0, 0.5]
