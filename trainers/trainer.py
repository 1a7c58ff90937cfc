"""`PolicyOptimizerTrainer`: a thin Tune trainable around one policy optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from ray import tune

from polopt.policies.policy import Policy
from polopt.trainers.checkpoint_fallback import read_or_fall_back
from polopt.trainers.checkpoints import refuse_pickled
from polopt.trainers.config import Experiment
from polopt.trainers.training import Training


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
        experiment = Experiment.parse(config, self.preset)
        self.training = Training(experiment, type(self).__name__)

    @property
    def experiment(self) -> Experiment:
        """What is trained."""
        return self.training.experiment

    @property
    def workers(self) -> Any:
        """The WorkerSet."""
        return self.training.workers

    @property
    def optimizer(self) -> Any:
        """The policy optimizer."""
        return self.training.optimizer

    def step(self) -> dict[str, Any]:
        """One training iteration: optimizer steps until it is long enough."""
        return self.training.step()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes tensors and JSON; see `polopt.trainers.checkpoints`."""
        self.training.save(checkpoint_dir)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Takes back a checkpoint of any trainer whose policy has the same network; if it is
        damaged, the one before it, with a warning that names both.

        Raises:
            CheckpointError: see `Training.load`.
        """
        self.training.load(checkpoint)

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
        self.training.reset(Experiment.parse(new_config, self.preset))
        return True

    def cleanup(self) -> None:
        """Ends the workers."""
        if hasattr(self, "training"):
            self.training.stop()

    def get_policy(self) -> Policy:
        """The policy that is learned."""
        return self.workers.local.policy

    def compute_single_action(self, observation: Any, explore: bool = False) -> Any:
        """The action for one observation of the environment's space, ready for `env.step`."""
        policy = self.get_policy()
        encoded = policy.encoder.encode_one(observation)[None]
        actions, _, _ = policy.compute_actions(encoded, explore=explore)
        return actions[0]
