"""The `jaxsched` rules as a few scans over the rows, for CPUs: `RowWalk.SEQUENTIAL`.

A CPU compiles a small scan into one kernel that spends some nanoseconds a row, where
the array form of the same rules (`microbatch_jaxsched`) starts some eighty steps of a
microsecond or more. So here all that is to be known of a row is worked out inside the
scan that needs it: one over the decodes, one over rows that run whole where there can
be any, one over the prefills, and one that fits drafts and writes the output order.
The plans are the same, bit for bit; why the rules are as they are stands there.

Two things keep it fast. Rows, results and what a scan carries are packed into one
array each: a CPU pays for every array, hardly for its columns. And the scans do not
look at snapshot points, whose number would make them too large to be one kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import (
    NO_ID,
    ChunkingPolicy,
    PlanError,
    SchedulerConfig,
)
from jaxsched.core.plan import Budget, Plan
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.output_order import (
    CHUNKS,
    DECODES,
    ENCODES,
    LAST_CHUNKS,
    output_order,
)
from jaxsched.scheduling.row_scans import (
    Left,
    Ordering,
    Row,
    Rows,
    scan_chunks,
    scan_decodes,
    scan_order,
    scan_whole,
)
from jaxsched.scheduling.snapshots import emit_points, is_snapshot_point

Array = jax.Array

_SIZE, _GROUP = Row._fields.index("size"), Row._fields.index("group")


class Decisions(NamedTuple):
    """A plan as few arrays; `plan_of` makes a `Plan` of them."""

    rows: Array  # i32[R, 4]  a `Row` each
    order: Array  # i32[R]
    snapshot_point: Array  # i32[R]
    emit_points: Array  # i32[R, E]
    num_seqs: Array  # i32[]
    num_batched_tokens: Array  # i32[]


def plan_rows(table: RequestTable, budget: Budget, config: SchedulerConfig) -> Plan:
    """One step under the `jaxsched` rules; see `scheduler.schedule`."""
    return plan_of(decide(table, budget, config, Rows(table, lambda row: row)))


def decide(
    table: RequestTable, budget: Budget, config: SchedulerConfig, source: Rows
) -> Decisions:
    """What `plan_rows` plans; `source` gives the rows of the same table to scans."""
    zero = jnp.int32(0)
    seats = jnp.maximum(budget.max_num_seqs, 0)
    left = Left(budget.max_num_batched_tokens, seats, zero, zero, zero)
    left, rows = scan_decodes(source, budget, left, config)
    decodes, encodes = seats - left.seats, zero
    chunked = config.chunking_policy != ChunkingPolicy.NONE
    if config.encoder_decoder or not chunked:
        before = left.seats
        left, rows = scan_whole(source, budget, left, rows, config)
        encodes = before - left.seats - left.last_chunks
    for_drafts = late_reason = zero
    if chunked:
        left, rows, for_drafts, late_reason = scan_chunks(
            table, source, budget, left, rows, config
        )
    taken = seats - left.seats
    state = Ordering(
        charged=left.charged,
        for_drafts=for_drafts,
        encodes=zero,
        chunks=encodes,
        last_chunks=taken - decodes - left.last_chunks,
        decodes=taken - decodes,
    )
    charged, rows, order = scan_order(rows, state, late_reason, chunked)
    group = rows[:, _GROUP]
    if config.group_by_lora:
        order = lax.cond(
            left.has_adapters > 0,
            lambda: output_order(group, table.lora_id, True, config.row_walk),
            lambda: order,
        )
    prefill = (group == CHUNKS) | (group == LAST_CHUNKS)
    end = table.num_computed_tokens + jnp.where(prefill, rows[:, _SIZE], 0)
    on_point = prefill & is_snapshot_point(table, end)
    return Decisions(
        rows=rows,
        order=order,
        snapshot_point=jnp.where(on_point, end, NO_ID),
        emit_points=emit_points(table, end, config),
        num_seqs=taken,
        num_batched_tokens=charged,
    )


def plan_of(decisions: Decisions) -> Plan:
    """The plan, of JAX's or NumPy's arrays alike."""
    row = Row(*decisions.rows.T)
    last = row.group == LAST_CHUNKS
    prefill = last | (row.group == CHUNKS)
    return Plan(
        num_scheduled_tokens=row.size,
        num_draft_tokens=row.num_draft_tokens,
        is_last_chunk=last,
        snapshot_point=decisions.snapshot_point,
        emit_points=decisions.emit_points,
        prefill_mask=prefill,
        decode_mask=row.group == DECODES,
        encode_mask=row.group == ENCODES,
        preempted_mask=prefill & ~prefill,
        order=decisions.order,
        reason=row.reason,
        num_seqs=decisions.num_seqs,
        num_batched_tokens=decisions.num_batched_tokens,
        error=decisions.num_seqs * int(PlanError.NONE),
    )
