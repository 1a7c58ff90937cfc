"""Tests of the module paths of RLlib below `polopt.rllib`."""

from __future__ import annotations

import importlib
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import polopt.rllib as rllib
from polopt.rllib import module_paths
from polopt.rllib.module_paths import MODULES

#: Imports of scripts of the three generations, and what they must give.
IMPORTS = [
    ("polopt.rllib.agents.ppo", "PPOTrainer", "polopt.rllib.algorithm.PPOTrainer"),
    ("polopt.rllib.agents.ppo", "PPOAgent", "polopt.rllib.algorithm.PPOTrainer"),
    ("polopt.rllib.agents.ppo.appo", "APPOTrainer", "polopt.rllib.algorithm.APPOTrainer"),
    ("polopt.rllib.agents.dqn.apex", "ApexTrainer", "polopt.rllib.algorithm.ApexTrainer"),
    ("polopt.rllib.agents.a3c.a2c", "A2CTrainer", "polopt.rllib.algorithm.A2CTrainer"),
    ("polopt.rllib.agents.pg", "PGTrainer", "polopt.rllib.algorithm.PGTrainer"),
    ("polopt.rllib.algorithms.pg", "PGConfig", "polopt.rllib.builders.PGConfig"),
    ("polopt.rllib.agents.impala", "ImpalaTrainer", "polopt.rllib.algorithm.ImpalaTrainer"),
    ("polopt.rllib.agents.trainer", "Trainer", "polopt.rllib.algorithm.Algorithm"),
    ("polopt.rllib.agents.callbacks", "DefaultCallbacks", "RLlibCallback"),
    ("polopt.rllib.algorithms.ppo", "PPOConfig", "polopt.rllib.builders.PPOConfig"),
    ("polopt.rllib.algorithms.ppo.ppo", "PPO", "polopt.rllib.algorithm.PPO"),
    ("polopt.rllib.algorithms.impala", "ImpalaConfig", "polopt.rllib.builders.IMPALAConfig"),
    ("polopt.rllib.algorithms.algorithm", "Algorithm", "polopt.rllib.algorithm.Algorithm"),
    ("polopt.rllib.algorithms.algorithm_config", "AlgorithmConfig", "AlgorithmConfig"),
    ("polopt.rllib.callbacks.callbacks", "RLlibCallback", "RLlibCallback"),
    ("polopt.rllib.env.env_context", "EnvContext", "polopt.rllib.script_utils.EnvContext"),
    ("polopt.rllib.env.multi_agent_env", "MultiAgentEnv", "MultiAgentEnv"),
    ("polopt.rllib.policy.sample_batch", "SampleBatch", "SampleBatch"),
    ("polopt.rllib.policy.policy", "PolicySpec", "polopt.rllib.multi_agent.PolicySpec"),
    ("polopt.rllib.core.rl_module.rl_module", "RLModule", "polopt.rllib.views.ModuleView"),
    ("polopt.rllib.core.columns", "Columns", "polopt.rllib.script_utils.Columns"),
    ("polopt.rllib", "MultiAgentEnv", "MultiAgentEnv"),
    ("polopt.rllib.connectors.env_to_module", "FlattenObservations", "unchanged"),
]


@pytest.mark.parametrize(("module", "name", "expected"), IMPORTS)
def test_import_of_a_script(module: str, name: str, expected: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"from {module} import {name}", scope)
    found = scope[name]
    assert f"{found.__module__}.{found.__qualname__}".endswith(expected)


OLD = {"a3c.a2c": "A2C", "a3c.a3c": "A3C", "dqn.apex": "Apex", "dqn.dqn": "DQN"}
OLD |= {"impala.impala": "Impala", "ppo.appo": "APPO", "ppo.ddppo": "DDPPO", "ppo.ppo": "PPO"}
OLD |= {"sac.sac": "SAC"}
NEW = {"a2c": "A2C", "a3c": "A3C", "apex_dqn": "ApexDQN", "appo": "APPO", "ddppo": "DDPPO"}
NEW |= {"dqn": "DQN", "impala": "IMPALA", "ppo": "PPO", "sac": "SAC"}


@pytest.mark.parametrize("path", OLD)
def test_old_module_has_its_trainer(path: str) -> None:
    module = importlib.import_module(f"polopt.rllib.agents.{path}")
    trainer = getattr(module, f"{OLD[path]}Trainer")
    assert trainer.__qualname__ == f"{OLD[path]}Trainer"
    assert module.DEFAULT_CONFIG is trainer.DEFAULT_CONFIG
    assert trainer.DEFAULT_CONFIG.algorithm is trainer


@pytest.mark.parametrize("path", NEW)
def test_new_module_has_its_algorithm_and_its_builder(path: str) -> None:
    module = importlib.import_module(f"polopt.rllib.algorithms.{path}")
    algorithm, builder = getattr(module, NEW[path]), getattr(module, f"{NEW[path]}Config")
    assert algorithm.__qualname__ == NEW[path]
    assert builder().algo_class is algorithm
    assert module.DEFAULT_CONFIG is algorithm.DEFAULT_CONFIG


def test_modules_are_found_as_attributes_and_by_from() -> None:
    from polopt.rllib import agents
    from polopt.rllib.agents import dqn

    assert agents.dqn is dqn is importlib.import_module("polopt.rllib.agents.dqn")
    assert rllib.agents.ppo.PPOTrainer is agents.ppo.PPOTrainer
    assert "PPOTrainer" in dir(agents.ppo)


def test_default_configs_have_the_names_of_their_generation() -> None:
    from polopt.rllib.agents import dqn, ppo
    from polopt.rllib.agents.dqn.apex import APEX_DEFAULT_CONFIG

    config = ppo.DEFAULT_CONFIG.copy()
    config["num_workers"] = 1
    assert config["num_env_runners"] == 1
    assert config["sgd_minibatch_size"] == config["minibatch_size"] == 128
    assert (config["lr"], config["train_batch_size"], config["num_sgd_iter"]) == (5e-5, 4000, 30)
    assert config["model"]["fcnet_hiddens"] == [256, 256]
    assert ppo.DEFAULT_CONFIG["num_workers"] == 2, "a copy is independent"
    assert dqn.DEFAULT_CONFIG["target_network_update_freq"] == 500
    assert dqn.DEFAULT_CONFIG["exploration_config"]["final_epsilon"] == 0.02
    assert APEX_DEFAULT_CONFIG["n_step"] == 3


#: What nobody can import, and what the error must name.
REFUSED = {
    "from polopt.rllib.agents.ppo import PPOEagerTFPolicy": "only PyTorch",
    "import polopt.rllib.agents.dqn.distributional_q_tf_model": "only PyTorch",
    "from polopt.rllib.models.tf.visionnet import VisionNetwork": "only PyTorch",
    "import polopt.rllib.algorithms.marwil": "no offline data",
    "from polopt.rllib.algorithms.ppo import PPOConfg": "did you mean .*ppo.PPOConfig",
    "from polopt.rllib.connectors.env_to_module import MeanStdFilter": "no connectors",
    "from polopt.rllib.examples.env.random_env import RandomEnv": "into your script",
    "from polopt.rllib.evaluation.postprocessing import compute_advantages": "write-a-policy",
    "from polopt.rllib.optimizers import AsyncGradientsOptimizer": "optimizer='async_gradients'",
    "from polopt.rllib.agents.es import ESTrainer": "no evolution strategies",
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_is_not_offered_says_what_to_use(code: str) -> None:
    with pytest.raises(ImportError, match=f"does not offer ray.rllib.*{REFUSED[code]}"):
        exec(code)


def test_missing_attribute_is_an_attribute_error() -> None:
    from polopt.rllib.agents import ppo

    assert not hasattr(ppo, "PPOEagerTFPolicy")
    with pytest.raises(AttributeError, match="polopt has only PyTorch"):
        _ = ppo.PPOEagerTFPolicy
    assert not hasattr(rllib, "anything")


def test_each_place_of_the_table_exists() -> None:
    for module, names in MODULES.items():
        for name, place in names.items():
            assert module_paths.resolve(place, f"{module}.{name}") is not None
    assert len(MODULES) > 80
    for module in MODULES:
        parent = module.rpartition(".")[0]
        assert not parent or parent in MODULES, f"{parent} would be missing for {module}"


def test_other_processes_find_what_was_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    from polopt.rllib.agents import ppo
    from polopt.rllib.algorithms.ppo import PPO

    data = pickle.dumps((ppo.PPOTrainer, PPO, ppo, ppo.DEFAULT_CONFIG))
    for name in [one for one in sys.modules if one.startswith("polopt.rllib.a")]:
        if name.removeprefix("polopt.rllib.") in MODULES:  # another process has not imported them
            monkeypatch.delitem(sys.modules, name)
    trainer, new, module, config = pickle.loads(data)
    assert (trainer, new) == (ppo.PPOTrainer, PPO)
    assert module is not ppo
    assert module.PPOTrainer is trainer
    assert config == ppo.DEFAULT_CONFIG


def test_classes_of_policies_are_names_of_policies(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "polopt"):
        from polopt.rllib.agents.a3c.a3c_tf_policy import A3CTFPolicy
    assert "A3CTFPolicy: the policy learns with PyTorch" in caplog.text
    assert A3CTFPolicy == "a3c"
    from polopt.rllib.agents.a3c.a3c_torch_policy import A3CTorchPolicy
    from polopt.rllib.agents.ppo import APPOTorchPolicy, PPOTorchPolicy
    from polopt.rllib.algorithms.dqn import DQNTorchPolicy

    found = (A3CTorchPolicy, APPOTorchPolicy, PPOTorchPolicy, DQNTorchPolicy)
    assert found == ("a3c", "appo", "ppo", "dqn")
    config = rllib.PPOConfig().multi_agent(policies={"a": (PPOTorchPolicy, None, None, {})})
    assert config.policies == {"a": {}}, "the policy of the preset"


def test_utilities_of_scripts() -> None:
    import numpy as np
    import torch

    from polopt.rllib.env.env_context import EnvContext
    from polopt.rllib.utils.framework import try_import_tf, try_import_torch
    from polopt.rllib.utils.metrics import ENV_RUNNER_RESULTS, EPISODE_RETURN_MEAN
    from polopt.rllib.utils.numpy import convert_to_numpy, softmax
    from polopt.rllib.utils.test_utils import check, check_learning_achieved
    from polopt.rllib.utils.typing import AgentID

    assert AgentID is Any
    assert try_import_torch() == (torch, torch.nn)
    assert try_import_tf() == (None, None, None)
    assert f"{ENV_RUNNER_RESULTS}/{EPISODE_RETURN_MEAN}" == "env_runners/episode_return_mean"
    np.testing.assert_allclose(softmax(convert_to_numpy(torch.zeros(2))), [0.5, 0.5])
    context = EnvContext({"size": 3}, worker_index=2)
    assert (context["size"], context.worker_index, context.vector_index) == (3, 2, 0)
    check({"a": [1.0]}, {"a": [1.0]})
    with pytest.raises(AssertionError):
        check(1.0, 2.0)

    result = SimpleNamespace(metrics={"env_runners": {"episode_return_mean": 7.0}})
    check_learning_achieved([result], 7.0)
    with pytest.raises(ValueError, match=r"of 8\.0 not reached: the best value is 7"):
        check_learning_achieved([result], 8.0)


def test_environments_of_examples() -> None:
    from polopt.rllib.examples.env.multi_agent import MultiAgentCartPole
    from polopt.rllib.examples.envs.classes.stateless_cartpole import StatelessCartPole

    assert len(MultiAgentCartPole({"num_agents": 3}).reset(seed=1)[0]) == 3
    env = StatelessCartPole({})
    observation, _ = env.reset(seed=1)
    assert observation in env.observation_space
    assert observation.tolist() == pytest.approx([env.state[0], env.state[2]])
    observation, reward, *_ = env.step(0)
    assert (observation.shape, reward) == ((2,), 1.0)


def test_copies_of_an_environment_are_agents() -> None:
    from polopt.rllib.env.multi_agent_env import make_multi_agent

    env: Any = make_multi_agent("CartPole-v1")({"num_agents": 2})
    observations, _ = env.reset(seed=1)
    assert set(observations) == set(env.get_agent_ids()) == {0, 1}
    over = {"__all__": False}
    while not over["__all__"]:
        acting = {agent: 1 for agent in observations if not over.get(agent)}
        observations, rewards, over, _, _ = env.step(acting)
    assert set(rewards) <= {0, 1}
