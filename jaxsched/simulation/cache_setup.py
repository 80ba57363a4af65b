"""From workload and configuration to the sizes of the cache, on the host.

Sizes are rounded up to a few values, so that workloads of a kind share a compilation;
what may be used of them is an array.
"""

import dataclasses

import numpy as np

from jaxsched.cache.hybrid_types import HybridConfig
from jaxsched.cache.selection import Selection
from jaxsched.core.build import bucket_size
from jaxsched.core.config import MAX_COUNT, SnapshotMode
from jaxsched.simulation.cache_state import CacheSetup
from jaxsched.simulation.replay_config import ReplayConfig, ReplayError
from jaxsched.simulation.workloads import Request, Workload, WorkloadError

_SMALLEST_ROW = 512
_SMALLEST_POOL = 512
_NARROWEST = 8192  # tokens of the narrowest width at which prompts are looked up
_STEP = 4  # each width is so many times the one before
_PUBLISHED_AT_ONCE = 64
_NUM_GHOSTS = 2048
_MAX_BYTES = 12 * 10**9
_BLOCK_BYTES = 84  # of a block's entries, its tokens left out
_ENTRY_BYTES = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The static setup of a run, and how much of it is in use."""

    setup: CacheSetup
    num_rows: int  # of the request table
    num_blocks: int
    num_snapshots: int


def cache_plan(
    workload: Workload, config: ReplayConfig, entering: np.ndarray
) -> CachePlan:
    """Sizes of the request table and the cache for the requests that enter.

    Raises:
      ReplayError: if the tables would not fit into memory, or the policy needs more
        blocks than there are.
    """
    requests = [workload.requests[index] for index in entering]
    # One after the other there is never more than one row.
    most = 1 if config.sequential else min(config.max_num_seqs, len(requests) or 1)
    num_rows = bucket_size(most)
    limited = config.kv_blocks > 0 or config.state_slots > 0
    is_used = config.prefix_caching or limited
    num_points = 1
    if config.scheduler().snapshot_mode == SnapshotMode.EMIT:
        num_points += config.scheduler().num_emit_columns
    if not is_used or not requests:
        return _no_cache(config, num_rows, num_points)
    size = config.block_size
    lengths = [_room(request, config) for request in requests]
    blocks = [-(-length // size) for length in lengths]
    longest = max(max(blocks), -(-min(_SMALLEST_ROW, size * 8) // size))
    width = bucket_size(longest)
    num_blocks = config.kv_blocks or max(sum(blocks), width)
    num_snapshots = _num_snapshots(requests, config, num_blocks)
    _check_policy(config, blocks)
    _check_memory(config, num_rows, width * size, num_blocks, num_snapshots)
    try:
        workload.first_ids  # noqa: B018  raises where ids do not suffice
    except WorkloadError as wrong:
        raise ReplayError(str(wrong)) from wrong
    grows = config.capacity_policy == "max_utilization" and config.kv_blocks > 0
    published = _PUBLISHED_AT_ONCE
    if grows:
        published = max(published, num_rows * (2 + config.draft_tokens // size))
    rough_blocks, rough_snapshots = _rough(num_blocks), _rough(num_snapshots)
    if config.pages_per_snapshot:
        rough_snapshots = min(
            rough_snapshots, rough_blocks // config.pages_per_snapshot
        )
    try:
        hybrid = HybridConfig(
            block_size=size,
            num_blocks=rough_blocks,
            blocks_per_row=width,
            num_rows=num_rows,
            num_snapshots=rough_snapshots,
            num_admitted=1,
            max_commit_blocks=published,
            num_points=num_points,
            pages_per_snapshot=config.pages_per_snapshot,
            state_tokens=config.state_tokens,
            num_ghosts=max(_NUM_GHOSTS, num_rows * num_points)
            if limited
            else (num_rows * num_points),
            eviction=config.eviction,
            selection=Selection.HALVING,
            is_unlimited=not limited,
        )
    except ValueError as wrong:
        raise ReplayError(str(wrong)) from wrong
    return CachePlan(
        setup=CacheSetup(
            is_used=True, hybrid=hybrid, buckets=_widths(width, size), grows=grows
        ),
        num_rows=num_rows,
        num_blocks=num_blocks,
        num_snapshots=min(num_snapshots, rough_snapshots),
    )


def _no_cache(config: ReplayConfig, num_rows: int, num_points: int) -> CachePlan:
    """The smallest tables there are; nobody looks at them."""
    hybrid = HybridConfig(
        block_size=1,
        num_blocks=1,
        blocks_per_row=1,
        num_rows=1,
        num_snapshots=0,
        num_points=num_points,
        num_ghosts=num_points,
        num_seen=1,
        is_unlimited=True,
    )
    setup = CacheSetup(is_used=False, hybrid=hybrid, buckets=(1,), grows=False)
    return CachePlan(setup=setup, num_rows=num_rows, num_blocks=1, num_snapshots=0)


def _room(request: Request, config: ReplayConfig) -> int:
    """Tokens that a request may come to hold."""
    return request.num_prompt_tokens + request.max_new_tokens + config.draft_tokens


def _num_snapshots(
    requests: list[Request], config: ReplayConfig, num_blocks: int
) -> int:
    """Slots: as many as configured, or as many as can ever be filed."""
    if not config.prefix_caching:
        return 0
    offsets = len(config.snapshot_from_start) + len(config.snapshot_from_end)
    extra = offsets + config.save_last + 2 * config.branch_snapshots
    extra += config.answer_snapshots
    interval, count = config.snapshot_interval, 0
    for request in requests:
        length = request.num_prompt_tokens
        if config.decode_snapshots or config.capacity_policy == "max_utilization":
            length += request.max_new_tokens  # recomputed answers are cut as well
        count += length // interval if interval else 0
        count += extra + len(request.snapshot_points)
    if config.state_slots:
        count = min(count, config.state_slots)
    if config.pages_per_snapshot:
        count = min(count, num_blocks // config.pages_per_snapshot)
    return count


def _check_policy(config: ReplayConfig, blocks: list[int]) -> None:
    if config.capacity_policy != "max_requests" or not config.kv_blocks:
        return
    most = sum(sorted(blocks, reverse=True)[: config.max_num_seqs])
    if most > config.kv_blocks:
        raise ReplayError(
            "capacity_policy='max_requests' looks at max_num_seqs="
            f"{config.max_num_seqs} alone, and so many requests may need {most} "
            f"blocks: kv_blocks must be at least that, got {config.kv_blocks}, or take "
            "another policy"
        )


def _check_memory(
    config: ReplayConfig, rows: int, length: int, blocks: int, snapshots: int
) -> None:
    if max(blocks, snapshots) > MAX_COUNT // 4:
        raise ReplayError(
            f"{blocks} blocks and {snapshots} snapshots are more than can be numbered: "
            "use larger blocks, a longer interval, or limit the pools"
        )
    tables = blocks * (4 * config.block_size + _BLOCK_BYTES)
    tokens, entries = 4 * rows * length, snapshots * _ENTRY_BYTES
    if tables + tokens + entries > _MAX_BYTES:
        raise ReplayError(
            f"the tables would take {(tables + tokens + entries) / 1e9:.1f} GB: "
            f"{blocks} blocks of {config.block_size} tokens, {snapshots} snapshots, "
            f"{rows} rows of {length} tokens; use larger blocks, limit kv_blocks, or "
            "lower max_num_seqs"
        )


def _rough(count: int) -> int:
    """A count rounded up by an eighth, small ones to one size: few sizes compile."""
    count = max(count, _SMALLEST_POOL)
    step = 1 << max(count.bit_length() - 4, 0)
    return -(-count // step) * step


def _widths(width: int, block_size: int) -> tuple[int, ...]:
    """Widths of lookups in blocks, ascending up to the whole row."""
    widths = [width]
    while widths[0] * block_size >= _STEP * _NARROWEST:
        widths.insert(0, widths[0] // _STEP)
    return tuple(widths)
