"""`PolicyOptimizerTrainer`: a thin Tune trainable around one policy optimizer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar

import ray
import torch
from ray import tune

from polopt.policies.config import ConfigError
from polopt.policies.policy import Policy
from polopt.policies.threads import limit_threads
from polopt.rollouts.gradient_worker import make_workers
from polopt.trainers.checkpoint_fallback import name_previous, read_or_fall_back
from polopt.trainers.checkpoints import CheckpointError, refuse_pickled, write_checkpoint
from polopt.trainers.config import Experiment
from polopt.trainers.portable import portable_config
from polopt.trainers.preparation import prepare
from polopt.trainers.results import make_result


class PolicyOptimizerTrainer(tune.Trainable):
    """Trains the policy that the config names with the optimizer that it names.

        tune.Tuner(
            PolicyOptimizerTrainer,
            param_space={
                "env": "CartPole-v1",
                "policy": "ppo",
                "optimizer": tune.grid_search(["sync_samples", "decentralized_allreduce"]),
            },
        ).fit()

    Works without Tune too: `trainer = PolicyOptimizerTrainer(config); trainer.train()`.

    Checkpoints hold weights, torch optimizer, schedules, counters and random numbers, and can be
    restored under another optimizer. What a resumed run repeats bit for bit is said at each
    optimizer's `get_state`.

    Class attribute `preset`: what differs from the defaults of the config classes.

    Raises:
        ConfigError: before any worker starts.
    """

    preset: ClassVar[dict[str, Any]] = {}

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """One bundle for the driver and one for each worker that the run can not start without, and
        for those below them."""
        experiment = Experiment.parse(config, cls.preset)
        driver, rollout = experiment.trainer, experiment.rollout
        head = {"CPU": driver.num_cpus_for_driver, "GPU": driver.num_gpus}
        worker = {
            "CPU": rollout.num_cpus_per_worker,
            "GPU": rollout.num_gpus_per_worker,
            "memory": rollout.memory_per_worker,
            **rollout.custom_resources_per_worker,
        }
        places = rollout.workers_needed * (1 + rollout.num_workers_below)
        bundles = [head, *([worker] * places)]
        nonzero = [{k: v for k, v in bundle.items() if v} for bundle in bundles]
        if not any(nonzero):
            nonzero = [{"CPU": 0.001}]  # Tune has no way to ask for nothing
        return tune.PlacementGroupFactory([nonzero[0], *(b for b in nonzero[1:] if b)])

    def setup(self, config: dict[str, Any]) -> None:
        """Builds workers and optimizer."""
        self.experiment = Experiment.parse(config, self.preset)
        # As many threads as CPUs asked for: idle ones spin, at the workers' cost.
        threads = min(int(self.experiment.trainer.num_cpus_for_driver), os.cpu_count() or 1)
        limit_threads(max(1, threads))
        worker_config, device = prepare(self.experiment), self._learner_device
        _ensure_ray(self.experiment)
        self.workers = make_workers(worker_config, device)
        self.optimizer = self._make_optimizer()

    @property
    def _learner_device(self) -> str:
        num_gpus = self.experiment.trainer.num_gpus
        if num_gpus and not torch.cuda.is_available():
            raise ConfigError(
                f"key 'num_gpus': got {num_gpus:g}, but torch finds no GPU; allowed: 0"
            )
        return "cuda" if num_gpus else "cpu"

    def _make_optimizer(self) -> Any:
        return self.experiment.optimizer_class(self.workers, self.experiment.optimizer)

    def step(self) -> dict[str, Any]:
        """One training iteration: optimizer steps until it is long enough."""
        limits = self.experiment.trainer
        started_s, sampled_before = time.perf_counter(), self.optimizer.num_env_steps_sampled
        steps = 0
        while True:
            self.optimizer.step()
            steps += 1
            sampled = self.optimizer.num_env_steps_sampled - sampled_before
            elapsed_s = time.perf_counter() - started_s
            if (
                sampled >= limits.min_sample_timesteps_per_iteration
                and elapsed_s >= limits.min_time_s_per_iteration
            ):
                return make_result(self.optimizer, sampled_before, elapsed_s, steps)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes tensors and JSON; see `polopt.trainers.checkpoints`."""
        state = {
            "trainer": type(self).__name__,
            # With the seed that was drawn, where the config left it open.
            "config": portable_config(self.experiment) | {"seed": self.workers.config.seed},
            "optimizer": self.optimizer.get_state(),
        }
        write_checkpoint(checkpoint_dir, state)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Takes back a checkpoint of any trainer whose policy has the same network; if it is
        damaged, the one before it, with a warning that names both.

        Raises:
            CheckpointError: missing, incomplete or damaged, and no whole one before it; or of
                another network, version or program.
        """
        found, state = read_or_fall_back(checkpoint)
        try:
            self.optimizer.set_state(state["optimizer"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            network = self.get_policy().get_state()["network"]
            previous = name_previous(
                found, lambda s: s["optimizer"]["policy"].get("network") == network
            )
            said = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise CheckpointError(f"checkpoint {found} does not fit: {said}{previous}") from None

    def restore(self, checkpoint_path: Any) -> None:
        """As every trainable, but for the file that Tune would unpickle if it lay there.

        Raises:
            CheckpointError: see `load_checkpoint`.
        """
        if isinstance(checkpoint_path, str | Path) and not Path(checkpoint_path).is_dir():
            checkpoint_path = str(read_or_fall_back(checkpoint_path)[0])
        refuse_pickled(checkpoint_path)
        super().restore(checkpoint_path)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Becomes the trainer that `new_config` makes; worker processes go on being used."""
        self.experiment = Experiment.parse(new_config, self.preset)
        self.optimizer.stop()
        worker_config = prepare(self.experiment)
        if not self.workers.reconfigure(worker_config, self._learner_device):
            self.workers.stop()
            self.workers = make_workers(worker_config, self._learner_device)
        self.optimizer = self._make_optimizer()
        return True

    def cleanup(self) -> None:
        """Ends the workers."""
        if hasattr(self, "optimizer"):
            self.optimizer.stop()
        if hasattr(self, "workers"):
            self.workers.stop()

    def get_policy(self) -> Policy:
        """The policy that is learned."""
        return self.workers.local.policy

    def compute_single_action(self, observation: Any, explore: bool = False) -> Any:
        """The action for one observation of the environment's space, ready for `env.step`."""
        policy = self.get_policy()
        encoded = policy.encoder.encode_one(observation)[None]
        actions, _, _ = policy.compute_actions(encoded, explore=explore)
        return actions[0]


def _ensure_ray(experiment: Experiment) -> None:
    """Outside Tune, as RLlib does: attaches to a cluster if `RAY_ADDRESS` names one, else starts
    Ray here, with as many logical CPUs as the workers need. Without workers nothing needs Ray."""
    rollout = experiment.rollout
    if ray.is_initialized() or rollout.num_workers == 0:
        return
    num_workers = rollout.num_workers * (1 + rollout.num_workers_below)
    needed = num_workers * rollout.num_cpus_per_worker
    cpus = None if "RAY_ADDRESS" in os.environ else max(os.cpu_count() or 1, int(needed) + 1)
    ray.init(num_cpus=cpus, include_dashboard=False if cpus else None)
