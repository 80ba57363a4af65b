"""Admission under the `tensorrt_llm` rules, bit for bit.

Oddities are kept on purpose: `max_requests` never takes a row that waits for a
transfer; a prefill past its first chunk is admitted anew in every pass; one that
fails under `max_utilization` preempts everything behind it even where that cannot
help (too many requests, an adapter that does not fit); preempting gives back blocks
per beam; a first chunk that is retried after a preemption defers to itself.

Source: the capacity scheduler of TensorRT-LLM after PR #16427.
"""

import jax
import jax.numpy as jnp

from jaxsched.core.config import NO_ID
from jaxsched.core.masking import count_before, first_true, iota, read_at
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.capacity_common import (
    Draft,
    adapters_of,
    encoder_error,
    first_computed,
    standing_verdict,
)
from jaxsched.scheduling.capacity_needs import (
    completion_columns,
    free_columns,
    not_held,
    roles_of,
    within_limits,
)
from jaxsched.scheduling.capacity_state import (
    CapacityConfig,
    CapacityError,
    CapacityPolicy,
    CapacityState,
    Verdict,
)
from jaxsched.scheduling.capacity_utilization import max_utilization
from jaxsched.scheduling.capacity_walk import (
    Adapters,
    Prefix,
    before,
    exact_cumsum,
    exact_sum,
    listed,
)

Array = jax.Array


def decide(table: RequestTable, state: CapacityState, config: CapacityConfig) -> Draft:
    """One pass under the `tensorrt_llm` rules; see the module's docstring."""
    role = roles_of(table)
    known = role.alive
    if config.policy == CapacityPolicy.MAX_REQUESTS:
        known &= ~role.transfer
    gated = known & not_held(table)
    standing = standing_verdict(table)
    policies = {
        CapacityPolicy.MAX_REQUESTS: _max_requests,
        CapacityPolicy.GUARANTEED_NO_EVICT: _guaranteed_no_evict,
        CapacityPolicy.STATIC_BATCH: _guaranteed_no_evict,
        CapacityPolicy.MAX_UTILIZATION: max_utilization,
    }
    draft = policies[config.policy](table, state, config, gated)
    verdict = jnp.where(gated, draft.verdict, standing)
    failed = draft.error != CapacityError.NONE
    return draft._replace(
        taken=draft.taken & ~failed,
        preempted=draft.preempted & ~failed,
        verdict=jnp.where(failed & gated, Verdict.REFUSED_STEP, verdict),
        order=jnp.where(failed, NO_ID, draft.order),
        preemption_order=jnp.where(failed, NO_ID, draft.preemption_order),
    )


def _max_requests(table, state: CapacityState, config, gated: Array) -> Draft:
    taken = gated & (count_before(gated) < state.max_num_requests)
    none = jnp.zeros_like(gated)
    verdict = jnp.where(taken, Verdict.ADMITTED, Verdict.BATCH_FULL)
    return Draft(taken, none, verdict, listed(taken), listed(none), jnp.int32(0))


def _guaranteed_no_evict(
    table: RequestTable, state: CapacityState, config: CapacityConfig, gated: Array
) -> Draft:
    role, seats = roles_of(table), state.max_num_requests
    need = within_limits(state, completion_columns(table, state))
    running = gated & role.running
    ahead = count_before(running)
    runs = running & (ahead < seats)
    # The first pass ends at the first row that finds every seat taken.
    reached = gated & (ahead < seats)
    free = free_columns(state) - exact_sum(jnp.where(runs[:, None], need, 0))
    adapters = adapters_of(table, state, config)
    deferred = jnp.zeros_like(gated)
    static = config.policy == CapacityPolicy.STATIC_BATCH
    if not static:
        deferred, _ = first_computed(table, state, config, gated)
    waiting = reached & ~role.running
    if static:
        waiting &= ~jnp.any(runs)

    taken, error = runs, jnp.int32(CapacityError.NONE)
    behind = Verdict.STATIC_BATCH if static else Verdict.BATCH_FULL
    verdict = jnp.where(static & ~jnp.any(runs), Verdict.BATCH_FULL, behind)
    verdict = jnp.where(runs, Verdict.ADMITTED, verdict)
    for listing in (waiting & role.transfer, waiting & ~role.transfer):
        walk, why = _take_list(
            listing, deferred, taken, need, free, state, role.encode, adapters
        )
        verdict = jnp.where(listing, why, verdict)
        asks = listing & role.encode & (iota(taken.shape[0]) <= walk.stop)
        error = encoder_error(state, asks, error)
        free -= exact_sum(jnp.where((walk.taken & ~role.encode)[:, None], need, 0))
        taken |= walk.taken
    transfers = taken & role.transfer
    order = _concatenate(runs, transfers, taken & ~runs & ~transfers)
    none = jnp.zeros_like(taken)
    return Draft(taken, none, verdict, order, listed(none), error)


def _concatenate(*masks: Array) -> Array:
    """Rows of the first mask, then of the next, ..., then NO_ID; i32[R]."""
    size = masks[0].shape[0]
    order, start = jnp.full(size, NO_ID, jnp.int32), jnp.int32(0)
    for mask in masks:
        place = jnp.where(mask, start + count_before(mask), size)
        order = order.at[place].set(iota(size), mode="drop")
        start += jnp.sum(mask.astype(jnp.int32))
    return order


def _take_list(
    listing: Array,
    deferred: Array,
    taken: Array,
    need: Array,
    free: Array,
    state: CapacityState,
    encode: Array,
    adapters: Adapters | None,
) -> tuple[Prefix, Array]:
    """Takes the rows of one list in order; also the verdict on each, i32[R].

    A row that finds no seat or no blocks ends the walk; one whose adapter does not
    fit is passed over, but only after its blocks have been looked at.
    """
    rows = iota(listing.shape[0])
    asks = listing & ~deferred
    fits = jnp.ones_like(asks)
    if adapters is not None:
        left = adapters.left_after(taken)
        fits = adapters.fits(asks, taken) & (left >= 0)
    takes = asks & fits
    charge = jnp.where((takes & ~encode)[:, None], need, 0)
    spent = before(exact_cumsum(charge))
    short = jnp.any(need > free[None, :] - spent, axis=1) & ~encode
    seats = state.max_num_requests - jnp.sum(taken.astype(jnp.int32))
    full = count_before(takes) >= seats
    stop = first_true(asks & (short | full))
    stopped_full = read_at(full, stop, fill=False)
    verdict = jnp.where(takes, Verdict.ADMITTED, Verdict.NO_LORA_PAGES)
    verdict = jnp.where(deferred, Verdict.PREFIX_DEFERRED, verdict)
    at_stop = jnp.where(stopped_full, Verdict.BATCH_FULL, Verdict.NO_BLOCKS)
    behind = jnp.where(stopped_full, Verdict.BATCH_FULL, Verdict.BEHIND_BLOCKED)
    verdict = jnp.where(rows == stop, at_stop, verdict)
    verdict = jnp.where(rows > stop, behind, verdict)
    return Prefix(takes & (rows < stop), stop, stopped_full), verdict
