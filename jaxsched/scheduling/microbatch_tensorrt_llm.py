"""The micro batch under the `tensorrt_llm` rules, bit for bit.

One walk over the rows in order: decodes, encoder inputs and un-chunked prompts take
budget and a seat; chunked prefills take a seat only, and share afterwards what the
others left. Oddities are kept on purpose: a queued prefill that later gets nothing
keeps its seat, an un-chunked prompt is charged for all its tokens instead of the
remaining ones, drafts stay whole unless chunks had to be cut.

Source: the Python micro-batch scheduler of TensorRT-LLM after PR #16427.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsched.core.config import (
    MAX_COUNT,
    UNLIMITED,
    ChunkingPolicy,
    Phase,
    PlanError,
    Reason,
    Rules,
    SchedulerConfig,
)
from jaxsched.core.masking import round_up_gap, saturating_sum, spend
from jaxsched.core.plan import Budget
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.chunking import (
    Limits,
    Prefills,
    deal_chunks,
    fit_draft_tokens,
)
from jaxsched.scheduling.microbatch import (
    Draft,
    batch_beam_width,
    first_chunk_reuse,
    standing_reason,
)
from jaxsched.scheduling.snapshots import next_snapshot_point
from jaxsched.scheduling.walk import Walk, walks_of

Array = jax.Array


class _Chunks(NamedTuple):
    """What the queued prefills get."""

    size: Array  # i32[R]
    num_draft_tokens: Array  # i32[R]
    cut: Array  # bool[]  not everything fitted whole
    charged: Array  # i32[R]
    rest: Array  # i32[]  capacity left


def plan_microbatch(
    table: RequestTable, budget: Budget, config: SchedulerConfig
) -> Draft:
    """One step under the `tensorrt_llm` rules; see the module's docstring."""
    standing = standing_reason(table, config)
    eligible = standing == Reason.SCHEDULED
    chunking = config.chunking_policy != ChunkingPolicy.NONE
    charge = _charge(table, chunking)
    walk = _walk(table, budget, config, eligible, charge)

    prefills = walk.taken & (table.phase == Phase.PREFILL)
    error = _error(table, budget, config, walk, eligible, charge)
    used = _total(jnp.where(walk.taken, charge, 0))
    if chunking:
        chunks = _share_the_rest(table, budget, config, prefills, used)
        no_tokens = jnp.where(chunks.rest == 0, Reason.NO_BUDGET, Reason.BELOW_UNIT)
    else:
        zero = jnp.zeros_like(charge)
        chunks = _Chunks(
            size=table.num_remaining_tokens,
            num_draft_tokens=table.num_draft_tokens,
            cut=jnp.asarray(False),
            charged=zero,
            rest=zero[0],
        )
        no_tokens = jnp.int32(Reason.NO_BUDGET)
    return _assemble(table, standing, walk, prefills, chunks, no_tokens, used, error)


def _total(counts: Array) -> Array:
    return saturating_sum(counts, 0, MAX_COUNT + 1)


def _assemble(
    table: RequestTable,
    standing: Array,
    walk: Walk,
    prefills: Array,
    chunks: _Chunks,
    no_tokens: Array,
    used: Array,
    error: Array,
) -> Draft:
    failed = error != PlanError.NONE
    taken = walk.taken & ~(prefills & (chunks.size == 0)) & ~failed
    size = jnp.where(
        table.phase == Phase.ENCODE, table.num_encoder_tokens, table.beam_width
    )
    size = jnp.where(prefills, chunks.size, size)
    drafts = jnp.where(table.phase == Phase.DECODE, table.num_draft_tokens, 0)
    drafts = jnp.where(prefills, chunks.num_draft_tokens, drafts)
    reason = jnp.where(standing == Reason.SCHEDULED, walk.reason, standing)
    reason = jnp.where(prefills, no_tokens, reason)
    reason = jnp.where(
        failed & (standing == Reason.SCHEDULED), Reason.PLAN_ERROR, reason
    )
    tokens = jnp.minimum(used + _total(chunks.charged), MAX_COUNT + 1)
    return Draft(
        size=jnp.where(taken, size, 0),
        num_draft_tokens=jnp.where(taken, drafts, 0),
        taken=taken,
        reason=jnp.where(taken, Reason.SCHEDULED, reason),
        split_last_chunks=chunks.cut,
        num_batched_tokens=jnp.where(failed, 0, tokens),
        error=error,
    )


def _charge(table: RequestTable, chunking: bool) -> Array:
    """Tokens that a row takes in the walk; chunked prefills take none yet; i32[R]."""
    decode = table.beam_width + table.num_draft_tokens
    charge = jnp.where(table.phase == Phase.ENCODE, table.num_encoder_tokens, decode)
    if chunking:
        return jnp.where(table.phase == Phase.PREFILL, 0, charge)
    base = table.num_prompt_tokens + table.num_output_tokens
    reuse = first_chunk_reuse(table)
    rest = jnp.maximum(table.num_remaining_tokens - reuse, 0)
    cost = jnp.where(reuse > 0, jnp.minimum(base, rest), base)
    whole = jnp.maximum(cost + table.num_draft_tokens, 1)
    return jnp.where(table.phase == Phase.PREFILL, whole, charge)


def _walk(
    table: RequestTable,
    budget: Budget,
    config: SchedulerConfig,
    eligible: Array,
    charge: Array,
) -> Walk:
    decodes = eligible & (table.phase == Phase.DECODE)
    width = batch_beam_width(table, decodes)
    counted = eligible & (~decodes | (table.beam_width == width))
    # The seat is counted after it is taken, so even a limit of 0 seats one row.
    seats = jnp.maximum(budget.max_num_seqs, 1)
    return walks_of(config.row_walk).take_in_order(
        charge, counted, eligible, budget.max_num_batched_tokens, seats
    )


def _error(
    table: RequestTable,
    budget: Budget,
    config: SchedulerConfig,
    walk: Walk,
    eligible: Array,
    charge: Array,
) -> Array:
    """The PlanError that the published scheduler raises on the way; i32[]."""
    whole = table.phase == Phase.ENCODE
    if config.chunking_policy == ChunkingPolicy.NONE:
        whole |= table.phase == Phase.PREFILL
    too_long = eligible & whole & (charge > budget.max_context_length)
    error = jnp.where(
        jnp.any(too_long & walk.reached), PlanError.ABOVE_CONTEXT_LENGTH, PlanError.NONE
    )
    if config.chunking_policy == ChunkingPolicy.FORCE_CHUNK:
        queued = jnp.any(walk.taken & (table.phase == Phase.PREFILL))
        below = budget.max_context_length < budget.chunk_unit_size
        below &= queued & (error == PlanError.NONE)
        error = jnp.where(below, PlanError.CONTEXT_BELOW_UNIT, error)
    return error.astype(jnp.int32)


def _share_the_rest(
    table: RequestTable,
    budget: Budget,
    config: SchedulerConfig,
    prefills: Array,
    used: Array,
) -> _Chunks:
    forced = config.chunking_policy == ChunkingPolicy.FORCE_CHUNK
    position, longest = table.num_computed_tokens, budget.max_context_length
    remaining = jnp.where(prefills, table.num_remaining_tokens, 0)
    computed = jnp.maximum(remaining - first_chunk_reuse(table), 0)
    drafts = jnp.where(prefills, table.num_draft_tokens, 0)
    capacity = spend(budget.max_num_batched_tokens, used)

    whole = computed + drafts
    over = (_total(whole) > capacity) | jnp.any(whole > longest)
    cut = jnp.any(prefills) & (over | forced)

    want, charge = remaining, computed
    if forced:
        stop = jnp.minimum(
            next_snapshot_point(table, position), table.num_prompt_tokens
        )
        want = charge = jnp.where(prefills, stop - position, 0)
    unit = budget.chunk_unit_size
    # Seats have been taken in the walk: every queued row has one.
    limits = Limits(capacity, unit, longest, jnp.int32(UNLIMITED))
    size, _ = deal_chunks(
        Prefills(position, want, charge),
        limits,
        config.chunking_policy,
        Rules.TENSORRT_LLM,
        config.row_walk,
    )
    space = jnp.maximum(jnp.minimum(round_up_gap(size, unit), longest - size), 0)
    charged = jnp.minimum(size, computed)
    last = prefills & (size == remaining)
    kept = fit_draft_tokens(
        jnp.where(last, drafts, 0), space, _total(charged), capacity, config.row_walk
    )
    size = jnp.where(cut, size, remaining)
    charged = jnp.where(cut, charged, computed)
    return _Chunks(
        size=size,
        # A row that is not at its last chunk yet keeps its drafts for later.
        num_draft_tokens=jnp.where(cut & last, kept, drafts),
        cut=cut,
        charged=charged,
        rest=spend(capacity, _total(jnp.minimum(size, charge))),
    )
