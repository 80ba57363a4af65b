"""The scans of `row_by_row`: what each works out of a row, and what it carries."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import (
    MAX_COUNT,
    NO_ID,
    ChunkingPolicy,
    Phase,
    Reason,
    Rules,
    SchedulerConfig,
)
from jaxsched.core.masking import iota, spend
from jaxsched.core.plan import Budget
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.chunking import (
    Limits,
    Prefills,
    deal_chunks,
    largest_chunk,
    reachable_unit,
)
from jaxsched.scheduling.microbatch import standing_reason
from jaxsched.scheduling.microbatch_jaxsched import (
    chunk_request,
    decode_request,
    free_space,
    stop_of,
    whole_request,
)
from jaxsched.scheduling.output_order import (
    CHUNKS,
    DECODES,
    ENCODES,
    LAST_CHUNKS,
    NUM_GROUPS,
)
from jaxsched.scheduling.walk import Deal
from jaxsched.scheduling.walk_sequential import deal_row, spend_exactly, take_row

Array = jax.Array

_LATER = NO_ID
"""Reason of a prefill that got nothing, until all have been dealt with."""


class Row(NamedTuple):
    """What is decided of a row: scalars inside a scan, columns i32[R] outside."""

    size: Array  # tokens
    num_draft_tokens: Array  # kept; on last chunks at first those that have a place
    reason: Array  # a Reason, or _LATER
    group: Array  # of the output order


class Left(NamedTuple):
    """What a step has left and has given; scalars that scans carry."""

    tokens: Array  # UNLIMITED stays UNLIMITED
    seats: Array  # rows that may still be taken
    charged: Array  # tokens, held at MAX_COUNT + 1
    last_chunks: Array  # rows
    has_adapters: Array  # 1: some row that could run has an adapter


class Rows(NamedTuple):
    """The rows that scans go through: arrays, and what makes a row of their slices."""

    arrays: object  # a pytree whose leaves have R as first axis
    read: Callable[[object], RequestTable]  # one row of it as a table of scalars


def _scan(
    step: Callable, state: NamedTuple, source: Rows, *columns
) -> tuple[NamedTuple, Array]:
    """`lax.scan` of steps from scalars to scalars and a `Row`; rows i32[R, C]."""
    kind = type(state)

    def packed(state, row):
        state, decided = step(kind(*state), source.read(row[0]), *row[1:])
        return _pack(state), _pack(decided)

    columns = (source.arrays, *columns)
    state, rows = lax.scan(packed, _pack(state), columns)
    return kind(*state), rows


def _pack(values: NamedTuple) -> Array:
    return jnp.stack([jnp.asarray(value).astype(jnp.int32) for value in values])


def _charge(charged: Array, tokens: Array) -> Array:
    """One more row's tokens; a sum of two held numbers cannot wrap."""
    return jnp.minimum(charged + jnp.minimum(tokens, MAX_COUNT + 1), MAX_COUNT + 1)


class _Taking(NamedTuple):
    """Carried through the scans of rows that run whole or not at all."""

    tokens: Array
    seats: Array
    stopped: Array  # bool, the walk has met a row that did not fit
    charged: Array
    last_chunks: Array
    has_adapters: Array
    beam_width: Array  # of the batch's decodes, NO_ID while none was met

    @classmethod
    def start(cls, left: Left) -> "_Taking":
        stopped = jnp.int32(0)
        return cls(left.tokens, left.seats, stopped, *left[2:], jnp.int32(NO_ID))

    def left(self) -> Left:
        return Left(
            self.tokens, self.seats, self.charged, self.last_chunks, self.has_adapters
        )

    def take(self, charge: Array, asks: Array) -> tuple["_Taking", Array, Array]:
        """The state behind a row, whether the row was taken, and why not."""
        walk = (self.tokens, self.seats, self.stopped > 0)
        walk, found = take_row(walk, charge, asks, asks)
        charged = _charge(self.charged, jnp.where(found.taken, charge, 0))
        tokens, seats, stopped = walk
        state = self._replace(
            tokens=tokens, seats=seats, stopped=stopped, charged=charged
        )
        return state, found.taken, found.reason


def scan_decodes(
    source: Rows, budget: Budget, left: Left, config: SchedulerConfig
) -> tuple[Left, Array]:
    """Standing reasons of all rows, and the decodes taken."""

    def step(state: _Taking, row: RequestTable):
        standing = standing_reason(row, config)
        free = standing == Reason.SCHEDULED
        decode = free & (row.phase == Phase.DECODE)
        drafts, fits, skipped = decode_request(row, budget)
        beam, width = row.beam_width, state.beam_width
        # The first decode that fits says what width the batch has.
        width = jnp.where((width == NO_ID) & decode & fits, beam, width)
        asks = decode & fits & (beam == width)
        state, taken, reason = state.take(beam + drafts, asks)
        reason = jnp.where(asks, reason, skipped)
        reason = jnp.where(taken, Reason.SCHEDULED, reason)
        has_adapter = (free & (row.lora_id != NO_ID)).astype(jnp.int32)
        state = state._replace(
            beam_width=width, has_adapters=state.has_adapters | has_adapter
        )
        return state, Row(
            size=jnp.where(taken, beam, 0),
            num_draft_tokens=jnp.where(taken, drafts, 0),
            reason=jnp.where(decode, reason, standing),
            group=jnp.where(taken, DECODES, NUM_GROUPS),
        )

    state, rows = _scan(step, _Taking.start(left), source)
    return state.left(), rows


def _waits(row: RequestTable, before: Row) -> Array:
    """Whether a row could run and has not been given anything yet."""
    return (before.reason == Reason.SCHEDULED) & (before.group == NUM_GROUPS)


def scan_whole(
    source: Rows,
    budget: Budget,
    left: Left,
    rows: Array,
    config: SchedulerConfig,
) -> tuple[Left, Array]:
    """Takes encoder inputs, and prompts where chunking is off: whole or not at all."""
    chunked = config.chunking_policy != ChunkingPolicy.NONE

    def step(state: _Taking, row: RequestTable, before: Array):
        before = Row(*before)
        waits, encode = _waits(row, before), row.phase == Phase.ENCODE
        asks = waits & encode if chunked else waits
        # Only an encoder input that the budget refused ends this walk.
        behind = waits & ~asks & (state.stopped > 0)
        size, charge, drafts, fits = whole_request(row, budget)
        state, taken, reason = state.take(charge + drafts, asks & fits)
        reason = jnp.where(fits, reason, Reason.TOO_LARGE)
        reason = jnp.where(asks & ~taken, reason, before.reason)
        last = (taken & ~encode).astype(jnp.int32)
        state = state._replace(last_chunks=state.last_chunks + last)
        group = jnp.where(encode, ENCODES, LAST_CHUNKS)
        return state, Row(
            size=jnp.where(taken, size, before.size),
            num_draft_tokens=jnp.where(taken, drafts, before.num_draft_tokens),
            reason=jnp.where(behind, Reason.BEHIND_BLOCKED, reason),
            group=jnp.where(taken, group, before.group),
        )

    state, rows = _scan(step, _Taking.start(left), source, rows)
    return state.left(), rows


class _Dealing(NamedTuple):
    """Carried through the scan of prefills."""

    tokens: Array  # behind the walk's cuts, whether or not a seat was left
    seats: Array
    rest: Array  # tokens that nobody was given
    charged: Array
    last_chunks: Array


def scan_chunks(
    table: RequestTable,
    source: Rows,
    budget: Budget,
    left: Left,
    rows: Array,
    config: SchedulerConfig,
) -> tuple[Left, Array, Array, Array]:
    """Deals chunks; also what is left for their drafts, and the reason for _LATER."""
    longest = budget.max_context_length
    limits = Limits(left.tokens, budget.chunk_unit_size, longest, left.seats)
    in_order = config.chunking_policy != ChunkingPolicy.EQUAL_PROGRESS
    unit = reachable_unit(limits)
    stop = stop_of(table, config)

    def wanted_by(row: RequestTable, before: Row, stop: Array):
        prefill = _waits(row, before) & (row.phase == Phase.PREFILL)
        return prefill, *chunk_request(row, prefill, stop, config)

    def step(state: _Dealing, row, stop: Array, before: Array, dealt: tuple):
        before = Row(*before)
        prefill, wanted, computed = wanted_by(row, before, stop)
        if in_order:
            full, cost = largest_chunk(wanted, limits._replace(unit=unit))
            walk = (state.tokens, state.seats)
            walk, deal = deal_row(walk, full, cost, wanted.position, unit)
            state = state._replace(tokens=walk[0])
        else:
            deal = Deal(*dealt)
        taken = deal.size > 0
        last = taken & (wanted.position + deal.size == row.num_prompt_tokens)
        drafts = jnp.minimum(row.num_draft_tokens, free_space(row, deal.size, budget))
        reason = jnp.where(deal.seat_left, _LATER, Reason.BATCH_FULL)
        reason = jnp.where(longest < 1, Reason.TOO_LARGE, reason)
        spent = jnp.minimum(deal.size, wanted.charge)
        state = state._replace(
            seats=state.seats - taken.astype(jnp.int32),
            rest=spend_exactly(state.rest, spent),
            charged=_charge(state.charged, jnp.minimum(deal.size, computed)),
            last_chunks=state.last_chunks + last.astype(jnp.int32),
        )
        group = jnp.where(last, LAST_CHUNKS, CHUNKS)
        return state, Row(
            size=jnp.where(taken, deal.size, before.size),
            num_draft_tokens=jnp.where(taken, drafts, before.num_draft_tokens),
            reason=jnp.where(prefill & ~taken, reason, before.reason),
            group=jnp.where(taken, group, before.group),
        )

    dealt = ()
    if not in_order:
        _, wanted, _ = wanted_by(table, Row(*rows.T), stop)
        dealt = _equal_progress(wanted, limits, config)
    zero = jnp.int32(0)
    state = _Dealing(left.tokens, left.seats, left.tokens, zero, left.last_chunks)
    state, rows = _scan(step, state, source, stop, rows, dealt)
    late_reason = jnp.where(state.rest == 0, Reason.NO_BUDGET, Reason.BELOW_UNIT)
    for_drafts = spend(left.tokens, state.charged)
    left = left._replace(
        seats=state.seats,
        charged=_charge(left.charged, state.charged),
        last_chunks=state.last_chunks,
    )
    return left, rows, for_drafts, late_reason


def _equal_progress(wanted: Prefills, limits: Limits, config: SchedulerConfig) -> Deal:
    """Sizes whose rounds are found by search, not row by row."""
    policy, walk = config.chunking_policy, config.row_walk
    return deal_chunks(wanted, limits, policy, Rules.JAXSCHED, walk)


class Ordering(NamedTuple):
    """Carried through the last scan."""

    charged: Array
    for_drafts: Array  # tokens left for the drafts of last chunks
    encodes: Array  # the next free place of each group, in the order of output
    chunks: Array
    last_chunks: Array
    decodes: Array


def scan_order(
    rows: Array, state: Ordering, late_reason: Array, chunked: bool
) -> tuple[Array, Array, Array]:
    """Fits drafts of last chunks, settles reasons, and writes the output order.

    Args:
      rows: i32[R, C], packed.
      state: where it starts.
      late_reason: i32[], what _LATER stands for.
      chunked: static; prompts that ran whole have had their drafts already.

    Returns:
      i32[] tokens charged in all, the rows, and i32[R] the order.
    """
    size = rows.shape[0]

    def step(carried, columns):
        state, order = carried
        row, index = columns
        row, state = Row(*row), Ordering(*state)
        late = (row.group == LAST_CHUNKS) & chunked
        kept = jnp.where(late, jnp.minimum(row.num_draft_tokens, state.for_drafts), 0)
        places, place = [], jnp.int32(size)  # a place of its own for rows left out
        for group, next_place in enumerate(state[2:]):
            here = row.group == group
            place = jnp.where(here, next_place, place)
            places.append(next_place + here.astype(jnp.int32))
        order = lax.dynamic_update_index_in_dim(order, index, place, 0)
        left = spend_exactly(state.for_drafts, kept)
        state = Ordering(_charge(state.charged, kept), left, *places)
        row = row._replace(
            num_draft_tokens=jnp.where(late, kept, row.num_draft_tokens),
            reason=jnp.where(row.reason == _LATER, late_reason, row.reason),
        )
        return (_pack(state), order), _pack(row)

    start = (_pack(state), jnp.full(size + 1, NO_ID, jnp.int32))
    (state, order), rows = lax.scan(step, start, (rows, iota(size)))
    return state[0], rows, order[:size]
