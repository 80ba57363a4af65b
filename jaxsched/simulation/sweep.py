"""Many configurations of a replay: few compilations, and every core or device at work.

Budgets, intervals, offsets, pools, rates and costs are arrays: configurations that
differ in them alone run one compiled program, over tables as large as the largest of
them needs. Only policies, rules and block sizes compile anew.

A batch axis over configurations would not help here. In a batched loop every branch
runs for every configuration, and a step in which nobody is admitted would pay for an
admission; so each configuration is a call of its own, and calls run side by side.
"""

import dataclasses
import os
from collections.abc import Collection, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

import jax

from jaxsched.simulation.cache_setup import CachePlan
from jaxsched.simulation.metrics import metrics
from jaxsched.simulation.replay import planned_sizes, replay
from jaxsched.simulation.replay_config import ReplayConfig, ReplayError
from jaxsched.simulation.workloads import Workload

_SIZES = ("num_blocks", "num_snapshots", "num_ghosts", "num_rows", "max_commit_blocks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one configuration.

    Attributes:
      index: place of the configuration in the list.
      figures: those of `metrics`; None: it could not go on.
      error: why it could not.
    """

    index: int
    figures: dict[str, object] | None
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Configurations that run the same compiled program, and their sizes."""

    indices: tuple[int, ...]
    plans: tuple[CachePlan, ...]  # with one setup for all of them


def sweep_groups(
    workload: Workload, configs: Sequence[ReplayConfig], done: Collection[int] = ()
) -> list[Group]:
    """Sorts configurations by the program that they need.

    Args:
      workload: what arrives.
      configs: the configurations.
      done: indices that are left out.

    Raises:
      ReplayError: as `replay`, for the first configuration that cannot start.
    """
    found: dict[Hashable, list[tuple[int, CachePlan]]] = {}
    for index, config in enumerate(configs):
        if index not in done:
            plan = planned_sizes(workload, config)
            found.setdefault(_program(config, plan), []).append((index, plan))
    return [_with_one_setup(members) for members in found.values()]


def sweep(
    workload: Workload,
    configs: Sequence[ReplayConfig],
    *,
    done: Collection[int] = (),
    num_workers: int | None = None,
) -> Iterator[Outcome]:
    """Replays a workload under many configurations; yields each as it is ready.

    Every outcome is the one that `replay` gives alone, whatever the order.

    Args:
      workload: what arrives, once for each configuration.
      configs: the configurations.
      done: indices that are left out.
      num_workers: replays that run side by side; default one for each core, or for
        each device where there are several.

    Raises:
      ReplayError: before anything has run, if a configuration cannot start.
    """
    groups = sweep_groups(workload, configs, done)
    devices = jax.local_devices()
    if num_workers is None:
        num_workers = len(devices) if len(devices) > 1 else _num_cores()
    with ThreadPoolExecutor(num_workers) as pool:
        nth = 0
        for group in groups:
            # The first one compiles; the others would only wait for it.
            first, *rest = zip(group.indices, group.plans, strict=True)
            yield _outcome(workload, configs, *first, devices[0])
            waiting = []
            for index, plan in rest:
                device = devices[nth % len(devices)]
                waiting.append(
                    pool.submit(_outcome, workload, configs, index, plan, device)
                )
                nth += 1
            try:
                for future in as_completed(waiting):
                    yield future.result()
            finally:
                for future in waiting:
                    future.cancel()


def _outcome(
    workload: Workload,
    configs: Sequence[ReplayConfig],
    index: int,
    plan: CachePlan,
    device: jax.Device,
) -> Outcome:
    try:
        with jax.default_device(device):
            run = replay(workload, configs[index], plan=plan)
    except ReplayError as wrong:
        return Outcome(index=index, figures=None, error=str(wrong))
    return Outcome(index=index, figures=metrics(run))


def _program(config: ReplayConfig, plan: CachePlan) -> Hashable:
    """What has to be equal for two configurations to share a compiled program."""
    rules, setup = config.snapshot_rules(), plan.setup
    choices = {
        field.name: getattr(setup.hybrid, field.name)
        for field in dataclasses.fields(setup.hybrid)
        if field.name not in _SIZES
    }
    return (
        *(config.scheduler(), config.sequential, setup.is_used, setup.grows),
        *(setup.buckets, tuple(choices.items())),
        *(rules.from_start.shape, rules.from_end.shape),
    )


def _with_one_setup(members: Sequence[tuple[int, CachePlan]]) -> Group:
    """Tables as large as the largest of the members needs, for all of them."""
    plans = [plan for _, plan in members]
    hybrids = [plan.setup.hybrid for plan in plans]
    sizes = {name: max(getattr(h, name) for h in hybrids) for name in _SIZES}
    if hybrids[0].is_shared:
        most = sizes["num_blocks"] // hybrids[0].pages_per_snapshot
        sizes["num_snapshots"] = min(sizes["num_snapshots"], most)
    hybrid = dataclasses.replace(hybrids[0], **sizes)
    setup = dataclasses.replace(plans[0].setup, hybrid=hybrid)
    num_rows = max(plan.num_rows for plan in plans)
    return Group(
        indices=tuple(index for index, _ in members),
        plans=tuple(
            dataclasses.replace(plan, setup=setup, num_rows=num_rows) for plan in plans
        ),
    )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
