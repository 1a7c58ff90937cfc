"""Makes the module paths of RLlib importable below `polopt.rllib`, from one table.

    import polopt.rllib.agents.ppo as ppo                 # RLlib up to 1.13
    from polopt.rllib.algorithms.ppo import PPOConfig     # RLlib 2
    from polopt.rllib.env.env_context import EnvContext

`MODULES` says what each module has. A path or a name that is not in the table raises an error that
names what to use instead. The import of `polopt.rllib` calls `install`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = "polopt.rllib"
#: The classes of RLlib's algorithms, by the names of their modules: the class in RLlib 2, the class
#: up to RLlib 1.13, and the config.
_ALGORITHMS = {
    "a2c": ("A2C", "A2CTrainer", "A2CConfig"),
    "a3c": ("A3C", "A3CTrainer", "A3CConfig"),
    "apex_dqn": ("ApexDQN", "ApexTrainer", "ApexDQNConfig"),
    "appo": ("APPO", "APPOTrainer", "APPOConfig"),
    "ddppo": ("DDPPO", "DDPPOTrainer", "DDPPOConfig"),
    "dqn": ("DQN", "DQNTrainer", "DQNConfig"),
    "impala": ("IMPALA", "ImpalaTrainer", "IMPALAConfig"),
    "pg": ("PG", "PGTrainer", "PGConfig"),
    "ppo": ("PPO", "PPOTrainer", "PPOConfig"),
    "sac": ("SAC", "SACTrainer", "SACConfig"),
}
#: Further names of the same classes.
_SAME = {
    "IMPALA": ("Impala",),
    "ImpalaTrainer": ("IMPALATrainer",),
    "IMPALAConfig": ("ImpalaConfig",),
    "ApexTrainer": ("ApexDQNTrainer",),
    "ApexDQNConfig": ("ApexConfig",),
}
#: The modules of `agents` up to RLlib 1.13, and the algorithms in them. The first one is the one of
#: `DEFAULT_CONFIG`.
_AGENTS = {
    "a3c": ("a3c", "a2c"),
    "a3c.a2c": ("a2c",),
    "a3c.a3c": ("a3c",),
    "dqn": ("dqn", "apex_dqn"),
    "dqn.apex": ("apex_dqn",),
    "dqn.dqn": ("dqn",),
    "impala": ("impala",),
    "impala.impala": ("impala",),
    "pg": ("pg",),
    "pg.pg": ("pg",),
    "ppo": ("ppo", "appo", "ddppo"),
    "ppo.appo": ("appo",),
    "ppo.ddppo": ("ddppo",),
    "ppo.ppo": ("ppo",),
    "sac": ("sac",),
    "sac.sac": ("sac",),
}
_CALLBACKS = {
    "DefaultCallbacks": "user_callbacks:DefaultCallbacks",
    "RLlibCallback": "user_callbacks:RLlibCallback",
    "MultiCallbacks": "user_callbacks:MultiCallbacks",
    "make_multi_callbacks": "user_callbacks:make_multi_callbacks",
}
_CONFIG = {
    "AlgorithmConfig": "algorithm_config:AlgorithmConfig",
    "TrainerConfig": "algorithm_config:AlgorithmConfig",
}
_ALGORITHM = {"Algorithm": "algorithm:Algorithm", "Trainer": "algorithm:Algorithm", **_CONFIG}
_REGISTRY = {
    "get_agent_class": "registration:algorithm_class",
    "get_algorithm_class": "registration:algorithm_class",
    "get_trainer_class": "registration:algorithm_class",
    "get_trainable_cls": "registration:algorithm_class",
}
_EPISODES = dict.fromkeys(
    ("Episode", "EpisodeV2", "MultiAgentEpisode", "SingleAgentEpisode"),
    "user_callbacks:CallbackEpisode",
)
_WORKERS = {
    **dict.fromkeys(
        ("EnvRunner", "MultiAgentEnvRunner", "RolloutWorker", "SingleAgentEnvRunner"),
        "views:WorkerView",
    ),
    **dict.fromkeys(("EnvRunnerGroup", "WorkerSet"), "views:WorkersView"),
}
_ENVIRONMENTS = {
    "EnvContext": "script_utils:EnvContext",
    "MultiAgentEnv": "script_utils:MultiAgentEnv",
    "BaseEnv": "script_utils:BaseEnv",
    "make_multi_agent": "script_utils:make_multi_agent",
    "PettingZooEnv": "script_utils:PettingZooEnv",
    "ParallelPettingZooEnv": "script_utils:PettingZooEnv",
}
#: polopt flattens all observations, so a function that makes this connector changes nothing.
_CONNECTORS = {"FlattenObservations": "script_utils:unchanged"}
_EXAMPLES = {
    "MultiAgentCartPole": "script_utils:MultiAgentCartPole",
    "MultiAgentPendulum": "script_utils:MultiAgentPendulum",
    "StatelessCartPole": "script_utils:StatelessCartPole",
}
_MODELS = {
    "ModelCatalog": "custom_models:ModelCatalog",
    "MODEL_DEFAULTS": "rllib_options:model_defaults",
    "TorchModelV2": "custom_models:TorchModelV2",
    "ModelV2": "custom_models:TorchModelV2",
    "RecurrentNetwork": "custom_models:RecurrentNetwork",
    "TorchRNN": "custom_models:TorchRNN",
    "FullyConnectedNetwork": "custom_models:FullyConnectedNetwork",
    "SlimConv2d": "custom_models:SlimConv2d",
    "SlimFC": "custom_models:SlimFC",
    "normc_initializer": "custom_models:normc_initializer",
    "TFModelV2": "custom_models:TFModelV2",
    "DQNTorchModel": "custom_models:DQNTorchModel",
    "AppendBiasLayer": "custom_models:AppendBiasLayer",
}
_POLICIES = {
    "Policy": "views:PolicyView",
    "PolicySpec": "multi_agent:PolicySpec",
    "TorchPolicy": "views:PolicyView",
}
_BATCHES = {
    "DEFAULT_POLICY_ID": "views:DEFAULT_POLICY_ID",
    "SampleBatch": "script_utils:SampleBatch",
    "MultiAgentBatch": "script_utils:MultiAgentBatch",
}
_MODULE_SPECS = {
    "RLModule": "views:ModuleView",
    "MultiRLModule": "views:ModuleView",
    "RLModuleSpec": "multi_agent:RLModuleSpec",
    "SingleAgentRLModuleSpec": "multi_agent:RLModuleSpec",
    "MultiRLModuleSpec": "multi_agent:MultiRLModuleSpec",
    "MultiAgentRLModuleSpec": "multi_agent:MultiRLModuleSpec",
    "DefaultModelConfig": "builders:DefaultModelConfig",
}
_FRAMEWORK = {
    "try_import_jax": "script_utils:try_import_jax",
    "try_import_tf": "script_utils:try_import_tf",
    "try_import_tfp": "script_utils:try_import_tfp",
    "try_import_torch": "script_utils:try_import_torch",
    "get_activation_fn": "script_utils:get_activation_fn",
}
_ANNOTATIONS = dict.fromkeys(
    ("Deprecated", "DeveloperAPI", "OldAPIStack", "OverrideToImplementCustomLogic", "PublicAPI"),
    "script_utils:unchanged",
)
_ANNOTATIONS |= {"override": "script_utils:override"}
_TESTS = {
    name: f"script_utils:{name}"
    for name in (
        "add_rllib_example_script_args",
        "check",
        "check_learning_achieved",
        "run_rllib_example_script_experiment",
    )
}
_CHECK_ENV = {"check_env": "script_utils:unchanged"}
_DICTS = {"merge_dicts": "script_utils:merge_dicts", "deep_update": "script_utils:deep_update"}
_COLUMNS = {
    "Columns": "script_utils:Columns",
    "DEFAULT_POLICY_ID": "views:DEFAULT_POLICY_ID",
}
_IDS = {
    "DEFAULT_AGENT_ID": "script_utils:DEFAULT_AGENT_ID",
    "DEFAULT_MODULE_ID": "views:DEFAULT_POLICY_ID",
    "DEFAULT_POLICY_ID": "views:DEFAULT_POLICY_ID",
}
_COMPONENTS = {
    f"COMPONENT_{name}": "script_utils:constant"
    for name in ("ENV_RUNNER", "LEARNER", "LEARNER_GROUP", "OPTIMIZER", "RL_MODULE")
}
#: Modules that any name may be asked of, and the function that makes the value from the name.
_ANY_NAME = {"utils.metrics": "script_utils:constant", "utils.typing": "script_utils:any_type"}

#: The modules of RLlib below `polopt.rllib`, and the names in them. A value is `module:name`, below
#: `polopt.rllib` or absolute.
MODULES: dict[str, Mapping[str, str]] = {
    "agents": {"with_common_config": "script_utils:with_common_config", **_CALLBACKS, **_ALGORITHM},
    "agents.trainer": {
        **_ALGORITHM,
        "COMMON_CONFIG": "script_utils:COMMON_CONFIG",
        "with_base_config": "script_utils:merge_dicts",
        "with_common_config": "script_utils:with_common_config",
    },
    "algorithms": {**_ALGORITHM, **_CALLBACKS},
    "core": {**_IDS, **_COLUMNS, **_COMPONENTS},
    "env": {**_ENVIRONMENTS, **_WORKERS},
    "evaluation": {**_EPISODES, **_WORKERS, **_BATCHES},
    "policy": {**_POLICIES, **_BATCHES},
    "registry": {"register_env": "ray.tune.registry:register_env"},
    "utils": {**_FRAMEWORK, **_DICTS, **_ANNOTATIONS, **_TESTS, **_CHECK_ENV},
    "utils.deprecation": {"Deprecated": "script_utils:unchanged"},
    "utils.metrics.metrics_logger": {"MetricsLogger": "user_callbacks:MetricsLogger"},
    "utils.numpy": {
        "convert_to_numpy": "script_utils:convert_to_numpy",
        "softmax": "script_utils:softmax",
    },
    "utils.torch_utils": {
        "FLOAT_MAX": "script_utils:FLOAT_MAX",
        "FLOAT_MIN": "script_utils:FLOAT_MIN",
        "convert_to_torch_tensor": "script_utils:convert_to_torch_tensor",
    },
}
#: Further modules, which have the same names.
_SAME_NAMES: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("agent agents.agent agents.registry algorithms.registry", _REGISTRY),
    ("agents.callbacks algorithms.callbacks callbacks callbacks.callbacks", _CALLBACKS),
    ("algorithms.algorithm", _ALGORITHM),
    ("algorithms.algorithm_config", _CONFIG),
    ("connectors.env_to_module connectors.env_to_module.flatten_observations", _CONNECTORS),
    ("core.columns", _COLUMNS),
    (
        "core.rl_module core.rl_module.default_model_config core.rl_module.marl_module",
        _MODULE_SPECS,
    ),
    ("core.rl_module.multi_rl_module core.rl_module.rl_module", _MODULE_SPECS),
    ("env.base_env env.env_context env.multi_agent_env env.wrappers", _ENVIRONMENTS),
    ("env.wrappers.pettingzoo_env", _ENVIRONMENTS),
    ("env.wrappers.atari_wrappers", {"wrap_deepmind": "script_utils:wrap_deepmind"}),
    ("env.env_runner env.env_runner_group env.multi_agent_env_runner", _WORKERS),
    ("env.single_agent_env_runner evaluation.rollout_worker evaluation.worker_set", _WORKERS),
    ("env.multi_agent_episode env.single_agent_episode", _EPISODES),
    ("evaluation.episode evaluation.episode_v2", _EPISODES),
    ("evaluation.sample_batch policy.sample_batch", _BATCHES),
    ("examples.env examples.env.multi_agent examples.env.stateless_cartpole", _EXAMPLES),
    ("examples.envs.classes examples.envs.classes.multi_agent", _EXAMPLES),
    ("examples.envs.classes.stateless_cartpole", _EXAMPLES),
    ("models models.catalog models.modelv2 models.tf models.tf.tf_modelv2 models.torch", _MODELS),
    ("models.torch.fcnet models.torch.misc models.torch.recurrent_net", _MODELS),
    ("models.torch.torch_modelv2", _MODELS),
    ("agents.dqn.dqn_torch_model algorithms.dqn.dqn_torch_model", _MODELS),
    ("policy.policy", _POLICIES),
    ("utils.annotations", _ANNOTATIONS),
    ("utils.framework", _FRAMEWORK),
    ("utils.pre_checks.env", _CHECK_ENV),
    ("utils.test_utils", _TESTS),
    ("connectors core.models core.models.configs examples examples.envs utils.metrics", {}),
    ("utils.pre_checks utils.typing", {}),
)
MODULES |= {path: names for paths, names in _SAME_NAMES for path in paths.split()}


def _of_algorithm(name: str) -> dict[str, str]:
    new, old, config = _ALGORITHMS[name]
    found = {new: f"algorithm:{new}", old: f"algorithm:{old}", config: f"builders:{config}"}
    agent = old.replace("Trainer", "Agent")  # up to RLlib 0.7
    same = {name: place for key, place in found.items() for name in _SAME.get(key, ())}
    return {**found, **same, agent: found[old], **_policies(name)}


def _policies(name: str) -> dict[str, str]:
    """Returns the classes of policies in the modules of an algorithm."""
    stem = _ALGORITHMS[name][0]
    names = (stem, *_SAME.get(stem, ()))
    kinds = ("Torch", "TF", "TF1", "TF2")
    return {f"{one}{kind}Policy": "multi_agent:policy_class" for one in names for kind in kinds}


def _with_default_config(old: str, names: dict[str, str]) -> dict[str, str]:
    return {**names, "DEFAULT_CONFIG": f"algorithm:{old}.DEFAULT_CONFIG"}


for _name in _ALGORITHMS:
    _names = _with_default_config(_ALGORITHMS[_name][0], _of_algorithm(_name))
    MODULES[f"algorithms.{_name}"] = MODULES[f"algorithms.{_name}.{_name}"] = _names
    for _kind in ("tf", "torch"):
        MODULES[f"algorithms.{_name}.{_name}_{_kind}_policy"] = _policies(_name)
for _name, _members in _AGENTS.items():
    _own: dict[str, str] = {}
    for _member in _members:
        _own |= _of_algorithm(_member)
        _default = f"{_member.removesuffix('_dqn').upper()}_DEFAULT_CONFIG"
        _own[_default] = f"algorithm:{_ALGORITHMS[_member][1]}.DEFAULT_CONFIG"
    MODULES[f"agents.{_name}"] = _with_default_config(_ALGORITHMS[_members[0]][1], _own)
    if "." in _name:
        for _kind in ("tf", "torch"):
            MODULES[f"agents.{_name}_{_kind}_policy"] = _policies(_members[0])
for _name in ("a3c", "dqn", "ppo"):  # up to RLlib 0.5
    MODULES[_name] = MODULES[f"agents.{_name}"]
#: Names that `from polopt.rllib import ...` also finds.
TOP = {**_ENVIRONMENTS, **_POLICIES, **_BATCHES, **_WORKERS}

_NO_TENSORFLOW = "polopt has only PyTorch. Use the module of RLlib for torch"
_NO_OFFLINE = "polopt has no offline data"
_OWN_POLICY = "to change a loss or a batch, write a policy of your own (docs/write-a-policy.md)"
_OWN_OPTIMIZER = (
    "to change which processes sample and learn, write an optimizer of your own "
    "(docs/write-an-optimizer.md)"
)
_COPY = "take the code of RLlib's example into your script"
#: What to use instead of modules and names that are not offered, by the begin of their path.
_INSTEAD = {
    "agents.trainer_template": _OWN_OPTIMIZER,
    "connectors": "polopt has no connectors. Wrap the environment (docs/wrappers.md)",
    "contrib": "polopt has no contributed algorithms",
    "core.learner": _OWN_POLICY,
    "core.rl_module.torch": 'use model={"custom": MyModule}, a torch.nn.Module (docs/networks.md)',
    "env.external_env": "polopt steps its environments itself",
    "env.policy_client": "polopt steps its environments itself",
    "env.policy_server_input": "polopt steps its environments itself",
    "env.vector_env": "polopt takes gymnasium.vector.VectorEnv (docs/environments.md)",
    "evaluation.postprocessing": _OWN_POLICY,
    "examples": _COPY,
    "execution": _OWN_OPTIMIZER,
    "models.action_dist": "polopt chooses the distribution from the action space",
    "models.tf": _NO_TENSORFLOW,
    "models.torch.torch_action_dist": "polopt chooses the distribution from the action space",
    "offline": _NO_OFFLINE,
    "optimizers": "use import polopt, and options such as optimizer='async_gradients'",
    "policy.tf_policy": _NO_TENSORFLOW,
    "policy.torch_policy": _OWN_POLICY,
    "tuned_examples": _COPY,
    "utils.exploration": "use exploration_config with EpsilonGreedy, or the option epsilon",
    "utils.replay_buffers": "name the type as a string, such as 'PrioritizedEpisodeReplayBuffer'",
    "utils.schedules": "give a schedule as [[steps, value], ...]",
}


class _Finder(MetaPathFinder, Loader):
    """Finds and makes the modules of the table. Python asks it for modules of `polopt.rllib` that
    are no files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module of the table, or None for modules outside of
        `polopt.rllib`.

        Raises:
            ModuleNotFoundError: the table has no such module. The message says what to use.
        """
        package, dot, name = fullname.partition(f"{_PACKAGE}.")
        if package or not dot:
            return None
        if name in MODULES:
            return ModuleSpec(fullname, self, is_package=True)
        raise ModuleNotFoundError(_refusal(name))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the module. It resolves its names when they are asked for."""
        watch_tune()
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = self.__name__.removeprefix(f"{_PACKAGE}.")
        if f"{path}.{name}" in MODULES:
            return import_module(f"{self.__name__}.{name}")
        place = MODULES[path].get(name)
        if place is None and path in _ANY_NAME and name[:1].isupper():
            place = _ANY_NAME[path]
        if place is None:
            raise AttributeError(_refusal(f"{path}.{name}"))
        value = resolve(place, f"{path}.{name}")
        setattr(self, name, value)
        return value

    def __reduce__(self) -> Any:
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        path = self.__name__.removeprefix(f"{_PACKAGE}.")
        below = [one[len(path) + 1 :] for one in MODULES if one.startswith(f"{path}.")]
        return sorted({*MODULES[path], *(one for one in below if "." not in one)})


def resolve(place: str, path: str) -> Any:
    """Returns the object of a place in the table.

    Args:
        place: `module:name`.
        path: the path under which the user asks for the object, for errors and constants.

    Raises:
        AttributeError: polopt does not offer the object.
    """
    module, _, name = place.partition(":")
    try:
        found: Any = import_module(module if "." in module else f"{_PACKAGE}.{module}")
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise AttributeError(_refusal(path)) from error
    if name in ("constant", "any_type", "policy_class"):
        return found(path.rpartition(".")[2])
    return found() if name == "model_defaults" else found


def _refusal(path: str) -> str:
    parts = path.split(".")
    starts = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    instead = next((_INSTEAD[start] for start in starts if start in _INSTEAD), "")
    if not instead and parts[0] in ("agents", "algorithms") and ".".join(parts[:2]) not in MODULES:
        from polopt.rllib.other_libraries import instead_of_algorithm

        instead = instead_of_algorithm(parts[-1].removesuffix("Trainer").removesuffix("Config"))
        instead = instead or instead_of_algorithm(parts[1:2] and parts[1])
    if not instead and ("TF" in path or "_tf_" in path):
        instead = _NO_TENSORFLOW
    if not instead and parts[-1][:1].isupper() and parts[-1].endswith("Policy"):
        instead = _OWN_POLICY
    if not instead:
        names = {*MODULES, *(f"{one}.{name}" for one, own in MODULES.items() for name in own)}
        names.discard(path)
        near = difflib.get_close_matches(path, names, 1, 0.8)
        instead = (
            f"did you mean {_PACKAGE}.{near[0]}" if near else "docs/migration-rllib.md says more"
        )
    return f"polopt does not offer ray.rllib.{path}: {instead}"


def watch_tune() -> None:
    """Makes Tune's experiments of this process warn if they train an algorithm of RLlib."""
    from polopt.trainers.tune_callbacks import add_callbacks

    add_callbacks()


def install() -> None:
    """Makes the modules of the table importable in this process."""
    if not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.append(_Finder())
