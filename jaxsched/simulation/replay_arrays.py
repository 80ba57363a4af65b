"""From workload and configuration to the arrays that a replay starts with."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxsched.core.build import bucket_size, request_table
from jaxsched.core.config import MAX_COUNT, NO_ID
from jaxsched.simulation.cache_setup import CachePlan
from jaxsched.simulation.cache_state import cache_settings, first_run
from jaxsched.simulation.cache_tokens import token_spans
from jaxsched.simulation.replay_clock import (
    NEVER_PS,
    PS_PER_MS,
    CostLine,
    Ticks,
    ticks,
)
from jaxsched.simulation.replay_config import ReplayConfig
from jaxsched.simulation.replay_state import (
    Arrivals,
    ChunkColumn,
    ReplayState,
    ResultColumn,
    Settings,
    StepColumn,
)
from jaxsched.simulation.workloads import Workload

NUM_STEP_ENTRIES = 2048
"""Room of the step log; the loop comes back to the host when it is full."""

NUM_LEARNED = 2
"""Points of a request that the cache may ask for: where it parts, what was evicted."""

_CHUNKS_PER_STEP = 4
_SMALLEST_BUCKET = 16
_SMALLEST_POINTS = 4
_SMALLEST_LISTED = 256


class ArrivalTimes(NamedTuple):
    """Picoseconds, a list entry a request of the workload."""

    arrival: list[int]
    patience: list[int | None]  # from the arrival on; None: without end


def arrivals_arrays(
    workload: Workload,
    config: ReplayConfig,
    times: ArrivalTimes,
    entering: np.ndarray,
    plan: CachePlan,
) -> Arrivals:
    """The requests that enter, padded to a bucket.

    At least one padding request stands at the end: it never arrives.
    """
    requests = [workload.requests[index] for index in entering]
    size = bucket_size(len(requests) + 1, smallest=_SMALLEST_BUCKET)

    def column(values: list[int], padding: int) -> np.ndarray:
        return np.array(values + [padding] * (size - len(values)), np.int32)

    def time_column(values: list[int]) -> Ticks:
        return ticks(np.array(values + [NEVER_PS] * (size - len(values)), np.uint64))

    arrival = [times.arrival[index] for index in entering]
    deadline = []
    for index, came in zip(entering, arrival, strict=True):
        waits = times.patience[index]
        start = 0 if config.sequential else came
        deadline.append(NEVER_PS if waits is None else start + waits)
    priority = column([r.priority for r in requests], -MAX_COUNT)
    order = np.argsort(-priority.astype(np.int64), kind="stable").astype(np.int32)
    rank = np.empty_like(order)
    rank[order] = np.arange(size)
    counts = [len(r.snapshot_points) for r in requests]
    points = [point for r in requests for point in r.snapshot_points]
    points += [NO_ID] * (
        bucket_size(len(points), smallest=_SMALLEST_LISTED) - len(points)
    )
    first = np.cumsum([0, *counts])[: len(requests)].tolist()
    return Arrivals(
        num_prompt_tokens=jnp.asarray(
            column([r.num_prompt_tokens for r in requests], 0)
        ),
        max_new_tokens=jnp.asarray(column([r.max_new_tokens for r in requests], 0)),
        lora_id=jnp.asarray(column([r.lora_id for r in requests], NO_ID)),
        priority=jnp.asarray(priority),
        arrival_ms=jnp.asarray(
            column([min(came // PS_PER_MS, MAX_COUNT) for came in arrival], 0)
        ),
        arrival=time_column(arrival),
        deadline=time_column(deadline),
        order=jnp.asarray(order),
        rank=jnp.asarray(rank),
        first_point=jnp.asarray(column(first, 0)),
        num_points=jnp.asarray(column(counts, 0)),
        points=jnp.asarray(np.array(points, np.int32)),
        spans=token_spans(workload, entering if plan.setup.is_used else [], size),
    )


def run_settings(config: ReplayConfig, num_requests: int) -> Settings:
    """The numbers of a run."""
    return Settings(
        budget=config.budget(),
        rules=config.snapshot_rules(),
        cost=CostLine(
            base=ticks(config.base_ps),
            per_token=jnp.uint32(config.token_ps),
            per_context=jnp.uint32(config.context_ps),
        ),
        cache=cache_settings(
            reads=config.prefix_caching,
            learns_branches=config.branch_snapshots,
            files_answers=config.answer_snapshots,
            decode_interval=config.snapshot_interval * config.decode_snapshots,
            whole_batches=config.capacity_policy == "static_batch",
        ),
        num_draft_tokens=jnp.int32(config.draft_tokens),
        num_accepted_tokens=jnp.int32(config.accepted_draft_tokens),
        sequential=jnp.asarray(config.sequential),
        num_requests=jnp.int32(num_requests),
    )


def window_size(
    workload: Workload, config: ReplayConfig, arrivals: Arrivals, num_rows: int
) -> int:
    """How much of the queue `settle` looks at: all of it where it has holes."""
    requests = workload.requests
    holes = any(r.priority != requests[0].priority for r in requests)
    if not config.sequential:
        holes |= any(r.cancel_at_ns is not None for r in requests)
    size = arrivals.order.shape[0]
    return size if holes else min(size, num_rows)


def first_state(
    config: ReplayConfig, arrivals: Arrivals, workload: Workload, plan: CachePlan
) -> ReplayState:
    """An empty table at time 0, before anything has arrived."""
    num_rows, size = plan.num_rows, arrivals.order.shape[0]
    requested = max(len(r.snapshot_points) for r in workload.requests)
    requested = bucket_size(requested, smallest=_SMALLEST_POINTS) + NUM_LEARNED
    rules = config.snapshot_rules()
    offsets = rules.from_start.shape[0] + rules.from_end.shape[0]
    emitted = config.scheduler().num_emit_columns
    columns = emitted + plan.setup.hybrid.num_points
    num_chunks = _CHUNKS_PER_STEP * NUM_STEP_ENTRIES + num_rows

    def never_rows() -> Ticks:
        return ticks(np.full(num_rows, NEVER_PS, np.uint64))

    return ReplayState(
        clock=ticks(0),
        table=request_table(
            [],
            num_rows=num_rows,
            num_points=offsets + requested + 1,
            num_requested_points=requested,
        ),
        admitted=never_rows(),
        first_token=never_rows(),
        deadline=never_rows(),
        left_queue=jnp.zeros(size, bool),
        num_arrived=jnp.int32(0),
        head=jnp.int32(0),
        next_deadline=ticks(NEVER_PS),
        results=jnp.zeros((size, len(ResultColumn)), jnp.uint32),
        num_ended=jnp.int32(0),
        steps=jnp.zeros((NUM_STEP_ENTRIES, len(StepColumn)), jnp.uint32),
        num_step_entries=jnp.int32(0),
        chunks=jnp.zeros((num_chunks, ChunkColumn.EMIT_POINTS + columns), jnp.int32),
        num_chunk_entries=jnp.int32(0),
        stalled=jnp.asarray(False),
        cache=first_run(
            plan.setup,
            num_rows=num_rows,
            num_requests=size,
            num_blocks=plan.num_blocks,
            num_snapshots=plan.num_snapshots,
        ),
    )
