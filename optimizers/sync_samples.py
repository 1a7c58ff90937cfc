"""SyncSamples: the driver learns from the samples of all workers (A2C, PPO).

The strategy follows RLlib 0.8's SyncSamplesOptimizer. The driver uses all samples. With the default
options, results do not depend on the order in which samples arrive. With `collection: overlapped`,
workers sample while the driver learns.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pydantic

from polopt.common.config import Automatic
from polopt.common.sample_batch import SampleBatch
from polopt.metrics.number import Number
from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.sync_sampling import SyncSampling
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.worker_set import WorkerSet

#: The highest rates of a strategy whose driver learns from the samples of its workers.
PEAKS = tuple(
    Number(
        f"{phase}_peak_throughput",
        "environment steps/s",
        f"highest rate so far at which the run could {phase}, if it did nothing else. The phase "
        "limits the run if the realised rate is almost as high",
        metric=f"peak_env_steps_per_s{{phase={phase}}}",
    )
    for phase in ("sample", "learn")
)


class SyncSamplesConfig(OptimizerConfig):
    """Options of `SyncSamples`.

    Attributes:
        train_batch_size: number of environment steps of one batch, rounded up to whole fragments. A
            batch has fewer steps if fragments end early, or if some of its rows are resets in
            next-step autoreset mode. None means one fragment from each worker.
        fraction_workers: once this share of the workers has sampled all fragments that the driver
            requested from them, the current fragments of the other workers end early. The driver
            uses these shortened fragments, and drops requests that it has not sent yet. With 1, the
            driver waits for all workers. With other values, results depend on timing.
        fraction_samples: a fragment that ends early has at least this share of its full length.
    """

    train_batch_size: Automatic = pydantic.Field(default=None, ge=0, le=10**8)
    fraction_workers: float = pydantic.Field(default=1.0, gt=0.0, le=1.0)
    fraction_samples: float = pydantic.Field(default=0.25, ge=0.0, le=1.0)


class SyncSamples(SyncSampling):
    """Sends weights to all workers, gathers their samples into one batch, and learns in the driver.

        polopt.PolicyOptimizerTrainer(
            env="CartPole-v1",
            policy="ppo",
            optimizer={"name": "sync_samples", "train_batch_size": 4000},
            num_workers=4,
        )

    A worker that starts during the run takes part in all steps after its start. If a worker fails,
    the workers that are up sample its fragments. With `fraction_workers` of 1, and as long as no
    worker fails or starts late, a run is reproducible bit for bit for one seed, config and number
    of workers. This is also true with `collection: overlapped`. With `num_workers=0`, the local
    worker in the driver samples.
    """

    name = "sync_samples"
    numbers = PEAKS
    config_class = SyncSamplesConfig
    config: SyncSamplesConfig
    phases: ClassVar[tuple[str, ...]] = ("broadcast", "sample", "learn")
    async_instead = "async_samples"

    def __init__(self, workers: WorkerSet, config: SyncSamplesConfig) -> None:
        stragglers = Stragglers(config.fraction_workers, config.fraction_samples)
        super().__init__(workers, config, stragglers)

    def step(self) -> StepResult:
        before = self.metrics.counts()
        with self.timers["broadcast"]:
            self.request(self.config.train_batch_size)
        with self.timers["sample"]:
            batch = SampleBatch.concat([reply.value for reply in self.fragments.all()])
        self.timers["sample"].push_rows(batch.agent_steps)
        if self.overlaps:
            with self.timers["broadcast"]:
                self.request(self.config.train_batch_size)
        with self.timers["learn"]:
            self.learn(batch)
        self.timers["learn"].push_rows(batch.agent_steps)
        return self.metrics.counts_since(before)

    def extra_stats(self) -> dict[str, Any]:
        return {
            "sample_peak_throughput": self.timers["sample"].peak_rows_per_s,
            "learn_peak_throughput": self.timers["learn"].peak_rows_per_s,
        }
