"""Dealing a capacity to rows in order, without a loop over the rows.

The sequential rule: walk the rows in order; a row that fits takes what it wants; the
first that does not is cut to a unit boundary; rows behind it may still fit into the
rest. Everything before that first overflow is a running sum. Behind it, less than one
unit is left, so the walk continues as a *first fit* of small requests, which needs at
most one round per bit of what is left: in each round either the rest falls below its
own leading power of two, or the list ends.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.masking import (
    exceeds,
    first_true,
    iota,
    read_at,
    spend,
    wide_cumsum,
)

Array = jax.Array


class _Round(NamedTuple):
    left: Array  # i32[]
    start: Array  # i32[]  first row not walked yet
    granted: Array  # i32[R]


def first_fit(offer: Array, fallback: Array, start: Array, left: Array) -> Array:
    """Walks rows `start`, `start + 1`, ... and grants what fits into `left`.

    Each row takes `offer` if it fits into what is left, else `fallback` if that fits,
    else nothing. Rows with `offer == 0` are passed over.

    Let h be the leading power of two of what is left. A row whose amount is below h
    fits without looking, as long as h is left; so all of them up to the next *event*
    (an amount of h or more that fits, or the rest falling below h) are taken by one
    running sum, and after the event less than h is left. Hence at most 31 rounds,
    however many rows there are.

    Args:
      offer: i32[R], tokens >= 0.
      fallback: i32[R], tokens >= 0, below `offer` where it is not 0; 0: none.
      start: i32[].
      left: i32[], tokens >= 0.

    Returns:
      i32[R], the tokens granted to each row.
    """
    rows = iota(offer.shape[0])
    size = offer.shape[0]

    def unfinished(state: _Round) -> Array:
        return (state.left > 0) & (state.start < size)

    def walk(state: _Round) -> _Round:
        left = state.left
        half = jnp.int32(1) << (31 - lax.clz(left))
        ahead = (rows >= state.start) & (offer > 0)
        sure = jnp.where(offer < half, offer, jnp.where(fallback < half, fallback, 0))
        sure = jnp.where(ahead, sure, 0)
        total = wide_cumsum(sure)
        before = left - (total - sure.astype(jnp.uint32)).astype(jnp.int32)
        big = (offer >= half) & (
            (offer <= before) | ((fallback >= half) & (fallback <= before))
        )
        drained = total > (left - half).astype(jnp.uint32)
        event = first_true(ahead & (drained | big))
        rest = jnp.where(
            event < size,
            read_at(before, event),
            left - total[-1].astype(jnp.int32),
        )
        amount = jnp.where(
            offer <= rest, offer, jnp.where(fallback <= rest, fallback, 0)
        )
        at_event = rows == event
        granted = jnp.where(ahead & (rows < event), sure, state.granted)
        granted = jnp.where(at_event, amount, granted)
        return _Round(rest - read_at(amount, event), event + 1, granted)

    zero = jnp.zeros_like(offer)
    return lax.while_loop(unfinished, walk, _Round(left, start, zero)).granted


def deal_in_order(
    full: Array,
    cost: Array,
    cut: Callable[[Array], Array],
    realign: Array,
    capacity: Array,
) -> Array:
    """Chunk sizes when a capacity is dealt to rows in order.

    Args:
      full: i32[R], the size a row takes if it fits; 0 on rows that take no part.
      cost: i32[R], what that size is charged; 0 <= cost <= full.
      cut: from an i32[] rest below a row's cost to the i32[R] sizes that rows are cut
        to, each charged as it is; leaves less than one unit.
      realign: i32[R], below `cost`: the size a row behind the cut one may take if its
        full size does not fit any more; 0: none.
      capacity: i32[], tokens >= 0 or UNLIMITED.

    Returns:
      i32[R], sizes; rows with cost 0 always take their full size.
    """
    rows = iota(full.shape[0])
    stop, left = _first_overflow(cost, capacity)
    sizes_if_cut = cut(left)
    left = jnp.where(stop < full.shape[0], left - read_at(sizes_if_cut, stop), 0)
    granted = first_fit(cost, realign, stop + 1, left)
    whole = (rows < stop) | (cost == 0) | (granted == cost)
    size = jnp.where(whole, full, granted)
    return jnp.where(rows == stop, sizes_if_cut, size)


def fill_in_order(full: Array, cost: Array, capacity: Array) -> Array:
    """Chunk sizes when a capacity is dealt to the token: nothing is left behind a cut.

    Args:
      full: i32[R], the size a row takes if it fits; 0 on rows that take no part.
      cost: i32[R], what that size is charged; a smaller size is charged as it is.
      capacity: i32[], tokens >= 0 or UNLIMITED.

    Returns:
      i32[R], sizes.
    """
    rows = iota(full.shape[0])
    stop, left = _first_overflow(cost, capacity)
    return jnp.where(rows < stop, full, jnp.where(rows == stop, left, 0))


def _first_overflow(cost: Array, capacity: Array) -> tuple[Array, Array]:
    """First row that does not fit whole, R if none, and what is left there; i32[]."""
    total = wide_cumsum(cost)
    stop = first_true(exceeds(total, capacity))
    spent = (total - cost.astype(jnp.uint32)).astype(jnp.int32)
    return stop, spend(capacity, read_at(spent, stop))
