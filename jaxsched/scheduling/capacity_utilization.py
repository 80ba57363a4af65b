"""The `max_utilization` policy under the `tensorrt_llm` rules, bit for bit.

Source: the capacity scheduler of TensorRT-LLM after PR #16427.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.masking import count_before, first_true, iota, read_at
from jaxsched.core.requests import RequestTable
from jaxsched.scheduling.capacity_common import (
    Draft,
    adapters_of,
    encoder_error,
    first_computed,
)
from jaxsched.scheduling.capacity_needs import (
    SATURATED,
    free_columns,
    held_columns,
    roles_of,
    step_columns,
    within_limits,
)
from jaxsched.scheduling.capacity_state import (
    CapacityConfig,
    CapacityState,
    Verdict,
)
from jaxsched.scheduling.capacity_walk import (
    Adapters,
    before,
    exact_cumsum,
    listed,
    listed_last,
)

Array = jax.Array


class _Round(NamedTuple):
    """Where the walk of `max_utilization` stands."""

    start: Array  # i32[]  first row not walked yet
    paused: Array  # i32[]  victims so far, counted from the last row that started
    taken: Array  # bool[R]
    verdict: Array  # i32[R]
    done: Array  # bool[]


class _Walked(NamedTuple):
    """What does not change while `max_utilization` walks."""

    asks: Array  # bool[R]  rows that are tried
    registering: Array  # bool[R]  of those, first chunks that defer when retried
    started: Array  # bool[R]  rows that can be preempted
    started_behind: Array  # i32[R]  how many of them stand behind a row
    need: Array  # i32[R, C]
    released: Array  # i32[R + 1, C]  free when so many have been preempted


def max_utilization(
    table: RequestTable, state: CapacityState, config: CapacityConfig, gated: Array
) -> Draft:
    """Takes rows in order; one that does not fit preempts from the end of the list.

    The published loop moves a cursor forward and an end backward. Both are monotone,
    so no loop is needed: row k gets in exactly where some number of victims behind k
    frees enough for all rows up to k, and the smallest such number for each row is
    found by bisection over the sums of what the last rows hold.

    One thing is not a prefix rule: with prefix deferral a first chunk that does not
    fit preempts one victim and then defers to itself. Each time that happens the walk
    starts again behind it; the loop runs at most once more than there are victims.
    """
    role = roles_of(table)
    deferred, registering = first_computed(table, state, config, gated)
    started = gated & role.started
    ones = started.astype(jnp.int32)
    static = _Walked(
        asks=gated & ~deferred,
        registering=registering,
        started=started,
        started_behind=jnp.sum(ones) - jnp.cumsum(ones),
        need=within_limits(state, step_columns(table, state)),
        released=_released(table, state, started),
    )
    adapters = adapters_of(table, state, config)
    size = gated.shape[0]
    begin = _Round(
        start=jnp.int32(0),
        paused=jnp.int32(0),
        taken=jnp.zeros_like(gated),
        verdict=jnp.full(size, Verdict.BEHIND_BLOCKED, jnp.int32),
        done=jnp.asarray(False),
    )

    def walk(now: _Round) -> _Round:
        return _walk_on(now, static, state, adapters)

    end = walk(begin)
    if config.prefix_deferral:
        end = lax.while_loop(lambda now: ~now.done, walk, end)
    preempted = started & (static.started_behind < end.paused)
    walked = iota(size) < end.start
    verdict = jnp.where(walked & deferred, Verdict.PREFIX_DEFERRED, end.verdict)
    verdict = jnp.where(preempted, Verdict.PREEMPTED, verdict)
    error = encoder_error(state, walked & gated & role.encode, jnp.int32(0))
    order = listed(end.taken)
    return Draft(end.taken, preempted, verdict, order, listed_last(preempted), error)


def _released(table: RequestTable, state: CapacityState, started: Array) -> Array:
    """Free blocks when the last m rows that started have been preempted, i32[R+1, C].

    Entries behind the last victim read SATURATED, which any sum fits into.
    """
    size = started.shape[0]
    held = held_columns(state, jnp.ones_like(table.beam_width))
    from_end = exact_cumsum(jnp.flip(jnp.where(started[:, None], held, 0), axis=0))
    free = free_columns(state)
    total = jnp.minimum(free[None, :] + jnp.flip(from_end, axis=0), SATURATED)
    ones = started.astype(jnp.int32)
    number = jnp.where(started, jnp.sum(ones) - count_before(started), size + 1)
    pool = jnp.full((size + 1, free.shape[0]), SATURATED, jnp.int32)
    pool = pool.at[0].set(free)
    return pool.at[number].set(total, mode="drop")


def _walk_on(
    now: _Round, static: _Walked, state: CapacityState, adapters: Adapters | None
) -> _Round:
    """Walks from `start` to the end, or to the next first chunk that defers."""
    size = static.asks.shape[0]
    rows = iota(size)
    ahead = static.asks & (rows >= now.start)
    walked = now.taken | ahead
    total = exact_cumsum(jnp.where(walked[:, None], static.need, 0))
    never = jnp.cumsum(walked.astype(jnp.int32)) > state.max_num_requests
    no_seat = never
    if adapters is not None:
        paid = exact_cumsum(adapters.paid_by(walked))
        never |= paid > jnp.minimum(state.max_lora_pages, SATURATED)
    victims = jax.vmap(
        lambda pool, wants: jnp.searchsorted(pool, wants, method="scan_unrolled"),
        in_axes=1,
    )(static.released, total)
    victims = jnp.max(victims.astype(jnp.int32), axis=0)
    no_room = victims > static.started_behind
    victims = jnp.where(never, size + 1, victims)
    victims = jnp.maximum(jnp.where(ahead, victims, 0), now.paused)
    victims = lax.cummax(victims)
    earlier = jnp.maximum(before(victims), now.paused)

    fails = victims > static.started_behind
    defers = static.registering & (victims > earlier)
    stop = first_true(ahead & (fails | defers))
    paused = jnp.where(
        stop < size, read_at(earlier, stop), jnp.maximum(victims[-1], now.paused)
    )
    return _stop_at(now, static, ahead, stop, paused, (no_seat, no_room))


def _stop_at(
    now: _Round,
    static: _Walked,
    ahead: Array,
    stop: Array,
    paused: Array,
    causes: tuple[Array, Array],
) -> _Round:
    size = ahead.shape[0]
    rows = iota(size)
    behind = read_at(static.started_behind, stop)
    at_end = stop >= size
    ended = at_end | (paused > behind)  # the row is a victim: the list ends before it
    can_start = read_at(static.started, stop, fill=False).astype(jnp.int32)
    retried = read_at(static.registering, stop, fill=False) & ~ended & (behind > paused)
    all_behind = jnp.where(ended, paused, behind + can_start)
    no_seat, no_room = (read_at(cause, stop, fill=False) for cause in causes)
    why = jnp.where(no_room, Verdict.NO_BLOCKS, Verdict.NO_LORA_PAGES)
    why = jnp.where(no_seat, Verdict.BATCH_FULL, why)
    why = jnp.where(retried, Verdict.PREFIX_DEFERRED, why)
    why = jnp.where(ended, Verdict.BEHIND_BLOCKED, why)
    taken = ahead & (rows < stop)
    verdict = jnp.where(taken, Verdict.ADMITTED, now.verdict)
    return _Round(
        start=jnp.where(ended & ~at_end, stop, stop + 1),
        paused=jnp.where(retried, paused + 1, all_behind),
        taken=now.taken | taken,
        verdict=jnp.where(rows == stop, why, verdict),
        done=~retried,
    )
