"""`bundles`: the Ray resources that a trial requests."""

from __future__ import annotations

from ray import tune

from polopt.trainers.experiment import Experiment


def bundles(experiment: Experiment) -> tune.PlacementGroupFactory:
    """Returns the placement group of a trial. It has one bundle for the driver, and one for each
    other process that the run needs to start. These processes are `workers_needed` workers, the
    `num_workers_below` rollout workers of each of them, the processes that the optimizer starts,
    and the evaluation workers. A process that reserves no resources has no bundle. If no process
    reserves resources, the only bundle has 0.001 CPUs."""
    driver, rollout = experiment.trainer, experiment.rollout
    head = {"CPU": driver.num_cpus_for_driver, "GPU": driver.num_gpus}
    worker = {
        "CPU": rollout.num_cpus_per_worker,
        "GPU": rollout.num_gpus_per_worker,
        "memory": rollout.memory_per_worker,
        **rollout.custom_resources_per_worker,
    }
    without_gpu = {**worker, "GPU": 0.0}  # for rollout workers below a worker, and evaluation
    places = rollout.workers_needed
    sampling = [without_gpu] * (places * rollout.num_workers_below)
    evaluation = [without_gpu] * driver.evaluation_num_workers
    nonzero = [
        {key: amount for key, amount in bundle.items() if amount}
        for bundle in [
            head,
            *[worker] * places,
            *sampling,
            *experiment.further_processes,
            *evaluation,
        ]
    ]
    if not any(nonzero):
        nonzero = [{"CPU": 0.001}]  # Tune rejects an empty request
    return tune.PlacementGroupFactory([nonzero[0], *(b for b in nonzero[1:] if b)])
