"""First fit without a loop over the rows: one round per bit of what is left.

In each round either the rest falls below its own leading power of two, or the list
ends.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.masking import first_true, iota, read_at, wide_cumsum

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
