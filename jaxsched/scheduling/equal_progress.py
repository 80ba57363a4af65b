"""EQUAL_PROGRESS: all prefills advance by one unit a round until the budget ends.

The sequential rule makes rounds over the rows; in each, every row is offered its next
unit and takes it if the cost still fits. Until the budget runs out no offer is
refused, so the number of such full rounds is found by binary search over a closed
form. After the first refusal less than one unit is left: full units are refused for
ever, and only last, partial units can still be taken, each in the rest of that round
or in the next one. That is one first fit over the rows in rotated order.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsched.core.config import MAX_COUNT, UNLIMITED
from jaxsched.core.masking import first_true, iota, read_at, saturating_sum, wide_cumsum
from jaxsched.scheduling.first_fit import first_fit

Array = jax.Array


def equal_progress(
    size_limit: Array,
    cost_limit: Array,
    offset: Array,
    unit: Array,
    capacity: Array,
    first_round: int,
) -> Array:
    """Sizes after all rounds.

    After t accepted offers a row's size is `min(t * unit - offset, size_limit)` and
    its cost the same held at `cost_limit`.

    Args:
      size_limit: i32[R], tokens; 0 on rows that take no part.
      cost_limit: i32[R], tokens, at most `size_limit`.
      offset: i32[R], tokens by which a row stands past a unit boundary, below `unit`.
      unit: i32[], tokens >= 1.
      capacity: i32[], tokens >= 0 or UNLIMITED.
      first_round: rounds known to be affordable for all rows; at least 1 if any
        offset is positive.

    Returns:
      i32[R], sizes in tokens.
    """

    def held(rounds: Array, limit: Array) -> Array:
        return jnp.clip(rounds * unit - offset, 0, limit)

    def total(rounds: Array) -> Array:
        return saturating_sum(held(rounds, cost_limit), 0, MAX_COUNT + 1)

    rounds = _first_round_at_capacity(
        total, cost_limit + offset, unit, capacity, first_round
    )
    spent = total(rounds)
    exhausted = (spent >= capacity) & (capacity != UNLIMITED)
    exact = held(rounds, size_limit)
    partial = _rounds_past_the_first_refusal(
        held, cost_limit, size_limit, rounds - 1, capacity - total(rounds - 1)
    )
    size = jnp.where(spent == capacity, exact, partial)
    return jnp.where(exhausted, size, size_limit)


def _first_round_at_capacity(total, reach, unit, capacity, first_round) -> Array:
    """Smallest number of rounds that spends the capacity, or completes every row."""
    completes = (jnp.max(reach, initial=0) + unit - 1) // unit
    # The row with most left to do takes a whole unit in every round but its first.
    spends = capacity // unit + 2
    high = jnp.maximum(jnp.minimum(completes, spends), first_round)

    def search(bounds):
        low, high = bounds
        middle = (low + high) // 2
        enough = total(middle) >= capacity
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    bounds = (jnp.int32(first_round), high.astype(jnp.int32))
    return lax.while_loop(lambda b: b[0] < b[1], search, bounds)[0]


def _rounds_past_the_first_refusal(
    held, cost_limit: Array, size_limit: Array, done: Array, left: Array
) -> Array:
    """Sizes when `done` rounds are affordable and the next one is not.

    Args:
      held: from rounds and a limit to amounts, see `equal_progress`.
      cost_limit: i32[R].
      size_limit: i32[R].
      done: i32[], full rounds.
      left: i32[], capacity left after them, > 0.
    """
    rows = iota(cost_limit.shape[0])
    now, after = held(done, cost_limit), held(done + 1, cost_limit)
    this_offer, next_offer = after - now, held(done + 2, cost_limit) - after
    running = wide_cumsum(this_offer)
    refused = first_true(running > jnp.maximum(left, 0).astype(jnp.uint32))
    spent = (running - this_offer.astype(jnp.uint32)).astype(jnp.int32)
    found = refused < cost_limit.shape[0]
    left = jnp.where(found, left - read_at(spent, refused), 0)

    # The walk goes on behind the refused row, then from the front in the next round.
    ahead, behind = rows > refused, rows < refused
    offer = jnp.where(behind, next_offer, jnp.where(ahead, this_offer, 0))
    rotated = jnp.roll(offer, -(refused + 1))
    granted = first_fit(rotated, jnp.zeros_like(offer), jnp.int32(0), left)
    granted = jnp.roll(granted, refused + 1)
    accepted = granted == offer

    left_this = left - jnp.sum(jnp.where(ahead, granted, 0))
    left_next = left_this - jnp.sum(jnp.where(behind, granted, 0))
    took_this = behind | (ahead & accepted)
    took_next = (left_this > 0) & jnp.where(behind, accepted, took_this)
    rounds = done + took_this.astype(jnp.int32)
    rounds = rounds + (took_this & took_next).astype(jnp.int32)
    # With tokens left, rows whose growth costs nothing (reuse) grow to their end.
    return jnp.where(took_next & (left_next > 0), size_limit, held(rounds, size_limit))
