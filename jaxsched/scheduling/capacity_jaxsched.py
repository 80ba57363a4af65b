"""Admission under the `jaxsched` rules.

Rows are walked by rank: the more urgent first, among equals those that have started,
then transfers, then queue order; where nobody can be preempted, all that have started
come first. What differs from the published rules, and why:

- A row that does not fit preempts rows behind it only if that makes it fit. Too many
  requests or an adapter that finds no pages preempt nobody.
- A row that gets nothing this time keeps what it holds until a row of higher rank
  needs it; those behind it that have started go on while they fit.
- A waiting row defers only behind rows that are in, never behind itself.
- Whoever cannot fit into *empty* pools is refused (`Verdict.TOO_LARGE`), with the
  number of blocks that it needs, instead of blocking the queue for ever.
- A prefill past its first chunk has been admitted: its reservation stands.

Progress: if every block is free or held by rows that are neither in flight nor held by
the caller, and adapters fit, the row of the highest rank that is not refused is in.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import NO_ID
from jaxsched.core.masking import count_before, first_true, iota, read_at
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.capacity_common import Draft, standing_verdict
from jaxsched.scheduling.capacity_needs import (
    SATURATED,
    completion_columns,
    free_columns,
    held_columns,
    not_held,
    required_columns,
    roles_of,
    step_columns,
    total_columns,
    within_limits,
)
from jaxsched.scheduling.capacity_state import (
    CapacityConfig,
    CapacityError,
    CapacityPolicy,
    CapacityState,
    Verdict,
)
from jaxsched.scheduling.capacity_walk import (
    Adapters,
    exact_cumsum,
    exact_sum,
    group_rows,
    listed,
    listed_last,
)

Array = jax.Array


class _Ranked(NamedTuple):
    """The rows by rank."""

    open: Array  # bool[R]  rows that can get in
    started: Array  # bool[R]  hold something, or are past their first chunk
    pausable: Array  # bool[R]  started, and no step is running on them
    waits_for_key: Array  # bool[R]  first chunks that may defer
    computes_key: Array  # bool[R]  prefills on which others may wait
    seeds_key: Array  # bool[R]  of those, rows past their first chunk
    key: Array  # i32[R]
    lora_id: Array  # i32[R]
    lora_pages: Array  # i32[R]
    need: Array  # i32[R, C]  >= 0
    held: Array  # i32[R, C]


class _Decision(NamedTuple):
    """Who gets in and why the others do not, by rank."""

    taken: Array  # bool[R]
    preempted: Array  # bool[R]
    verdict: Array  # i32[R]


def decide(table: RequestTable, state: CapacityState, config: CapacityConfig) -> Draft:
    """One pass under the `jaxsched` rules; see the module's docstring."""
    role = roles_of(table)
    held = held_columns(state, table.beam_width)
    started = role.alive & (role.started | jnp.any(held > 0, axis=1))
    refused = _never_fits(table, state, config, started)
    open_rows = role.alive & not_held(table) & ~refused
    rows = _by_urgency(table, state, config, started)
    keyed = role.alive & (state.new_block_key != NO_ID) & (state.num_windows == 1)
    first = keyed & role.first_chunk
    ranked = _Ranked(
        open=open_rows,
        started=started,
        pausable=started & open_rows & ~table.in_flight,
        waits_for_key=first & ~started,
        computes_key=first & open_rows,
        seeds_key=keyed & role.started & ~role.running,
        key=state.new_block_key,
        lora_id=table.lora_id,
        lora_pages=state.lora_pages,
        need=within_limits(state, needed_columns(table, state, config.policy)),
        held=held,
    )
    ranked = jax.tree.map(lambda field: field[rows], ranked)
    decision = _POLICIES[config.policy](ranked, state, config)
    standing = jnp.where(refused, Verdict.TOO_LARGE, standing_verdict(table))
    verdict = jnp.zeros_like(rows).at[rows].set(decision.verdict)
    return Draft(
        taken=jnp.zeros_like(started).at[rows].set(decision.taken),
        preempted=jnp.zeros_like(started).at[rows].set(decision.preempted),
        verdict=jnp.where(open_rows, verdict, standing),
        order=_rows_at(rows, listed(decision.taken)),
        preemption_order=_rows_at(rows, listed_last(decision.preempted)),
        error=jnp.int32(CapacityError.NONE),
    )


def _rows_at(rows: Array, ranks: Array) -> Array:
    return jnp.where(ranks == NO_ID, NO_ID, rows[ranks])


def needed_columns(
    table: RequestTable, state: CapacityState, policy: CapacityPolicy
) -> Array:
    """What each row takes if it gets in, i32[R, C], never negative."""
    if policy != CapacityPolicy.MAX_UTILIZATION:
        return jnp.maximum(completion_columns(table, state), 0)
    role = roles_of(table)
    whole = (role.first_chunk | role.transfer)[:, None]
    held = jnp.where(whole, held_columns(state, table.beam_width), 0)
    return jnp.maximum(step_columns(table, state) - held, 0)


def _never_fits(
    table: RequestTable, state: CapacityState, config: CapacityConfig, started: Array
) -> Array:
    """Rows that empty pools could not take, bool[R]."""
    if config.policy == CapacityPolicy.MAX_REQUESTS:
        return jnp.zeros_like(started)
    required = required_columns(table, state, config)
    small = jnp.any(required > total_columns(state)[None, :], axis=1)
    if config.lora:
        has = table.lora_id != NO_ID
        small |= has & (state.lora_pages > state.max_lora_pages)
    if config.policy != CapacityPolicy.MAX_UTILIZATION:
        small &= ~started  # it has been admitted: its reservation stands
    return small & roles_of(table).alive


def _by_urgency(
    table: RequestTable, state: CapacityState, config: CapacityConfig, started: Array
) -> Array:
    """Row numbers by rank, i32[R]; rows in no phase of interest are the last."""
    role = roles_of(table)
    group = jnp.where(started, 0, jnp.where(role.transfer, 1, 2))
    keys = [-table.priority, group]
    if config.policy != CapacityPolicy.MAX_UTILIZATION:
        keys.insert(0, (~started).astype(jnp.int32))
    dead = (~role.alive).astype(jnp.int32)
    rows = iota(table.num_rows)
    return lax.sort((dead, *keys, rows), num_keys=len(keys) + 2)[-1]


def _adapters_of(
    ranked: _Ranked, state: CapacityState, config: CapacityConfig
) -> Adapters | None:
    if not config.lora:
        return None
    return Adapters.of(ranked.lora_id, ranked.lora_pages, state.max_lora_pages)


def _deferring(
    ranked: _Ranked, state: CapacityState, config: CapacityConfig, possible: Array
) -> Array:
    """First chunks whose first block an earlier row, or one under way, computes.

    An earlier row that is looked at is in, or lacks the same adapter, or has ended
    the walk; so none of them is waited for in vain.
    """
    if not config.prefix_deferral:
        return jnp.zeros_like(ranked.open)
    first = ranked.computes_key & possible
    computes = first | ranked.seeds_key
    groups = group_rows(ranked.key, ranked.lora_id, computes)
    earlier = ~groups.is_first(first)
    behind = groups.any_in_group(ranked.seeds_key) | earlier
    return ranked.open & ranked.waits_for_key & behind


def _fits_adapter(adapters: Adapters | None, candidates: Array, taken: Array) -> Array:
    if adapters is None:
        return jnp.ones_like(candidates)
    return adapters.fits(candidates, taken)


def _by_count(
    ranked: _Ranked, state: CapacityState, config: CapacityConfig
) -> _Decision:
    taken = ranked.open & (count_before(ranked.open) < state.max_num_requests)
    verdict = jnp.where(taken, Verdict.ADMITTED, Verdict.BATCH_FULL)
    return _Decision(taken, jnp.zeros_like(taken), verdict)


def _with_reservation(
    ranked: _Ranked, state: CapacityState, config: CapacityConfig
) -> _Decision:
    """Those that have started keep their reservation; others get in while theirs fits.

    Rows that have started come first by rank, so this is one walk in two parts.
    """
    seats, rows = state.max_num_requests, iota(ranked.open.shape[0])
    runs = ranked.open & ranked.started
    runs &= count_before(runs) < seats
    free = free_columns(state) - exact_sum(
        jnp.where(ranked.started[:, None], ranked.need, 0)
    )
    verdict = jnp.where(runs, Verdict.ADMITTED, Verdict.BATCH_FULL)
    none = jnp.zeros_like(runs)
    waiting = ranked.open & ~ranked.started
    if config.policy == CapacityPolicy.STATIC_BATCH:
        busy = jnp.any(ranked.started)
        verdict = jnp.where(waiting & busy, Verdict.STATIC_BATCH, verdict)
        waiting &= ~busy
    deferring = _deferring(ranked, state, config, runs | waiting)
    adapters = _adapters_of(ranked, state, config)
    lacks = waiting & ~_fits_adapter(adapters, waiting & ~deferring, ranked.started)
    takes = waiting & ~lacks & ~deferring
    spent = exact_cumsum(jnp.where(takes[:, None], ranked.need, 0))
    short = jnp.any(spent > free[None, :], axis=1)
    full = count_before(takes) + jnp.sum(runs.astype(jnp.int32)) >= seats
    stop = first_true(takes & (short | full))
    why = jnp.where(lacks, Verdict.NO_LORA_PAGES, Verdict.PREFIX_DEFERRED)
    why = jnp.where(takes, Verdict.ADMITTED, why)
    is_full = read_at(full, stop, fill=False)
    why = jnp.where(rows >= stop, _stopped(rows == stop, is_full), why)
    verdict = jnp.where(waiting, why, verdict)
    return _Decision(runs | (takes & (rows < stop)), none, verdict)


def _stopped(at_stop: Array, is_full: Array) -> Array:
    """Verdicts on the row that ended a walk and on those behind it, i32[R]."""
    why = jnp.where(at_stop, Verdict.NO_BLOCKS, Verdict.BEHIND_BLOCKED)
    return jnp.where(is_full, Verdict.BATCH_FULL, why)


def _with_preemption(
    ranked: _Ranked, state: CapacityState, config: CapacityConfig
) -> _Decision:
    """Takes rows while they fit into what is free and what rows behind them hold.

    Both sums are monotone in the rank, so the first row that does not fit is found by
    a reduction, and the fewest victims that suffice by another.
    """
    rows, free = iota(ranked.open.shape[0]), free_columns(state)
    deferring = _deferring(ranked, state, config, ranked.open)
    adapters = _adapters_of(ranked, state, config)
    nobody = jnp.zeros_like(ranked.open)
    lacks = ranked.open & ~_fits_adapter(adapters, ranked.open & ~deferring, nobody)
    takes = ranked.open & ~lacks & ~deferring
    total = exact_cumsum(jnp.where(takes[:, None], ranked.need, 0))
    held = jnp.where(ranked.pausable[:, None], ranked.held, 0)
    from_here = jnp.flip(exact_cumsum(jnp.flip(held, axis=0)), axis=0)
    behind = jnp.concatenate([from_here[1:], jnp.zeros_like(from_here[:1])])
    short = jnp.any(total > _plus(free[None, :], behind), axis=1)
    full = count_before(takes) >= state.max_num_requests
    stop = first_true(takes & (short | full))
    taken = takes & (rows < stop)

    spent = exact_sum(jnp.where(taken[:, None], ranked.need, 0))
    needed = jnp.any(spent[None, :] > _plus(free[None, :], behind), axis=1)
    preempted = ranked.pausable & needed
    left = _plus(free, exact_sum(jnp.where(preempted[:, None], held, 0))) - spent

    is_full = read_at(full, stop, fill=False)
    why = jnp.where(lacks, Verdict.NO_LORA_PAGES, Verdict.PREFIX_DEFERRED)
    why = jnp.where(takes, Verdict.ADMITTED, why)
    why = jnp.where(rows >= stop, _stopped(rows == stop, is_full), why)
    coasts = ranked.open & ranked.started & ~preempted & (rows > stop)
    coasts &= ~is_full
    more, why_not = _coast(ranked, coasts, taken, left, state, adapters)
    why = jnp.where(coasts, why_not, why)
    why = jnp.where(preempted, Verdict.PREEMPTED, why)
    return _Decision(taken | more, preempted, why)


def _coast(
    ranked: _Ranked,
    candidates: Array,
    taken: Array,
    left: Array,
    state: CapacityState,
    adapters: Adapters | None,
) -> tuple[Array, Array]:
    """Rows that have started go on while they fit; nobody is preempted for them."""
    rows = iota(candidates.shape[0])
    fits = _fits_adapter(adapters, candidates, taken)
    takes = candidates & fits
    total = exact_cumsum(jnp.where(takes[:, None], ranked.need, 0))
    short = jnp.any(total > left[None, :], axis=1)
    seats = state.max_num_requests - jnp.sum(taken.astype(jnp.int32))
    full = count_before(takes) >= seats
    stop = first_true(takes & (short | full))
    why = jnp.where(takes, Verdict.ADMITTED, Verdict.NO_LORA_PAGES)
    is_full = read_at(full, stop, fill=False)
    at_stop = jnp.where(is_full, Verdict.BATCH_FULL, Verdict.NO_BLOCKS)
    return takes & (rows < stop), jnp.where(rows >= stop, at_stop, why)


def _plus(free: Array, more: Array) -> Array:
    """Free blocks and more of them; a pool without a limit stays SATURATED."""
    return jnp.minimum(free + more, SATURATED)


_POLICIES = {
    CapacityPolicy.MAX_REQUESTS: _by_count,
    CapacityPolicy.GUARANTEED_NO_EVICT: _with_reservation,
    CapacityPolicy.STATIC_BATCH: _with_reservation,
    CapacityPolicy.MAX_UTILIZATION: _with_preemption,
}
