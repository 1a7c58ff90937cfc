"""`Experiment`: the parsed config of a trainer. Also all checks of options, in the order in which
they run. All of them run before any actor of the run starts:

1. `read_config` finds the owner of each key of the flat config, and each config class checks its
   own options (`Config.parse`). All wrong keys are reported in one error.
2. `CONFIG_CHECKS` check the parsed options together. They need no environment. `Experiment.parse`
   runs them, under Tune also in the user's program.
3. `START_CHECKS` make one environment to check its spaces, and need the machine on which the run
   starts. `checked_plan` runs them.

A strategy, a policy and an add-on add checks with the methods of `polopt.common.checks.Checks`.
`plugins_accept_options`, `evaluation_has_weights` and `plugins_accept_spaces` call these methods.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import gymnasium
import torch
from gymnasium.envs.registration import EnvSpec

from polopt.common.add_ons import add_ons
from polopt.common.checks import Checks
from polopt.common.config import Config, ConfigError, shown
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.learning.schedules import Schedule
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.ray_session import attach_or_start
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.callbacks import resolve_callbacks
from polopt.rollouts.workers.worker_config import WorkerConfig, make_worker_config
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.evaluation import evaluation_config
from polopt.trainers.flat_config import NO_ENV, read_config
from polopt.trainers.trainer_config import TrainerConfig

logger = logging.getLogger("polopt")

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Experiment:
    """The parsed config of a trainer. Each part is validated by the class that owns it."""

    trainer: TrainerConfig
    rollout: RolloutConfig
    policy_name: str
    policy_class: type[Policy]
    policy: PolicyConfig
    optimizer_name: str
    optimizer_class: type[PolicyOptimizer]
    optimizer: OptimizerConfig
    add_ons: tuple[Config, ...] = ()

    @classmethod
    def parse(cls, options: Mapping[str, Any], preset: Mapping[str, Any]) -> Experiment:
        """Parses a flat config dict. Passes each key to the config class that owns this key.

        Args:
            options: the user's flat dict. The value of `optimizer` or `policy` is a registered
                name, `module:Class`, a class, or a dict. Such a dict has the key `name` and
                options that apply only to this optimizer or policy. `options` may also have the key
                `preset`, whose value is a preset in one of these forms.
            preset: options of the preset that differ from the defaults. `options` override them,
                but may not name an optimizer or policy other than the preset's.

        Raises:
            ConfigError: keys are unknown or values are wrong. The message has one line for each
                wrong key. Also raised if one of `CONFIG_CHECKS` fails.
        """
        experiment = cls(**read_config(options, preset))
        for check in CONFIG_CHECKS:
            check(experiment)
        return experiment

    def to_dict(self) -> dict[str, Any]:
        """Returns a flat config dict. For a custom network, the dict holds the registered name of
        the network's class. `parse` accepts the dict. If the class is not registered, the dict
        holds the name of the class, and `parse` does not accept the dict."""
        env = self.rollout.env
        if isinstance(env, EnvSpec) and env == gymnasium.registry.get(env.id):
            env = env.id
        return {
            **self.trainer.to_dict(),
            **{key: value for part in self.add_ons for key, value in part.to_dict().items()},
            **self.rollout.to_dict(),
            "env": env,
            "policy": {
                "name": self.policy_name,
                **self.policy.to_dict(),
                "model": self.policy.model.named(),
            },
            "optimizer": {"name": self.optimizer_name, **self.optimizer.to_dict()},
        }

    def add_on(self, cls: type[C]) -> C:
        """Returns the options of an add-on. `cls` is the config class of the add-on."""
        return next(part for part in self.add_ons if isinstance(part, cls))

    def make_worker_config(self) -> WorkerConfig:
        """Returns the config of the workers. To check the config, this method makes one environment
        and one policy, and closes the environment.

        Raises:
            ConfigError: the environment is unknown or cannot be made, a space is not supported, or
                `callbacks` has a wrong value.
        """
        callbacks = resolve_callbacks(self.trainer.callbacks)
        return make_worker_config(self.rollout, self.policy_class, self.policy, callbacks=callbacks)

    @property
    def further_processes(self) -> list[dict[str, float]]:
        """The resources of each process that the optimizer starts in addition to the workers."""
        return self.optimizer_class.further_processes(self.optimizer)

    @property
    def num_remote_processes(self) -> int:
        """The number of remote processes of the run. These processes are the `num_workers` workers,
        the `num_workers_below` rollout workers of each of them, the evaluation workers, and the
        processes that the optimizer starts."""
        return self._num_remote_workers + len(self.further_processes)

    @property
    def remote_cpus(self) -> float:
        """The number of Ray CPUs that all remote processes of the run reserve."""
        further = sum(process.get("CPU", 0.0) for process in self.further_processes)
        return self._num_remote_workers * self.rollout.num_cpus_per_worker + further

    @property
    def _num_remote_workers(self) -> int:
        places = self.rollout.num_workers * (1 + self.rollout.num_workers_below)
        return places + self.trainer.evaluation_num_workers


@dataclass
class RunPlan:
    """What a trainer starts. The checks of `START_CHECKS` fill it in.

    Attributes:
        experiment: the parsed config.
        device: torch device of the driver's policy.
        workers: config of the training workers.
        worker_set: class of the set of the training workers.
        evaluation: config of the evaluation workers. None without `evaluation_interval`.
    """

    experiment: Experiment
    device: str = "cpu"
    workers: WorkerConfig = None  # type: ignore[assignment]
    worker_set: type[WorkerSet] = WorkerSet
    evaluation: WorkerConfig | None = None


def checked_plan(experiment: Experiment) -> RunPlan:
    """Runs `START_CHECKS`, and returns the plan of the run.

    Raises:
        ConfigError: see each of `START_CHECKS`.
    """
    plan = RunPlan(experiment)
    for check in START_CHECKS:
        check(plan)
    return plan


# ---- checks of the parsed options ----------------------------------------------------------------


def env_is_given(experiment: Experiment) -> None:
    """Checks that the config has an environment."""
    if experiment.rollout.env is None:
        raise ConfigError(NO_ENV)


def policy_fits_optimizer(experiment: Experiment) -> None:
    """Checks that the optimizer can use the policy. The error names the optimizers that can use
    this policy, and the policies that this optimizer can use."""
    optimizer, policy = experiment.optimizer_class, experiment.policy_class
    given = optimizer.batches_of(experiment.optimizer)
    problem = _why_not(optimizer, policy, given)
    if not problem:
        return
    policies = [
        repr(name)
        for name in POLICIES.names()
        if not _why_not(optimizer, POLICIES.get(name), given)
    ]
    optimizers = []
    for name in OPTIMIZERS.names():
        other: type[PolicyOptimizer] = OPTIMIZERS.get(name)
        if not _why_not(other, policy, other.learns_from):
            optimizers.append(repr(name))
        for kind, (key, value) in other.also_learns_from.items():
            if not _why_not(other, policy, kind):
                optimizers.append(f"{name!r} with {key}={value!r}")
    raise ConfigError(
        f"policy {experiment.policy_name!r} with optimizer {experiment.optimizer_name!r}: "
        f"{problem}. Allowed: optimizer {', '.join(optimizers) or 'of your own'}, or policy "
        f"{', '.join(policies) or 'of your own'}"
    )


def _why_not(
    optimizer_class: type[PolicyOptimizer], policy_class: type[Policy], given: type
) -> str:
    """Returns why the optimizer cannot use the policy, or an empty string if it can.

    Args:
        optimizer_class: the class of the optimizer.
        policy_class: the class of the policy.
        given: the type of the batches that the optimizer gives to the policy.
    """
    learned = policy_class.learns_from
    if given is not learned:
        return (
            f"the policy learns from {learned.__name__}, but the optimizer gives it "
            f"{given.__name__}"
        )
    if optimizer_class.needs_gradients and not policy_class.gives_gradients():
        return (
            "the optimizer applies gradients that workers compute, but the policy defines neither "
            "minibatch_gradients nor compute_gradients"
        )
    return ""


def optimizer_has_workers(experiment: Experiment) -> None:
    """Checks that an optimizer that needs remote workers has some."""
    experiment.optimizer_class.check_workers(experiment.rollout)


def plugins_accept_options(experiment: Experiment) -> None:
    """Calls `Checks.check` of the strategy, the policy and each add-on."""
    for plugin, config in _plugins(experiment):
        plugin.check(experiment.rollout, config)


def evaluation_has_weights(experiment: Experiment) -> None:
    """With `evaluation_interval`, calls `Checks.check_evaluation` of the strategy, the policy and
    each add-on."""
    if experiment.trainer.evaluation_interval is not None:
        for plugin, config in _plugins(experiment):
            plugin.check_evaluation(config)


def _plugins(experiment: Experiment) -> Iterator[tuple[Checks | type[Checks], Any]]:
    """Yields the strategy, the policy and the add-ons, each with its options."""
    yield experiment.optimizer_class, experiment.optimizer
    yield experiment.policy_class, experiment.policy
    for add_on in add_ons():
        cls = add_on.config_class
        own = [part for part in experiment.add_ons if cls is not None and isinstance(part, cls)]
        if cls is None or own:  # the module of the environment may have registered a new add-on
            yield add_on, next(iter(own), None)


# ---- checks where the run starts -----------------------------------------------------------------


def gpu_exists(plan: RunPlan) -> None:
    """Checks that torch finds a GPU if the driver reserves one."""
    num_gpus = plan.experiment.trainer.num_gpus
    if num_gpus and not torch.cuda.is_available():
        raise ConfigError(f"key 'num_gpus': got {num_gpus:g}, but torch finds no GPU. Allowed: 0")
    plan.device = "cuda" if num_gpus else "cpu"


def workers_can_sample(plan: RunPlan) -> None:
    """Makes one environment and one policy, and closes the environment. Checks that the callbacks
    can be found, that the environment can be made, that the policy supports its spaces, and that
    the user's values can be sent to workers."""
    plan.workers = plan.experiment.make_worker_config()


def plugins_accept_spaces(plan: RunPlan) -> None:
    """Calls `Checks.check_spaces` of the strategy, the policy and each add-on."""
    for plugin, config in _plugins(plan.experiment):
        plugin.check_spaces(plan.workers, config)


def options_have_an_effect(plan: RunPlan) -> None:
    """Warns of options that are allowed, but are probably a mistake."""
    for text in doubtful(plan.experiment):
        logger.warning(text)


def evaluation_can_play(plan: RunPlan) -> None:
    """With `evaluation_interval`, checks the environments of evaluation. See
    `evaluation_config`."""
    plan.evaluation = evaluation_config(plan.experiment.trainer, plan.workers)


def workers_below_can_start(plan: RunPlan) -> None:
    """Checks that an add-on starts the workers below the workers, if the config asks for some."""
    chosen = (add_on.worker_set(plan.workers) for add_on in add_ons())
    kind = next((cls for cls in chosen if cls is not None), None)
    below = plan.experiment.rollout.num_workers_below
    if kind is None and below:
        raise ConfigError(
            f"key 'num_workers_below': got {below}, but no add-on starts workers below the "
            "workers. Allowed: 0, or polopt with all its add-ons"
        )
    plan.worker_set = kind or WorkerSet


def ray_has_resources(plan: RunPlan) -> None:
    """Connects to Ray if the run has processes besides the driver. Checks that Ray answers, and
    that the memory of this machine is large enough. Warns if Ray has too few CPUs."""
    run = plan.experiment
    if run.num_remote_processes:
        evaluation_cpus = run.trainer.evaluation_num_workers * run.rollout.num_cpus_per_worker
        attach_or_start(run.remote_cpus, run.num_remote_processes, evaluation_cpus=evaluation_cpus)


def doubtful(experiment: Experiment) -> list[str]:
    """Returns a warning for each option that is allowed, but is probably a mistake."""
    policy, texts = experiment.policy, []
    rates = {
        name: getattr(policy, name)
        for name in type(policy).model_fields
        if name == "lr" or name.endswith("_lr")
    }
    further = [value for name, value in rates.items() if name != "lr"]
    if further and None not in further:
        del rates["lr"]  # no segment uses it
    for name, rate in rates.items():
        if rate is not None and Schedule(rate).is_zero:
            texts.append(f"{name}={shown(rate)}: the weights with this learning rate never change")
    size, rows = getattr(policy, "sgd_minibatch_size", None), _largest_batch(experiment)
    field = type(policy).model_fields.get("sgd_minibatch_size")
    if field is not None and size not in (None, field.default) and size > rows:
        texts.append(
            f"sgd_minibatch_size={size}: a batch has at most {rows} rows, so each epoch is one "
            "update with the whole batch. For more rows, raise rollout_fragment_length, "
            "num_envs_per_worker or num_workers"
        )
    return texts


def _largest_batch(experiment: Experiment) -> int:
    """Returns an upper bound of the number of rows from which a learner learns at once, if it
    learns from fragments."""
    rollout = experiment.rollout
    rows = rollout.rollout_fragment_length * rollout.num_envs_per_worker
    rows *= max(rollout.num_workers_below, 1)
    given = getattr(experiment.optimizer, "train_batch_size", None)
    if given is not None:
        return int(-(-given // rows) * rows)
    learns_alone = experiment.optimizer_class.needs_gradients
    return rows * (1 if learns_alone else max(rollout.num_workers, 1))


CONFIG_CHECKS: tuple[Callable[[Experiment], None], ...] = (
    env_is_given,
    policy_fits_optimizer,
    optimizer_has_workers,
    plugins_accept_options,
    evaluation_has_weights,
)

START_CHECKS: tuple[Callable[[RunPlan], None], ...] = (
    gpu_exists,
    workers_can_sample,
    plugins_accept_spaces,
    options_have_an_effect,
    evaluation_can_play,
    workers_below_can_start,
    ray_has_resources,
)
