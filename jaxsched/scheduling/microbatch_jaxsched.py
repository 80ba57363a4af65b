"""The micro batch under the `jaxsched` rules.

Three walks, each spending what the one before left: decodes, then rows that run whole
(encoder inputs, and prompts where chunking is off), then chunked prefills. What
differs from the published rules, and why:

- Running decodes take budget *and* seats first; a queued prefill that gets nothing
  takes no seat.
- Draft tokens are optional work: a decode whose drafts exceed the whole budget keeps
  fewer, where the published rules would wait for ever.
- An encoder input that waits for budget holds back the prefills behind it: served
  ahead of it for ever, they would turn into decodes and starve it.
- A row that no step of this budget can take is passed over and says so (TOO_LARGE),
  where the published rules stop or raise.
- At least one prompt token is always charged: a full hit still computes the last one.
- Drafts of last chunks are always fitted to the free part of the last block, measured
  from the chunk's end.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxsched.core.config import (
    MAX_COUNT,
    ChunkingPolicy,
    Phase,
    PlanError,
    Reason,
    Rules,
    SchedulerConfig,
    SnapshotMode,
)
from jaxsched.core.masking import (
    first_true,
    iota,
    round_up_gap,
    saturating_sum,
    spend,
)
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
from jaxsched.scheduling.snapshots import next_snapshot_points
from jaxsched.scheduling.walk import walks_of

Array = jax.Array


class _Left(NamedTuple):
    """What the walks before have left of a step."""

    tokens: Array  # i32[]  UNLIMITED stays UNLIMITED
    rows: Array  # i32[]


class _Share(NamedTuple):
    """What one walk gave its rows."""

    size: Array  # i32[R]
    num_draft_tokens: Array  # i32[R]
    taken: Array  # bool[R]
    reason: Array  # i32[R]  for its rows that were not taken
    tokens: Array  # i32[]  charged, drafts included


def plan_microbatch(
    table: RequestTable, budget: Budget, config: SchedulerConfig
) -> Draft:
    """One step under the `jaxsched` rules; see the module's docstring."""
    standing = standing_reason(table, config)
    free = standing == Reason.SCHEDULED
    decodes = free & (table.phase == Phase.DECODE)
    others = free & ~decodes

    left = _Left(budget.max_num_batched_tokens, budget.max_num_seqs)
    decode = _take_decodes(table, budget, left, decodes, config)
    shares = [(decodes, decode)]
    left = _after(left, decode)
    if config.chunking_policy == ChunkingPolicy.NONE:
        shares.append((others, _take_whole(table, budget, left, others, config)))
    else:
        prefills = others & (table.phase == Phase.PREFILL)
        if config.encoder_decoder:
            encodes = others & ~prefills
            whole = _take_whole(table, budget, left, encodes, config)
            shares.append((encodes, whole))
            left = _after(left, whole)
            behind = prefills & _behind_refused(encodes, whole)
            shares.append((behind, _nothing(behind, Reason.BEHIND_BLOCKED)))
            prefills &= ~behind
        shares.append((prefills, _take_chunks(table, budget, left, prefills, config)))
    return _join(shares, standing)


def _join(shares: list[tuple[Array, _Share]], standing: Array) -> Draft:
    size, drafts, reason = jnp.zeros_like(standing), jnp.zeros_like(standing), standing
    taken, tokens = jnp.zeros(standing.shape, bool), jnp.int32(0)
    for rows, share in shares:
        size = jnp.where(rows, share.size, size)
        drafts = jnp.where(rows, share.num_draft_tokens, drafts)
        reason = jnp.where(rows, share.reason, reason)
        taken = taken | (rows & share.taken)
        tokens = jnp.minimum(tokens + share.tokens, MAX_COUNT + 1)
    return Draft(
        size=jnp.where(taken, size, 0),
        num_draft_tokens=jnp.where(taken, drafts, 0),
        taken=taken,
        reason=jnp.where(taken, Reason.SCHEDULED, reason),
        split_last_chunks=jnp.asarray(True),
        num_batched_tokens=tokens,
        error=jnp.int32(PlanError.NONE),
    )


def _after(left: _Left, share: _Share) -> _Left:
    rows = jnp.sum(share.taken.astype(jnp.int32))
    return _Left(spend(left.tokens, share.tokens), jnp.maximum(left.rows - rows, 0))


def _behind_refused(rows: Array, share: _Share) -> Array:
    """Rows behind the first of `rows` that the budget refused; bool[R].

    Were they served, they would turn into decodes and keep the budget from a row that
    needs much of it at once for as long as new requests arrive.
    """
    refused = first_true(rows & ~share.taken & (share.reason == Reason.NO_BUDGET))
    return iota(rows.shape[0]) > refused


def _nothing(rows: Array, reason: Reason) -> _Share:
    zero = jnp.zeros(rows.shape, jnp.int32)
    return _Share(zero, zero, jnp.zeros_like(rows), zero + reason, jnp.int32(0))


def _total(counts: Array) -> Array:
    """Sum that an unlimited budget cannot wrap: it is held above MAX_COUNT."""
    return saturating_sum(counts, 0, MAX_COUNT + 1)


def _take_decodes(
    table: RequestTable,
    budget: Budget,
    left: _Left,
    decodes: Array,
    config: SchedulerConfig,
) -> _Share:
    drafts, fits, skipped = decode_request(table, budget)
    beam = table.beam_width
    same_width = beam == batch_beam_width(table, decodes & fits)
    candidates = decodes & fits & same_width
    return _walk(candidates, beam, drafts, beam + drafts, left, skipped, config)


def decode_request(table: RequestTable, budget: Budget) -> tuple[Array, Array, Array]:
    """Drafts that a decode may keep, whether it fits at all, and why it is skipped.

    Like the functions below it reads a whole table or, in a scan, one row of it.
    """
    limit, beam = budget.max_num_batched_tokens, table.beam_width
    drafts = jnp.clip(limit - beam, 0, table.num_draft_tokens)
    fits = beam <= limit
    return drafts, fits, jnp.where(fits, Reason.BEAM_WIDTH, Reason.TOO_LARGE)


def _take_whole(
    table: RequestTable,
    budget: Budget,
    left: _Left,
    rows: Array,
    config: SchedulerConfig,
) -> _Share:
    """Encoder inputs, and prompts where chunking is off: all of a row or nothing."""
    size, charge, drafts, fits = whole_request(table, budget)
    skipped = jnp.full_like(size, Reason.TOO_LARGE)
    charge = charge + drafts
    return _walk(rows & fits, size, drafts, charge, left, skipped, config)


def whole_request(
    table: RequestTable, budget: Budget
) -> tuple[Array, Array, Array, Array]:
    """Size, charge, drafts of a row that runs whole, and whether it fits at all."""
    encode = table.phase == Phase.ENCODE
    size = jnp.where(
        encode, jnp.maximum(table.num_encoder_tokens, 1), table.num_remaining_tokens
    )
    charge = jnp.where(encode, size, _must_compute(table))
    limit = jnp.minimum(budget.max_num_batched_tokens, budget.max_context_length)
    drafts = jnp.clip(limit - charge, 0, table.num_draft_tokens)
    return size, charge, jnp.where(encode, 0, drafts), charge <= limit


def _walk(
    candidates: Array,
    size: Array,
    drafts: Array,
    charge: Array,
    left: _Left,
    skipped: Array,
    config: SchedulerConfig,
) -> _Share:
    """Takes candidates in order; `skipped` is the reason of all other rows."""
    walk = walks_of(config.row_walk).take_in_order(
        charge, candidates, candidates, left.tokens, left.rows
    )
    return _Share(
        size=size,
        num_draft_tokens=drafts,
        taken=walk.taken,
        reason=jnp.where(candidates, walk.reason, skipped),
        tokens=_total(jnp.where(walk.taken, charge, 0)),
    )


def _must_compute(table: RequestTable) -> Array:
    """Prompt tokens that reuse cannot spare, at least one; i32[R]."""
    # A decode stands past its prompt's end: nothing remains, not less than nothing.
    remaining = jnp.maximum(table.num_remaining_tokens, 0)
    return jnp.maximum(remaining - first_chunk_reuse(table), jnp.minimum(remaining, 1))


def _take_chunks(
    table: RequestTable,
    budget: Budget,
    left: _Left,
    prefills: Array,
    config: SchedulerConfig,
) -> _Share:
    stop = stop_of(table, config)
    wanted, computed = chunk_request(table, prefills, stop, config)
    longest = budget.max_context_length
    limits = Limits(left.tokens, budget.chunk_unit_size, longest, left.rows)
    size, seat_left = deal_chunks(
        wanted, limits, config.chunking_policy, Rules.JAXSCHED, config.row_walk
    )
    taken = size > 0
    charged = _total(jnp.minimum(size, computed))
    drafts = fit_draft_tokens(
        table.num_draft_tokens,
        free_space(table, size, budget),
        charged,
        left.tokens,
        config.row_walk,
    )
    rest = spend(left.tokens, _total(jnp.minimum(size, wanted.charge)))
    reason = jnp.where(rest == 0, Reason.NO_BUDGET, Reason.BELOW_UNIT)
    reason = jnp.where(seat_left, reason, Reason.BATCH_FULL)
    return _Share(
        size=size,
        num_draft_tokens=drafts,
        taken=taken,
        reason=jnp.where(longest < 1, Reason.TOO_LARGE, reason),
        tokens=jnp.minimum(charged + _total(drafts), MAX_COUNT + 1),
    )


def chunk_request(
    table: RequestTable, prefills: Array, stop: Array, config: SchedulerConfig
) -> tuple[Prefills, Array]:
    """What prefills want of a step, and what reuse cannot spare them.

    `stop` is what `stop_of` gives."""
    position = table.num_computed_tokens
    want = jnp.where(prefills, stop - position, 0)
    computed = _must_compute(table)
    forced = config.chunking_policy == ChunkingPolicy.FORCE_CHUNK
    charge = want if forced else jnp.minimum(want, computed)
    return Prefills(position, want, charge), computed


def free_space(table: RequestTable, size: Array, budget: Budget) -> Array:
    """Tokens free behind a last chunk; 0 behind others.

    Drafts must not need another block: only the free part of the last one counts.
    """
    prompt = table.num_prompt_tokens
    last = (size > 0) & (table.num_computed_tokens + size == prompt)
    space = round_up_gap(prompt, budget.chunk_unit_size)
    space = jnp.minimum(space, budget.max_context_length - size)
    return jnp.where(last, jnp.maximum(space, 0), 0)


def stop_of(table: RequestTable, config: SchedulerConfig) -> Array:
    """Where a row's chunk ends at the latest: a point to stand on, or its prompt's end.

    In emit mode the points before the last one that fits into `Plan.emit_points` are
    passed: the model returns their states from inside the chunk.
    """
    passed = 0
    if config.snapshot_mode == SnapshotMode.EMIT:
        passed = config.max_emit_points
    points = next_snapshot_points(table, table.num_computed_tokens, passed + 1)
    return jnp.minimum(points[..., -1], table.num_prompt_tokens)
